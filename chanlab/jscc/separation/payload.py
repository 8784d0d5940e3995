"""Channel uses that a payload of so many bytes takes on the separation baseline's link: 5G LDPC and QAM over AWGN."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import torch
from scipy.special import log_ndtr
from torch import Tensor, nn

from chanlab.channels.sionna_phy import phy
from chanlab.errors import UsageError
from chanlab.jscc.contract import side_information_uses
from chanlab.jscc.separation.bler import BlerTable
from chanlab.jscc.separation.channel_codes import LdpcQam
from chanlab.jscc.separation.mcs import Mcs, TransportFormat, mcs_index_bits, nr_mcs, transport_format

TABLE = Path(__file__).with_name("payload.json")
"""The points of `PayloadRate` that are shipped."""
ERROR = 1e-3
"""Probability that a payload is lost, at most."""
SNR_DB = (-5.0, 25.0, 0.25)
"""First, last and step of the SNRs of `PayloadRate` [dB]."""
LOG2_BITS = (6.0, 20.0, 0.5)
"""First, last and step of its payloads, log2 of bits."""
_CAPACITY_MARGIN_DB = 1.0  # no scheme above the capacity at so much more SNR is tried
_LONGEST_BLOCK = 8448  # a larger transport block has several code blocks, none of which is stronger


def payload_uses(
    num_bytes: int, snr_db: float, error: float = ERROR, table: BlerTable | None = None
) -> tuple[int, TransportFormat]:
    """The fewest complex channel uses in which a scheme of 5G NR carries a payload over AWGN.

    Counted, as `Separation` does: the bytes, the bit that marks their end, CRC bits of transport and code blocks, and
    the symbols that tell the receiver the scheme (`side_information_uses` of `mcs_index_bits()`). A transport block may
    be larger than the payload where that is safer. Results are kept.

    Args:
        num_bytes: Payload [byte].
        snr_db: SNR per complex symbol [dB].
        error: Probability that the payload is lost, at most; by the table, with the gain of the link's decoder that
            `LdpcQam` reckons with. The table was measured down to about 1 %, from where its lines are extrapolated.
        table: Block error rates; the shipped table by default.

    Returns:
        Channel uses, those that tell the scheme included, and the format, whose `uses` carry the payload.

    Raises:
        UsageError: If there is no payload, or no scheme carries it at this SNR.
    """
    if num_bytes < 1:
        raise UsageError(f"a payload has at least one byte, not {num_bytes}: nothing needs no channel use.")
    if not 0 < error < 1:
        raise UsageError(f"error must lie between 0 and 1, not {error}.")
    return _payload_uses(int(num_bytes), float(snr_db), float(error), table)


@functools.lru_cache(1 << 16)
def _payload_uses(num_bytes: int, snr_db: float, error: float, table: BlerTable | None) -> tuple[int, TransportFormat]:
    link = _link(table)
    bits = 8 * num_bytes + 1
    capacity = math.log2(1 + 10 ** ((snr_db + link.gain_db + _CAPACITY_MARGIN_DB) / 10))
    schemes = [m for m in reversed(nr_mcs()) if m.efficiency <= capacity]
    best = _first(schemes, bits, snr_db, error, link)
    if best is None:
        raise UsageError(
            f"no scheme of 5G NR carries {num_bytes} bytes over AWGN at {snr_db:g} dB with a block error rate of "
            f"{error:g}: raise the SNR or the error (QPSK 251/1024, the lowest rate, begins near -2 dB)."
        )
    for mcs in schemes:
        best = _fewest(mcs, bits, snr_db, error, link, best)
    return best.uses + _index_uses(snr_db), best


def _first(schemes: list[Mcs], bits: int, snr_db: float, error: float, link: LdpcQam) -> TransportFormat | None:
    """Any format that will do, of a good scheme: the bound of the search."""
    size = bits
    while True:
        for mcs in schemes:
            start = _least_uses(mcs, size)
            for uses in (start, _least_uses(mcs, _block_size(mcs, start) + 1) - 1):
                if _holds(mcs, uses, snr_db, error, link):
                    return transport_format(mcs, uses)
        if size > _LONGEST_BLOCK:
            return None
        size = size * 5 // 4 + 8


def _fewest(mcs: Mcs, bits: int, snr_db: float, error: float, link: LdpcQam, best: TransportFormat) -> TransportFormat:
    """The scheme's format of fewest uses, or the given one if it is none worse.

    The size of the transport block is a staircase over the uses. On a step the code rate falls, and with it the error.
    """
    start = _least_uses(mcs, bits)
    while start < best.uses:
        following = _least_uses(mcs, _block_size(mcs, start) + 1)
        low, high = start - 1, min(following, best.uses) - 1
        if _holds(mcs, start, snr_db, error, link):
            high = start
        if _holds(mcs, high, snr_db, error, link):
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if _holds(mcs, middle, snr_db, error, link) else (middle, high)
            found = transport_format(mcs, high)
            assert found is not None
            return found
        start = following
    return best


def _holds(mcs: Mcs, uses: int, snr_db: float, error: float, link: LdpcQam) -> bool:
    """Whether a scheme's block of so many uses is lost with a probability of at most `error`."""
    line = _waterfall(mcs, uses, link)
    if line is None:
        return False
    mean, deviation, blocks = line
    return bool(-math.expm1(blocks * float(log_ndtr((snr_db + link.gain_db - mean) / deviation))) <= error)


