"""The separation baseline: an image codec, then 5G LDPC and QAM with link adaptation, or an ideal channel code.

`separation(images, ratio, snr_db, codec)` is the call; `Separation` has channels, channel codes and what a lost image
looks like as arguments; `sweep` measures systems over SNRs.
"""

from chanlab.jscc.separation.baseline import OperatingPoint, Separated, Separation, separation
from chanlab.jscc.separation.channel_codes import CapacityCode, ChannelCode, LdpcQam, NormalCode, Offer, OutageCode
from chanlab.jscc.separation.image_codecs import (
    CODECS,
    Avif,
    Bpg,
    CodecError,
    CompressAI,
    ImageCodec,
    Jpeg,
    Jpeg2000,
    WebP,
    available_codecs,
    find_codec,
)
from chanlab.jscc.separation.mcs import Mcs, TransportFormat, nr_mcs, transport_format
from chanlab.jscc.separation.payload import PayloadRate, payload_uses
from chanlab.jscc.separation.sweeps import System, sweep

__all__ = [
    "CODECS",
    "Avif",
    "Bpg",
    "CapacityCode",
    "ChannelCode",
    "CodecError",
    "CompressAI",
    "ImageCodec",
    "Jpeg",
    "Jpeg2000",
    "LdpcQam",
    "Mcs",
    "NormalCode",
    "Offer",
    "OperatingPoint",
    "OutageCode",
    "PayloadRate",
    "Separated",
    "Separation",
    "System",
    "TransportFormat",
    "WebP",
    "available_codecs",
    "find_codec",
    "nr_mcs",
    "payload_uses",
    "separation",
    "sweep",
    "transport_format",
]
