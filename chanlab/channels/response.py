"""Paths to channels: coefficients between ports, frequency response (CFR) and taps (CIR).

Synthetic arrays: the paths of the array centres serve all elements, whose phases follow from the directions (plane
waves) or, with `near_field=True`, from spherical wavefronts. An element's delay within the band is that of the centre.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypedDict, Unpack, cast

import torch
from torch import Tensor

from chanlab.channels.arrays import PlanarArray, field, rotation_matrix, steering, world_positions
from chanlab.channels.near_field import excess_length
from chanlab.channels.paths import PATH_TENSORS, SPEED_OF_LIGHT, Paths
from chanlab.errors import UsageError

CHUNK_ELEMENTS = 2**24
"""Largest intermediate tensor [elements] of one step over the batch; memory follows it, results don't."""

# (delay [..., path], phase [..., path], weight [..., path]) -> weight exp(j phase) times the response to the delay.
_Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]


class Geometry(TypedDict, total=False):
    """How the devices are held: keyword arguments shared by all views.

    Keys:
        tx_orientation: Transmitter orientation (α, β, γ) [rad], `[3]` or `[..., 3]`; none is zero.
        rx_orientation: Receiver orientation, `[3]` or `[..., 3]` over the batch axes of the paths.
        tx_elements: Element positions of the transmit array in its own axes [m], `[element, 3]`, instead of the
            regular ones (differentiable).
        rx_elements: The same of the receive array.
        near_field: Spherical instead of plane wavefronts.
        tx_position: Transmitter position [m], `[3]` or `[..., 3]`: only for `near_field` with scattered paths.
        rx_position: Receiver position.
        band_offset: Centre of the band relative to the paths' carrier [Hz], 0 by default. Frequencies and taps are
            relative to that centre, Doppler and array phases are taken there (elements stay where they are).
    """

    tx_orientation: Tensor | None
    rx_orientation: Tensor | None
    tx_elements: Tensor | None
    rx_elements: Tensor | None
    near_field: bool
    tx_position: Tensor | None
    rx_position: Tensor | None
    band_offset: float


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
        UsageError: If shapes don't fit or positions are missing.
    """
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
    return _respond(paths, tx_array, rx_array, times, kernel, count, delay_drift, geometry)


def cfr_along(
    paths: Paths,
    anchor_times: Tensor,
    times: Tensor,
    tx_array: PlanarArray,
    rx_array: PlanarArray,
    frequencies: Tensor,
    tx_orientation: Tensor | None = None,
    rx_orientations: Tensor | None = None,
    **geometry: Unpack[Geometry],
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
        **geometry: Further keys of `Geometry`, batched over anchors as well.

    Returns:
        Complex `[..., rx_ant, tx_ant, time, subcarrier]`.

    Raises:
        UsageError: If shapes don't fit.
    """
    geometry = _anchor_geometry(geometry, tx_orientation, rx_orientations)
    kernel, count = _frequency_kernel(paths, frequencies, geometry)
    return _respond_along(paths, anchor_times, times, tx_array, rx_array, kernel, count, geometry)


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
    return _respond(paths, tx_array, rx_array, times, kernel, count, delay_drift, geometry)


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
    **geometry: Unpack[Geometry],
) -> Tensor:
    """Taps as `cir_taps`, of users that move from anchor to anchor as in `cfr_along`.

    Returns:
        Complex `[..., rx_ant, tx_ant, time, tap]`.
    """
    geometry = _anchor_geometry(geometry, tx_orientation, rx_orientations)
    kernel, count = _tap_kernel(bandwidth, l_min, l_max, geometry)
    return _respond_along(paths, anchor_times, times, tx_array, rx_array, kernel, count, geometry)


def _frequency_kernel(paths: Paths, frequencies: Tensor, geometry: Geometry) -> tuple[_Kernel, int]:
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


