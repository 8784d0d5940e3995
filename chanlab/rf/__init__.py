"""RF reconstruction with Gaussian splatting: a radiance field of 3-D Gaussians, rendered where a receiver stands."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chanlab.rf.coherent import coherent_sum
    from chanlab.rf.coherent_primitives import Rays, image, line_of_sight, scatterer
    from chanlab.rf.panorama import Panorama
    from chanlab.rf.rasterize import Rendering, Visibility, rasterize_sphere

_HOMES = {
    "Panorama": "panorama",
    "Rays": "coherent_primitives",
    "Rendering": "rasterize",
    "Visibility": "rasterize",
    "coherent_sum": "coherent",
    "image": "coherent_primitives",
    "line_of_sight": "coherent_primitives",
    "rasterize_sphere": "rasterize",
    "scatterer": "coherent_primitives",
}

__all__ = [
    "Panorama",
    "Rays",
    "Rendering",
    "Visibility",
    "coherent_sum",
    "image",
    "line_of_sight",
    "rasterize_sphere",
    "scatterer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
