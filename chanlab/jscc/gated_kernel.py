"""The CUDA kernels of `chanlab.jscc.gated`, in Triton."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MANY = 65536
"""Positions from which on tiles have 64: with fewer, short tiles keep more of the device busy."""


@triton.jit
def _modulated(x, known, modulation, channel, width: tl.constexpr):
    """Layer norm over channels, beyond which `x` is zero, then scale and shift, stored one behind the other."""
    mean = tl.sum(x, 1) / width
    centred = tl.where(known[None, :], x - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, 1) / width
    scale = tl.load(modulation[:, None] + channel[None, :], known[None, :], 0.0).to(tl.float32)
    shift = tl.load(modulation[:, None] + width + channel[None, :], known[None, :], 0.0).to(tl.float32)
    return centred * tl.rsqrt(variance + 1e-5)[:, None] * (1 + scale) + shift


@triton.jit
def _linear(x, weight, bias, channel, known, width: tl.constexpr):
    """A layer of `width` inputs and outputs: products of the weights' type, sums in float32."""
    inside = known[:, None] & known[None, :]
    matrix = tl.load(weight + channel[None, :] * width + channel[:, None], inside, 0.0)
    offset = tl.load(bias + channel, known, 0.0).to(tl.float32)
    return tl.dot(x, matrix.to(x.dtype)) + offset[None, :]


@triton.jit
def _widen(
    x,
    modulation,
    stride,
    weight,
    bias,
    out,
    positions,
    area,
    width: tl.constexpr,
    rows: tl.constexpr,
    wide: tl.constexpr,
) -> None:
    """Modulated features widened to two halves; positions lie along a tile's first axis, channels along the second."""
    position = tl.program_id(0) * rows + tl.arange(0, rows)
    channel = tl.arange(0, wide)
    known = channel < width
    inside = (position < positions)[:, None] & known[None, :]
    value = tl.load(x + position[:, None] * width + channel[None, :], inside, 0.0).to(tl.float32)
    image = tl.minimum(position, positions - 1) // area
    value = _modulated(value, known, modulation + image * stride, channel, width).to(x.dtype.element_ty)
    left = _linear(value, weight, bias, channel, known, width)
    right = _linear(value, weight + width * width, bias + width, channel, known, width)
    here = out + position[:, None] * (2 * width) + channel[None, :]
    tl.store(here, left.to(out.dtype.element_ty), inside)
    tl.store(here + width, right.to(out.dtype.element_ty), inside)


@triton.jit
def _mix(
    x,
    widened,
    modulation,
    stride,
    taps,
    taps_bias,
    spatial,
    spatial_bias,
    mixer_in,
    mixer_in_bias,
    mixer_out,
    mixer_out_bias,
    out,
    positions,
    rows_of_image,
    columns,
    size: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    wide: tl.constexpr,
) -> None:
    """All behind `_widen`: both halves convolved and multiplied, projected, added; then the channel mixer."""
    position = tl.program_id(0) * rows + tl.arange(0, rows)
    channel = tl.arange(0, wide)
    known = channel < width
    row, column = position // columns % rows_of_image, position % columns
    empty = tl.zeros((rows, wide), tl.float32)
    left = empty + tl.load(taps_bias + channel, known, 0.0).to(tl.float32)[None, :]
    right = empty + tl.load(taps_bias + width + channel, known, 0.0).to(tl.float32)[None, :]
    for i in range(size):
        down = row + i - size // 2
        in_row = (position < positions) & (down >= 0) & (down < rows_of_image)
        for j in tl.static_range(size):
            across = column + j - size // 2
            there = (in_row & (across >= 0) & (across < columns))[:, None] & known[None, :]
            from_ = position + (i - size // 2) * columns + (j - size // 2)
            place = widened + from_[:, None] * (2 * width) + channel[None, :]
            tap = taps + (i * size + j) * (2 * width) + channel
            left += tl.load(place, there, 0.0).to(tl.float32) * tl.load(tap, known, 0.0).to(tl.float32)[None, :]
            right += (
                tl.load(place + width, there, 0.0).to(tl.float32)
                * tl.load(tap + width, known, 0.0).to(tl.float32)[None, :]
            )
    kind = x.dtype.element_ty
    inside = (position < positions)[:, None] & known[None, :]
    here = position[:, None] * width + channel[None, :]
    value = tl.load(x + here, inside, 0.0).to(tl.float32)
    value += _linear((left * right).to(kind), spatial, spatial_bias, channel, known, width)
    image = tl.minimum(position, positions - 1) // (rows_of_image * columns)
    mixed = _modulated(value, known, modulation + image * stride + 2 * width, channel, width).to(kind)
    left = _linear(mixed, mixer_in, mixer_in_bias, channel, known, width)
    right = _linear(mixed, mixer_in + width * width, mixer_in_bias + width, channel, known, width)
    value += _linear((left * right).to(kind), mixer_out, mixer_out_bias, channel, known, width)
    tl.store(out + here, value.to(out.dtype.element_ty), inside)


def gated_block(x: Tensor, modulation: Tensor, weights: list[Tensor], tile: tuple[int, int] | None = None) -> Tensor:
    """See `chanlab.jscc.gated.gated_block`.

    Args:
        x: `[batch, height, width, C]`.
        modulation: `[batch, 1, 1, 4 C]`.
        weights: Weight and bias of each layer, in their order.
        tile: Positions of a tile and warps that work on it; None: what is fast.
    """
    x = x.contiguous()
    batch, height, columns, width = x.shape
    positions = batch * height * columns
    widen, widen_bias, depthwise, *others = weights
    taps = depthwise.flatten(1).t().contiguous()  # no copy where the weights lie so
    others = [value.contiguous() for value in others]
    modulation = modulation if modulation.stride(-1) == 1 else modulation.contiguous()
    stride = modulation.stride(0) if batch > 1 else 0
    wide = max(16, triton.next_power_of_2(width))
    rows, warps = tile or _tile(positions, wide)
    grid = (triton.cdiv(positions, rows),)
    widened, out = x.new_empty(*x.shape[:3], 2 * width), torch.empty_like(x)
    with torch.cuda.device_of(x):
        _widen[grid](
            x,
            modulation,
            stride,
            widen.contiguous(),
            widen_bias,
            widened,
            positions,
            height * columns,
            width,
            rows,
            wide,
            num_warps=warps,
        )
        _mix[grid](
            x,
            widened,
            modulation,
            stride,
            taps,
            *others,
            out,
            positions,
            height,
            columns,
            depthwise.shape[-1],
            width,
            rows,
            wide,
            num_warps=warps,
        )
    return out


def _tile(positions: int, wide: int) -> tuple[int, int]:
    """Positions of a tile, as few as keep the device busy, and warps, as many as spill no registers."""
    if positions < MANY and wide <= 64:
        return 32, 4
    return 64, 4 if wide <= 32 else 8