def _tap_kernel(bandwidth: float, l_min: int, l_max: int, geometry: Geometry) -> tuple[_Kernel, int]:
    if l_max < l_min or bandwidth <= 0:
        raise UsageError(f"taps need l_min <= l_max and a bandwidth > 0, not {l_min}, {l_max} and {bandwidth} Hz.")
    offset = geometry.get("band_offset", 0.0)

    def kernel(delay: Tensor, phase: Tensor, weight: Tensor) -> Tensor:
        lag = torch.arange(l_min, l_max + 1, dtype=delay.dtype, device=delay.device)
        pulse = torch.sinc(lag - bandwidth * delay[..., None])
        return torch.polar(weight, phase - 2 * math.pi * offset * delay)[..., None] * pulse

    return kernel, l_max - l_min + 1


def _respond(
    paths: Paths,
    tx_array: PlanarArray,
    rx_array: PlanarArray,
    times: Tensor | None,
    kernel: _Kernel,
    count: int,
    delay_drift: bool,
    geometry: Geometry,
) -> Tensor:
    """Sum over paths of port coefficients times kernel, `[..., rx_ant, tx_ant, time, count]`."""
    batch, n = paths.batch_shape, paths.num_paths
    times = torch.zeros(1, dtype=torch.float64, device=paths.delay.device) if times is None else times
    clock = _expand(times, (*batch, times.shape[-1]), "times").reshape(-1, 1, times.shape[-1])
    flat, held = _flatten(paths, len(batch)), _flatten_geometry(geometry, batch)
    shape = (rx_array.num_ports, tx_array.num_ports, times.shape[-1], count)
    # Delays that drift bring the Doppler shift of the band's offset with them.
    stretch = 1.0 if delay_drift else 1 + geometry.get("band_offset", 0.0) / paths.carrier
    parts = []
    for rows in _chunks(flat.batch_shape[0], n * (shape[2] * count + shape[0] * shape[1]) + math.prod(shape)):
        part = flat[rows]
        ports = port_coefficients(part, tx_array, rx_array, **_rows(held, rows)).flatten(-3, -2)
        turns = part.doppler[..., None] * clock[rows].to(part.delay)
        delay = part.delay[..., None] - turns / part.carrier if delay_drift else part.delay[..., None]
        pulse = kernel(delay, (2 * math.pi * stretch) * turns, torch.ones_like(turns))
        parts.append((ports @ pulse.flatten(-2)).reshape(-1, *shape))
    return torch.cat(parts).reshape(*batch, *shape)


def _respond_along(
    paths: Paths,
    anchor_times: Tensor,
    times: Tensor,
    tx_array: PlanarArray,
    rx_array: PlanarArray,
    kernel: _Kernel,
    count: int,
    geometry: Geometry,
) -> Tensor:
    """As `_respond` for paths `[..., anchor, path]`, cross-fading between anchors."""
    if paths.mask.ndim < 2 or anchor_times.shape != paths.batch_shape:
        raise UsageError(
            f"anchor_times has shape {list(anchor_times.shape)}; with paths [..., anchor, path] of shape "
            f"{list(paths.mask.shape)} it must be {list(paths.batch_shape)}."
        )
    batch, n = paths.batch_shape[:-1], paths.num_paths
    clock = _expand(times, (*batch, times.shape[-1]), "times").reshape(-1, times.shape[-1])
    anchors = anchor_times.reshape(-1, anchor_times.shape[-1])
    flat, held = _flatten(paths, len(batch)), _flatten_geometry(geometry, paths.batch_shape, keep=1)
    shape = (rx_array.num_ports, tx_array.num_ports, clock.shape[-1], count)
    parts = []
    for rows in _chunks(flat.batch_shape[0], 2 * shape[2] * n * (count + shape[0] * shape[1]) + math.prod(shape)):
        span, index, offset, weight = _neighbours(anchors[rows], clock[rows])
        line = torch.arange(span.shape[0], device=span.device)[:, None]
        part = flat[rows][line, span]
        near = {k: v[line, span] if isinstance(v, Tensor) and v.ndim == 3 and v.shape[1] > 1 else v
                for k, v in _rows(held, rows).items()}  # fmt: skip
        ports = port_coefficients(part, tx_array, rx_array, **cast(Geometry, near)).flatten(-3, -2).mT
        # [row, time, neighbour, path, ...]: gathered, the neighbours' paths are summed as one.
        line = line[:, :, None]
        turns = part.doppler[line, index] * offset[..., None].to(part.delay)
        delay = part.delay[line, index] - turns / paths.carrier
        pulse = kernel(delay, 2 * math.pi * turns, weight[..., None].to(turns).expand_as(turns))
        ports = ports.contiguous()[line, index].flatten(2, 3)
        parts.append((ports.mT @ pulse.flatten(2, 3)).transpose(1, 2).reshape(-1, *shape))
    return torch.cat(parts).reshape(*batch, *shape)


