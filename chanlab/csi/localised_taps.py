"""Delay taps of a band: localised functions over its subcarriers that hold what arrives within a window of delays."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

NUM_TAPS = 60
WINDOW = (-2.25, 50.4)
"""Delays that the taps hold, in units of 1 / bandwidth."""
_EDGE = 0.45  # taps stand this far inside the window
_ORIGIN = -1.25  # frequency of a band's first subcarrier, in bandwidths, where its taps' phases are counted from


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)  # what is kept must serve training, whoever asks first
def localised_taps(num_subcarriers: int, offset: float = 0.0, device: torch.device | str = "cpu") -> Tensor:
    """Delay taps of a band as functions over its subcarriers.

    The functions span what delays of `WINDOW` make of the band (the leading singular vectors of their phasors, as
    prolate spheroidal sequences are), turned into the orthonormal functions nearest to phasors of equally spaced delays
    (Löwdin, J. Chem. Phys. 18, 1950). Of a path inside the window they miss less than 1e-6 of its energy, while the
    taps of a plain DFT leak far. White noise stays white. With fewer subcarriers than taps they are a tight frame.

    Args:
        num_subcarriers: Subcarriers F of the band.
        offset: Distance of the band from the one whose delays they share, in bandwidths: tap k of both stands for the
            same delay.
        device: Where they are kept.

    Returns:
        Complex64 `[subcarrier, tap]`, a matrix U with U^H U = 1 (U U^H = 1 if F is smaller than the number of taps).
    """
    frequency = torch.arange(num_subcarriers, dtype=torch.float64) / num_subcarriers + offset + _ORIGIN

    def phasors(low: float, high: float, count: int) -> Tensor:
        delay = torch.linspace(low, high, count, dtype=torch.float64)
        return torch.exp(-2j * math.pi * frequency[:, None] * delay)

    span = torch.linalg.svd(phasors(*WINDOW, 600), full_matrices=False)[0][:, :NUM_TAPS]
    inside = span @ (span.mH @ phasors(WINDOW[0] + _EDGE, WINDOW[1] - _EDGE, NUM_TAPS))
    left, _, right = torch.linalg.svd(inside, full_matrices=False)
    taps: Tensor = (left @ right).to(device, torch.complex64)
    return taps
