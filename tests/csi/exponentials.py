"""Channels that are sums of few complex exponentials over antennas, time and subcarriers: predictable exactly."""

import math

import torch
from torch import Tensor


def exponentials(
    batch: int = 4,
    num_tx: int = 4,
    num_steps: int = 20,
    num_subcarriers: int = 8,
    num_paths: int = 3,
    max_doppler: float = 0.2,
    num_rx: int = 1,
    seed: int = 0,
) -> Tensor:
    """Plane waves of random gain, angle, delay and Doppler [cycles per step], complex64."""
    generator = torch.Generator().manual_seed(seed)

    def uniform() -> Tensor:
        return torch.rand(batch, num_paths, generator=generator, dtype=torch.float64)

    def wave(cycles: Tensor, count: int) -> Tensor:
        return torch.exp(2j * math.pi * cycles[..., None] * torch.arange(count))

    gain = torch.randn(batch, num_paths, dtype=torch.complex128, generator=generator)
    waves = (
        wave(uniform() - 0.5, num_rx),
        wave(uniform() - 0.5, num_tx),
        wave((2 * uniform() - 1) * max_doppler, num_steps),
        wave(-0.3 * uniform(), num_subcarriers),
    )
    return torch.einsum("bp,bpr,bpt,bpn,bpk->brtnk", gain, *waves).to(torch.complex64)


def noisy(channels: Tensor, snr_db: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Channels with noise, and its variance `[batch]`."""
    generator = torch.Generator().manual_seed(seed)
    variance = channels.abs().square().mean((1, 2, 3, 4)) * 10 ** (-snr_db / 10)
    noise = torch.randn(channels.shape, dtype=channels.dtype, generator=generator)
    return channels + noise * variance.sqrt()[:, None, None, None, None], variance


def nmse_db(prediction: Tensor, target: Tensor) -> float:
    """Pooled NMSE [dB]."""
    error = (prediction - target).detach()
    return 10 * math.log10(error.abs().square().sum() / target.abs().square().sum())
