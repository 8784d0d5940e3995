"""Delay-angle spectrum: where the power of a channel comes from, as an array and a band can tell."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from chanlab.channels.arrays import PlanarArray, direction, rotation_matrix, steering, world_positions
from chanlab.channels.paths import SPEED_OF_LIGHT
from chanlab.errors import UsageError


def azimuth_directions(
    count: int = 181, zenith: float = math.pi / 2, span: float = math.pi, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Unit vectors `[direction, 3]` in the array's own axes at one zenith and azimuths from -span/2 to span/2.

    Args:
        count: Number of directions.
        zenith: Zenith angle [rad]; π/2 is the horizon.
        span: Range of azimuths around boresight [rad].
        dtype: Precision.
    """
    azimuth = torch.linspace(-span / 2, span / 2, count, dtype=dtype)
    return direction(torch.full_like(azimuth, zenith), azimuth)


def delay_angle_spectrum(
    channel: Tensor,
    array: PlanarArray,
    frequencies: Tensor,
    carrier: float,
    side: str = "rx",
    delays: Tensor | None = None,
    directions: Tensor | None = None,
    orientation: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Bartlett spectrum of a CFR over direction (array) and delay (band).

    The channel is matched with plane waves of every direction and delay; powers of the array's polarisations, the other
    side's ports and the times are averaged. A single plane wave of unit amplitude at every port gives 1 at its place.
    With directions and delays on DFT grids this is the DFT of the array and the inverse DFT of the band.

    Args:
        channel: Complex `[..., rx_ant, tx_ant, time, subcarrier]`.
        array: The array of the side looked from; needs as many ports as the channel has there.
        frequencies: Offsets from the carrier [Hz], `[subcarrier]`.
        carrier: Carrier frequency [Hz].
        side: `rx` (angles of arrival) or `tx` (angles of departure).
        delays: Delays to look at [s], `[delay]`; None is the DFT grid 0 .. 1/spacing of equally spaced subcarriers.
        directions: World unit vectors to look at, `[direction, 3]`; None is `azimuth_directions()` turned by
            `orientation`, the half-plane before the array.
        orientation: Orientation of the array [rad], `[3]`; None is zero.
        positions: Element positions in the array's axes [m], `[element, 3]`, instead of its own.

    Returns:
        Power, real `[..., direction, delay]`.

    Raises:
        UsageError: If shapes don't fit, or delays are None and the subcarriers are not equally spaced.
    """
    if side not in ("rx", "tx"):
        raise UsageError(f"side must be 'rx' or 'tx', not {side!r}.")
    axis = -4 if side == "rx" else -3
    if channel.ndim < 4 or channel.shape[-1:] != frequencies.shape or channel.shape[axis] != array.num_ports:
        raise UsageError(
            f"channel has shape {list(channel.shape)}; it must be [..., rx_ant, tx_ant, time, subcarrier] with "
            f"{array.num_ports} {side} ports and {frequencies.numel()} subcarriers."
        )
    real = channel.real
    rotation = None if orientation is None else rotation_matrix(orientation.to(real))
    if directions is None:
        directions = azimuth_directions(dtype=real.dtype).to(real)
        directions = directions if rotation is None else directions @ rotation.mT
    delays = _delay_grid(frequencies) if delays is None else delays
    wavelength = SPEED_OF_LIGHT / carrier
    elements = world_positions(array, wavelength, rotation, positions, real)
    match_angle = steering(elements, directions.to(real).mT, wavelength).conj() / array.num_elements
    frequencies, delays = frequencies.double().to(real.device), delays.double().to(real.device)
    turn = 2 * math.pi * (frequencies[:, None] * delays).to(real)
    match_delay = torch.polar(torch.full_like(turn, 1 / frequencies.numel()), turn)

    # [..., other port, time, polarisation, element, subcarrier]
    ordered = channel.movedim(axis, -2)
    ordered = ordered.reshape(*ordered.shape[:-2], array.num_polarizations, array.num_elements, frequencies.numel())
    spectrum: Tensor = match_angle.mT @ (ordered @ match_delay)
    return spectrum.abs().square().mean((-5, -4, -3))


def _delay_grid(frequencies: Tensor) -> Tensor:
    step = frequencies.diff()
    if frequencies.numel() < 2 or not torch.allclose(step, step[:1].expand_as(step), rtol=1e-4, atol=0.0):
        raise UsageError("subcarriers are not equally spaced: give the delays [s] to look at.")
    count = frequencies.numel()
    return torch.arange(count, dtype=torch.float64, device=frequencies.device) / (count * step[0].double())
