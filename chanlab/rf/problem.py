"""What compiled back ends of `rasterize_sphere` are told of a call, and how tensors are laid out for kernels."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

from torch import Tensor

from chanlab.rf.panorama import Panorama

Asked = tuple[int, int, float, float, float, float, float]
"""Height, width, lowest, highest, start, nearest and blur: scalars of the operator."""


@functools.lru_cache(maxsize=64)
def pack_problem(asked: Asked, gaussians: int, receivers: int, channels: int) -> bytes:
    """`sphere::Problem` in `kernels/sphere.h`."""
    height, width, lowest, _, start, nearest, blur = asked
    image = Panorama(*asked[:5])
    sizes = (gaussians, receivers, channels, height, width)
    return struct.pack("5q6d", *sizes, lowest, image.row_step, start, image.column_step, nearest, blur)


def laid_out(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous, with lazy negation (`is_neg`) carried out: what pointers show. Complex ones are conjugated before."""
    return [x if x.is_contiguous() and not x.is_neg() else x.resolve_neg().contiguous() for x in tensors]
