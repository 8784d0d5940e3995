"""`rasterize_sphere` on CUDA: what the kernels are given, and where in memory."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from chanlab.errors import ChanlabError, UsageError
from chanlab.rf.build import library
from chanlab.rf.problem import Asked, laid_out, pack_problem
from chanlab.rf.room import ROOM

TILE_WIDTH, TILE_HEIGHT = 16, 8
"""As in `kernels/sphere.h`."""

MAX_CHANNELS = 38
"""Of the CUDA kernels."""

ITEM_THREADS = 256
"""As in `kernels/sphere_lists.cuh`."""

RADIX_ITEMS, RADIX_GAUSSIANS = 1 << 19, 1 << 17
"""From so many items, or Gaussians of a receiver, keys are sorted by radix: more launches and less work than merges."""

_LISTS, _COMPOSITE, _BACKWARD = struct.Struct("2q16P"), struct.Struct("2q7P"), struct.Struct("3q20P")
"""`ListsCall`, `CompositeCall` and `BackwardCall` in `kernels/sphere.cu`, after the problem."""


class _Plan(NamedTuple):
    """What calls of the same sizes share."""

    problem: bytes
    items: int
    state: int
    """Words, without room for pairs."""
    scratch: int
    sort: int
    """Address of the sort by radix; 0: none."""
    sort_bytes: int


@functools.lru_cache(maxsize=256)
def _plan(asked: Asked, gaussians: int, receivers: int, channels: int, device: int) -> _Plan:
    items = gaussians * receivers
    _check_sizes(asked, items, receivers, 0)
    sizes = (gaussians, receivers, *asked[:2])
    problem = pack_problem(asked, gaussians, receivers, channels)
    many = items >= RADIX_ITEMS or gaussians >= RADIX_GAUSSIANS
    sort, more = _radix_sort(items, device) if many else (0, 0)
    return _Plan(problem, items, state_words(*sizes, 0), _scratch_words(*sizes) + -(-more // 4), sort, more)


def _radix_sort(items: int, device: int) -> tuple[int, int]:
    """Address of `sphere_sort_keys`, and how many bytes it wants."""
    sort, size, found = _sort_library().sphere_sort_keys, ctypes.c_size_t(), ctypes.c_void_p()
    with torch.cuda.device(device):
        code = sort(None, ctypes.byref(size), None, None, items, 0, 64, None, ctypes.byref(found))
    if code:
        _refuse(code)
    return ctypes.cast(sort, ctypes.c_void_p).value or 0, size.value


def tiles(height: int, width: int) -> int:
    """Of an image."""
    return -(-height // TILE_HEIGHT) * -(-width // TILE_WIDTH)


def state_words(gaussians: int, receivers: int, height: int, width: int, capacity: int) -> int:
    """Size of what a backward pass needs from its forward pass [int32]; `State` in the kernels lays it out."""
    return 4 + 12 * gaussians * receivers + capacity + receivers * (2 * tiles(height, width) + height * width)


def _scratch_words(gaussians: int, receivers: int, height: int, width: int) -> int:
    """Size of what a forward pass needs for itself [int32]; `Scratch` in the kernels lays it out."""
    return receivers * (6 * gaussians + -(-gaussians // ITEM_THREADS) * tiles(height, width))


def _check_sizes(asked: Asked, items: int, receivers: int, capacity: int) -> None:
    """Refuse what the kernels can't count: a range of tiles is four 16-bit numbers, all else 32-bit ones."""
    height, width = asked[:2]
    across, up = -(-width // TILE_WIDTH), -(-height // TILE_HEIGHT)
    if max(across, up) >= 1 << 16:
        raise UsageError(
            f"rasterize_sphere: the CUDA kernels draw up to {TILE_HEIGHT * 0xFFFF} rows and {TILE_WIDTH * 0xFFFF} "
            f"columns, got {height} x {width}; render bands of the panorama."
        )
    if max(items, capacity, max(8 * receivers, 32) * across * up) >= 1 << 31:
        raise UsageError(
            f"rasterize_sphere: {items} Gaussians times receivers, room for {capacity} pairs and {receivers} images of "
            f"{height} x {width} pixels are too much at once; render fewer receivers in a call."
        )


def forward(
    inputs: Sequence[Tensor], asked: Asked, statistics: bool, capacity: int, slot: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """Image, transmittance, radius, weight and peak (None without `statistics`), and state.

    A state that is not to be kept for a backward pass shares its memory with what the forward pass alone needs. The
    first kernels run while the rest is prepared: they take less time than the host does.
    """
    inputs = laid_out(inputs)
    means, device, size = inputs[0], inputs[0].get_device(), asked[:2]
    gaussians, receivers, channels = means.shape[0], inputs[5].shape[0], inputs[4].shape[1]
    plan = _plan(asked, gaussians, receivers, channels, device)
    if capacity >= 1 << 31:
        _check_sizes(asked, plan.items, receivers, capacity)
    words = plan.state + capacity
    apart = words + words % 2  # keys are 64-bit numbers
    state = means.new_empty(words if keep else apart + plan.scratch, dtype=torch.int32)
    radius = means.new_empty(receivers, gaussians)
    weight, peak = (torch.empty_like(radius), torch.empty_like(radius)) if statistics else (None, None)
    if not plan.items:
        return (
            means.new_zeros(receivers, channels, *size),
            means.new_ones(receivers, *size),
            radius,
            weight,
            peak,
            state,
        )
    kernels, begin, stream = _library(), state.data_ptr(), _stream(device)
    scratch = means.new_empty(plan.scratch, dtype=torch.int32) if keep else None
    given, sort = [x.data_ptr() for x in inputs], plan[-2:]
    behind = begin + 4 * apart if scratch is None else scratch.data_ptr()
    seen = (0, 0) if weight is None or peak is None else (weight.data_ptr(), peak.data_ptr())
    lists = _LISTS.pack(
        capacity, device, *given, begin, behind, radius.data_ptr(), *seen, ROOM.address(slot), *sort, stream
    )
    if code := kernels.sphere_cuda_lists(plan.problem + lists):
        _refuse(code)
    image, transmittance = means.new_empty(receivers, channels, *size), means.new_empty(receivers, *size)
    composite = _COMPOSITE.pack(
        capacity, device, given[4], begin, *seen, image.data_ptr(), transmittance.data_ptr(), stream
    )
    if code := kernels.sphere_cuda_composite(plan.problem + composite):
        _refuse(code)
    return image, transmittance, radius, weight, peak, state


def backward(
    by_image: Tensor,
    by_transmittance: Tensor | None,
    inputs: Sequence[Tensor],
    transmittance: Tensor,
    state: Tensor,
    asked: Asked,
    capacity: int,
    poses: bool,
) -> tuple[Tensor, ...]:
    """Gradients by the inputs; those by receivers and rotations are zero without `poses`."""
    by_image, *inputs = laid_out((by_image, *inputs))
    if by_transmittance is not None:
        by_transmittance = laid_out((by_transmittance,))[0]
    means, channels = inputs[0], inputs[4].shape[1]
    device = means.get_device()
    plan = _plan(asked, means.shape[0], inputs[5].shape[0], channels, device)
    if not plan.items:
        return tuple(torch.zeros_like(x) for x in inputs)
    outputs = [torch.empty_like(x) for x in inputs]
    sums = means.new_empty(plan.items * (10 + channels))
    kernels = _library()
    call = plan.problem + _BACKWARD.pack(
        capacity,
        device,
        poses,
        *[x.data_ptr() for x in inputs],
        by_image.data_ptr(),
        0 if by_transmittance is None else by_transmittance.data_ptr(),
        transmittance.data_ptr(),
        state.data_ptr(),
        *[x.data_ptr() for x in outputs],
        sums.data_ptr(),
        _stream(device),
    )
    if code := kernels.sphere_cuda_backward(call):
        _refuse(code)
    return tuple(outputs)


def _stream(device: int) -> int:
    """The current stream, as CUDA knows it; without an object of torch's around it."""
    return int(torch._C._cuda_getCurrentRawStream(device))


@functools.cache
def _library() -> ctypes.CDLL:
    kernels = library("sphere.cu")
    kernels.sphere_cuda_error.restype = ctypes.c_char_p
    return kernels


@functools.cache
def _sort_library() -> ctypes.CDLL:
    return library("sphere_sort.cu")


def _refuse(code: int) -> None:
    said = _library().sphere_cuda_error(code).decode()
    raise ChanlabError(
        f"rasterize_sphere: CUDA says `{said}` ({code}). If it names the kernel image or the architecture, build "
        "for this GPU: CHANLAB_CUDA_ARCHS=MAJOR.MINOR python -m chanlab.rf.build cuda."
    )
