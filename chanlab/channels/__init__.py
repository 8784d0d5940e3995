"""Where channels come from, and the views of them: paths, arrays, CFR, CIR, spectrum, received power."""

from chanlab.channels.arrays import PlanarArray, array_response, rotation_matrix
from chanlab.channels.coefficients import port_coefficients
from chanlab.channels.paths import PATH_TENSORS, SPEED_OF_LIGHT, Paths
from chanlab.channels.response import (
    cfr,
    cfr_along,
    cir_taps,
    cir_taps_along,
    subcarrier_frequencies,
)
from chanlab.channels.source import Links, Motion, Source, sample_generator

__all__ = [
    "PATH_TENSORS",
    "SPEED_OF_LIGHT",
    "Links",
    "Motion",
    "Paths",
    "PlanarArray",
    "Source",
    "array_response",
    "cfr",
    "cfr_along",
    "cir_taps",
    "cir_taps_along",
    "port_coefficients",
    "rotation_matrix",
    "sample_generator",
    "subcarrier_frequencies",
]