@functools.lru_cache(1 << 18)
def _waterfall(mcs: Mcs, uses: int, link: LdpcQam) -> tuple[float, float, int] | None:
    """Mean and deviation [dB] of a scheme's code, and the number of code blocks; None where it can't be sent."""
    format = transport_format(mcs, uses)
    if format is None:
        return None
    mean, deviation = link.table.waterfall(mcs.bits_per_symbol, format.block_bits, format.codeword_bits)
    return mean, deviation, format.num_blocks


@functools.lru_cache(1 << 16)
def _least_uses(mcs: Mcs, bits: int) -> int:
    """The fewest uses whose transport block has at least so many bits; sizes grow with the uses."""
    low, high = (int((scale * bits + offset) / mcs.efficiency) for scale, offset in ((0.9, -40), (1.1, 60)))
    low = max(low, 0)
    while high - low > 1:
        tried = torch.linspace(low + 1, high - 1, min(high - low - 1, 64), dtype=torch.float64).long()
        index = int((_block_sizes(mcs, tried) < bits).sum())
        low, high = (int(tried[index - 1]) if index else low, int(tried[index]) if index < len(tried) else high)
    return high


@functools.lru_cache(1 << 18)
def _block_size(mcs: Mcs, uses: int) -> int:
    return int(_block_sizes(mcs, torch.tensor([uses]))[0])


def _block_sizes(mcs: Mcs, uses: Tensor) -> Tensor:
    """Bits of transport blocks, also where the code can't be sent (TS 38.214, 5.1.3.2); 0 for less than the least."""
    coded = uses * mcs.bits_per_symbol
    sizes: Tensor = phy("nr.utils").calculate_tb_size(
        torch.full_like(coded, mcs.bits_per_symbol),
        mcs.code_rate,
        num_coded_bits=coded,
        return_cw_length=False,
        device="cpu",
    )[0]
    return sizes.where(mcs.code_rate * coded >= 32, 0)


def _index_uses(snr_db: float) -> int:
    """Channel uses of the symbols that tell the scheme."""
    bits = torch.tensor([float(mcs_index_bits())])
    return int(side_information_uses(bits, torch.tensor([snr_db])))


@functools.cache
def _link(table: BlerTable | None) -> LdpcQam:
    return LdpcQam(table)


