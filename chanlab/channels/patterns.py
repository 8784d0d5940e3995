"""Antenna patterns: field amplitudes of vertically polarised elements over direction.

Each function takes the sine and cosine of the zenith angle θ and the azimuth φ [rad] in the antenna's own axes
(boresight along x) and returns the amplitude of the θ̂ component; its square is the gain over an isotropic antenna.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Pattern = Callable[[Tensor, Tensor, Tensor], Tensor]


def iso(sin_zenith: Tensor, cos_zenith: Tensor, azimuth: Tensor) -> Tensor:
    """Isotropic: unit gain everywhere."""
    return torch.ones_like(cos_zenith)


def dipole(sin_zenith: Tensor, cos_zenith: Tensor, azimuth: Tensor) -> Tensor:
    """Short dipole along z, gain 1.5 sin²θ (Balanis, Antenna Theory, 3rd ed., eq. 4-26a)."""
    return math.sqrt(1.5) * sin_zenith


def hw_dipole(sin_zenith: Tensor, cos_zenith: Tensor, azimuth: Tensor) -> Tensor:
    """Half-wave dipole along z, gain 1.643 (cos(π/2 cos θ) / sin θ)² (Balanis, eq. 4-84)."""
    at_pole = sin_zenith < 1e-5
    safe = torch.where(at_pole, 1.0, sin_zenith)
    return math.sqrt(1.643) * torch.where(at_pole, 0.0, (math.pi / 2 * cos_zenith).cos().abs() / safe)


def tr38901(sin_zenith: Tensor, cos_zenith: Tensor, azimuth: Tensor) -> Tensor:
    """3GPP sector element: 8 dBi, 65° beam width in both planes, 30 dB floor (TR 38.901, table 7.3-1)."""
    width, floor, peak = math.radians(65.0), 30.0, 8.0
    zenith = torch.atan2(sin_zenith, cos_zenith)
    vertical = (12 * ((zenith - math.pi / 2) / width).square()).clamp(max=floor)
    horizontal = (12 * (azimuth / width).square()).clamp(max=floor)
    gain_db = peak - (vertical + horizontal).clamp(max=floor)
    return torch.pow(10.0, gain_db / 20)


PATTERNS: dict[str, Pattern] = {"iso": iso, "dipole": dipole, "hw_dipole": hw_dipole, "tr38901": tr38901}
"""Patterns by name."""

SLANTS: dict[str, tuple[float, ...]] = {
    "V": (0.0,),
    "H": (math.pi / 2,),
    "VH": (0.0, math.pi / 2),
    "cross": (-math.pi / 4, math.pi / 4),
}
"""Slant angles ζ [rad] of the ports of one element; the field is (cos ζ, sin ζ) in (θ̂, φ̂) (TR 38.901, eqs. 7.3-4/5)."""
