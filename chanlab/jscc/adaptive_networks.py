"""Networks of `AdaptiveJSCC`: gated convolutions at two resolutions, beside a linear path."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chanlab.jscc import gated
from chanlab.jscc.allocation import LEVELS, STEP_DB
from chanlab.jscc.depthwise import depthwise
from chanlab.jscc.latents import linear_start

MEANS = 2
"""Complex channels that hold means of blocks, from the first on; see `linear_start`."""


class GatedBlock(nn.Module):
    """Two residual branches on normalised, modulated features: a depthwise convolution and a channel mixer, both gated.

    Normalise over channels, scale and shift by the conditions, widen to 2 C (and convolve each channel), multiply one
    half by the other, project to C: the simple gate of NAFNet (Chen et al., 2022), with FiLM in place of its channel
    attention, whose mean over the image depends on the image's size.

    Args:
        width: C.
        kernel: Of the depthwise convolution, odd.
    """

    compilable = True

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.spatial_in = nn.Linear(width, 2 * width)
        self.depthwise = nn.Conv2d(2 * width, 2 * width, kernel, padding=kernel // 2, groups=2 * width)
        self.spatial_out = nn.Linear(width, width)
        self.mixer_in = nn.Linear(width, 2 * width)
        self.mixer_out = nn.Linear(width, width)

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        """Features of the same shape.

        Args:
            x: `[batch, height, width, C]`.
            modulation: `[batch, 1, 1, 4 C]`: scale and shift of either branch.
        """
        if gated.fits(x):
            layers = self.spatial_in, self.depthwise, self.spatial_out, self.mixer_in, self.mixer_out
            return gated.gated_block(x, modulation, layers)
        spatial_scale, spatial_shift, mixer_scale, mixer_shift = modulation.chunk(4, -1)
        y = self.spatial_in(_normalise(x) * (1 + spatial_scale) + spatial_shift)
        left, right = depthwise(y, self.depthwise.weight, cast(Tensor, self.depthwise.bias)).chunk(2, -1)
        x = x + self.spatial_out(left * right)
        left, right = self.mixer_in(_normalise(x) * (1 + mixer_scale) + mixer_shift).chunk(2, -1)
        mixed: Tensor = self.mixer_out(left * right)
        return x + mixed


class _Trunk(nn.Module):
    """Blocks at two resolutions and the conditions that modulate them."""

    def __init__(self, widths: Sequence[int], kernel: int, conditions: int, conditioning: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GatedBlock(width, kernel) for width in widths)
        self.widths = [4 * width for width in widths]
        self.embed = nn.Sequential(
            nn.Linear(conditions, 2 * conditioning), nn.SiLU(), nn.Linear(2 * conditioning, conditioning), nn.SiLU()
        )
        self.modulate = _zero(nn.Linear(conditioning, sum(self.widths)))

    def modulations(self, embedded: Tensor) -> Sequence[Tensor]:
        """One for each block."""
        parts: Sequence[Tensor] = self.modulate(embedded)[:, None, None].split(self.widths, -1)
        return parts


class Encoder(nn.Module):
    """Differences and bases `[batch, 6, H, W]` to latents of differences `[batch, channels, H/8, W/8]`."""

    def __init__(
        self, channels: int, widths: Sequence[int], depths: Sequence[int], kernel: int, conditioning: int
    ) -> None:
        super().__init__()
        fine, coarse = widths
        self.depth = depths[0]
        self.stem = nn.Linear(97, fine)
        self.trunk = _Trunk([fine] * depths[0] + [coarse] * depths[1], kernel, 4, conditioning)
        self.down = nn.Linear(4 * fine, coarse)
        self.head = _zero(nn.Linear(coarse, 2 * channels))
        self.linear = nn.Linear(192, channels)
        self.gain = _zero(nn.Linear(conditioning, channels))
        self.compand = nn.Parameter(-_compand(channels))
        with torch.no_grad():
            self.linear.weight.copy_(linear_start(channels)[0])
            self.linear.bias.zero_()

    def forward(self, images: Tensor, conditions: Tensor, activity: Tensor) -> Tensor:
        """Latents of the batch; see the class for the images, `AdaptiveJSCC.conditions`, `ActivityMap.activity`."""
        embedded = self.trunk.embed(conditions)
        modulations = self.trunk.modulations(embedded)
        pixels = images.permute(0, 2, 3, 1)
        linear = self.linear(_to_patches(pixels[..., :3], 8)) * self.gain(embedded).exp()[:, None, None]
        x = self.stem(torch.cat([_to_patches(pixels, 4), activity[..., None].to(pixels)], -1))
        for i, block in enumerate(self.trunk.blocks):
            if i == self.depth:
                x = self.down(_to_patches(x, 2))
            x = block(x, modulations[i])
        weight, added = self.head(_normalise(x)).chunk(2, -1)
        latent: Tensor = (linear * (1 + weight) + added) * _companded(self.compand, activity[:, ::2, ::2])
        return latent.permute(0, 3, 1, 2)


class Decoder(nn.Module):
    """Received latents `[batch, channels, H/8, W/8]` and bases to differences from these, `[batch, 3, H, W]`."""

    def __init__(
        self, channels: int, widths: Sequence[int], depths: Sequence[int], kernel: int, conditioning: int
    ) -> None:
        super().__init__()
        fine, coarse = widths
        self.depth = depths[1]
        self.stem = nn.Linear(channels + 192 + 1, coarse)
        self.trunk = _Trunk([coarse] * depths[1] + [fine] * depths[0], kernel, 5, conditioning)
        self.up = nn.Linear(coarse, 4 * fine)
        self.head = _zero(nn.Conv2d(fine, 48, 3, padding=1))
        self.latents = channels // 3 * 2
        self.weight = _zero(nn.Linear(coarse, self.latents))
        self.linear = nn.Linear(self.latents, 192)
        self.refine = nn.Linear(96, fine)
        self.expand = nn.Parameter(_compand(self.latents))
        with torch.no_grad():
            self.linear.weight.copy_(linear_start(self.latents)[1])
            self.linear.bias.zero_()

    def forward(self, features: Tensor, conditions: Tensor, base: Tensor, activity: Tensor) -> Tensor:
        """Differences, at half of unit contrast; see the class, `AdaptiveJSCC.synthesis`, `ActivityMap.activity`."""
        modulations = self.trunk.modulations(self.trunk.embed(conditions))
        received = features.permute(0, 2, 3, 1)
        known = base.permute(0, 2, 3, 1)
        inputs = [received, _to_patches(known, 8).to(received), activity[..., None].to(received)]
        x = self.stem(torch.cat(inputs, -1))
        for i, block in enumerate(self.trunk.blocks):
            if i == self.depth:
                estimates = received[..., : self.latents] * _companded(self.expand, activity)
                linear = self.linear(estimates * (1 + self.weight(_normalise(x))))
                image = _from_patches(linear, 8)
                x = _from_patches(self.up(x), 2) + self.refine(_to_patches(torch.cat([image, known.to(image)], -1), 4))
            x = block(x, modulations[i])
        x = self.head(_normalise(x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return (image.float() + _from_patches(x, 4)).permute(0, 3, 1, 2)


def _compand(channels: int) -> Tensor:
    """Exponents with which latents follow activity: σ^(1/2), best for linear receivers; means don't follow it."""
    half = torch.full((channels // 2,), 0.5)
    half[:MEANS] = 0.0
    return half.repeat(2)


def _companded(exponents: Tensor, activity: Tensor) -> Tensor:
    """Gains of latents `[batch, h, w, channels]` where the activity is `[batch, h, w]`, see `ActivityMap.activity`."""
    decibel = (LEVELS - 1) * STEP_DB / 2
    return (activity[..., None] * (math.log(10) / 20 * decibel * exponents)).exp()


def _normalise(x: Tensor) -> Tensor:
    """Zero mean and unit variance over channels, at each position."""
    return F.layer_norm(x, x.shape[-1:])


def _to_patches(x: Tensor, size: int) -> Tensor:
    """Patches of size x size positions become channels: `[batch, h, w, c]` to `[batch, h/size, w/size, size² c]`."""
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // size, size, width // size, size, channels).transpose(2, 3)
    return x.reshape(batch, height // size, width // size, size * size * channels)


def _from_patches(x: Tensor, size: int) -> Tensor:
    """The inverse of `_to_patches`."""
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height, width, size, size, channels // size**2).transpose(2, 3)
    return x.reshape(batch, height * size, width * size, channels // size**2)


def _zero(layer: nn.Linear | nn.Conv2d) -> nn.Linear | nn.Conv2d:
    """A layer that starts at zero."""
    nn.init.zeros_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
