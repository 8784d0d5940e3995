"""Random numbers from counters: whole batches at once on the learner's device, each sample's its own on any device.

An entry of a sample's random numbers is a function of (key, position) alone, with no state: what a sample gets depends
neither on its batch nor on the kind of device, but for rounding in float32. The function is SplitMix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", 2014), then Box and Muller's transform for Gaussian numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from chanlab.data.draws import hashed

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_CHUNK = 2**24


def keys(sample_id: Tensor, *name: int | str) -> Tensor:
    """A key for each sample.

    Args:
        sample_id: Ids, int64 `[batch]`.
        *name: What else the random numbers depend on: seed, split, the use they are put to.

    Returns:
        Int64 `[batch]` on the device of the ids.
    """
    base = hashed(*name) - 2**63
    return _mix(_mix(sample_id * _GOLDEN) + base)


def uniform(key: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Numbers in [0, 1), float32 `[batch, *shape]`, in steps of 2^-24.

    Args:
        key: Int64 `[batch]`.
        shape: Shape of each sample's numbers.
    """
    bits = _bits(key, 0, math.prod(shape))
    return (_shift(bits, 40).float() * 2.0**-24).view(len(key), *shape)


def complex_normal(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Complex Gaussian numbers of variance 1 (1/2 per real dimension), complex64 `[batch, *shape]`.

    Args:
        key: Int64 `[batch]`.
        shape: Shape of each sample's numbers.
    """
    count = math.prod(shape)
    out = torch.empty(len(key), count, dtype=torch.complex64, device=key.device)
    rows = max(1, _CHUNK // max(1, count))
    for i in range(0, len(key), rows):
        bits = _bits(key[i : i + rows], 0, count)
        radius = (((_shift(bits, 40).float() + 0.5) * 2.0**-24).log_().neg_()).sqrt_()
        angle = (bits & 0xFFFFFF).float() * (2 * math.pi * 2.0**-24)
        out[i : i + rows] = torch.polar(radius, angle)
    return out.view(len(key), *shape)


def normal(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Real Gaussian numbers of variance 1, float32 `[batch, *shape]`; see `complex_normal`."""
    return complex_normal(key, shape).real * math.sqrt(2)


def _bits(key: Tensor, start: int, count: int) -> Tensor:
    """64 random bits for each position, int64 `[batch, count]`."""
    position = torch.arange(start + 1, start + count + 1, device=key.device)
    return _mix(key[:, None] + position * _GOLDEN)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _MIX[0]
    z = (z ^ _shift(z, 27)) * _MIX[1]
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: PyTorch's own keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
