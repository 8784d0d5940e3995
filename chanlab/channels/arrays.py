"""Planar antenna arrays: where the elements are and what their ports see."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from chanlab.channels.patterns import PATTERNS, SLANTS
from chanlab.errors import UsageError

_POLE = 6e-6  # sin θ below which a direction counts as a pole, its azimuth as 0 (as Sionna RT does in float32)


@dataclass(frozen=True)
class PlanarArray:
    """A planar array in the y-z plane of the device, boresight along x.

    Elements are numbered down each column (z falling), columns in the order of y rising, as in Sionna RT: element =
    column · num_rows + row. A dual-polarised element has two ports at one place, numbered polarisation first: port =
    polarisation · num_elements + element.

    Attributes:
        num_rows: Number of rows (vertical).
        num_cols: Number of columns (horizontal).
        vertical_spacing: Distance of rows [wavelengths].
        horizontal_spacing: Distance of columns [wavelengths].
        pattern: Element pattern: `iso`, `dipole` (short), `hw_dipole` (half wave) or `tr38901`.
        polarization: `V`, `H`, `VH` or `cross` (slants of -45° and +45°).
    """

    num_rows: int = 1
    num_cols: int = 1
    vertical_spacing: float = 0.5
    horizontal_spacing: float = 0.5
    pattern: Literal["iso", "dipole", "hw_dipole", "tr38901"] = "iso"
    polarization: Literal["V", "H", "VH", "cross"] = "V"

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.num_cols < 1:
            raise UsageError(f"PlanarArray needs at least one row and column, not {self.num_rows} x {self.num_cols}.")
        if self.pattern not in PATTERNS:
            raise UsageError(f"unknown antenna pattern {self.pattern!r}; known are {', '.join(PATTERNS)}.")
        if self.polarization not in SLANTS:
            raise UsageError(f"unknown polarization {self.polarization!r}; known are {', '.join(SLANTS)}.")

    @property
    def num_elements(self) -> int:
        """Number of element positions."""
        return self.num_rows * self.num_cols

    @property
    def num_polarizations(self) -> int:
        """Ports per element (1 or 2)."""
        return len(SLANTS[self.polarization])

    @property
    def num_ports(self) -> int:
        """Number of ports: what the antenna axis of a channel counts."""
        return self.num_elements * self.num_polarizations

    def positions(
        self, wavelength: float, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
    ) -> Tensor:
        """Element positions relative to the device, in its own axes [m], `[element, 3]`."""
        col = torch.arange(self.num_cols, dtype=dtype, device=device) - (self.num_cols - 1) / 2
        row = (self.num_rows - 1) / 2 - torch.arange(self.num_rows, dtype=dtype, device=device)
        y = (col * self.horizontal_spacing * wavelength).repeat_interleave(self.num_rows)
        z = (row * self.vertical_spacing * wavelength).repeat(self.num_cols)
        return torch.stack([torch.zeros_like(y), y, z], -1)


def rotation_matrix(orientation: Tensor) -> Tensor:
    """Rotation by α about z, β about y, γ about x: R = R_z(α) R_y(β) R_x(γ) (TR 38.901, eq. 7.1-4).

    Args:
        orientation: (α, β, γ) [rad], `[..., 3]`.

    Returns:
        Matrices that turn device axes into world axes, `[..., 3, 3]`.
    """
    if orientation.shape[-1:] != (3,):
        raise UsageError(f"an orientation is (α, β, γ): [..., 3], not {list(orientation.shape)}.")
    (ca, cb, cg), (sa, sb, sg) = orientation.cos().unbind(-1), orientation.sin().unbind(-1)
    rows = [
        [ca * cb, ca * sb * sg - sa * cg, ca * sb * cg + sa * sg],
        [sa * cb, sa * sb * sg + ca * cg, sa * sb * cg - ca * sg],
        [-sb, cb * sg, cb * cg],
    ]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def direction(zenith: Tensor, azimuth: Tensor) -> Tensor:
    """Unit vectors `[..., 3]` of zenith and azimuth angles `[...]` [rad]."""
    return torch.stack([zenith.sin() * azimuth.cos(), zenith.sin() * azimuth.sin(), zenith.cos()], -1)


def _angles(vector: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sine and cosine of zenith and azimuth of unit vectors `[..., 3, path]`; azimuth 0 at the poles."""
    x, y, z = vector.unbind(-2)
    rho2 = x * x + y * y
    pole = rho2 < _POLE**2
    rho = torch.where(pole, 1.0, rho2).sqrt()
    sin_azimuth, cos_azimuth = torch.where(pole, 0.0, y / rho), torch.where(pole, 1.0, x / rho)
    return torch.where(pole, 0.0, rho), z, sin_azimuth, cos_azimuth


