"""Channel estimation over time and frequency from pilot OFDM symbols, by Wiener filters whose statistics the data pick.

The pilots of one link decide which of a family of power delay profiles and Doppler spectra explains them best; the
linear MMSE filter of that pair then estimates the whole grid and tells its own mean square error. Both correlations
together have the structure of a Kronecker product, so that their eigenvectors, computed once, make the joint filter of
time and frequency exact and cheap.
"""

from __future__ import annotations

import functools
import math
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

DELAYS = tuple(2.0**-i for i in range(2, 11))
"""Widths of uniform profiles, and 4 times the RMS delay spreads of exponential ones, in OFDM symbols without prefix."""
LONGEST = 64
"""Pilot symbols that are filtered together."""
DOPPLERS = (1e-4, 3e-4, 1e-3, 2e-3, 4e-3, 8e-3, 0.016, 0.032, 0.064, 0.128)
"""Half widths of uniform Doppler spectra, in cycles per OFDM symbol."""


def wiener_estimate(
    pilots: Tensor, noise_variance: Tensor, pilot_times: Tensor, num_symbols: int
) -> tuple[Tensor, Tensor]:
    """Linear MMSE estimate of a grid from OFDM symbols that are all pilots.

    Mean delay and mean Doppler shift are estimated from phases of neighbouring pilots and taken out first; the spectra
    are uniform around them, or exponential in delay. Which widths: those of the largest likelihood of the pilots of all
    receive ports (uniform spectra make robust filters: Li, Cimini and Sollenberger, 1998). Long grids are estimated in
    parts of up to `LONGEST` pilot symbols, each with statistics of its own.

    Args:
        pilots: Received over sent pilots of a channel of unit mean power, complex64
            `[batch, rx_ant, pilot, subcarrier]`.
        noise_variance: Of each of them, `[batch]`.
        pilot_times: OFDM symbols that are pilots, ascending at equal distances, int64 `[pilot]`.
        num_symbols: OFDM symbols of the grid.

    Returns:
        The estimate, complex64 `[batch, rx_ant, symbol, subcarrier]`, and the variance of its error under the chosen
        statistics, float32 `[batch, symbol, subcarrier]`.
    """
    count = len(pilot_times)
    if count > LONGEST:
        number = -(-count // LONGEST)
        ends = [count * i // number for i in range(number + 1)]
        # A part ends in the middle between its last pilot and the next part's first.
        cuts = [0, *(int(pilot_times[i - 1] + pilot_times[i] + 1) // 2 for i in ends[1:-1]), num_symbols]
        parts = [
            wiener_estimate(pilots[:, :, i:j], noise_variance, pilot_times[i:j] - start, stop - start)
            for (i, j), (start, stop) in zip(pairwise(ends), pairwise(cuts), strict=True)
        ]
        return torch.cat([part[0] for part in parts], 2), torch.cat([part[1] for part in parts], 1)
    z, turn = _centre(pilots, pilot_times, num_symbols)
    times = tuple(pilot_times.tolist())
    delay = _delay_statistics(z.shape[-1], z.device)
    doppler = _doppler_statistics(times, num_symbols, z.device)
    i, j = _most_likely(z, noise_variance, delay, doppler)
    values_f, vectors_f = delay[0][i], delay[1][i]  # [batch, a], [batch, subcarrier, a]
    values_t, vectors_t, cross = (x[j] for x in doppler)
    a = vectors_t.mH[:, None] @ z @ vectors_f.conj()[:, None]
    joint = values_t[:, :, None] * values_f[:, None] + noise_variance[:, None, None]
    weight = values_f[:, None] / joint
    estimate = (cross @ vectors_t)[:, None] @ (a * weight[:, None]) @ vectors_f.mT[:, None]
    shares_t, shares_f = (cross @ vectors_t).abs().square(), vectors_f.abs().square()
    # A difference of numbers near 1, in double precision whatever the precision of matrix products is set to.
    known = shares_t.double() @ (values_f[:, None] * weight).double() @ shares_f.mT.double()
    return estimate * turn, (1 - known).float().clamp(min=1e-6)


def _centre(pilots: Tensor, times: Tensor, num_symbols: int) -> tuple[Tensor, Tensor]:
    """Pilots without mean delay and mean Doppler shift, and what turns a whole grid back."""
    f = torch.arange(pilots.shape[-1], device=pilots.device)
    t = torch.arange(num_symbols, device=pilots.device)
    slope_f = (pilots[..., 1:] * pilots[..., :-1].conj()).sum((1, 2, 3)).angle()
    slope_t = torch.zeros_like(slope_f)
    if len(times) > 1:
        step = int(times[1] - times[0])
        slope_t = (pilots[:, :, 1:] * pilots[:, :, :-1].conj()).sum((1, 2, 3)).angle() / step
    phase = slope_t[:, None, None] * t[:, None] + slope_f[:, None, None] * f
    turn = torch.polar(torch.ones_like(phase), phase)[:, None]
    return pilots * turn[:, :, times].conj(), turn


Statistics: TypeAlias = tuple[Tensor, ...]
"""Eigenvalues and eigenvectors of a family of correlations, and what goes with them; the family first."""


def _most_likely(z: Tensor, noise_variance: Tensor, delay: Statistics, doppler: Statistics) -> tuple[Tensor, Tensor]:
    """Index of the delay profile and of the Doppler spectrum for each of the batch: by turns, which settles at once."""
    j = torch.full((len(z),), len(doppler[0]) // 2, device=z.device)
    i = j
    for _ in range(2):
        rotated = doppler[1][j].mH[:, None] @ z
        values = doppler[0][j]
        cost = [
            _cost(rotated @ vectors.conj(), values[:, :, None] * profile + noise_variance[:, None, None])
            for profile, vectors in zip(delay[0], delay[1], strict=True)
        ]
        i = torch.stack(cost).argmin(0)
        rotated = z @ delay[1][i].conj()[:, None]
        values = delay[0][i]
        cost = [
            _cost(vectors.mH @ rotated, spectrum[:, None] * values[:, None] + noise_variance[:, None, None])
            for spectrum, vectors in zip(doppler[0], doppler[1], strict=True)
        ]
        j = torch.stack(cost).argmin(0)
    return i, j


def _cost(rotated: Tensor, variance: Tensor) -> Tensor:
    """Negative log-likelihood of independent Gaussian entries, up to a constant, `[batch]`."""
    energy = rotated.abs().square().sum(1)
    return (rotated.shape[1] * variance.log() + energy / variance).sum((1, 2))


@functools.lru_cache(maxsize=8)
def _delay_statistics(num_subcarriers: int, device: torch.device) -> Statistics:
    """Eigenvalues `[profile, a]` and -vectors `[profile, subcarrier, a]` of the correlation over frequency."""
    place = torch.arange(num_subcarriers, dtype=torch.float64)
    distance = place[:, None] - place
    uniform = [torch.sinc(distance * width).to(torch.complex128) for width in DELAYS]
    spreads = [width / 4 for width in DELAYS]
    # An exponential profile whose mean delay, equal to its spread, is taken out.
    exponential = [
        torch.polar(torch.ones_like(distance), 2 * math.pi * distance * s) / (1 + 2j * math.pi * distance * s)
        for s in spreads
    ]
    values, vectors = torch.linalg.eigh(torch.stack(uniform + exponential))
    return values.clamp(min=0).float().to(device), vectors.to(device, torch.complex64)


@functools.lru_cache(maxsize=32)
def _doppler_statistics(pilot_times: tuple[int, ...], num_symbols: int, device: torch.device) -> Statistics:
    """Eigenvalues and -vectors of the correlation of pilots over time, and their correlation with all symbols."""
    place = torch.arange(num_symbols, dtype=torch.float64)
    distance = place[:, None] - place[list(pilot_times)]
    cross = torch.stack([torch.sinc(2 * distance * width) for width in DOPPLERS]).to(torch.complex128)
    values, vectors = torch.linalg.eigh(cross[:, list(pilot_times)])
    values = values.clamp(min=0).float()
    return values.to(device), vectors.to(device, torch.complex64), cross.to(device, torch.complex64)
