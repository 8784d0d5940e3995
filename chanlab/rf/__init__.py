"""RF reconstruction: primitives in space, and the operators that make images and channels of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chanlab.rf.coherent import coherent_sum
    from chanlab.rf.coherent_primitives import Rays, image, line_of_sight, scatterer

_HOMES = {
    "Rays": "coherent_primitives",
    "coherent_sum": "coherent",
    "image": "coherent_primitives",
    "line_of_sight": "coherent_primitives",
    "scatterer": "coherent_primitives",
}

__all__ = ["Rays", "coherent_sum", "image", "line_of_sight", "scatterer"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
