"""Wiener prediction of stationary processes from their Doppler spectra: the posterior of a Gaussian process."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Posterior(NamedTuple):
    """What a history says of later instants.

    Attributes:
        mean: Each component's mean, complex64 `[..., component, series, horizon]`.
        variance: Variance of the components' sum, real `[..., horizon]`.
    """

    mean: Tensor
    variance: Tensor


def doppler_posterior(spectrum: Tensor, noise: Tensor, history: Tensor, ahead: Tensor) -> Posterior:
    """Mean and variance, given a noisy history, of a sum of independent stationary Gaussian processes.

    A process is a sum of spectral lines, equally spaced over one cycle per snapshot, with independent complex Gaussian
    amplitudes of the variances in `spectrum`; Doppler shifts are counted from -1/2 to 1/2 cycle per snapshot. Several
    series share one spectrum. Solved in double precision. Source: any text on Wiener filters or Gaussian processes.

    Args:
        spectrum: Power of each line, real `[..., component, line]`, not negative.
        noise: Variance of the noise on each snapshot, `[..., time]` (broadcast): large for a snapshot that is missing.
        history: Complex `[..., series, time]`.
        ahead: Instants asked for, in snapshots after the last one, any real numbers, `[horizon]`.
    """
    num_lines, steps = spectrum.shape[-1], history.shape[-1]
    line = torch.arange(num_lines, device=spectrum.device, dtype=torch.float64) / num_lines
    line = torch.where(line < 0.5, line, line - 1.0)
    past = torch.arange(1 - steps, 1, device=spectrum.device, dtype=torch.float64)
    power = spectrum.double()

    def correlation(values: Tensor, lags: Tensor) -> Tensor:
        """E[x(t + lag) x*(t)], complex128 `[..., *lags.shape]`."""
        phase = 2 * math.pi * line[:, None] * lags.flatten()
        found = torch.complex(values @ phase.cos(), values @ phase.sin())
        return found.reshape(*found.shape[:-1], *lags.shape)

    total = power.sum(-2)
    lags = correlation(total, torch.arange(steps, device=spectrum.device, dtype=torch.float64))
    index = (past[:, None] - past).long()
    covariance = torch.where(index >= 0, lags[..., index.abs()], lags[..., index.abs()].conj())
    covariance = covariance + torch.diag_embed(noise.double().expand(*total.shape[:-1], steps)).to(covariance)
    factor = torch.linalg.cholesky_ex(covariance)[0]
    cross = correlation(power, ahead.double()[:, None] - past)  # [..., component, horizon, time]
    summed = cross.sum(-3)
    sides = torch.cat([history.to(covariance).mT, summed.mH], -1)
    solved = torch.cholesky_solve(sides, factor)
    series = history.shape[-2]
    mean = (cross @ solved[..., None, :, :series]).mT
    explained = (summed * solved[..., series:].mT).sum(-1).real
    variance = (total.sum(-1, keepdim=True) - explained).clamp_min(0.0)
    return Posterior(mean.to(torch.complex64), variance.float())