def _neighbours(anchors: Tensor, clock: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which anchors each time lies between.

    Args:
        anchors: `[row, anchor]` [s].
        clock: `[row, time]` [s].

    Returns:
        The anchors used by any time `[row, span]`; each time's two neighbours as indices into that span, their offsets
        in time [s] and their weights, all `[row, time, 2]`, the last two in the precision of `clock`.
    """
    last = anchors.shape[1] - 1
    anchors = anchors.to(clock.dtype)
    left = (torch.searchsorted(anchors.contiguous(), clock.contiguous(), right=True) - 1).clamp(0, max(last - 1, 0))
    index = torch.stack([left, (left + 1).clamp(max=last)], -1)
    at = anchors.gather(1, index.flatten(1)).view(index.shape)
    gap = at[..., 1] - at[..., 0]
    fade = torch.where(gap > 0, (clock - at[..., 0]) / torch.where(gap > 0, gap, 1.0), 0.0).clamp(0, 1)
    first = left.amin(1, keepdim=True)
    width = int((index.amax((1, 2)) - first[:, 0]).max()) + 1
    span = (first + torch.arange(width, device=clock.device)).clamp(max=last)
    return span, index - first[..., None], clock[..., None] - at, torch.stack([1 - fade, fade], -1)


def _expand(x: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    try:
        return x.expand(shape)
    except RuntimeError:
        raise UsageError(f"{name} has shape {list(x.shape)}, which doesn't broadcast to {list(shape)}.") from None


def _rotation(orientation: Tensor | None, paths: Paths, name: str) -> Tensor | None:
    if orientation is None:
        return None
    if orientation.ndim > 1:
        orientation = _expand(orientation, (*paths.batch_shape, 3), name)
    return rotation_matrix(orientation.to(paths.delay))


def _flatten(paths: Paths, axes: int) -> Paths:
    """Join the first `axes` batch axes."""
    tensors = {name: getattr(paths, name) for name in PATH_TENSORS}
    return replace(paths, **{k: v.reshape(math.prod(v.shape[:axes]), *v.shape[axes:]) for k, v in tensors.items()})


_BATCHED = ("tx_orientation", "rx_orientation", "tx_position", "rx_position")


def _flatten_geometry(geometry: Geometry, batch: tuple[int, ...], keep: int = 0) -> Geometry:
    """Join batch axes of what is held per link, but for the last `keep`."""
    held = dict(geometry)
    for name in _BATCHED:
        x = held.get(name)
        if isinstance(x, Tensor) and x.ndim > 1:
            lead = len(batch) - keep
            held[name] = _expand(x, (*batch, 3), name).reshape(math.prod(batch[:lead]), *batch[lead:], 3)
    return cast(Geometry, held)


def _rows(geometry: Geometry, rows: slice) -> Geometry:
    return cast(
        Geometry,
        {k: v[rows] if k in _BATCHED and isinstance(v, Tensor) and v.ndim > 1 else v for k, v in geometry.items()},
    )


def _anchor_geometry(geometry: Geometry, tx_orientation: Tensor | None, rx_orientations: Tensor | None) -> Geometry:
    if tx_orientation is not None and tx_orientation.ndim > 1:
        tx_orientation = tx_orientation[..., None, :]
    return cast(Geometry, {**geometry, "tx_orientation": tx_orientation, "rx_orientation": rx_orientations})


def _chunks(rows: int, elements: int) -> Iterator[slice]:
    """Slices over `rows`, each of at most `CHUNK_ELEMENTS` in all (but at least one row)."""
    step = max(1, CHUNK_ELEMENTS // max(elements, 1))
    for start in range(0, max(rows, 1), step):
        yield slice(start, start + step)
