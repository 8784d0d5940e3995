"""Spherical wavefronts: how the length of a path differs from element to element."""

from __future__ import annotations

import torch
from torch import Tensor

from chanlab.channels.paths import SPEED_OF_LIGHT, Paths
from chanlab.errors import UsageError

_SPECULAR, _DIFFUSE, _DIFFRACTION = 1, 2, 8


def excess_length(
    paths: Paths, tx_offsets: Tensor, rx_offsets: Tensor, tx_position: Tensor | None, rx_position: Tensor | None
) -> Tensor:
    """Length of each path between two elements minus its length between the centres of the devices [m].

    Specular reflection and refraction keep the wavefront of the source, so its centre is the image of the other end at
    the full path length; a diffuse or diffracting interaction emits a new wavefront from its own place (an edge is
    taken as a point). Line of sight and single reflections are exact for every pair of elements; paths of more
    reflections neglect the product of both ends' offsets.

    Args:
        paths: `[..., path]`.
        tx_offsets: Element positions relative to the transmitter, world axes [m], `[..., tx_element, 3]`.
        rx_offsets: The same of the receiver, `[..., rx_element, 3]`.
        tx_position: Position of the transmitter [m], `[3]` or `[..., 3]`; needed where paths scatter.
        rx_position: Position of the receiver.

    Returns:
        `[..., rx_element, tx_element, path]`.

    Raises:
        UsageError: If positions are missing that a scattered path needs.
    """
    tx_radius, rx_radius = _radii(paths, tx_position, rx_position)
    along_tx, along_rx = tx_offsets @ paths.departure, rx_offsets @ paths.arrival
    square_tx, square_rx = (x.square().sum(-1)[..., None] for x in (tx_offsets, rx_offsets))
    apart = (
        _excess(square_tx - 2 * tx_radius[..., None, :] * along_tx, tx_radius[..., None, :])[..., None, :, :]
        + _excess(square_rx - 2 * rx_radius[..., None, :] * along_rx, rx_radius[..., None, :])[..., :, None, :]
    )

    # Unfolded at its reflection, a path is the straight line from a tx element to the image of an rx element.
    reflections = (paths.interactions == _SPECULAR).sum(-2)
    normal = torch.nn.functional.normalize(paths.departure + paths.arrival, dim=-2)
    normal = torch.where((reflections == 1)[..., None, :], normal, 0.0)
    inner = (rx_offsets @ tx_offsets.mT)[..., None] - 2 * (
        (rx_offsets @ normal)[..., :, None, :] * (tx_offsets @ normal)[..., None, :, :]
    )
    square = square_rx[..., :, None, :] + square_tx[..., None, :, :] - 2 * inner
    length = (SPEED_OF_LIGHT * paths.delay)[..., None, None, :]
    along = along_rx[..., :, None, :] + along_tx[..., None, :, :]
    joint = _excess(square - 2 * length * along, length)
    straight = ~_scatters(paths).any(-2) & (reflections <= 1)
    return torch.where(straight[..., None, None, :], joint, apart)


def _excess(difference: Tensor, radius: Tensor) -> Tensor:
    """sqrt(radius² + difference) - radius without cancellation."""
    positive = radius > 0
    safe = torch.where(positive, radius, 1.0)
    root = torch.where(positive, safe.square() + difference, 1.0).clamp(min=0).sqrt()
    return torch.where(positive, difference / (root + safe), 0.0)


def _scatters(paths: Paths) -> Tensor:
    return (paths.interactions == _DIFFUSE) | (paths.interactions == _DIFFRACTION)


def _radii(paths: Paths, tx_position: Tensor | None, rx_position: Tensor | None) -> tuple[Tensor, Tensor]:
    """Distance from each device to the centre of its wavefront [m], `[..., path]`."""
    length = SPEED_OF_LIGHT * paths.delay
    scatters = _scatters(paths)
    if not bool(scatters.any()):
        return length, length
    if tx_position is None or rx_position is None:
        raise UsageError(
            "near_field=True with diffuse or diffracted paths needs tx_position and rx_position "
            "(the distance to the first and last vertex)."
        )
    first = (paths.vertices[..., 0, :, :] - tx_position.to(length)[..., :, None]).norm(dim=-2)
    last = (paths.vertices[..., 1, :, :] - rx_position.to(length)[..., :, None]).norm(dim=-2)
    depth = paths.interactions.shape[-2]
    index = torch.arange(depth, device=length.device)[:, None]
    at_last = (index == (paths.interactions != 0).sum(-2, keepdim=True) - 1) & scatters
    scatters_first, scatters_last = scatters[..., 0, :], at_last.any(-2)
    tx = torch.where(scatters_first, first, torch.where(scatters_last, length - last, length))
    rx = torch.where(scatters_last, last, torch.where(scatters_first, length - first, length))
    return tx, rx
