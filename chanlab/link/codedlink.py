"""A coded multi-user OFDM downlink on sionna.phy: 5G LDPC, QAM, a slot with pilots, estimation, LMMSE, decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from chanlab.channels.sionna_phy import phy
from chanlab.errors import UsageError
from chanlab.link.decoding import block_errors, is_lost, iteration_stages

_LARGEST_BLOCK = 8448  # information bits of an LDPC code block, 3GPP TS 38.212


@dataclass(frozen=True)
class Transmission:
    """What a set of users is sent in one slot, and the noise they add to it.

    Attributes:
        bits: Information bits, 0 or 1, real `[set, user, block, k]`.
        code_bits: Code bits, 0 or 1, real `[set, user, block, n]`.
        grid: Data and pilot symbols before precoding, complex `[set, user, symbol, subcarrier]`.
        noise: Complex noise of unit variance at each user's antenna, `[set, user, symbol, subcarrier]`.
    """

    bits: Tensor
    code_bits: Tensor
    grid: Tensor
    noise: Tensor

    @property
    def num_sets(self) -> int:
        """Number of sets of users."""
        return int(self.bits.shape[0])

    def __getitem__(self, sets: slice) -> Transmission:
        """Some of the sets."""
        return Transmission(self.bits[sets], self.code_bits[sets], self.grid[sets], self.noise[sets])


@dataclass(frozen=True)
class BlerResult:
    """Code blocks that failed.

    Attributes:
        errors: Bool `[set, user, block]`.
        bits_per_block: Information bits of a block.
        rate: Spectral efficiency of one user if no block fails [bit/s/Hz], pilots counted as overhead.
    """

    errors: Tensor
    bits_per_block: int
    rate: float

    @property
    def blocks(self) -> int:
        """Number of code blocks."""
        return self.errors.numel()

    @property
    def block_errors(self) -> int:
        """Number of code blocks with at least one wrong information bit."""
        return int(self.errors.sum())

    @property
    def bler(self) -> float:
        """Block error rate."""
        return self.block_errors / self.blocks

    @property
    def goodput(self) -> float:
        """(1 - BLER) rate [bit/s/Hz] of one user: no retransmissions."""
        return (1 - self.bler) * self.rate


class CodedLink:
    """One slot of a precoded OFDM downlink to K single-antenna users on the same resource elements.

    Each user's bits are 5G LDPC coded, mapped to QAM and to the slot's data symbols. Pilots are precoded like data; in
    pilot symbols the users' streams take turns on a comb over the subcarriers with K times the power, so that the power
    of every resource element is the same. A user estimates the gain of its own and of the other streams on that comb
    (least squares, linear in between, averaged over the pilot symbols), or knows it (`receiver="perfect"`). Its LMMSE
    equaliser and demapper count the other streams as noise. The decoder is belief propagation; a block counts as wrong
    if any information bit is, which an ideal CRC would notice.

    The subcarriers are those of the channels it is run on: a view with one subcarrier per resource block is simulated
    as a grid of that many subcarriers.

    Args:
        num_subcarriers: Subcarriers of the channels.
        num_users: K, one stream each.
        num_symbols: OFDM symbols of the slot.
        pilot_symbols: Which of them carry pilots.
        bits_per_symbol: 2, 4, 6 or 8: QPSK to 256-QAM.
        code_rate: Information bits per code bit, 0.2 to 0.92.
        receiver: `ls` or `perfect`: how a user knows its effective channel.
        subcarrier_spacing: [Hz]; describes the grid, it does not change the results.
        num_iterations: Iterations of the decoder at most.
        shortcuts: Stop decoding a block when it is right, and don't try one whose logits carry less information than
            its code needs (`chanlab.link.decoding.is_lost`): several times faster, same errors.
        device: Device of the simulation.

    Raises:
        UsageError: If the grid, the modulation and the code don't fit together.
    """

    def __init__(
        self,
        num_subcarriers: int,
        num_users: int = 4,
        num_symbols: int = 14,
        pilot_symbols: Sequence[int] = (2, 11),
        bits_per_symbol: int = 4,
        code_rate: float = 0.5,
        receiver: Literal["ls", "perfect"] = "ls",
        subcarrier_spacing: float = 30e3,
        num_iterations: int = 20,
        shortcuts: bool = True,
        device: str | torch.device = "cpu",
    ) -> None:
        self.num_users = num_users
        self.num_symbols = num_symbols
        self.num_subcarriers = num_subcarriers
        self.pilot_symbols = tuple(pilot_symbols)
        self.bits_per_symbol = bits_per_symbol
        self.receiver = receiver
        self.num_iterations = num_iterations
        self.shortcuts = shortcuts
        self.device = str(device)
        self._check(code_rate)
        data_symbols = num_subcarriers * (num_symbols - len(self.pilot_symbols))
        self.num_blocks = _num_blocks(data_symbols, bits_per_symbol * code_rate)
        self.n = data_symbols // self.num_blocks * bits_per_symbol
        self.k = round(self.n * code_rate)
        self._build(subcarrier_spacing)

    def _check(self, code_rate: float) -> None:
        if self.receiver not in ("ls", "perfect"):
            raise UsageError(f"receiver must be 'ls' or 'perfect', not {self.receiver!r}.")
        if self.bits_per_symbol not in (2, 4, 6, 8):
            raise UsageError(f"bits_per_symbol must be 2, 4, 6 or 8, not {self.bits_per_symbol}.")
        if not 0.2 <= code_rate <= 0.92:
            raise UsageError(
                f"code_rate must lie between 0.2 and 0.92 (TS 38.212 without repetition), not {code_rate}."
            )
        if len(set(self.pilot_symbols)) != len(self.pilot_symbols) or not all(
            0 <= s < self.num_symbols for s in self.pilot_symbols
        ):
            raise UsageError(f"pilot_symbols {self.pilot_symbols} must be different, within 0..{self.num_symbols - 1}.")
        if len(self.pilot_symbols) >= self.num_symbols:
            raise UsageError("a slot needs at least one symbol without pilots.")
        if self.receiver == "ls" and not self.pilot_symbols:
            raise UsageError("receiver='ls' estimates from pilots: give pilot_symbols, or receiver='perfect'.")
        if self.pilot_symbols and (self.num_subcarriers % self.num_users or self.num_subcarriers < 2 * self.num_users):
            raise UsageError(
                f"{self.num_subcarriers} subcarriers can't hold the pilot combs of {self.num_users} users: take a "
                f"multiple of {self.num_users}, at least {2 * self.num_users}."
            )

    def _build(self, subcarrier_spacing: float) -> None:
        import numpy as np

        ldpc, mapping, mimo, ofdm = (phy(name) for name in ("fec.ldpc", "mapping", "mimo", "ofdm"))
        where = {"precision": "single", "device": self.device}
        grid = ofdm.ResourceGrid(
            self.num_symbols,
            self.num_subcarriers,
            subcarrier_spacing,
            num_streams_per_tx=self.num_users,
            pilot_pattern=self._pilot_pattern() if self.pilot_symbols else None,
            **where,
        )
        streams = mimo.StreamManagement(np.ones([self.num_users, 1]), self.num_users)
        self._encoder = ldpc.LDPC5GEncoder(self.k, self.n, num_bits_per_symbol=self.bits_per_symbol, **where)
        self._decoder = ldpc.LDPC5GDecoder(self._encoder, num_iter=self.num_iterations, return_state=True, **where)
        self._mapper = mapping.Mapper("qam", self.bits_per_symbol, **where)
        self._demapper = mapping.Demapper("app", "qam", self.bits_per_symbol, **where)
        self._grid_mapper = ofdm.ResourceGridMapper(grid, **where)
        self._equaliser = ofdm.LMMSEEqualizer(grid, streams, **where)
        self._estimator = (
            ofdm.LSChannelEstimator(grid, interpolation_type="lin_time_avg", **where) if self.receiver == "ls" else None
        )

    def _pilot_pattern(self) -> Any:
        """QPSK pilots, user j on subcarriers j, j + K, ...; the others silent there."""
        shape = (1, self.num_users, self.num_symbols, self.num_subcarriers)
        mask = torch.zeros(shape, dtype=torch.int32)
        mask[:, :, list(self.pilot_symbols)] = 1
        quadrant = torch.randint(
            4,
            (self.num_users, len(self.pilot_symbols), self.num_subcarriers),
            generator=torch.Generator().manual_seed(self.num_subcarriers),
        )
        pilots = torch.polar(torch.tensor(math.sqrt(self.num_users)), math.pi / 4 + math.pi / 2 * quadrant)
        turn = torch.arange(self.num_subcarriers) % self.num_users == torch.arange(self.num_users)[:, None]
        pilots = pilots * turn[:, None]
        pilots = pilots.reshape(1, self.num_users, -1)
        return phy("ofdm").PilotPattern(mask, pilots, precision="single", device=self.device)

    @property
    def rate(self) -> float:
        """Information bits per resource element and user [bit/s/Hz], pilots counted as overhead."""
        return self.num_blocks * self.k / (self.num_symbols * self.num_subcarriers)

    def transmit(self, generators: Sequence[torch.Generator]) -> Transmission:
        """Draw bits and noise for as many sets of users as there are generators (on the CPU), and encode.

        A set's bits and noise depend on its generator alone.
        """
        slot = (self.num_users, self.num_symbols, self.num_subcarriers)
        bits = torch.stack(
            [torch.randint(0, 2, (self.num_users, self.num_blocks, self.k), generator=g) for g in generators]
        ).to(self.device, torch.float32)
        noise = torch.stack([torch.randn(slot, dtype=torch.complex64, generator=g) for g in generators])
        with torch.inference_mode():
            code_bits = self._encoder(bits)
            symbols = self._mapper(code_bits).flatten(2)
            grid = self._grid_mapper(symbols[:, None])[:, 0]
        return Transmission(bits, code_bits, grid, noise.to(self.device))

    def receive(self, gain: Tensor, sent: Transmission, noise_variance: float) -> Tensor:
        """What arrives at the users: own stream, the others' and noise.

        Args:
            gain: h_k w_j, what user k receives of stream j, complex `[set, user, stream, symbol, subcarrier]` (see
                `chanlab.link.effective_gain`); a symbol axis of 1 is a channel that is constant in the slot.
            sent: What `transmit` returned.
            noise_variance: N0 at a user's antenna.

        Returns:
            Complex `[set, user, symbol, subcarrier]`.

        Raises:
            UsageError: If the shape of `gain` does not fit.
        """
        gain = self._per_symbol(gain, sent)
        return torch.einsum("skjtf,sjtf->sktf", gain, sent.grid) + math.sqrt(noise_variance) * sent.noise

    def run(self, gain: Tensor, sent: Transmission, noise_variance: float) -> BlerResult:
        """Receive and decode: which blocks fail. Arguments and errors as for `receive`."""
        with torch.inference_mode():
            y = self.receive(gain, sent, noise_variance)[:, :, None]  # [set, rx, rx_ant, symbol, subcarrier]
            n0 = torch.tensor(noise_variance, dtype=torch.float32, device=self.device)
            if self._estimator is None:
                h = self._per_symbol(gain, sent)[:, :, None, None]  # [set, rx, rx_ant, tx, stream, symbol, subcarrier]
                error_variance = torch.zeros((), device=self.device)
            else:
                h, error_variance = self._estimator(y, n0)
            symbols, n0_effective = self._equaliser(y, h, error_variance, n0)
            llr = self._demapper(symbols, n0_effective).reshape(-1, self.n)
            errors = self._decode(llr, sent.bits.reshape(-1, self.k), sent.code_bits.reshape(-1, self.n))
        return BlerResult(errors.reshape(sent.bits.shape[:3]), self.k, self.rate)

    def _decode(self, llr: Tensor, bits: Tensor, code_bits: Tensor) -> Tensor:
        """Which blocks are wrong, bool `[block]`."""
        if not self.shortcuts:
            every = torch.ones(llr.shape[0], dtype=torch.bool, device=llr.device)
            return block_errors(self._decoder, llr, bits, [self.num_iterations], every)
        lost = is_lost(llr, code_bits, self.k / self.n)
        return block_errors(self._decoder, llr, bits, iteration_stages(self.num_iterations), ~lost)

    def _per_symbol(self, gain: Tensor, sent: Transmission) -> Tensor:
        """`gain` for each symbol of the slot."""
        want = (sent.num_sets, self.num_users, self.num_users, self.num_symbols, self.num_subcarriers)
        if gain.ndim != 5 or gain.shape[3] not in (1, want[3]) or (*gain.shape[:3], want[3], gain.shape[4]) != want:
            raise UsageError(f"gain {list(gain.shape)} must be {list(want)}; the symbol axis may be 1.")
        return gain.to(self.device, torch.complex64).expand(want)


def _num_blocks(data_symbols: int, bits_per_data_symbol: float) -> int:
    """Fewest code blocks of equal whole symbols that respect the largest block of the standard."""
    least = max(1, math.ceil(data_symbols * bits_per_data_symbol / _LARGEST_BLOCK))
    for count in range(least, data_symbols + 1):
        if data_symbols % count == 0:
            return count
    raise UsageError(f"{data_symbols} data symbols can't be divided into code blocks.")
