"""Where channels come from, and the views of them: paths, arrays, CFR, CIR, spectrum, received power."""

from chanlab.channels.arrays import PlanarArray, array_response, direction, rotation_matrix
from chanlab.channels.cell_drops import CellDrops
from chanlab.channels.cir import CIR
from chanlab.channels.closed_form import FreeSpace, Ring, TwoRay
from chanlab.channels.coefficients import Elements, Geometry, port_coefficients
from chanlab.channels.delay_lines import CDL, TDL
from chanlab.channels.drawn import CDLGrid, DrawnChannels
from chanlab.channels.geometric import free_space_paths, two_ray_paths
from chanlab.channels.paths import PATH_TENSORS, SPEED_OF_LIGHT, Paths
from chanlab.channels.plane_waves import Clarke, PathList, PathSpec
from chanlab.channels.power import k_factor, mean_delay, path_gain, path_powers, rms_delay_spread, rssi, rssi_from_cfr
from chanlab.channels.response import (
    cfr,
    cfr_along,
    cir_taps,
    cir_taps_along,
    subcarrier_frequencies,
)
from chanlab.channels.scenes import SceneSource
from chanlab.channels.source import CIRLinks, Links, Motion, Source, sample_generator
from chanlab.channels.spectrum import azimuth_directions, delay_angle_spectrum
from chanlab.channels.threegpp import ThreeGPP
from chanlab.channels.trajectories import Drops, RandomWaypoints, StraightTrajectories, Trajectories

__all__ = [
    "CDL",
    "CIR",
    "PATH_TENSORS",
    "SPEED_OF_LIGHT",
    "TDL",
    "CDLGrid",
    "CIRLinks",
    "CellDrops",
    "Clarke",
    "DrawnChannels",
    "Drops",
    "Elements",
    "FreeSpace",
    "Geometry",
    "Links",
    "Motion",
    "PathList",
    "PathSpec",
    "Paths",
    "PlanarArray",
    "RandomWaypoints",
    "Ring",
    "SceneSource",
    "Source",
    "StraightTrajectories",
    "ThreeGPP",
    "Trajectories",
    "TwoRay",
    "array_response",
    "azimuth_directions",
    "cfr",
    "cfr_along",
    "cir_taps",
    "cir_taps_along",
    "delay_angle_spectrum",
    "direction",
    "free_space_paths",
    "k_factor",
    "mean_delay",
    "path_gain",
    "path_powers",
    "port_coefficients",
    "rms_delay_spread",
    "rotation_matrix",
    "rssi",
    "rssi_from_cfr",
    "sample_generator",
    "subcarrier_frequencies",
    "two_ray_paths",
]
