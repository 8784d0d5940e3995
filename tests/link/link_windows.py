"""Windows made of plane waves over a planar array, with Doppler: channels whose future a closed form knows."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class SyntheticBatch(NamedTuple):
    history: Tensor
    target: Tensor
    noise_variance: Tensor
    sample_id: Tensor
    window: Tensor


def plane_wave_windows(
    samples: int,
    windows: int = 1,
    num_paths: int = 6,
    num_subcarriers: int = 48,
    history: int = 8,
    horizons: int = 2,
    csi_snr_db: float = 20.0,
    max_doppler: float = 0.06,
    seed: int = 0,
) -> SyntheticBatch:
    """A 4x4 array of two polarisations; Doppler in cycles per snapshot, delays of 1 % of the symbol."""
    g = torch.Generator().manual_seed(seed)
    n = samples * windows
    amplitude = torch.randn(samples, 2, num_paths, dtype=torch.complex64, generator=g)
    amplitude = amplitude * 0.6 ** torch.arange(num_paths)
    sines = 2 * torch.rand(samples, 2, num_paths, generator=g) - 1
    delay = 0.01 * torch.rand(samples, num_paths, generator=g)
    doppler = max_doppler * torch.cos(2 * math.pi * torch.rand(samples, num_paths, generator=g))
    grid = torch.arange(4)
    phase = math.pi * (sines[:, 0, None, None] * grid[:, None, None] + sines[:, 1, None, None] * grid[None, :, None])
    array = torch.polar(torch.ones(()), phase).flatten(1, 2)  # [sample, element, path]
    ports = (amplitude[:, :, None] * array[:, None]).flatten(1, 2)  # [sample, port, path]
    time = torch.arange(history + horizons) + 50.0 * torch.arange(windows)[:, None]  # [window, time]
    turn = torch.polar(torch.ones(()), 2 * math.pi * doppler[:, None, None] * time[..., None])
    tone = torch.polar(torch.ones(()), -2 * math.pi * delay[:, None] * torch.arange(num_subcarriers)[:, None])
    h = torch.einsum("smp,swtp,sfp->swmtf", ports, turn, tone).reshape(n, 1, 32, history + horizons, num_subcarriers)
    past = h[..., :history, :]
    noise_variance = past.abs().square().mean((1, 2, 3, 4)) * 10 ** (-csi_snr_db / 10)
    noise = (
        torch.randn(past.shape, dtype=torch.complex64, generator=g) * noise_variance.sqrt()[:, None, None, None, None]
    )
    return SyntheticBatch(
        past + noise,
        h[..., history:, :].contiguous(),
        noise_variance,
        torch.arange(samples).repeat_interleave(windows),
        torch.arange(windows).repeat(samples),
    )