def spherical_basis(vector: Tensor) -> tuple[Tensor, Tensor]:
    """World unit vectors θ̂ and φ̂ at a direction.

    Args:
        vector: Unit vectors `[..., 3, path]`. At the poles the azimuth counts as 0.

    Returns:
        θ̂ and φ̂, each `[..., 3, path]`.
    """
    st, ct, sp, cp = _angles(vector)
    return torch.stack([ct * cp, ct * sp, -st], -2), torch.stack([-sp, cp, torch.zeros_like(sp)], -2)


def field(array: PlanarArray, vector: Tensor, rotation: Tensor | None = None) -> Tensor:
    """Field of one element's ports towards a direction, in the world basis.

    Args:
        array: Pattern and polarisation.
        vector: World unit vectors away from the device, `[..., 3, path]`.
        rotation: Device to world `[..., 3, 3]`; None is the identity.

    Returns:
        Real amplitudes (θ̂, φ̂) of each polarisation, `[..., polarization, 2, path]`.
    """
    slants = vector.new_tensor(SLANTS[array.polarization])[:, None]
    local = vector if rotation is None else rotation.mT @ vector
    st, ct, sp, cp = _angles(local)
    azimuth = torch.atan2(sp, cp)
    amplitude = PATTERNS[array.pattern](st, ct, azimuth)[..., None, :]
    cos_slant, sin_slant = slants.cos(), slants.sin()
    if rotation is None:
        theta, phi = amplitude * cos_slant, amplitude * sin_slant
    else:
        # The device's θ̂ lies at an angle ψ from the world's θ̂ in the plane across the ray.
        turned = rotation @ spherical_basis(local)[0]
        world_theta, world_phi = spherical_basis(vector)
        cos_psi = (turned * world_theta).sum(-2)[..., None, :]
        sin_psi = (turned * world_phi).sum(-2)[..., None, :]
        theta = amplitude * (cos_slant * cos_psi - sin_slant * sin_psi)
        phi = amplitude * (cos_slant * sin_psi + sin_slant * cos_psi)
    return torch.stack([theta, phi], -2)


def steering(positions: Tensor, vector: Tensor, wavelength: float) -> Tensor:
    """Plane-wave phase of each element, exp(+j 2π/λ k̂·p).

    Args:
        positions: Element positions in world axes [m], `[..., element, 3]`.
        vector: Unit vectors away from the device, `[..., 3, path]`.
        wavelength: Wavelength λ [m].

    Returns:
        Complex `[..., element, path]`.
    """
    phase = (2 * math.pi / wavelength) * (positions @ vector)
    return torch.polar(torch.ones_like(phase), phase)


def array_response(
    array: PlanarArray,
    vector: Tensor,
    wavelength: float,
    orientation: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Response of every port to a plane wave: pattern, polarisation and phase.

    Args:
        array: The array.
        vector: World unit vectors away from the device (departure at a transmitter, arrival at a receiver),
            `[..., 3, path]`.
        wavelength: Wavelength [m].
        orientation: Device orientation [rad], `[3]` or `[..., 3]`; None is zero.
        positions: Element positions in device axes [m], `[element, 3]`, instead of the array's own (differentiable).

    Returns:
        Complex (θ̂, φ̂) amplitudes in the world basis, `[..., port, 2, path]`, ports polarisation first.

    Raises:
        UsageError: If shapes don't fit.
    """
    rotation = None if orientation is None else rotation_matrix(orientation.to(vector))
    phases = steering(world_positions(array, wavelength, rotation, positions, vector), vector, wavelength)
    ports = field(array, vector, rotation)[..., :, None, :, :] * phases[..., None, :, None, :]
    return ports.flatten(-4, -3)


def world_positions(
    array: PlanarArray, wavelength: float, rotation: Tensor | None, positions: Tensor | None, like: Tensor
) -> Tensor:
    """Element positions turned into world axes [m], `[..., element, 3]`, in the dtype and on the device of `like`."""
    if positions is None:
        positions = array.positions(wavelength, like.dtype, like.device)
    elif positions.shape != (array.num_elements, 3):
        raise UsageError(
            f"element positions have shape {list(positions.shape)}; this array takes [{array.num_elements}, 3] "
            "(one row per element, shared by its polarisations)."
        )
    positions = positions.to(like)
    return positions if rotation is None else positions @ rotation.mT
