"""Rays of primitives: what a scatterer, the line of sight and the image of a plane add to the channel of two points.

A point scatterer is not a mirror: the point that reflects moves with the users. Each kind therefore has its own delay,
amplitude and directions, all smooth functions of both ends and of the primitive. The rays carry no carrier phase;
`coherent_sum` over absolute frequencies gives it, exp(-j 2π f τ). All are reciprocal: swapped ends swap directions.

Amplitudes are clamped where a distance falls below λ/4π, at which an isotropic antenna would receive more than was
sent; at a distance of zero the directions are zero vectors and nothing diverges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from chanlab.channels.paths import SPEED_OF_LIGHT
from chanlab.errors import UsageError


class Rays(NamedTuple):
    """Rays of a batch of links, the first four inputs of `coherent_sum` but for the gain of the primitive itself.

    Attributes:
        delay: τ [s], `[..., path]`.
        amplitude: Real amplitude before any gain [linear; 1/m for scatterers], `[..., path]`.
        departure: Unit vectors from the transmitter along the ray, `[..., 3, path]`.
        arrival: Unit vectors from the receiver towards where the ray comes from, `[..., 3, path]`.
    """

    delay: Tensor
    amplitude: Tensor
    departure: Tensor
    arrival: Tensor

    @staticmethod
    def cat(items: Sequence[Rays]) -> Rays:
        """Join along the path axis; batch axes are broadcast."""
        if not items:
            raise UsageError("Rays.cat needs at least one item.")
        batch = torch.broadcast_shapes(*(x.delay.shape[:-1] for x in items))  # type: ignore[no-untyped-call]
        whole = [[x.expand(*batch, *x.shape[-trail:]) for x, trail in zip(r, (1, 1, 2, 2), strict=True)] for r in items]
        return Rays(*(torch.cat(parts, -1) for parts in zip(*whole, strict=True)))


def line_of_sight(tx: Tensor, rx: Tensor, wavelength: float) -> Rays:
    """The direct ray: τ = d/c, amplitude λ/(4π d) (Friis).

    Args:
        tx: Transmitter positions [m], `[..., 3]`, float64 where the phase of a carrier is to come of it.
        rx: Receiver positions [m], `[..., 3]`.
        wavelength: λ [m].

    Returns:
        `[..., 1]` rays.
    """
    way, distance = _way(tx, rx)
    return Rays(
        distance[..., None] / SPEED_OF_LIGHT,
        _spread(distance, wavelength)[..., None],
        way[..., None],
        -way[..., None],
    )


def scatterer(tx: Tensor, rx: Tensor, mean: Tensor, wavelength: float) -> Rays:
    """Rays by way of points: τ = (d₁ + d₂)/c, amplitude λ/(4π d₁ d₂).

    The gain of a scatterer is its complex scattering length S [m]: with the radar cross section σ = 4π |S|² this is the
    bistatic radar equation.

    Args:
        tx: Transmitter positions [m], `[..., 3]`.
        rx: Receiver positions [m], `[..., 3]`.
        mean: Positions of the scatterers [m], `[path, 3]` or `[..., path, 3]`.
        wavelength: λ [m].

    Returns:
        `[..., path]` rays; amplitudes in 1/m.
    """
    departure, first = _way(tx[..., None, :], mean)
    arrival, second = _way(rx[..., None, :], mean)
    shortest = wavelength / (4 * math.pi)
    return Rays(
        (first + second) / SPEED_OF_LIGHT,
        _spread(first, wavelength) / second.clamp(min=shortest),
        departure.mT,
        arrival.mT,
    )


def image(tx: Tensor, rx: Tensor, normal: Tensor, offset: Tensor, wavelength: float) -> Rays:
    """Rays mirrored by planes n·x = s: τ = ‖tx - M rx‖/c with the mirror image M rx, amplitude λ/(4π d).

    The gain is the plane's complex reflection coefficient. A plane reflects only when both ends are on one side of it:
    else the amplitude is 0.

    Args:
        tx: Transmitter positions [m], `[..., 3]`.
        rx: Receiver positions [m], `[..., 3]`.
        normal: Unit normals n, `[path, 3]` or `[..., path, 3]`.
        offset: s [m], `[path]` or `[..., path]`.
        wavelength: λ [m].

    Returns:
        `[..., path]` rays.
    """
    tx, rx = tx[..., None, :], rx[..., None, :]
    tx_height, rx_height = ((x * normal).sum(-1) - offset for x in (tx, rx))
    departure, distance = _way(tx, rx - 2 * rx_height[..., None] * normal)
    arrival, _ = _way(rx, tx - 2 * tx_height[..., None] * normal)
    one_side = tx_height * rx_height > 0
    amplitude = torch.where(one_side, _spread(distance, wavelength), 0.0)
    return Rays(distance / SPEED_OF_LIGHT, amplitude, departure.mT, arrival.mT)


def _way(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vector and length of the way from start to end."""
    way = end - start
    length = torch.linalg.vector_norm(way, dim=-1)
    return way / torch.where(length > 0, length, 1.0)[..., None], length


def _spread(distance: Tensor, wavelength: float) -> Tensor:
    shortest = wavelength / (4 * math.pi)
    return shortest / distance.clamp(min=shortest)
