"""Images over noisy channels: DeepJSCC codecs and the separation baseline under one physical-layer contract."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chanlab.jscc.classifier import ImageClassifier
    from chanlab.jscc.contract import (
        STANDARD,
        Convention,
        Received,
        Transmission,
        bandwidth_ratio,
        channel_uses,
        find_convention,
        normalise_power,
        pair_iq,
        split_iq,
    )
    from chanlab.jscc.image_files import open_images, open_pictures
    from chanlab.jscc.images import ImageBatch, ImageDataModule

_HOMES = {
    "Convention": "contract",
    "ImageBatch": "images",
    "ImageClassifier": "classifier",
    "ImageDataModule": "images",
    "Received": "contract",
    "STANDARD": "contract",
    "Transmission": "contract",
    "bandwidth_ratio": "contract",
    "channel_uses": "contract",
    "find_convention": "contract",
    "normalise_power": "contract",
    "open_images": "image_files",
    "open_pictures": "image_files",
    "pair_iq": "contract",
    "split_iq": "contract",
}

__all__ = [
    "STANDARD",
    "Convention",
    "ImageBatch",
    "ImageClassifier",
    "ImageDataModule",
    "Received",
    "Transmission",
    "bandwidth_ratio",
    "channel_uses",
    "find_convention",
    "normalise_power",
    "open_images",
    "open_pictures",
    "pair_iq",
    "split_iq",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
