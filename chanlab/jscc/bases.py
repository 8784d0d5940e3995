"""Base layers: what a receiver has of an image before symbols refine it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Base:
    image: Tensor
    num_bytes: Tensor
    uses: Tensor | None = None


def mean_colour(images: Tensor) -> Tensor:
    """Mean colours as 8 bits a channel tell them, `[batch, 3]`."""
    mean: Tensor = (255 * images.float().mean((2, 3))).round().clamp(0, 255) / 255
    return mean
