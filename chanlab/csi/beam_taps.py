"""What a network may see of a channel in the beam-delay domain: second moments, without phase and scale."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

NUM_LINES = 64
"""Lines of a Doppler spectrum over one cycle per snapshot."""

NUM_FEATURES = 99


@torch.no_grad()
def features(taps: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    """What the network sees of beams and taps: second moments, without phase and scale.

    Args:
        taps: Complex `[batch, series, column, row, tap, time]`, of unit mean power.
        level: Noise variance `[batch]`.

    Returns:
        Features `[batch, column, row, tap, 99]` and the periodogram `[batch, column, row, tap, 64]`.
    """
    steps = taps.shape[-1]
    noise = level[:, None, None, None, None]
    periodogram = square(torch.fft.fft(taps, n=NUM_LINES, dim=-1) if steps <= NUM_LINES else _folded(taps)).mean(1)
    periodogram = periodogram / steps
    power = square(taps).mean((1, -1))[..., None]
    coarse = periodogram[..., :: NUM_LINES // 32]

    def coherence(other: Tensor, reach: int) -> Tensor:
        scale = (power * square(other).mean((1, -1))[..., None]).sqrt() + 0.3 * noise
        found = []
        for lag in range(-reach, reach + 1):
            one = taps[..., max(0, lag) : steps + min(0, lag)]
            two = other[..., max(0, -lag) : steps - max(0, lag)]
            product = (one * two.conj()).sum((1, -1))[..., None] / (taps.shape[1] * steps)
            found.append(product / scale)
        return torch.view_as_real(torch.cat(found, -1)).flatten(-2)

    next_tap, second_tap = (functional.pad(taps[..., k:, :], (0, 0, 0, k)) for k in (1, 2))
    seen = [
        torch.log1p(coarse / noise),
        coarse / (power + 1e-9) * 0.3,
        torch.log1p(power / noise),
        torch.log(power + 1e-7),
        torch.log(noise).expand_as(power),
        coherence(next_tap, 2),
        coherence(second_tap, 2),
        coherence(taps.roll(-1, 2), 1),
        coherence(taps.roll(-1, 3), 1),
    ]
    return torch.cat(seen, -1), periodogram


@torch.no_grad()
def snapshot_noise(taps: Tensor) -> Tensor:
    """Noise variance of each snapshot from its weakest tenth of beams and taps, `[batch, time]`.

    A snapshot with almost no power (a lost one) is marked by a variance of 1e3.

    Args:
        taps: Complex `[batch, series, column, row, tap, time]`, of unit mean power.
    """
    power = square(taps).mean(1).flatten(1, 3)  # [batch, beam and tap, time]
    weakest = power.median(-1).values.argsort(1)[:, : max(1, power.shape[1] // 10)]
    noise = power.gather(1, weakest[..., None].expand(-1, -1, power.shape[-1])).mean(1)
    whole = power.mean(1)
    lost = whole < 1e-3 * whole.median(1, keepdim=True).values
    noise = noise.clamp_min(1e-4)
    return torch.where(lost, 1e3, noise)


def beam_directions(columns: int, rows: int) -> Tensor:
    """Harmonics of the beams' spatial frequencies, `[column, row, 16]`, for arrays of any size."""

    def harmonics(count: int) -> Tensor:
        turn = 2 * math.pi * torch.arange(count) / count
        return torch.stack([turn.cos(), turn.sin(), (2 * turn).cos(), (2 * turn).sin()], -1)

    one = harmonics(columns)[:, None].expand(columns, rows, 4)
    two = harmonics(rows)[None].expand(columns, rows, 4)
    first = (one[..., :2, None] * two[..., None, :2]).flatten(-2)
    second = (one[..., 2:, None] * two[..., None, 2:]).flatten(-2)
    return torch.cat([one, two, first, second], -1)


def square(x: Tensor) -> Tensor:
    """|x|² of complex numbers."""
    return x.real.square() + x.imag.square()


def _folded(taps: Tensor) -> Tensor:
    """DFT at 64 frequencies of a series longer than that."""
    steps = taps.shape[-1]
    padded = functional.pad(torch.view_as_real(taps), (0, 0, 0, -steps % NUM_LINES))
    return torch.fft.fft(torch.view_as_complex(padded).unflatten(-1, (-1, NUM_LINES)).sum(-2), dim=-1)  # type: ignore[no-any-return, no-untyped-call]
