"""Channels as views of paths: frequency response (CFR) and taps (CIR), at one instant or along a trajectory."""

from __future__ import annotations

import math
from typing import Unpack

import torch
from torch import Tensor

from chanlab.channels.arrays import PlanarArray
from chanlab.channels.coefficients import Elements, Geometry, check_keys
from chanlab.channels.path_sum import Kernel, sum_along, sum_paths
from chanlab.channels.paths import Paths
from chanlab.errors import UsageError


def subcarrier_frequencies(
    count: int, spacing: float, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
) -> Tensor:
    """Baseband frequencies of subcarriers around the carrier [Hz], ascending, `[subcarrier]`.

    Even counts run from -count/2 to count/2 - 1, odd ones from -(count-1)/2 to (count-1)/2, times `spacing`, as
    `sionna.phy.channel.subcarrier_frequencies`.
    """
    if count < 1 or spacing <= 0:
        raise UsageError(f"need at least one subcarrier and a spacing > 0, not {count} and {spacing} Hz.")
    return (torch.arange(count, dtype=dtype, device=device) - count // 2) * spacing


def cfr(
    paths: Paths,
    tx_array: PlanarArray,
    rx_array: PlanarArray,
    frequencies: Tensor,
    times: Tensor | None = None,
    delay_drift: bool = False,
    **geometry: Unpack[Geometry],
) -> Tensor:
    """Channel frequency response h(t, f) = Σ_p a_p exp(j 2π ν_p t) exp(-j 2π f τ_p(t)).

    Args:
        paths: `[..., path]`.
        tx_array: Transmit array.
        rx_array: Receive array.
        frequencies: Offsets from the carrier [Hz], `[subcarrier]`, ascending.
        times: Times relative to the paths' instant [s], `[time]` or `[..., time]`; None is one snapshot at 0.
        delay_drift: Let delays follow the Doppler shift, τ(t) = τ - ν t / f_c, else they stay.
        **geometry: Orientations, near field and more: see `Geometry`.

    Returns:
        Complex `[..., rx_ant, tx_ant, time, subcarrier]`, in the precision of `paths`.

    Raises:
        UsageError: If shapes don't fit.
    """
    kernel, count = _frequency_kernel(paths, frequencies, geometry)
    return sum_paths(paths, tx_array, rx_array, times, kernel, count, delay_drift, geometry)


def cfr_along(
    paths: Paths,
    anchor_times: Tensor,
    times: Tensor,
    tx_array: PlanarArray,
    rx_array: PlanarArray,
    frequencies: Tensor,
    tx_orientation: Tensor | None = None,
    rx_orientations: Tensor | None = None,
    **elements: Unpack[Elements],
) -> Tensor:
    """Channel frequency response of users that move from anchor to anchor.

    Each anchor's paths are extrapolated by Doppler shift and delay drift; a time between two anchors takes the linear
    cross-fade of both extrapolations. At an anchor the response is that of its paths; in between paths are born and die
    smoothly. Times before the first or after the last anchor extrapolate that anchor.

    Args:
        paths: `[..., anchor, path]`.
        anchor_times: Ascending times of the anchors [s], `[..., anchor]`, float64 advised.
        times: Times asked for [s], `[time]` or `[..., time]`, on the clock of `anchor_times`.
        tx_array: Transmit array.
        rx_array: Receive array.
        frequencies: Offsets from the carrier [Hz], `[subcarrier]`, ascending.
        tx_orientation: `[3]` or `[..., 3]` (no anchor axis) [rad].
        rx_orientations: `[3]` or `[..., anchor, 3]` [rad].
        **elements: See `Elements`; positions are `[3]` or `[..., anchor, 3]`.

    Returns:
        Complex `[..., rx_ant, tx_ant, time, subcarrier]`.

    Raises:
        UsageError: If shapes don't fit.
    """
    geometry = _anchor_geometry(elements, tx_orientation, rx_orientations)
    kernel, count = _frequency_kernel(paths, frequencies, geometry)
    return sum_along(paths, anchor_times, times, tx_array, rx_array, kernel, count, geometry)


def cir_taps(
    paths: Paths,
    tx_array: PlanarArray,
    rx_array: PlanarArray,
    bandwidth: float,
    l_min: int,
    l_max: int,
    times: Tensor | None = None,
    delay_drift: bool = False,
    **geometry: Unpack[Geometry],
) -> Tensor:
    """Taps of the channel behind a sinc filter, h_l(t) = Σ_p a_p exp(j 2π ν_p t) sinc(l - W τ_p(t)).

    The definition of `sionna.phy.channel.cir_to_time_channel`; over all lags the taps hold the mean power of the CFR
    over the band W (Parseval).

    Args:
        paths: `[..., path]`.
        tx_array: Transmit array.
        rx_array: Receive array.
        bandwidth: W [Hz].
        l_min: Smallest lag [samples]; delays are absolute, so lags reach W τ of the last path.
        l_max: Largest lag, included.
        times: As for `cfr`.
        delay_drift: As for `cfr`.
        **geometry: See `Geometry`.

    Returns:
        Complex `[..., rx_ant, tx_ant, time, tap]`.

    Raises:
        UsageError: If shapes don't fit or no tap is asked for.
    """
    kernel, count = _tap_kernel(bandwidth, l_min, l_max, geometry)
    return sum_paths(paths, tx_array, rx_array, times, kernel, count, delay_drift, geometry)


def cir_taps_along(
    paths: Paths,
    anchor_times: Tensor,
    times: Tensor,
    tx_array: PlanarArray,
    rx_array: PlanarArray,
    bandwidth: float,
    l_min: int,
    l_max: int,
    tx_orientation: Tensor | None = None,
    rx_orientations: Tensor | None = None,
    **elements: Unpack[Elements],
) -> Tensor:
    """Taps as `cir_taps`, of users that move from anchor to anchor as in `cfr_along`.

    Returns:
        Complex `[..., rx_ant, tx_ant, time, tap]`.
    """
    geometry = _anchor_geometry(elements, tx_orientation, rx_orientations)
    kernel, count = _tap_kernel(bandwidth, l_min, l_max, geometry)
    return sum_along(paths, anchor_times, times, tx_array, rx_array, kernel, count, geometry)


def _frequency_kernel(paths: Paths, frequencies: Tensor, geometry: Geometry) -> tuple[Kernel, int]:
    if frequencies.ndim != 1:
        raise UsageError(f"frequencies must be [subcarrier] [Hz], not {list(frequencies.shape)}.")
    # Shift in float64 before casting, so that neither a large offset nor a fine grid is lost.
    offset = geometry.get("band_offset", 0.0)
    grid = (-2 * math.pi * (frequencies.double() + offset)).to(paths.delay)

    def kernel(delay: Tensor, phase: Tensor, weight: Tensor) -> Tensor:
        if delay.shape == phase.shape:
            total = torch.addcmul(phase[..., None], delay[..., None], grid)
            return torch.polar(weight[..., None].expand(total.shape), total)
        turn = delay[..., None] * grid
        return torch.polar(weight, phase)[..., None] * torch.polar(torch.ones_like(turn), turn)

    return kernel, frequencies.shape[0]


def _tap_kernel(bandwidth: float, l_min: int, l_max: int, geometry: Geometry) -> tuple[Kernel, int]:
    if l_max < l_min or bandwidth <= 0:
        raise UsageError(f"taps need l_min <= l_max and a bandwidth > 0, not {l_min}, {l_max} and {bandwidth} Hz.")
    offset = geometry.get("band_offset", 0.0)

    def kernel(delay: Tensor, phase: Tensor, weight: Tensor) -> Tensor:
        lag = torch.arange(l_min, l_max + 1, dtype=delay.dtype, device=delay.device)
        pulse = torch.sinc(lag - bandwidth * delay[..., None])
        return torch.polar(weight, phase - 2 * math.pi * offset * delay)[..., None] * pulse

    return kernel, l_max - l_min + 1


def _anchor_geometry(elements: Elements, tx_orientation: Tensor | None, rx_orientations: Tensor | None) -> Geometry:
    check_keys(elements, Elements)
    if tx_orientation is not None and tx_orientation.ndim > 1:
        tx_orientation = tx_orientation[..., None, :]
    return Geometry(**elements, tx_orientation=tx_orientation, rx_orientation=rx_orientations)
