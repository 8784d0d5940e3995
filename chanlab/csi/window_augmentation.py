"""Windows that are as likely as those they are made from: shifted in Doppler, delay and angle, or mixed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def augment_windows(
    history: Tensor,
    target: Tensor,
    noise_variance: Tensor | None,
    tx_shape: Sequence[int],
    offset: float,
    probability: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Changes some windows in ways that a predictor of any channel should be ready for; others stay as they are.

    With `probability` each, independently: a common Doppler shift up to 1/4 cycle per snapshot; a common delay up to 8
    samples of the band; a turn of the array's beams; a mixture with another window of the batch, scaled to this one's
    power. From torch's global generator, which an interrupted run doesn't continue.

    Args:
        history: Complex `[batch, rx_ant, tx_ant, time, subcarrier]`, noise included.
        target: Complex `[batch, rx_ant, tx_ant, horizon, bands * subcarrier]`: one band, or both.
        noise_variance: `[batch]`, or None.
        tx_shape: Polarizations, columns and rows of the transmit array.
        offset: Distance of the other band in bandwidths; of the only band, where targets have one.
        probability: Of each change, between 0 and 1.

    Returns:
        History, target and noise variance, shaped as given.
    """
    batch, device = len(history), history.device
    steps, horizon, width = history.shape[3], target.shape[3], history.shape[4]

    def chosen(*size: int) -> Tensor:
        return (torch.rand(batch, *([1] * len(size)), device=device) < probability) * torch.ones(
            batch, *size, device=device
        )

    def drawn(*size: int) -> Tensor:
        return (2 * torch.rand(batch, *size, device=device) - 1) * chosen(*size)

    def turns(x: Tensor) -> Tensor:
        return torch.polar(torch.ones_like(x), 2 * math.pi * x)

    place = torch.arange(width, device=device) / width
    bands = target.shape[4] // width
    places = torch.cat([place, place + offset]) if bands == 2 else place + offset
    doppler = drawn(1) * 0.25
    time = torch.arange(1 - steps, 1 + horizon, device=device)
    over_time = turns(doppler * time)[:, None, None, :, None]
    delay = drawn(1).abs() * 8.0
    columns, rows = tx_shape[1:]
    angle = drawn(2)
    grid = angle[:, :1, None] * torch.arange(columns, device=device)[:, None] + angle[:, 1:, None] * torch.arange(
        rows, device=device
    )
    over_ports = turns(grid.flatten(1).repeat(1, tx_shape[0]))[:, None, :, None, None]
    history = history * over_ports * over_time[:, :, :, :steps] * turns(-delay * place)[:, None, None, None]
    target = target * over_ports * over_time[:, :, :, steps:] * turns(-delay * places)[:, None, None, None]
    if batch == 1:
        return history, target, noise_variance
    share = (0.5 * torch.rand(batch, device=device)) * chosen()
    moved = int(torch.randint(1, batch, ()))
    power = history.abs().square().mean((1, 2, 3, 4))
    scale = torch.where(power > 0, power / power.roll(moved).clamp_min(torch.finfo(power.dtype).tiny), 0.0)
    scale = torch.where(power.roll(moved) > 0, scale, 0.0)
    keep, take = ((x.sqrt()).view(-1, 1, 1, 1, 1) for x in (1 - share, share * scale))
    if noise_variance is not None:
        noise_variance = (1 - share) * noise_variance + share * scale * noise_variance.roll(moved)
    return keep * history + take * history.roll(moved, 0), keep * target + take * target.roll(moved, 0), noise_variance
