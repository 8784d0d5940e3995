"""Paths in closed form from positions alone: free space and two rays, exact and in any precision."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from chanlab.channels.arrays import spherical_basis
from chanlab.channels.paths import PATH_TENSORS, SPEED_OF_LIGHT, Paths
from chanlab.errors import UsageError

VACUUM_PERMITTIVITY = 8.8541878128e-12
"""Electric constant [F/m] (CODATA 2018)."""


def fresnel(cos_incidence: Tensor, permittivity: complex) -> tuple[Tensor, Tensor]:
    """Reflection coefficients of a half space seen from vacuum (ITU-R P.2040-3, eqs. 31a and 31b).

    Args:
        cos_incidence: Cosine of the angle of incidence, `[...]`.
        permittivity: Complex relative permittivity η.

    Returns:
        Complex coefficients of the field across the plane of incidence (TE) and within it (TM), `[...]`.
    """
    eta = torch.tensor(permittivity, dtype=cos_incidence.dtype.to_complex(), device=cos_incidence.device)
    root = (eta - (1 - cos_incidence.square())).sqrt()
    return (cos_incidence - root) / (cos_incidence + root), (eta * cos_incidence - root) / (eta * cos_incidence + root)


def ground_permittivity(relative_permittivity: float, conductivity: float, carrier: float) -> complex:
    """Complex relative permittivity η = ε_r - j σ / (2π f_c ε_0), conductivity in S/m."""
    return complex(relative_permittivity, -conductivity / (2 * math.pi * carrier * VACUUM_PERMITTIVITY))


def free_space_paths(tx_position: Tensor, rx_position: Tensor, velocity: Tensor, carrier: float) -> Paths:
    """The line of sight: amplitude λ/(4π d), phase -2π f_c d/c (Friis).

    Args:
        tx_position: Transmitter [m], `[3]` or `[..., 3]`.
        rx_position: Receivers [m], `[..., 3]`; its precision is that of the result.
        velocity: Receiver velocities [m/s], `[..., 3]`.
        carrier: Carrier frequency [Hz].

    Returns:
        `[..., path]` with one path.

    Raises:
        UsageError: If both ends are at one place.
    """
    tx_position = tx_position.to(rx_position).expand_as(rx_position)
    length, along = _line(tx_position, rx_position)
    unchanged = torch.eye(3, dtype=rx_position.dtype.to_complex(), device=rx_position.device)
    transfer = _transfer(along, along, length, carrier, unchanged)
    return _path(transfer, length, along, along, 0, torch.stack([rx_position, tx_position], -2), velocity, carrier)


def two_ray_paths(
    tx_position: Tensor,
    rx_position: Tensor,
    velocity: Tensor,
    carrier: float,
    relative_permittivity: float = 5.24,
    conductivity: float = 0.123,
) -> Paths:
    """Line of sight and one reflection from flat ground at z = 0, with the Fresnel coefficient of each polarisation.

    Args:
        tx_position: Transmitter above ground [m], `[3]` or `[..., 3]`.
        rx_position: Receivers above ground [m], `[..., 3]`.
        velocity: Receiver velocities [m/s], `[..., 3]`.
        carrier: Carrier frequency [Hz].
        relative_permittivity: ε_r of the ground.
        conductivity: σ of the ground [S/m].

    Returns:
        `[..., path]` with two paths, the line of sight first.

    Raises:
        UsageError: If an end is not above ground or both are at one place.
    """
    tx_position = tx_position.to(rx_position).expand_as(rx_position)
    if not bool((tx_position[..., 2] > 0).all() and (rx_position[..., 2] > 0).all()):
        raise UsageError("two rays need both ends above the ground: z > 0.")
    direct = free_space_paths(tx_position, rx_position, velocity, carrier)
    flip = torch.tensor([1.0, 1.0, -1.0], dtype=rx_position.dtype, device=rx_position.device)
    length, arriving = _line(tx_position * flip, rx_position)  # from the image below ground
    departing = arriving * flip
    fraction = tx_position[..., 2:] / (tx_position[..., 2:] + rx_position[..., 2:])
    ground = (tx_position + fraction * (rx_position - tx_position)) * torch.tensor([1.0, 1.0, 0.0]).to(flip)

    # Across the plane of incidence (horizontal) and within it, in terms of the ray before and after.
    horizontal = torch.stack([-departing[..., 1], departing[..., 0], torch.zeros_like(length)], -1)
    straight_down = horizontal.norm(dim=-1, keepdim=True) < 1e-12
    horizontal = torch.where(straight_down, flip.new_tensor([0.0, 1.0, 0.0]), horizontal)
    across = torch.nn.functional.normalize(horizontal, dim=-1)
    te, tm = fresnel(arriving[..., 2], ground_permittivity(relative_permittivity, conductivity, carrier))
    within_before = torch.linalg.cross(across, departing)
    within_after = torch.linalg.cross(across, arriving)
    operator = te[..., None, None] * _outer(across, across) + tm[..., None, None] * _outer(within_after, within_before)
    transfer = _transfer(departing, arriving, length, carrier, operator)
    touched = torch.stack([ground, ground], -2)
    reflected = _path(transfer, length, departing, arriving, 1, touched, velocity, carrier)
    both = {name: torch.cat([getattr(direct, name), getattr(reflected, name)], -1) for name in PATH_TENSORS}
    return Paths(**both, carrier=carrier)


def _line(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Length and unit vector of the straight line."""
    way = end - start
    length = torch.linalg.vector_norm(way, dim=-1)
    if not bool((length > 0).all()):
        raise UsageError("transmitter and receiver are at one place; move one of them.")
    return length, way / length[..., None]


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a[..., :, None] * b[..., None, :]


def _transfer(departing: Tensor, arriving: Tensor, length: Tensor, carrier: float, operator: Tensor) -> Tensor:
    """2x2 matrix of a ray that travels along `departing`, comes in along `arriving` and turns its field by `operator`.

    The receiver's basis is that of the direction in which it looks, -arriving.
    """
    tx_basis = torch.stack(spherical_basis(departing[..., None]), -3)[..., 0]
    rx_basis = torch.stack(spherical_basis(-arriving[..., None]), -3)[..., 0]
    wavelength = SPEED_OF_LIGHT / carrier
    amplitude = torch.polar(wavelength / (4 * math.pi * length), -2 * math.pi / wavelength * length)
    turned = rx_basis.to(operator.dtype) @ operator.to(length.device) @ tx_basis.to(operator.dtype).mT
    return turned * amplitude[..., None, None]


def _path(
    transfer: Tensor,
    length: Tensor,
    departing: Tensor,
    arriving: Tensor,
    interaction: int,
    vertices: Tensor,
    velocity: Tensor,
    carrier: float,
) -> Paths:
    """One path per link."""
    velocity = velocity.to(arriving).expand_as(arriving)
    return Paths(
        transfer=transfer[..., None],
        delay=(length / SPEED_OF_LIGHT)[..., None],
        departure=departing[..., None],
        arrival=-arriving[..., None],
        doppler=(-(velocity * arriving).sum(-1) * (carrier / SPEED_OF_LIGHT))[..., None],
        interactions=torch.full((*length.shape, 1, 1), interaction, dtype=torch.int8, device=length.device),
        vertices=vertices[..., None],
        mask=torch.ones((*length.shape, 1), dtype=torch.bool, device=length.device),
        carrier=carrier,
    )
