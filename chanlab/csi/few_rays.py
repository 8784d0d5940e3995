"""Windows of a few plane waves, as streets have them and models of spread clusters do not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MOST_RAYS = 12
LARGEST_DOPPLER = 0.45
"""In cycles per snapshot: what the snapshot rate resolves, and a little to spare."""


def few_ray_windows(
    batch: int,
    rx_ant: int,
    tx_shape: Sequence[int],
    steps: int,
    horizon: int,
    width: int,
    bands: Sequence[float],
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Draws channels of 1 to 12 rays, each with its own Doppler shift, delay and direction.

    Delays are exponential behind a first arrival, powers fall with them by up to 30 dB with a log-normal spread of 6 dB
    about that; Doppler shifts are a largest one times the cosine of a uniform angle; polarizations and receive antennas
    have gains of their own. From torch's global generator.

    Args:
        batch: Windows.
        rx_ant: Receive antennas.
        tx_shape: Polarizations, columns and rows of the transmit array, half a wavelength apart.
        steps: Snapshots of the history.
        horizon: Snapshots after it.
        width: Subcarriers of a band.
        bands: Distances of the target's bands from the history's, in bandwidths; 0 is the history's own.
        device: Where.

    Returns:
        History `[batch, rx_ant, tx_ant, steps, width]` and target `[batch, rx_ant, tx_ant, horizon, bands * width]`,
        complex64, without noise; the history's mean power is 1 in each window.
    """
    polarizations, columns, rows = tx_shape

    def uniform(*size: int) -> Tensor:
        return torch.rand(batch, *size, device=device)

    def turns(x: Tensor) -> Tensor:
        return torch.polar(torch.ones_like(x), 2 * math.pi * x)

    count = 1 + (uniform(1) * MOST_RAYS).floor()
    there = torch.arange(MOST_RAYS, device=device) < count
    first, spread = 6 * uniform(1), 0.1 * 100 ** uniform(1)  # samples of the band
    late = -spread * torch.log(1 - uniform(MOST_RAYS))
    late[:, 0] = 0
    loss = late / spread * 10 * uniform(1) + 6 * torch.randn(batch, MOST_RAYS, device=device)  # [dB]
    amplitude = there * 10 ** (-loss.clamp(max=30.0) / 20)
    doppler = LARGEST_DOPPLER * uniform(1) * torch.cos(math.pi * uniform(MOST_RAYS))
    gain = torch.randn(batch, MOST_RAYS, rx_ant, polarizations, device=device, dtype=torch.complex64)
    gain = gain / gain.abs().square().mean((2, 3), keepdim=True).sqrt() * amplitude[..., None, None]
    angle = uniform(MOST_RAYS, 2) - 0.5  # half a wavelength: a cycle over the visible directions
    grid = (
        angle[..., :1, None] * torch.arange(columns, device=device)[:, None]
        + angle[..., 1:, None] * torch.arange(rows, device=device)
    ).flatten(2)
    ports = (gain[..., None] * turns(grid)[:, :, None, None]).flatten(3)  # [batch, ray, rx, port]
    time = torch.arange(1 - steps, 1 + horizon, device=device)
    moving = turns(doppler[..., None] * time)
    place = torch.arange(width, device=device) / width
    delay = (first + late)[..., None]

    def field(over_time: Tensor, places: Tensor) -> Tensor:
        return torch.einsum("brap,brt,brf->baptf", ports, over_time, turns(-delay * places))

    history = field(moving[..., :steps], place)
    target = field(moving[..., steps:], torch.cat([place + offset for offset in bands]))
    scale = history.abs().square().mean((1, 2, 3, 4), keepdim=True).clamp_min(1e-20).rsqrt()
    return history * scale, target * scale


def with_few_rays(
    history: Tensor,
    target: Tensor,
    noise_variance: Tensor,
    tx_shape: Sequence[int],
    bands: Sequence[float],
    probability: float,
) -> tuple[Tensor, Tensor]:
    """Puts windows of few rays, of the same power and with noise of the same variance, in the place of some.

    Args:
        history: Complex `[batch, rx_ant, tx_ant, time, subcarrier]`, noise included.
        target: Complex `[batch, rx_ant, tx_ant, horizon, bands * subcarrier]`.
        noise_variance: `[batch]`.
        tx_shape: Polarizations, columns and rows of the transmit array.
        bands: See `few_ray_windows`.
        probability: Of a window to be replaced, between 0 and 1.

    Returns:
        History and target, shaped as given.
    """
    batch, rx_ant, _, steps, width = history.shape
    drawn, following = few_ray_windows(batch, rx_ant, tx_shape, steps, target.shape[3], width, bands, history.device)
    variance = noise_variance.view(-1, 1, 1, 1, 1)
    power = (history.abs().square().mean((1, 2, 3, 4), keepdim=True) - variance).clamp_min(0.0).sqrt()
    noisy = power * drawn + variance.sqrt() * torch.randn_like(drawn)
    taken = (torch.rand(batch, device=history.device) < probability).view(-1, 1, 1, 1, 1)
    return torch.where(taken, noisy, history), torch.where(taken, power * following, target)
