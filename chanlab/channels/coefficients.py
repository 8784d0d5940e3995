"""What each path carries between two ports: patterns, polarisation and the phases of the elements.

Synthetic arrays: the paths of the array centres serve all elements, whose phases follow from the directions (plane
waves) or, with `near_field=True`, from spherical wavefronts. An element's delay within the band is that of the centre.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from chanlab.channels.arrays import PlanarArray, field, rotation_matrix, steering, world_positions
from chanlab.channels.near_field import excess_length
from chanlab.channels.paths import SPEED_OF_LIGHT, Paths
from chanlab.errors import UsageError


class Elements(TypedDict, total=False):
    """How an array's elements see a path: keyword arguments shared by all views.

    Keys:
        tx_elements: Element positions of the transmit array in its own axes [m], `[element, 3]`, instead of the
            regular ones (differentiable).
        rx_elements: The same of the receive array.
        near_field: Spherical instead of plane wavefronts.
        tx_position: Transmitter position [m], `[3]` or `[..., 3]` over the batch axes of the paths: only for
            `near_field` with scattered paths.
        rx_position: Receiver position.
        band_offset: Centre of the band relative to the paths' carrier [Hz], 0 by default. Frequencies and taps are
            relative to that centre, Doppler and array phases are taken there (elements stay where they are).
    """

    tx_elements: Tensor | None
    rx_elements: Tensor | None
    near_field: bool
    tx_position: Tensor | None
    rx_position: Tensor | None
    band_offset: float


class Geometry(Elements, total=False):
    """`Elements` and how the devices are turned.

    Keys:
        tx_orientation: Transmitter orientation (α, β, γ) [rad], `[3]` or `[..., 3]`; none is zero.
        rx_orientation: Receiver orientation, `[3]` or `[..., 3]` over the batch axes of the paths.
    """

    tx_orientation: Tensor | None
    rx_orientation: Tensor | None


def port_coefficients(
    paths: Paths, tx_array: PlanarArray, rx_array: PlanarArray, **geometry: Unpack[Geometry]
) -> Tensor:
    """Amplitude of each path between each pair of ports at the paths' instant.

    Args:
        paths: `[..., path]`.
        tx_array: Transmit array.
        rx_array: Receive array.
        **geometry: See `Geometry`.

    Returns:
        Complex `[..., rx_ant, tx_ant, path]`; masked paths are zero.

    Raises:
        UsageError: If shapes don't fit, a keyword is unknown or positions are missing.
    """
    check_keys(geometry, Geometry)
    tx_rotation = _rotation(geometry.get("tx_orientation"), paths, "tx_orientation")
    rx_rotation = _rotation(geometry.get("rx_orientation"), paths, "rx_orientation")
    tx_field = field(tx_array, paths.departure, tx_rotation)[..., None, :, None, :, :]
    rx_field = field(rx_array, paths.arrival, rx_rotation)[..., :, None, :, None, :]
    gain = (rx_field * paths.transfer[..., None, None, :, :, :] * tx_field).sum((-3, -2))
    gain = gain[..., :, None, :, None, :]  # [..., rx_pol, 1, tx_pol, 1, path]

    like, design = paths.delay, paths.wavelength
    wavelength = SPEED_OF_LIGHT / (paths.carrier + geometry.get("band_offset", 0.0))
    tx_offsets = world_positions(tx_array, design, tx_rotation, geometry.get("tx_elements"), like)
    rx_offsets = world_positions(rx_array, design, rx_rotation, geometry.get("rx_elements"), like)
    if geometry.get("near_field", False):
        batch = paths.batch_shape
        tx_offsets, rx_offsets = (x.expand(*batch, *x.shape[-2:]) for x in (tx_offsets, rx_offsets))
        excess = excess_length(paths, tx_offsets, rx_offsets, geometry.get("tx_position"), geometry.get("rx_position"))
        phase = (-2 * math.pi / wavelength) * excess
        coefficients = gain * torch.polar(torch.ones_like(phase), phase)[..., None, :, None, :, :]
    else:
        tx_phase = steering(tx_offsets, paths.departure, wavelength)[..., None, None, None, :, :]
        rx_phase = steering(rx_offsets, paths.arrival, wavelength)[..., None, :, None, None, :]
        coefficients = (gain * tx_phase) * rx_phase
    return coefficients.reshape(*paths.batch_shape, rx_array.num_ports, tx_array.num_ports, paths.num_paths)


def _rotation(orientation: Tensor | None, paths: Paths, name: str) -> Tensor | None:
    if orientation is None:
        return None
    if orientation.ndim > 1:
        orientation = expand(orientation, (*paths.batch_shape, 3), name)
    return rotation_matrix(orientation.to(paths.delay))


def expand(x: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """`x.expand(shape)` with an error that names `x`."""
    try:
        return x.expand(shape)
    except RuntimeError:
        raise UsageError(f"{name} has shape {list(x.shape)}, which doesn't broadcast to {list(shape)}.") from None


def check_keys(given: Mapping[str, object], known: type[Elements]) -> None:
    """Raise `UsageError` for keyword arguments that `known` doesn't have."""
    unknown = sorted(set(given) - set(known.__annotations__))
    if unknown:
        raise UsageError(f"unknown argument {', '.join(unknown)}; known are {', '.join(known.__annotations__)}.")
