"""Sums over paths: of one instant, or along anchors with births and deaths; in chunks of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from chanlab.channels.arrays import PlanarArray
from chanlab.channels.coefficients import Geometry, expand, port_coefficients
from chanlab.channels.paths import PATH_TENSORS, Paths
from chanlab.errors import UsageError

CHUNK_ELEMENTS = 2**24
"""Largest intermediate tensor [elements] of one step over the batch; memory follows it, results don't."""

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(delay, phase, weight), each `[..., path, time]`, to weight · exp(j phase) · response to the delay, count last."""


def sum_paths(
    paths: Paths,
    tx_array: PlanarArray,
    rx_array: PlanarArray,
    times: Tensor | None,
    kernel: Kernel,
    count: int,
    delay_drift: bool,
    geometry: Geometry,
) -> Tensor:
    """Sum over paths of port coefficients times kernel, `[..., rx_ant, tx_ant, time, count]`."""
    batch, n = paths.batch_shape, paths.num_paths
    times = torch.zeros(1, dtype=torch.float64, device=paths.delay.device) if times is None else times
    clock = expand(times, (*batch, times.shape[-1]), "times").reshape(-1, 1, times.shape[-1])
    flat, held = _flatten(paths, len(batch)), _flatten_geometry(geometry, batch)
    shape = (rx_array.num_ports, tx_array.num_ports, times.shape[-1], count)
    # Delays that drift bring the Doppler shift of the band's offset with them.
    stretch = 1.0 if delay_drift else 1 + geometry.get("band_offset", 0.0) / paths.carrier
    parts = []
    for rows in _chunks(flat.batch_shape[0], n * (shape[2] * count + shape[0] * shape[1]) + math.prod(shape)):
        part = flat[rows]
        ports = port_coefficients(part, tx_array, rx_array, **_pick(held, rows)).flatten(-3, -2)
        turns = part.doppler[..., None] * clock[rows].to(part.delay)
        delay = part.delay[..., None] - turns / part.carrier if delay_drift else part.delay[..., None]
        pulse = kernel(delay, (2 * math.pi * stretch) * turns, torch.ones_like(turns))
        parts.append((ports @ pulse.flatten(-2)).reshape(-1, *shape))
    return torch.cat(parts).reshape(*batch, *shape)


def sum_along(
    paths: Paths,
    anchor_times: Tensor,
    times: Tensor,
    tx_array: PlanarArray,
    rx_array: PlanarArray,
    kernel: Kernel,
    count: int,
    geometry: Geometry,
) -> Tensor:
    """As `sum_paths` for paths `[..., anchor, path]`, cross-fading between anchors."""
    if paths.mask.ndim < 2 or anchor_times.shape != paths.batch_shape:
        raise UsageError(
            f"anchor_times has shape {list(anchor_times.shape)}; with paths [..., anchor, path] of shape "
            f"{list(paths.mask.shape)} it must be {list(paths.batch_shape)}."
        )
    batch, n = paths.batch_shape[:-1], paths.num_paths
    clock = expand(times.to(paths.delay.device), (*batch, times.shape[-1]), "times").reshape(-1, times.shape[-1])
    anchors = anchor_times.to(clock.device).reshape(-1, anchor_times.shape[-1])
    flat, held = _flatten(paths, len(batch)), _flatten_geometry(geometry, paths.batch_shape, keep=1)
    shape = (rx_array.num_ports, tx_array.num_ports, clock.shape[-1], count)
    parts = []
    for rows in _chunks(flat.batch_shape[0], 2 * shape[2] * n * (count + shape[0] * shape[1]) + math.prod(shape)):
        span, index, offset, weight = _neighbours(anchors[rows], clock[rows])
        line = torch.arange(span.shape[0], device=span.device)[:, None]
        part = flat[rows][line, span]
        near = _pick(_pick(held, rows), (line, span))
        ports = port_coefficients(part, tx_array, rx_array, **near).flatten(-3, -2).mT
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
        in time [s] and their weights, all `[row, time, 2]`.
    """
    last = anchors.shape[1] - 1
    anchors, clock = anchors.double(), clock.double()
    left = (torch.searchsorted(anchors.contiguous(), clock.contiguous(), right=True) - 1).clamp(0, max(last - 1, 0))
    index = torch.stack([left, (left + 1).clamp(max=last)], -1)
    at = anchors.gather(1, index.flatten(1)).view(index.shape)
    gap = at[..., 1] - at[..., 0]
    fade = torch.where(gap > 0, (clock - at[..., 0]) / torch.where(gap > 0, gap, 1.0), 0.0).clamp(0, 1)
    first = left.amin(1, keepdim=True)
    width = int((index.amax((1, 2)) - first[:, 0]).max()) + 1
    span = (first + torch.arange(width, device=clock.device)).clamp(max=last)
    return span, index - first[..., None], clock[..., None] - at, torch.stack([1 - fade, fade], -1)


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
            held[name] = expand(x, (*batch, 3), name).reshape(math.prod(batch[:lead]), *batch[lead:], 3)
    return cast(Geometry, held)


def _pick(geometry: Geometry, index: slice | tuple[Tensor, Tensor]) -> Geometry:
    """Index the batch axes of what is held per link."""
    picked = {k: v[index] if k in _BATCHED and isinstance(v, Tensor) and v.ndim > 1 else v for k, v in geometry.items()}
    return cast(Geometry, picked)


def _chunks(rows: int, elements: int) -> Iterator[slice]:
    """Slices over `rows`, each of at most `CHUNK_ELEMENTS` in all (but at least one row)."""
    step = max(1, CHUNK_ELEMENTS // max(elements, 1))
    for start in range(0, max(rows, 1), step):
        yield slice(start, start + step)
