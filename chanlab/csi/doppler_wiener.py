"""Wiener prediction of stationary processes from their Doppler spectra: the posterior of a Gaussian process."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from chanlab.csi.hermitian import solve_hermitian


class Posterior(NamedTuple):
    """What a history says of later instants.

    Attributes:
        mean: Each component's mean, complex64 `[..., component, series, horizon]`.
        variance: Variance of the components' sum, real `[..., horizon]`.
        misfit: How large the history is for its covariance K: y^H K⁻¹ y per series and snapshot, 1 on average where
            the spectra are right, real `[...]`; None unless asked for.
    """

    mean: Tensor
    variance: Tensor
    misfit: Tensor | None = None


def doppler_posterior(
    spectrum: Tensor, noise: Tensor, history: Tensor, ahead: Tensor, with_misfit: bool = False
) -> Posterior:
    """Mean and variance, given a noisy history, of a sum of independent stationary Gaussian processes.

    A process is a sum of spectral lines, equally spaced over one cycle per snapshot, with independent complex Gaussian
    amplitudes of the variances in `spectrum`; Doppler shifts are counted from -1/2 to 1/2 cycle per snapshot. Several
    series share one spectrum. Solved in double precision. Source: any text on Wiener filters or Gaussian processes.

    Args:
        spectrum: Power of each line, real `[..., component, line]`, not negative.
        noise: Variance of the noise on each snapshot, `[..., time]` (broadcast): large for a snapshot that is missing.
        history: Complex `[..., series, time]`.
        ahead: Instants asked for, in snapshots after the last one, any real numbers, `[horizon]`.
        with_misfit: Whether to tell how well history and spectra agree; no gradient comes from that.
    """
    num_lines, steps, horizon = spectrum.shape[-1], history.shape[-1], len(ahead)
    line = _lines(num_lines, spectrum.device)
    past = torch.arange(1 - steps, 1, device=spectrum.device, dtype=torch.float64)
    power = spectrum.double()

    def correlation(values: Tensor, lags: Tensor) -> Tensor:
        """E[x(t + lag) x*(t)], complex128 `[..., *lags.shape]`."""
        phase = 2 * math.pi * line[:, None] * lags.flatten()
        turns = torch.stack([phase.cos(), phase.sin()], -1).flatten(1)
        return torch.view_as_complex((values @ turns).unflatten(-1, (*lags.shape, 2)))  # type: ignore[no-untyped-call]

    total = power.sum(-2)
    covariance = correlation(total, past[:, None] - past)
    loading = torch.diag_embed(noise.double().expand(*total.shape[:-1], steps))
    cross = correlation(power, past[:, None] - ahead.double())  # [..., component, time, horizon]
    sides = cross.movedim(-3, -2).flatten(-2)  # [..., time, component * horizon]
    observed = history.to(torch.complex128).mT if with_misfit else sides[..., :0]
    solved = solve_hermitian(covariance + loading, torch.cat([sides, observed], -1))
    weights = solved[..., : sides.shape[-1]]
    misfit = None
    if with_misfit:
        with torch.no_grad():
            whitened = solved[..., sides.shape[-1] :]
            energy = observed.real * whitened.real + observed.imag * whitened.imag
            misfit = energy.mean((-2, -1)).float()
    mean = weights.to(torch.complex64).mH @ history.to(torch.complex64).mT  # [..., component * horizon, series]
    pairs = weights.unflatten(-1, (-1, horizon)).sum(-2), cross.sum(-3)  # type: ignore[no-untyped-call]
    explained = (pairs[0].real * pairs[1].real + pairs[0].imag * pairs[1].imag).sum(-2)
    variance = (total.sum(-1, keepdim=True) - explained).clamp_min(0.0)
    return Posterior(mean.unflatten(-2, (-1, horizon)).mT, variance.float(), misfit)  # type: ignore[no-untyped-call]


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)  # what is kept must serve training, whoever asks first
def _lines(count: int, device: torch.device) -> Tensor:
    """Doppler shifts of spectral lines, cycles per snapshot."""
    line = torch.arange(count, dtype=torch.float64) / count
    return torch.where(line < 0.5, line, line - 1.0).to(device)
