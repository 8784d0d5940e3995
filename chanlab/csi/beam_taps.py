"""What a network may see of a channel in the beam-delay domain: second moments, without phase and scale."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional

NUM_LINES = 128
"""Lines of a Doppler spectrum over one cycle per snapshot."""

LOST = 1e3
"""Noise variance that marks a snapshot which never arrived."""

NUM_SPECTRAL = 67
NUM_COHERENCES = 32
NUM_FEATURES = NUM_SPECTRAL + NUM_COHERENCES
_COARSE = 32  # lines that the network sees: all that a periodogram of 16 snapshots holds


@torch.no_grad()
def spectral_features(taps: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    """What the network sees of beams and taps one by one: periodogram and power, over the noise and as they are.

    Args:
        taps: Complex `[batch, series, column, row, tap, time]`, of unit mean power.
        level: Noise variance `[batch]`.

    Returns:
        Features `[batch, column, row, tap, 67]` and the periodogram `[batch, column, row, tap, 128]`.
    """
    steps = taps.shape[-1]
    noise = level[:, None, None, None, None]
    periodogram = square(torch.fft.fft(taps, n=NUM_LINES, dim=-1) if steps <= NUM_LINES else _folded(taps)).mean(1)
    periodogram = periodogram / steps
    power = square(taps).mean((1, -1))[..., None]
    coarse = periodogram[..., :: NUM_LINES // _COARSE]
    seen = [
        torch.log1p(coarse / noise),
        coarse / (power + 1e-9) * 0.3,
        torch.log1p(power / noise),
        torch.log(power + 1e-7),
        torch.log(noise).expand_as(power),
    ]
    return torch.cat(seen, -1), periodogram


@torch.no_grad()
def coherence_features(taps: Tensor, next_tap: Tensor, second_tap: Tensor, level: Tensor) -> Tensor:
    """What the network sees of pairs: coherence with the next two taps and the next beams, by lag.

    Args:
        taps: Complex `[batch, series, column, row, tap, time]`, of unit mean power.
        next_tap: The tap behind each of them, same shape.
        second_tap: The tap behind that, same shape.
        level: Noise variance `[batch]`.

    Returns:
        `[batch, column, row, tap, 32]`.
    """
    steps = taps.shape[-1]
    noise = level[:, None, None, None, None]
    power = square(taps).mean((1, -1))[..., None]

    def coherence(other: Tensor, reach: int) -> Tensor:
        scale = (power * square(other).mean((1, -1))[..., None]).sqrt() + 0.3 * noise
        found = []
        for lag in range(-reach, reach + 1):
            one = taps[..., max(0, lag) : steps + min(0, lag)]
            two = other[..., max(0, -lag) : steps - max(0, lag)]
            product = (one * two.conj()).sum((1, -1))[..., None] / (taps.shape[1] * steps)
            found.append(product / scale)
        return torch.view_as_real(torch.cat(found, -1)).flatten(-2)

    pairs = [(next_tap, 2), (second_tap, 2), (taps.roll(-1, 2), 1), (taps.roll(-1, 3), 1)]
    return torch.cat([coherence(other, reach) for other, reach in pairs], -1)


@torch.no_grad()
def strongest_taps(taps: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Taps that hold the most power, and the others; int64 `[batch, count]` and the rest, each in order of delay.

    Args:
        taps: Complex `[batch, series, column, row, tap, time]`.
        count: How many.
    """
    order = square(taps).sum((1, 2, 3, 5)).argsort(1, descending=True)
    return order[:, :count].sort(1).values, order[:, count:].sort(1).values


def pick_taps(taps: Tensor, index: Tensor) -> Tensor:
    """Taps `[batch, series, column, row, tap, time]` by their numbers `[batch, count]`; beyond the last they are 0."""
    last = taps.shape[4]
    chosen = index.clamp(max=last - 1)[:, None, None, None, :, None]
    picked = taps.gather(4, chosen.expand(*taps.shape[:4], -1, taps.shape[5]))
    return picked * (index < last)[:, None, None, None, :, None]


@torch.no_grad()
def snapshot_noise(taps: Tensor) -> Tensor:
    """Noise variance of each snapshot from its weakest tenth of beams and taps, `[batch, time]`.

    A snapshot with almost no power beside the strongest quarter (a lost one) is marked by a variance of `LOST`.

    Args:
        taps: Complex `[batch, series, column, row, tap, time]`, of unit mean power.
    """
    power = square(taps).mean(1).flatten(1, 3)  # [batch, beam and tap, time]
    whole = power.mean(1)
    lost = whole < 1e-3 * whole.quantile(0.75, 1, keepdim=True)
    usual = torch.nanmedian(torch.where(lost[:, None], math.nan, power), -1).values
    weakest = usual.argsort(1)[:, : max(1, power.shape[1] // 10)]
    noise = power.gather(1, weakest[..., None].expand(-1, -1, power.shape[-1])).mean(1)
    return torch.where(lost, LOST, noise.clamp_min(1e-4))


def noise_level(noise: Tensor) -> Tensor:
    """Noise variance of a window `[batch]`: the median of its snapshots' `[batch, time]`, lost ones left out."""
    return torch.nanmedian(torch.where(noise >= LOST, math.nan, noise), -1).values


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)  # what is kept must serve training, whoever asks first
def beam_directions(columns: int, rows: int, device: torch.device) -> Tensor:
    """Harmonics of the beams' spatial frequencies, `[column, row, 16]`, for arrays of any size."""

    def harmonics(count: int) -> Tensor:
        turn = 2 * math.pi * torch.arange(count) / count
        return torch.stack([turn.cos(), turn.sin(), (2 * turn).cos(), (2 * turn).sin()], -1)

    one = harmonics(columns)[:, None].expand(columns, rows, 4)
    two = harmonics(rows)[None].expand(columns, rows, 4)
    first = (one[..., :2, None] * two[..., None, :2]).flatten(-2)
    second = (one[..., 2:, None] * two[..., None, 2:]).flatten(-2)
    return torch.cat([one, two, first, second], -1).to(device)


def square(x: Tensor) -> Tensor:
    """|x|² of complex numbers."""
    return x.real.square() + x.imag.square()


def _folded(taps: Tensor) -> Tensor:
    """DFT at `NUM_LINES` frequencies of a series longer than that."""
    steps = taps.shape[-1]
    padded = functional.pad(torch.view_as_real(taps), (0, 0, 0, -steps % NUM_LINES))
    return torch.fft.fft(torch.view_as_complex(padded).unflatten(-1, (-1, NUM_LINES)).sum(-2), dim=-1)  # type: ignore[no-any-return, no-untyped-call]
