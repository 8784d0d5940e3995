"""Histories as receivers have them in the field: estimated from pilots, out of phase, late and quantised.

Functions take histories `[batch, rx_ant, tx_ant, time, subcarrier]` and a key per sample (`chanlab.data.counter`), on
any device; a sample's outcome depends on its key alone. What an oscillator or a clock does is told relative to the last
snapshot, whose phase and timing are right: so targets, which are the channel itself, stay predictable.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from chanlab.data import counter
from chanlab.errors import UsageError

BURST_LENGTH = 10
"""Snapshots of a burst of `burst_noise`."""


@dataclass(frozen=True)
class Impairments:
    """What stands between the channel and the history that a predictor is given; everything is off by default.

    Applied in this order to a history that carries its Gaussian noise: rotations (which leave white noise white), the
    estimate from pilots, quantisation. `CSIBatch.noise_variance` and `snr_db` stay those of the pilots.

    Attributes:
        pilot_spacing: The channel is observed on every n-th subcarrier, from the first on, and estimated in between;
            None: on all of them.
        estimator: `ls`: the pilots' least-squares estimates, interpolated linearly and held at the edge; `lmmse`:
            linear MMSE over frequency, for an exponential power delay profile and the noise variance as it is.
        delay_spread: RMS delay spread that `lmmse` reckons with [s].
        common_phase: Standard deviation of a Gaussian phase common to a snapshot, independent from snapshot to snapshot
            [rad]; infinity: uniform over the circle.
        cfo: Residual carrier frequency offset, uniform in ±cfo, constant in a window [Hz].
        timing_drift: Drift of the sampling clock, uniform in ±timing_drift, constant in a window (1e-7 is 0.1 ppm).
        feedback_delay: Snapshots between the end of the history and the present, from which horizons count: with d,
            the step h is asked for d + h snapshots after the history's last one.
        quantisation_bits: Bits per real dimension of a uniform quantiser over the peak of each snapshot; None: none.
    """

    pilot_spacing: int | None = None
    estimator: Literal["ls", "lmmse"] = "ls"
    delay_spread: float = 300e-9
    common_phase: float = 0.0
    cfo: float = 0.0
    timing_drift: float = 0.0
    feedback_delay: int = 0
    quantisation_bits: int | None = None

    def __post_init__(self) -> None:
        if self.estimator not in ("ls", "lmmse"):
            raise UsageError(f"estimator must be 'ls' or 'lmmse', not {self.estimator!r}.")
        for name, least in (("pilot_spacing", 1), ("quantisation_bits", 1), ("feedback_delay", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise UsageError(f"{name} must be a whole number >= {least}, not {value!r}.")
        for name in ("common_phase", "cfo", "timing_drift", "delay_spread"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"{name} must be >= 0, not {getattr(self, name)!r}.")

    def apply(
        self, history: Tensor, noise_variance: Tensor, sample_key: Tensor, interval: float, subcarrier_spacing: float
    ) -> Tensor:
        """The history that a predictor is given.

        Args:
            history: The channel with its Gaussian noise, complex64 `[batch, rx_ant, tx_ant, time, subcarrier]`.
            noise_variance: Of that noise, `[batch]`.
            sample_key: Int64 `[batch]`, from `chanlab.data.counter.keys`.
            interval: Time between snapshots [s].
            subcarrier_spacing: [Hz].
        """

        def key(use: int) -> Tensor:
            return counter.keys(sample_key, use)

        if self.common_phase:
            history = turn_snapshots(history, self.common_phase, key(1))
        if self.cfo:
            history = carrier_offset(history, self.cfo * _symmetric(key(2)), interval)
        if self.timing_drift:
            history = timing_drift(history, self.timing_drift * _symmetric(key(3)), interval, subcarrier_spacing)
        if self.pilot_spacing is not None:
            pilots = history[..., :: self.pilot_spacing]
            grid = (history.shape[-1], self.pilot_spacing)
            if self.estimator == "ls":
                history = interpolate_pilots(pilots, *grid)
            else:
                history = lmmse_pilots(pilots, noise_variance, *grid, subcarrier_spacing, self.delay_spread)
        if self.quantisation_bits is not None:
            history = quantise(history, self.quantisation_bits)
        return history


def turn_snapshots(history: Tensor, deviation: float, key: Tensor) -> Tensor:
    """Turn each snapshot by a phase of its own, common to antennas and subcarriers, relative to the last snapshot.

    Args:
        history: Complex `[batch, rx_ant, tx_ant, time, subcarrier]`.
        deviation: Of the Gaussian phase [rad]; infinity: uniform over the circle.
        key: Int64 `[batch]`.
    """
    steps = (history.shape[3],)
    if math.isinf(deviation):
        phase = 2 * math.pi * counter.uniform(key, steps)
    else:
        phase = deviation * counter.normal(key, steps)
    return history * _turn(phase - phase[:, -1:])[:, None, None, :, None]


def carrier_offset(history: Tensor, offset: Tensor, interval: float) -> Tensor:
    """Turn snapshots by a carrier frequency offset: linearly in time, and not at all the last one.

    Args:
        history: Complex `[batch, rx_ant, tx_ant, time, subcarrier]`.
        offset: `[batch]` [Hz].
        interval: Time between snapshots [s].
    """
    return history * _turn(2 * math.pi * offset[:, None] * _past(history, interval))[:, None, None, :, None]


def timing_drift(history: Tensor, drift: Tensor, interval: float, subcarrier_spacing: float) -> Tensor:
    """Delay snapshots by a clock's drift: a phase linear over subcarriers (about the band's centre) and over time.

    Args:
        history: Complex `[batch, rx_ant, tx_ant, time, subcarrier]`.
        drift: `[batch]`, seconds of delay gained per second.
        interval: Time between snapshots [s].
        subcarrier_spacing: [Hz].
    """
    subcarriers = history.shape[-1]
    frequency = (torch.arange(subcarriers, device=history.device) - subcarriers // 2) * subcarrier_spacing
    delay = drift[:, None] * _past(history, interval)
    return history * _turn(-2 * math.pi * delay[..., None] * frequency)[:, None, None]


def interpolate_pilots(pilots: Tensor, num_subcarriers: int, spacing: int) -> Tensor:
    """Least-squares estimates at comb pilots, interpolated linearly; the last one is held up to the edge.

    Args:
        pilots: Received pilots over what was sent, complex `[..., pilot]`, at subcarriers 0, spacing, 2 spacing, ...
        num_subcarriers: Length of the axis of frequency to be filled.
        spacing: Of the comb.
    """
    place = torch.arange(num_subcarriers, device=pilots.device)
    left = place // spacing
    right = (left + 1).clamp(max=pilots.shape[-1] - 1)
    share = (place % spacing) / spacing
    return torch.lerp(pilots[..., left], pilots[..., right], share.to(pilots.dtype))


def lmmse_pilots(
    pilots: Tensor,
    noise_variance: Tensor,
    num_subcarriers: int,
    spacing: int,
    subcarrier_spacing: float,
    delay_spread: float,
) -> Tensor:
    """Linear MMSE estimate over frequency from comb pilots, for an exponential power delay profile that starts at 0.

    The channel's power is taken from the pilots of the sample. Correlation over a distance Δf of the profile with RMS
    delay spread τ: 1 / (1 + j2πΔfτ).

    Args:
        pilots: Complex `[batch, ..., pilot]`; see `interpolate_pilots`.
        noise_variance: Of the pilots, `[batch]`.
        num_subcarriers: Length of the axis of frequency to be filled.
        spacing: Of the comb.
        subcarrier_spacing: [Hz].
        delay_spread: τ [s].
    """
    values, vectors, cross = _frequency_covariance(num_subcarriers, spacing, subcarrier_spacing, delay_spread)
    received = pilots.abs().square().flatten(1).mean(1)
    power = (received - noise_variance).clamp(min=1e-3 * received)
    ratio = (noise_variance / power.where(power > 0, 1.0)).view(-1, *[1] * (pilots.ndim - 1))
    values, vectors, cross = (x.to(pilots.device) for x in (values, vectors, cross))
    return ((pilots @ vectors.conj()) / (values + ratio)) @ cross


def quantise(history: Tensor, bits: int) -> Tensor:
    """Real and imaginary parts on a uniform grid of 2^bits levels up to the peak of each snapshot, which stays exact.

    Args:
        history: Complex `[batch, rx_ant, tx_ant, time, subcarrier]`.
        bits: Per real dimension.
    """
    parts = torch.view_as_real(history.resolve_conj())
    peak = parts.abs().amax((1, 2, 4, 5), keepdim=True)
    step = peak.where(peak > 0, 1.0) * 2.0 ** (1 - bits)
    level = ((parts / step).floor() + 0.5).clamp(-(2.0 ** (bits - 1)) + 0.5, 2.0 ** (bits - 1) - 0.5)
    return torch.view_as_complex(torch.where(peak > 0, level * step, 0.0))


def phase_noise(history: Tensor, deviation: float, key: Tensor) -> Tensor:
    """Turn every entry by a Gaussian phase of its own (CSI-4CAST's `phase`).

    Args:
        history: Complex `[batch, rx_ant, tx_ant, time, subcarrier]`.
        deviation: [rad].
        key: Int64 `[batch]`.
    """
    return history * _turn(deviation * counter.normal(key, history.shape[1:]))


def drop_packets(history: Tensor, probability: float, key: Tensor) -> Tensor:
    """Set whole snapshots to zero (CSI-4CAST's `packagedrop`).

    Args:
        history: Complex `[batch, rx_ant, tx_ant, time, subcarrier]`.
        probability: Of each snapshot.
        key: Int64 `[batch]`.
    """
    kept = counter.uniform(key, (history.shape[3],)) >= probability
    return history * kept[:, None, None, :, None]


def burst_noise(history: Tensor, degree: float, key: Tensor) -> Tensor:
    """Add a burst of Gaussian noise over up to ten snapshots (CSI-4CAST's `burst`).

    A sample has a burst with probability 1 - (1 - 2 degree)^(time + 1); it starts at a uniformly drawn snapshot and
    ends with the history at the latest. Its complex standard deviation is 2 degree exp(-x²/2), x from -1 to 1 over the
    burst, against channels of unit mean energy per entry. (There both channels and noise are twice as strong, counted
    per real dimension: the same ratio, and the one that their levels in dB are named after.)

    Args:
        history: Complex `[batch, rx_ant, tx_ant, time, subcarrier]`, of unit mean energy per entry.
        degree: Strength and frequency of bursts, up to 0.5.
        key: Int64 `[batch]`.
    """
    steps = history.shape[3]
    draw = counter.uniform(counter.keys(key, 1), (2,))
    start = (draw[:, :1] * steps).floor()
    length = (steps - start).clamp(max=BURST_LENGTH)
    place = torch.arange(steps, device=history.device) - start
    x = 2 * place / (length - 1).clamp(min=1) - 1
    inside = (place >= 0) & (place < length) & (draw[:, 1:] < 1 - (1 - 2 * degree) ** (steps + 1))
    envelope = torch.where(inside, 2 * degree * (-0.5 * x.square()).exp(), 0.0)
    noise = counter.complex_normal(counter.keys(key, 2), history.shape[1:])
    return history + envelope[:, None, None, :, None] * noise


def _symmetric(key: Tensor) -> Tensor:
    """A number in [-1, 1) for each sample."""
    return 2 * counter.uniform(key) - 1


def _past(history: Tensor, interval: float) -> Tensor:
    """Times of snapshots relative to the last one, `[time]` [s]."""
    steps = history.shape[3]
    return torch.arange(1 - steps, 1, device=history.device) * interval


def _turn(phase: Tensor) -> Tensor:
    return torch.polar(torch.ones_like(phase), phase)


@functools.lru_cache(maxsize=8)
def _frequency_covariance(
    num_subcarriers: int, spacing: int, subcarrier_spacing: float, delay_spread: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues and -vectors of the pilots' covariance; the cross-covariance with all subcarriers in their terms."""
    place = torch.arange(num_subcarriers, dtype=torch.float64)
    distance = (place[:, None] - place[::spacing]) * subcarrier_spacing
    cross = 1 / (1 + 2j * math.pi * distance * delay_spread)
    values, vectors = torch.linalg.eigh(cross[::spacing])
    return values.clamp(min=0).float(), vectors.to(torch.complex64), (vectors.mT @ cross.mT).to(torch.complex64)