class PayloadRate(nn.Module):
    """`payload_uses` for whole batches on the learner's device, by interpolation: what training needs.

    log2 of the uses is bilinear in the SNR [dB] and in log2 of the payload's bits between points of `payload_uses`,
    so that jumps between two schemes are smoothed over a cell of the grid. The points that come with the library, at
    `SNR_DB` and `LOG2_BITS` for a loss of 1e-3 by the shipped table of block error rates, were made in two minutes by
    `python -c "from chanlab.jscc.separation.payload import TABLE, PayloadRate; PayloadRate.make().save(TABLE)"`.

    Args:
        points: Uses at the points of the grid, `[SNR, bits]`, infinite where no scheme carries the bits; those of the
            library by default.
        origin: Loss, gain and origin of the table that they were made for.

    Raises:
        UsageError: If the points don't fit the grid.
    """

    log2_uses: Tensor
    least_snr_db: Tensor

    def __init__(self, points: Tensor | None = None, origin: dict[str, Any] | None = None) -> None:
        super().__init__()
        if points is None:
            points, origin = _read(TABLE)
        snr, sizes = _grid(SNR_DB), _grid(LOG2_BITS)
        carried = points.isfinite()
        if points.shape != (len(snr), len(sizes)) or not carried[-1].all():
            raise UsageError(f"points must be [{len(snr)}, {len(sizes)}] and finite at {snr[-1]:g} dB.")
        first = (~carried).sum(0)  # uses fall with the SNR: what is not carried lies below what is
        filled = torch.where(carried, points, points.gather(0, first[None]).expand_as(points))
        self.origin = origin or {}
        self.points = points
        self.register_buffer("log2_uses", filled.log2().float(), persistent=False)
        self.register_buffer("least_snr_db", SNR_DB[0] + SNR_DB[2] * first.float(), persistent=False)

    @classmethod
    def make(cls, error: float = ERROR, table: BlerTable | None = None) -> PayloadRate:
        """Points for another loss or another table: two minutes or so.

        Args:
            error: Probability that a payload is lost, at most.
            table: Block error rates; the shipped table by default.
        """
        snr, sizes = _grid(SNR_DB), _grid(LOG2_BITS)
        points = torch.full((len(snr), len(sizes)), math.inf, dtype=torch.float64)
        for j, size in enumerate(sizes):
            for i in reversed(range(len(snr))):
                try:
                    points[i, j] = payload_uses(math.ceil(2**size / 8), snr[i], error, table)[0]
                except UsageError:
                    break
        link = _link(table)
        return cls(points, {"error": error, "gain_db": link.gain_db, "table": link.table.origin})

    @classmethod
    def load(cls, path: str | Path) -> PayloadRate:
        """Read points that `save` wrote.

        Raises:
            UsageError: If the file is missing or has no such points.
        """
        return cls(*_read(Path(path)))

    def save(self, path: str | Path) -> None:
        """Write the points."""
        rows = [[int(x) if x < math.inf else None for x in row] for row in self.points.tolist()]
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
        Path(path).write_text(f'{{"origin": {json.dumps(self.origin)},\n"uses": [\n{lines}\n]}}\n', encoding="utf-8")

    def uses(self, bits: Tensor, snr_db: Tensor) -> Tensor:
        """Channel uses, those that tell the scheme included.

        Args:
            bits: Payload [bit], eight for each byte, `[batch]`; 0 needs no channel use. Less than `LOG2_BITS` has are
                taken for the least of them, beyond the most the uses grow with the bits.
            snr_db: SNR per complex symbol [dB], `[batch]`; more than `SNR_DB` has is taken for the highest.

        Returns:
            Float32 `[batch]`, not rounded; infinite where no scheme carries the bits.
        """
        size, snr = bits.float().clamp(min=2 ** LOG2_BITS[0]).log2(), snr_db.float()
        i, along_snr = _cell(snr, SNR_DB)
        j, along_bits = _cell(size, LOG2_BITS)
        table = self.log2_uses
        low = torch.lerp(table[i, j], table[i, j + 1], along_bits)
        high = torch.lerp(table[i + 1, j], table[i + 1, j + 1], along_bits)
        uses = torch.exp2(torch.lerp(low, high, along_snr) + (size - LOG2_BITS[1]).clamp(min=0))
        least = torch.maximum(self.least_snr_db[j], self.least_snr_db[j + 1])
        return uses.where(snr >= least, math.inf).where(bits > 0, 0.0)


def _read(path: Path) -> tuple[Tensor, dict[str, Any]]:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        points = [[math.inf if x is None else x for x in row] for row in held["uses"]]
        return torch.tensor(points, dtype=torch.float64), dict(held["origin"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} has no points ({error}): PayloadRate.make().save(path) makes them.") from error


def _grid(span: tuple[float, float, float]) -> list[float]:
    first, last, step = span
    return [first + step * i for i in range(round((last - first) / step) + 1)]


def _cell(x: Tensor, span: tuple[float, float, float]) -> tuple[Tensor, Tensor]:
    """Lower index of the cell that holds x, and where in it x lies, 0 to 1."""
    first, last, step = span
    at = (x.clamp(first, last) - first) / step
    index = at.long().clamp(max=round((last - first) / step) - 1)
    return index, at - index
