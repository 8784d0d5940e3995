"""The equirectangular image of a receiver's sphere: which ray a pixel looks along."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from chanlab.errors import UsageError


@dataclass(frozen=True)
class Panorama:
    """Equirectangular image of a hemisphere, a sphere, or a band of it; a full turn of azimuth wide.

    Row i looks at elevation `lowest + (i + 1/2) (highest - lowest) / height`: row 0 is the lowest. Column j looks at
    azimuth `start + (j + 1/2) 2π / width`, counter-clockwise from the receiver's x axis; z points up.

    Attributes:
        height: Number of rows.
        width: Number of columns.
        lowest: Elevation of the lower edge [rad].
        highest: Elevation of the upper edge [rad].
        start: Azimuth of the left edge [rad].
    """

    height: int
    width: int
    lowest: float = 0.0
    highest: float = math.pi / 2
    start: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is no image."""
        if self.height < 1 or self.width < 1:
            raise UsageError(f"A panorama of {self.height} x {self.width} pixels has none; give at least 1 x 1.")
        if not -math.pi <= self.lowest < self.highest <= math.pi:
            raise UsageError(
                f"A panorama's elevations go up from lowest to highest, in radians: got {self.lowest}, {self.highest}."
            )

        if not abs(self.start) <= 2 * math.pi:
            raise UsageError(f"A panorama starts within 2π of azimuth 0, got {self.start} rad; take whole turns off.")

    @classmethod
    def hemisphere(cls, height: int, width: int) -> Panorama:
        """Everything above the receiver's horizon."""
        return cls(height, width)

    @classmethod
    def sphere(cls, height: int, width: int) -> Panorama:
        """All directions."""
        return cls(height, width, lowest=-math.pi / 2)

    @property
    def row_step(self) -> float:
        """Elevation between rows [rad]."""
        return (self.highest - self.lowest) / self.height

    @property
    def column_step(self) -> float:
        """Azimuth between columns [rad]."""
        return 2 * math.pi / self.width

    def rays(self, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None) -> Tensor:
        """Unit vectors of the pixels in the receiver's axes, `[height, width, 3]`."""
        elevation = self.lowest + (torch.arange(self.height, dtype=torch.float64, device=device) + 0.5) * self.row_step
        azimuth = self.start + (torch.arange(self.width, dtype=torch.float64, device=device) + 0.5) * self.column_step
        level, up = elevation.cos()[:, None], elevation.sin()[:, None]
        parts = (level * azimuth.cos(), level * azimuth.sin(), up.expand(self.height, self.width))
        return torch.stack(parts, -1).to(dtype)
