"""Random numbers of windows: each depends on (seed, sample id, window, epoch) and its use alone."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

START, SNR, NOISE = 1, 2, 3
"""Streams: where a window starts, its SNR, its noise. 0 is what `sample_generator` gives trajectories."""

FIXED = 2**32 - 1
"""The epoch of windows that are the same in every epoch."""


def uniform(seed: int, sample_id: int, window: int, epoch: int, stream: int) -> float:
    """A number in [0, 1)."""
    return float(_state(seed, sample_id, window, epoch, stream) >> 11) / 2.0**53


def add_noise(history: Tensor, deviation: float, seed: int, sample_id: int, window: int, epoch: int) -> None:
    """Add complex Gaussian noise to one window in place.

    It is drawn on the CPU, wherever the learner computes, and is the same on every CPU but for rounding in float32.

    Args:
        history: Complex64 on the CPU, any shape.
        deviation: Standard deviation of the complex noise; each real dimension has half its variance.
        seed: Seed.
        sample_id: Sample id.
        window: Index of the window.
        epoch: Epoch, or `FIXED`.
    """
    if deviation == 0:
        return
    generator = torch.Generator().manual_seed(_state(seed, sample_id, window, epoch, NOISE) >> 1)
    real = torch.view_as_real(history)
    real += torch.empty_like(real).normal_(0.0, deviation * math.sqrt(0.5), generator=generator)


def _state(seed: int, sample_id: int, window: int, epoch: int, stream: int) -> int:
    sequence = np.random.SeedSequence([seed, sample_id, stream], spawn_key=(window, epoch))
    return int(sequence.generate_state(1, np.uint64)[0])
