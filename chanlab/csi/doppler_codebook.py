"""The standard's own answer: Release 18's enhanced Type II codebook for predicted precoders, ideally quantised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from chanlab.csi.pad import PAD
from chanlab.csi.predictor import check_history
from chanlab.errors import UsageError


class Combination(NamedTuple):
    """What a report may hold, per layer.

    Attributes:
        beams: L, of each polarization.
        taps: p, share of the frequency units that are delay taps of the report.
        coefficients: β, share of the coefficients that aren't zero.
    """

    beams: int
    taps: float
    coefficients: float


COMBINATIONS = {
    1: Combination(2, 1 / 8, 1 / 4),
    2: Combination(2, 1 / 4, 1 / 2),
    3: Combination(4, 1 / 4, 1 / 4),
    4: Combination(4, 1 / 4, 1 / 4),
    5: Combination(4, 1 / 4, 1 / 2),
    6: Combination(4, 1 / 4, 3 / 4),
    7: Combination(4, 1 / 2, 1 / 2),
    8: Combination(6, 1 / 4, 1 / 2),
    9: Combination(6, 1 / 4, 3 / 4),
}
"""By `paramCombination-Doppler-r18`, for one or two layers; 3 and 4 differ for more."""

OVERSAMPLING = 4
"""Of the beams along each axis of more than one port."""


class DopplerCodebook(nn.Module):
    """A user predicts, and reports by the enhanced Type II codebook for predicted precoders of Release 18.

    TS 38.214 (Release 18), section 5.2.2.2.10, reports N4 future precoders together, W = W1 · W2 · (Wf ⊗ Wd)ᴴ: L
    beams of an oversampled DFT grid for both polarizations (W1), delay taps of a DFT over frequency units (Wf), two of
    the N4 DFT vectors over the intervals, one of which is the constant (Wd), and of the coefficients (W2) only the
    strongest. How the user predicts is left open there: that is `predictor`, here PAD.

    What is told here is the channel at the base station after such a report, with these idealisations: coefficients
    aren't quantised; the channel itself is reported rather than a precoder, so that gains are kept; a precoder has no
    phase of its own, so the phase of the strongest beam is taken off for each unit and interval, as users do, and given
    back afterwards as if known; the delay taps are any, not only some of a window. Each receive antenna is a layer.
    The base station takes a unit's channel for all of its subcarriers.

    The user measures on the band that it reports: in FDD its history is the downlink's, so that the row belongs beside
    those for TDD, where history and target share a band.

    Args:
        horizons: Number of steps predicted, N4: 1, 2, 4 or 8.
        predictor: The user's; None: `PAD` at its default order.
        combination: `paramCombination-Doppler-r18`, 1 to 9, see `COMBINATIONS`; 9 is the largest report.
        subcarriers_per_unit: Subcarriers of a frequency unit. The finest of the standard is half a subband of 4
            resource blocks, 24; 1 reports each subcarrier, at a cost that the standard doesn't allow.
        tx_shape: `(polarizations, columns, rows)` of the transmit array, ports in the order of
            `chanlab.channels.PlanarArray`; two polarizations.
    """

    _bases: Tensor

    def __init__(
        self,
        horizons: int = 4,
        predictor: nn.Module | None = None,
        combination: int = 9,
        subcarriers_per_unit: int = 24,
        tx_shape: Sequence[int] = (2, 4, 4),
    ) -> None:
        super().__init__()
        if horizons not in (1, 2, 4, 8):
            raise UsageError(f"the codebook reports 1, 2, 4 or 8 intervals, not {horizons}")
        if combination not in COMBINATIONS:
            raise UsageError(f"combination is one of {', '.join(map(str, COMBINATIONS))}, not {combination}")
        if subcarriers_per_unit < 1:
            raise UsageError(f"subcarriers_per_unit must be at least 1, not {subcarriers_per_unit}")
        if len(tx_shape) != 3 or tx_shape[0] != 2 or min(tx_shape) < 1:
            raise UsageError(f"the codebook is for tx_shape [2, columns, rows], not {list(tx_shape)}")
        columns, rows = tx_shape[1:]
        self.combination = COMBINATIONS[combination]
        if self.combination.beams > columns * rows:
            raise UsageError(f"{self.combination.beams} beams are more than {columns * rows} ports of a polarization")
        if predictor is None:
            predictor = PAD(horizons, tx_shape=tx_shape)
        if getattr(predictor, "horizons", horizons) != horizons:
            raise UsageError(f"the user's predictor is for {predictor.horizons} steps, the codebook for {horizons}")
        self.horizons = horizons
        self.predictor = predictor
        self.subcarriers_per_unit = subcarriers_per_unit
        self.num_tx = 2 * columns * rows
        self.register_buffer("_bases", _beams(columns, rows), persistent=False)

    def forward(self, history: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """Predicts complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`; see `Predictor`."""
        check_history(history)
        return self.report(self.predictor(history, noise_variance))

    def report(self, channel: Tensor) -> Tensor:
        """What arrives of a channel at all intervals; with the true future, the loss of the report alone.

        Args:
            channel: Complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`.

        Raises:
            UsageError: The channel has other intervals or antennas than the codebook.
        """
        if channel.ndim != 5 or channel.shape[2:4] != (self.num_tx, self.horizons):
            raise UsageError(
                f"this codebook reports [batch, rx_ant, {self.num_tx}, {self.horizons}, subcarrier], "
                f"not {list(channel.shape)}"
            )
        unit = torch.arange(channel.shape[-1], device=channel.device) // self.subcarriers_per_unit
        count = torch.bincount(unit)
        units = channel.new_zeros(*channel.shape[:-1], len(count)).index_add_(-1, unit, channel) / count
        ports = units.reshape(*units.shape[:2], 2, self.num_tx // 2, *units.shape[3:])  # a polarization's elements
        beams = self._chosen_beams(ports)
        coefficients = torch.einsum("ble,brpetn->brpltn", beams.conj(), ports)
        reference = _phase_of_strongest(coefficients)
        kept = self._strongest(coefficients / reference) * reference
        return torch.einsum("ble,brpltn->brpetn", beams, kept).flatten(2, 3)[..., unit]

    def _chosen_beams(self, ports: Tensor) -> Tensor:
        """L orthogonal beams of the rotation in which they hold most power, `[batch, beam, element]`."""
        bases = self._bases.to(ports.dtype)
        seen = torch.einsum("qle,brpetn->bqlrptn", bases.conj(), ports)
        power = seen.abs().square().sum((3, 4, 5, 6))
        strongest, index = power.topk(self.combination.beams, dim=-1)
        rotation = strongest.sum(-1).argmax(-1)
        chosen = index[torch.arange(len(ports), device=ports.device), rotation]
        return bases[rotation[:, None], chosen]

    def _strongest(self, coefficients: Tensor) -> Tensor:
        """The coefficients that a report holds, of `[batch, rx, polarization, beam, interval, unit]`."""
        x = torch.fft.fft(torch.fft.ifft(coefficients, dim=-1, norm="ortho"), dim=-2, norm="ortho")
        power = x.abs().square()
        num_units, shifts = x.shape[-1], min(2, self.horizons)
        taps = min(num_units, math.ceil(self.combination.taps * num_units))
        by_tap = power.sum((2, 3, 4))
        allowed = torch.zeros_like(by_tap).scatter_(-1, by_tap.topk(taps, -1).indices, 1.0)[:, :, None, None, None]
        by_shift = (power * allowed).sum((2, 3, 5))
        by_shift[..., 0] = math.inf  # the constant is always reported
        shifted = torch.zeros_like(by_shift).scatter_(-1, by_shift.topk(shifts, -1).indices, 1.0)
        power = (power * allowed * shifted[:, :, None, None, :, None]).flatten(2)
        nonzero = math.ceil(2 * self.combination.coefficients * self.combination.beams * taps * shifts)
        within = torch.zeros_like(power).scatter_(-1, power.topk(nonzero, -1).indices, 1.0) * power
        over = within.flatten(1)  # all layers together hold twice as many at most
        best = over.topk(min(2 * nonzero, over.shape[1]), -1).indices
        held = (torch.zeros_like(over).scatter_(-1, best, 1.0) * (over > 0)).view_as(x)
        back: Tensor = torch.fft.fft(torch.fft.ifft(x * held, dim=-2, norm="ortho"), dim=-1, norm="ortho")
        return back


def _beams(columns: int, rows: int) -> Tensor:
    """Orthonormal beams for each rotation of the oversampled grid, complex64 `[rotation, beam, element]`."""

    def axis(ports: int) -> Tensor:
        factor = OVERSAMPLING if ports > 1 else 1
        rotation, beam = torch.arange(factor).double() / factor, torch.arange(ports).double()
        turns = (beam[None, :, None] + rotation[:, None, None]) * torch.arange(ports) * (2 * math.pi / ports)
        return torch.polar(torch.full_like(turns, 1 / math.sqrt(ports)), turns)

    grid = torch.einsum("qbc,sdr->qsbdcr", axis(columns), axis(rows))
    return grid.flatten(4, 5).flatten(2, 3).flatten(0, 1).to(torch.complex64)


def _phase_of_strongest(coefficients: Tensor) -> Tensor:
    """Unit phase of each layer's strongest beam by interval and unit, `[batch, rx, 1, 1, interval, unit]`."""
    power = coefficients.abs().square().sum((-1, -2)).flatten(2)
    index = power.argmax(-1)[:, :, None, None, None]
    beams = coefficients.flatten(2, 3)
    strongest = beams.gather(2, index.expand(-1, -1, 1, *beams.shape[3:]))
    magnitude = strongest.abs()
    unit = torch.where(magnitude > 0, strongest / magnitude.clamp(min=torch.finfo(magnitude.dtype).tiny), 1.0)
    return unit[:, :, :, None]
