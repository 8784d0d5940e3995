"""The angle-delay domain: where a channel of few paths has few strong bins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from chanlab.errors import UsageError


class BinNoise(NamedTuple):
    """Noise variance of bins, and which of them stand out of it."""

    variance: Tensor
    strong: Tensor


def to_angle_delay(channel: Tensor, tx_shape: tuple[int, int, int]) -> Tensor:
    """Unitary DFTs over the transmit array (sum and difference of polarizations, columns, rows) and the subcarriers.

    Args:
        channel: Complex `[batch, rx_ant, tx_ant, time, subcarrier]`.
        tx_shape: `(polarizations, columns, rows)` of the transmit array, ports in the order of
            `chanlab.channels.PlanarArray`.

    Returns:
        Complex `[batch, rx_ant, polarization, column, row, delay, time]`; time last, as predictors read it.

    Raises:
        UsageError: The shape doesn't multiply to the number of transmit antennas.
    """
    num_tx = channel.shape[2]
    if math.prod(tx_shape) != num_tx:
        raise UsageError(
            f"tx_shape {list(tx_shape)} has {math.prod(tx_shape)} ports, the channel {num_tx}: "
            "give [polarizations, columns, rows] of the transmit array"
        )
    x = torch.fft.ifft(channel, dim=-1, norm="ortho").movedim(-2, -1)
    x = x.reshape(*x.shape[:2], *tx_shape, *x.shape[3:])
    bins: Tensor = torch.fft.fftn(x, dim=(2, 3, 4), norm="ortho")
    return bins


def from_angle_delay(bins: Tensor) -> Tensor:
    """Inverse of `to_angle_delay`, complex `[batch, rx_ant, tx_ant, time, subcarrier]`."""
    x = torch.fft.ifftn(bins, dim=(2, 3, 4), norm="ortho").flatten(2, 4)
    channel: Tensor = torch.fft.fft(x.movedim(-1, -2), dim=-1, norm="ortho")
    return channel


def strong_bins(mean_power: Tensor, noise_variance: Tensor | None, steps: int, margin: float, eps: float) -> BinNoise:
    """The noise in each bin, and which bins hold more than it.

    Args:
        mean_power: Mean over time of each bin's power, `[batch, ...]`.
        noise_variance: `[batch]`; None where unknown: then only the rounding of the input counts.
        steps: Snapshots that the means were taken over.
        margin: By how many standard deviations of such a mean of noise a bin has to exceed it.
        eps: Relative rounding error of the input: a bin holds noise at least in that amount.
    """
    noise = eps**2 * mean_power.flatten(1).mean(1)
    if noise_variance is not None:
        noise = torch.maximum(noise, noise_variance.to(noise))
    noise = noise.view(-1, *[1] * (mean_power.ndim - 1)).expand_as(mean_power)
    return BinNoise(noise, mean_power > noise * (1.0 + margin / math.sqrt(steps)))


def tap_noise(history: Tensor) -> Tensor:
    """Variance of the noise on each entry, from the delay taps that hold nothing else.

    It is the median of the taps' power, which says more than the noise alone where paths fill half the taps or more. A
    Hann window over the subcarriers keeps paths from leaking into all taps.

    Args:
        history: Complex `[batch, rx_ant, tx_ant, time, subcarrier]`.

    Returns:
        Real `[batch]`: the mean over snapshots, where they differ.
    """
    window = torch.hann_window(history.shape[-1], device=history.device)
    window = window / window.square().mean().sqrt()
    taps = torch.fft.ifft(history * window, dim=-1, norm="ortho").abs().square()
    noise: Tensor = taps.mean((1, 2, 3)).median(-1).values
    return noise


def neighbours(shape: Sequence[int], device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Which bins lie next to each bin: the other polarization, and the next angles and delays, which count half.

    Args:
        shape: `[rx_ant, polarization, column, row, delay]`.
        device: Where the result lies.

    Returns:
        Indices into the flattened bins, int64 `[bin, neighbour]`, and the neighbours' weights `[neighbour]`. Angles and
        delays are circular, as the DFT's are.
    """
    index = torch.arange(math.prod(shape), device=device).reshape(*shape)
    found, weights = [], []
    if shape[1] == 2:
        found.append(index.flip(1))
        weights.append(1.0)
    for dim in (2, 3, 4):
        if shape[dim] > 1:
            found += [index.roll(1, dim), index.roll(-1, dim)]
            weights += [0.5, 0.5]
    if not found:
        found, weights = [index], [0.0]
    return torch.stack(found, -1).flatten(0, -2), torch.tensor(weights, device=device)
