"""Linear transforms between images and latents: DCTs whose coefficients have gains."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class LatentTransform(nn.Module):
    """Orthonormal DCT over blocks of latent positions, each coefficient of each channel at a gain that is learnt.

    At the start channels of block means get gains of σ^(-1/2), with σ falling with frequency f as 1 / (0.1 + f), the
    others 1. Positions beyond the last whole block stay as they are.

    Args:
        channels: Real latent channels, in the order of `linear_start`.
        inverse: From coefficients back; it starts with the inverse gains.
        size: Positions of a block, in either dimension.
    """

    basis: Tensor

    def __init__(self, channels: int, inverse: bool = False, size: int = 4) -> None:
        super().__init__()
        self.inverse, self.size = inverse, size
        self.register_buffer("basis", torch.kron(cosines(size), cosines(size)), persistent=False)
        deviation = 1 / (0.1 + _frequencies(size) / size)
        start = (deviation / deviation.square().mean().sqrt()).log() / -2
        order = _order(channels)
        is_mean = torch.zeros(channels)
        is_mean[_rows(channels, len(order))] = (order % 64 == 0).float()
        self.gain = nn.Parameter(is_mean[:, None, None] * (-start if inverse else start))

    def forward(self, latent: Tensor) -> Tensor:
        """Coefficients, or latents of them, float32.

        Args:
            latent: `[batch, channels, h, w]`.
        """
        size, (batch, channels, height, width) = self.size, latent.shape
        rows, columns = height // size, width // size
        with torch.autocast(latent.device.type, enabled=False):
            latent = latent.float()
            if not rows or not columns:
                return latent
            whole = latent[:, :, : rows * size, : columns * size]
            blocks = whole.reshape(batch, channels, rows, size, columns, size).transpose(3, 4).flatten(4)
            gain = self.gain.exp().flatten(1)[:, None, None]
            blocks = (blocks * gain) @ self.basis if self.inverse else blocks @ self.basis.T * gain
            blocks = blocks.reshape(batch, channels, rows, columns, size, size).transpose(3, 4)
            whole = blocks.reshape(whole.shape)
            if whole.shape == latent.shape:
                return whole
            whole = torch.cat([whole, latent[:, :, : rows * size, columns * size :]], 3)
            return torch.cat([whole, latent[:, :, rows * size :]], 2)


def linear_start(channels: int) -> tuple[Tensor, Tensor]:
    """Analogue transmission of blocks of 8 x 8 pixels: where the linear path of `AdaptiveJSCC` starts.

    DCT coefficients of decorrelated colours, those of most variance in natural images first, two to a complex channel,
    each at a gain of σ^(-1/2), which is best where power is shared and receivers are linear (Lee and Petersen, 1976;
    SoftCast: Jakubczak and Katabi, 2011). The standard deviation falls with spatial frequency f as 1 / (0.3 + f), and
    is a quarter for colour differences. An image of mean square 1/4 in [-1, 1] has unit power.

    Args:
        channels: Real latent channels, in-phase ones first.

    Returns:
        Weights from pixels `[row, column, colour]` in [-1, 1] to latents, `[channels, 192]`, and back,
        `[192, channels]`; channels beyond the 192 coefficients are zero.
    """
    waves = cosines(8)
    colours = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, -1.0], [1.0, -2.0, 1.0]])
    colours = colours / colours.norm(dim=1, keepdim=True)
    basis = torch.einsum("kc,uy,vx->kuvyxc", colours, waves, waves).reshape(192, 192)
    deviation = _deviation()
    order = _order(channels)
    gain = deviation[order].rsqrt()
    gain = gain / (2 * (gain * deviation[order]).square().mean()).sqrt()
    encoder, decoder = torch.zeros(channels, 192), torch.zeros(192, channels)
    rows = _rows(channels, len(order))
    encoder[rows] = basis[order] * gain[:, None]
    decoder[:, rows] = basis[order].T / gain
    return encoder, decoder


def latent_deviation_db(pairs: int) -> Tensor:
    """Standard deviation of the complex channels of `linear_start` before their gains, over its mean [dB], `[pairs]`.

    Channels beyond the 192 coefficients are taken for as weak as the last.
    """
    deviation = _deviation().sort(descending=True).values
    deviation = torch.cat([deviation, deviation[-1:].expand(max(0, 2 * pairs - 192))])[: 2 * pairs]
    decibel = 10 * deviation.view(-1, 2).square().mean(1).log10()
    return decibel - decibel.mean()


def cosines(size: int) -> Tensor:
    """The orthonormal DCT of type II, `[frequency, position]`."""
    index = torch.arange(size)
    waves = (math.pi / size * (index + 0.5) * index[:, None]).cos()
    orthonormal: Tensor = waves / waves.norm(dim=1, keepdim=True)
    return orthonormal


def _frequencies(size: int) -> Tensor:
    """Distance of each coefficient of a two-dimensional DCT from the mean, `[size, size]`."""
    index = torch.arange(size).float()
    return torch.hypot(*torch.meshgrid(index, index, indexing="ij"))


def _deviation() -> Tensor:
    """Standard deviations of the coefficients [colour, row, column], `[192]`."""
    deviation = (torch.tensor([1.0, 0.25, 0.25])[:, None, None] / (0.3 + _frequencies(8))).flatten()
    scaled: Tensor = deviation * (192 / 4 / deviation.square().sum()).sqrt()
    return scaled


def _order(channels: int) -> Tensor:
    """Which coefficients latent channels stand for, those of most variance first, in-phase ones before quadratures."""
    order = _deviation().argsort(descending=True, stable=True)[:channels]
    return torch.cat([order[0::2], order[1::2]])


def _rows(channels: int, coefficients: int) -> Tensor:
    """Which channels they are."""
    half, used = channels // 2, coefficients // 2
    return torch.cat([torch.arange(used), half + torch.arange(coefficients - used)])
