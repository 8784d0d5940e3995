"""The CUDA kernels of `chanlab.jscc.depthwise`, in Triton."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

POSITIONS = 32
"""Positions of a tile of `convolve`."""
ROWS, CHUNK = 16, 512
"""Positions of a tile of `correlate`, and of a program."""


@triton.jit
def _convolve(
    x, taps, bias, out, positions, height, width, channels, size: tl.constexpr, rows: tl.constexpr, wide: tl.constexpr
) -> None:
    """Positions lie along the first axis of a tile, channels along the second."""
    position = tl.program_id(0) * rows + tl.arange(0, rows)
    channel = tl.program_id(1) * wide + tl.arange(0, wide)
    row, column = position // width % height, position % width
    known = channel < channels
    total = tl.zeros((rows, wide), tl.float32) + tl.load(bias + channel, known, 0.0).to(tl.float32)[None, :]
    for i in tl.static_range(size):
        down = i - size // 2
        in_row = (position < positions) & (row + down >= 0) & (row + down < height)
        for j in tl.static_range(size):
            right = j - size // 2
            there = in_row & (column + right >= 0) & (column + right < width)
            place = (position + down * width + right)[:, None] * channels + channel[None, :]
            value = tl.load(x + place, there[:, None] & known[None, :], 0.0).to(tl.float32)
            tap = tl.load(taps + (i * size + j) * channels + channel, known, 0.0).to(tl.float32)
            total += value * tap[None, :]
    here = position[:, None] * channels + channel[None, :]
    tl.store(out + here, total.to(out.dtype.element_ty), (position < positions)[:, None] & known[None, :])


@triton.jit
def _correlate(
    x,
    gradient,
    partial,
    positions,
    height,
    width,
    channels,
    size: tl.constexpr,
    padded: tl.constexpr,
    rows: tl.constexpr,
    chunk: tl.constexpr,
    wide: tl.constexpr,
) -> None:
    """A row of the kernel for a chunk of positions: its taps lie along the second axis, channels along the third."""
    channel = tl.program_id(1) * wide + tl.arange(0, wide)
    down = tl.program_id(2) - size // 2
    right = tl.arange(0, padded) - size // 2
    known = channel < channels
    total = tl.zeros((rows, padded, wide), tl.float32)
    for start in range(0, chunk, rows):
        position = tl.program_id(0) * chunk + start + tl.arange(0, rows)
        row, column = position // width % height, position % width
        here = position[:, None] * channels + channel[None, :]
        weight = tl.load(gradient + here, (position < positions)[:, None] & known[None, :], 0.0).to(tl.float32)
        in_row = (position < positions) & (row + down >= 0) & (row + down < height)
        to = column[:, None] + right[None, :]
        there = in_row[:, None] & (to >= 0) & (to < width) & (right <= size // 2)[None, :]
        source = (position + down * width)[:, None] + right[None, :]
        place = source[:, :, None] * channels + channel[None, None, :]
        value = tl.load(x + place, there[:, :, None] & known[None, None, :], 0.0).to(tl.float32)
        total += weight[:, None, :] * value
    tap = (tl.program_id(0) * size + tl.program_id(2)) * size + tl.arange(0, padded)
    place = tap[:, None] * channels + channel[None, :]
    tl.store(partial + place, tl.sum(total, 0), (tl.arange(0, padded) < size)[:, None] & known[None, :])


def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """See `chanlab.jscc.depthwise.depthwise`; CUDA tensors only."""
    x = x.contiguous()
    batch, height, width, channels = x.shape
    positions = batch * height * width
    out = torch.empty_like(x)
    taps = weight.flatten(1).t().contiguous()
    wide = min(64, triton.next_power_of_2(channels))
    grid = (triton.cdiv(positions, POSITIONS), triton.cdiv(channels, wide))
    with torch.cuda.device(x.device):
        _convolve[grid](
            x, taps, bias, out, positions, height, width, channels, weight.shape[-1], POSITIONS, wide, num_warps=4
        )
    return out


def correlate(x: Tensor, gradient: Tensor, size: int) -> Tensor:
    """Gradient of the weights `[channels, 1, size, size]`, float32: one pass over chunks, one over their sums."""
    x, gradient = x.contiguous(), gradient.contiguous()
    batch, height, width, channels = x.shape
    positions = batch * height * width
    chunks = triton.cdiv(positions, CHUNK)
    partial = torch.empty(chunks, size, size, channels, device=x.device)
    wide = min(32, triton.next_power_of_2(channels))
    grid = (chunks, triton.cdiv(channels, wide), size)
    with torch.cuda.device(x.device):
        _correlate[grid](
            x,
            gradient,
            partial,
            positions,
            height,
            width,
            channels,
            size,
            triton.next_power_of_2(size),
            ROWS,
            CHUNK,
            wide,
            num_warps=4,
        )
    return partial.sum(0).permute(2, 0, 1)[:, None].contiguous()
