"""Random numbers of windows: each depends on (seed, sample id, window, epoch) and its use alone."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

START, SNR, NOISE, FEW, IMPAIRMENTS = 1, 2, 3, 4, 5
"""Streams: where a window starts, its SNR, its noise, whether few-shot training keeps its sample, its impairments."""

FIXED = 2**32 - 1
"""The epoch of windows that are the same in every epoch."""


def uniform(seed: int, sample_id: int, window: int, epoch: int, stream: int) -> float:
    """A number in [0, 1)."""
    return float(hashed(seed, sample_id, window, epoch, stream) >> 11) / 2.0**53


def fill_noise(window: Tensor, deviation: float, seed: int, sample_id: int, index: int, epoch: int) -> None:
    """Fill one window with complex Gaussian noise.

    It is drawn on the CPU, wherever the learner computes, and is the same on every CPU but for rounding in float32.

    Args:
        window: Complex64 on the CPU, any shape, contiguous; overwritten.
        deviation: Standard deviation of the complex noise; each real dimension has half its variance.
        seed: Seed.
        sample_id: Sample id.
        index: Index of the window.
        epoch: Epoch, or `FIXED`.
    """
    real = torch.view_as_real(window)
    if deviation == 0:
        real.zero_()
        return
    generator = torch.Generator().manual_seed(hashed(seed, sample_id, index, epoch, NOISE) >> 1)
    real.normal_(0.0, deviation * math.sqrt(0.5), generator=generator)


def hashed(*key: int | str) -> int:
    """64 bits that look random and are the same with every version of every library."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")
