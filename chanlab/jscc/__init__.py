"""Images over noisy channels: DeepJSCC codecs and the separation baseline under one physical-layer contract."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chanlab.jscc.adaptive import AdaptiveJSCC
    from chanlab.jscc.adjscc import ADJSCC
    from chanlab.jscc.codec import Codec
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
    from chanlab.jscc.deepjscc import DeepJSCC
    from chanlab.jscc.gdn import GDN
    from chanlab.jscc.image_writer import ReceivedImageWriter
    from chanlab.jscc.module import JSCCModule, load_codec

_HOMES = {
    "ADJSCC": "adjscc",
    "AdaptiveJSCC": "adaptive",
    "Codec": "codec",
    "DeepJSCC": "deepjscc",
    "GDN": "gdn",
    "JSCCModule": "module",
    "ReceivedImageWriter": "image_writer",
    "load_codec": "module",
    "Convention": "contract",
    "Received": "contract",
    "STANDARD": "contract",
    "Transmission": "contract",
    "bandwidth_ratio": "contract",
    "channel_uses": "contract",
    "find_convention": "contract",
    "normalise_power": "contract",
    "pair_iq": "contract",
    "split_iq": "contract",
}

__all__ = [
    "ADJSCC",
    "GDN",
    "STANDARD",
    "AdaptiveJSCC",
    "Codec",
    "Convention",
    "DeepJSCC",
    "JSCCModule",
    "Received",
    "ReceivedImageWriter",
    "Transmission",
    "bandwidth_ratio",
    "channel_uses",
    "find_convention",
    "load_codec",
    "normalise_power",
    "pair_iq",
    "split_iq",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
