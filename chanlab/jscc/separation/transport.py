"""Transport blocks of 5G NR over a channel of complex symbols: CRC, segmentation, LDPC, QAM, demapping, decoding."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from chanlab.channels.sionna_phy import phy
from chanlab.errors import UsageError
from chanlab.jscc.separation.mcs import TransportFormat
from chanlab.link.decoding import is_lost

NUM_ITERATIONS = 50
"""Iterations of belief propagation at most: about 0.3 dB better than Sionna's default of 20; most blocks stop early."""
_SYMBOLS_AT_ONCE = 1 << 18


def decoding_stages(num_iterations: int) -> list[int]:
    """Iterations of each stage of decoding: looks after 2, 5, 10, 15, 20 and 30, then at the end."""
    looks = [look for look in (2, 5, 10, 15, 20, 30) if look < num_iterations] + [num_iterations]
    return [look - before for before, look in zip([0, *looks], looks, strict=False)]


class QamDemapper:
    """Exact (APP) logits of Gray-mapped square QAM, each of its two PAM constellations on its own.

    What `sionna.phy.mapping.Demapper("app", "qam", ...)` gives, but 2^(m/2) instead of 2^m distances for each symbol.

    Args:
        bits_per_symbol: m: 2, 4, 6, 8 or 10.
        device: Device of the computation.
    """

    def __init__(self, bits_per_symbol: int, device: str = "cpu") -> None:
        mapping = phy("mapping")
        self.bits_per_symbol = bits_per_symbol
        self._demapper = mapping.Demapper("app", "pam", bits_per_symbol // 2, precision="single", device=device)

    def __call__(self, symbols: Tensor, noise_variance: Tensor) -> Tensor:
        """Logits log p(1) / p(0), float32 `[..., k m]`.

        Args:
            symbols: Complex `[..., k]`.
            noise_variance: Of the complex noise on each symbol, `[..., k]`.
        """
        parts = torch.view_as_real(symbols) * math.sqrt(2)  # PAM of unit power; its noise is real: N0 per dimension
        flat = parts.reshape(-1, 2)
        variance = 2 * noise_variance.expand(symbols.shape).reshape(-1, 1).expand(-1, 2)
        logits = [
            self._demapper(torch.complex(y, torch.zeros_like(y)), n0.contiguous())
            for y, n0 in zip(torch.split(flat, _SYMBOLS_AT_ONCE), torch.split(variance, _SYMBOLS_AT_ONCE), strict=True)
        ]
        by_bit = torch.cat(logits).reshape(-1, 2, self.bits_per_symbol // 2)
        return by_bit.transpose(1, 2).reshape(*symbols.shape[:-1], -1)


class TransportChannel:
    """Transport blocks of one format, sent as QAM symbols and decoded.

    Encoding is `sionna.phy.nr.TBEncoder` (CRC, segmentation, LDPC, rate matching, interleaving, scrambling);
    decoding is belief propagation whose blocks stop as soon as their CRC is right at a look (`decoding_stages`).

    Args:
        format: From `transport_format`.
        num_iterations: Iterations of belief propagation at most.
        device: Device of the simulation.
    """

    def __init__(self, format: TransportFormat, num_iterations: int = NUM_ITERATIONS, device: str = "cpu") -> None:
        nr, ldpc, crc, mapping, scrambling = (
            phy(name) for name in ("nr", "fec.ldpc", "fec.crc", "mapping", "fec.scrambling")
        )
        order, where = format.mcs.bits_per_symbol, {"precision": "single", "device": device}
        self.format, self.num_iterations, self.device = format, num_iterations, device
        coded = format.uses * order
        with warnings.catch_warnings():
            # CRC bits take the highest rates of short blocks above 948/1024, up to which Sionna doesn't warn.
            warnings.filterwarnings("ignore", "Effective coderate", UserWarning)
            self._encoder = nr.TBEncoder(format.size, coded, format.mcs.code_rate, order, **where)
        if (self._encoder.tb_size, self._encoder.n) != (format.size, coded):
            raise UsageError(f"{format} isn't a transport block of TS 38.214: take it from transport_format.")
        self._decoder = ldpc.LDPC5GDecoder(
            self._encoder.ldpc_encoder, num_iter=num_iterations, return_state=True, **where
        )
        self._tb_crc = crc.CRCDecoder(self._encoder.tb_crc_encoder, **where)
        cb_crc = self._encoder.cb_crc_encoder
        self._cb_crc = crc.CRCDecoder(cb_crc, **where) if cb_crc is not None else self._tb_crc
        self._descramble = scrambling.Descrambler(self._encoder.scrambler, binary=False, **where)
        self._mapper = mapping.Mapper("qam", order, **where)
        self._demapper = QamDemapper(order, device)

    def encode(self, bits: Tensor) -> tuple[Tensor, Tensor]:
        """Symbols of transport blocks.

        Args:
            bits: 0 or 1, `[batch, size]`.

        Returns:
            Complex64 `[batch, uses]` of unit mean power over the constellation, and the code bits, `[batch, uses m]`.
        """
        with torch.inference_mode():
            code_bits = self._encoder(bits.to(self.device, torch.float32))
            return self._mapper(code_bits), code_bits

    def decode(self, symbols: Tensor, noise_variance: Tensor, code_bits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Transport blocks from received symbols.

        Args:
            symbols: Equalised, complex `[batch, uses]`.
            noise_variance: Of each symbol, `[batch, uses]` (or broadcast).
            code_bits: Those that were sent: blocks whose logits can't be decoded (`chanlab.link.decoding.is_lost`) are
                then not tried, which changes no result that any decoder could reach.

        Returns:
            Bits `[batch, size]` (0 or 1) and whether all CRCs are right, bool `[batch]`.
        """
        with torch.inference_mode():
            logits = self._demapper(symbols.to(self.device), noise_variance.to(self.device, torch.float32))
            llr = self._blocks(logits)
            tried = torch.ones(llr.shape[0], dtype=torch.bool, device=llr.device)
            if code_bits is not None:
                sent = self._blocks(2 * code_bits - 1)
                rate = self.format.block_bits / self.format.codeword_bits
                tried = ~is_lost(llr, (sent > 0).float(), rate)
            decoded = self._decode_blocks(llr, tried)
            payload = self._cb_crc(decoded)[0] if self._cb_crc is not self._tb_crc else decoded
            bits, right = self._tb_crc(payload.reshape(symbols.shape[0], -1))
            # all-zero blocks have a right CRC: those that were not tried don't count
            everyone = tried.reshape(symbols.shape[0], -1).all(-1)
            return bits, right.reshape(-1).bool() & everyone

    def _blocks(self, values: Tensor) -> Tensor:
        """Logits of bits as sent -> code blocks in the decoder's order, unsent ones 0, `[batch * block, n]`."""
        values = self._descramble(values[:, None])[:, 0]
        ldpc_n, count = self._encoder.ldpc_encoder.n, self.format.num_blocks
        fill = values.new_zeros(values.shape[0], ldpc_n * count - values.shape[1])
        ordered = torch.cat([values, fill], -1)[:, self._encoder.output_perm_inv]
        return ordered.reshape(-1, ldpc_n)

    def _decode_blocks(self, llr: Tensor, tried: Tensor) -> Tensor:
        """Information bits of the blocks, `[block, block_bits]`; zeros for those that are not tried."""
        out = llr.new_zeros(llr.shape[0], self.format.block_bits)
        chunk = 8 if llr.device.type == "cpu" else 512  # 8: their messages stay in a CPU's cache
        for part in torch.split(tried.nonzero().squeeze(-1), chunk):
            index, state = part, None
            for iterations in decoding_stages(self.num_iterations):
                if not index.numel():
                    break
                decoded, state = self._decoder(llr[index], num_iter=iterations, msg_v2c=state)
                out[index] = decoded
                going = ~self._cb_crc(decoded)[1].reshape(-1).bool()
                index, state = index[going], state[going]
        return out


def bytes_to_bits(data: bytes, size: int) -> Tensor:
    """A payload as a transport block: its bits (most significant first), a 1, zeros up to `size`; float32 `[size]`.

    The 1 tells the receiver where the payload ends, so that a block of `size` bits carries (size - 1) // 8 bytes.

    Raises:
        UsageError: If the payload doesn't fit.
    """
    if 8 * len(data) + 1 > size:
        raise UsageError(f"{len(data)} bytes and the mark of their end don't fit {size} bits.")
    bits = torch.zeros(size)
    octets = torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[: len(data)]
    bits[: 8 * len(data)] = ((octets[:, None] >> torch.arange(7, -1, -1)) & 1).reshape(-1).float()
    bits[8 * len(data)] = 1
    return bits


def bits_to_bytes(bits: Tensor) -> bytes | None:
    """The payload of a transport block `[size]`; None where it doesn't end after whole bytes."""
    ones = bits.nonzero()
    if not ones.numel() or int(ones[-1]) % 8:
        return None
    octets = bits[: int(ones[-1])].reshape(-1, 8).to(torch.int64) @ (1 << torch.arange(7, -1, -1, device=bits.device))
    return bytes(octets.tolist())
