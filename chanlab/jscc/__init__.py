"""Images over noisy channels: DeepJSCC codecs and the separation baseline under one physical-layer contract."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chanlab.jscc.adaptive import AdaptiveJSCC
    from chanlab.jscc.adjscc import ADJSCC
    from chanlab.jscc.base_layer import BaseLayer
    from chanlab.jscc.bases import Base, BaseCodec, BasePool
    from chanlab.jscc.channels import AWGN, Equalised, SymbolChannel
    from chanlab.jscc.classifier import ImageClassifier
    from chanlab.jscc.codec import Codec
    from chanlab.jscc.compiled import CompiledCodec
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
        side_information_uses,
        split_iq,
    )
    from chanlab.jscc.deepjscc import DeepJSCC
    from chanlab.jscc.fading import Rayleigh, Rician
    from chanlab.jscc.gdn import GDN
    from chanlab.jscc.image_crops import ImageBatch
    from chanlab.jscc.image_files import open_images, open_pictures
    from chanlab.jscc.image_writer import ReceivedImageWriter
    from chanlab.jscc.images import ImageDataModule
    from chanlab.jscc.mimo import MIMO
    from chanlab.jscc.module import JSCCModule, load_codec
    from chanlab.jscc.ofdm import OFDMLink
    from chanlab.jscc.realisations import Grid, ModelRealisations, Realisations, SourceRealisations, StoreRealisations

_HOMES = {
    "ADJSCC": "adjscc",
    "AWGN": "channels",
    "AdaptiveJSCC": "adaptive",
    "Base": "bases",
    "BaseCodec": "bases",
    "BaseLayer": "base_layer",
    "BasePool": "bases",
    "Codec": "codec",
    "CompiledCodec": "compiled",
    "Convention": "contract",
    "DeepJSCC": "deepjscc",
    "Equalised": "channels",
    "GDN": "gdn",
    "Grid": "realisations",
    "ImageBatch": "image_crops",
    "ImageClassifier": "classifier",
    "ImageDataModule": "images",
    "JSCCModule": "module",
    "MIMO": "mimo",
    "ModelRealisations": "realisations",
    "OFDMLink": "ofdm",
    "Rayleigh": "fading",
    "Realisations": "realisations",
    "Received": "contract",
    "ReceivedImageWriter": "image_writer",
    "Rician": "fading",
    "STANDARD": "contract",
    "SourceRealisations": "realisations",
    "StoreRealisations": "realisations",
    "SymbolChannel": "channels",
    "Transmission": "contract",
    "bandwidth_ratio": "contract",
    "channel_uses": "contract",
    "find_convention": "contract",
    "load_codec": "module",
    "normalise_power": "contract",
    "open_images": "image_files",
    "open_pictures": "image_files",
    "pair_iq": "contract",
    "side_information_uses": "contract",
    "split_iq": "contract",
}

__all__ = [
    "ADJSCC",
    "AWGN",
    "GDN",
    "MIMO",
    "STANDARD",
    "AdaptiveJSCC",
    "Base",
    "BaseCodec",
    "BaseLayer",
    "BasePool",
    "Codec",
    "CompiledCodec",
    "Convention",
    "DeepJSCC",
    "Equalised",
    "Grid",
    "ImageBatch",
    "ImageClassifier",
    "ImageDataModule",
    "JSCCModule",
    "ModelRealisations",
    "OFDMLink",
    "Rayleigh",
    "Realisations",
    "Received",
    "ReceivedImageWriter",
    "Rician",
    "SourceRealisations",
    "StoreRealisations",
    "SymbolChannel",
    "Transmission",
    "bandwidth_ratio",
    "channel_uses",
    "find_convention",
    "load_codec",
    "normalise_power",
    "open_images",
    "open_pictures",
    "pair_iq",
    "side_information_uses",
    "split_iq",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
