"""Our codec: one network for all SNRs, bandwidth ratios and image sizes."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chanlab.errors import UsageError
from chanlab.jscc import gated
from chanlab.jscc.codec import Codec, Ratio
from chanlab.jscc.contract import (
    Received,
    Transmission,
    per_image,
    power_scale,
    scaled,
    source_values,
)
from chanlab.jscc.depthwise import depthwise
from chanlab.jscc.latents import LatentTransform, linear_start

SCALE_BITS, LOWEST_SCALE_DB, HIGHEST_SCALE_DB = 10, -20.0, 60.0
"""Side information that tells a scale, in equal steps of its range [dB]."""
LOWEST_SNR_DB, HIGHEST_SNR_DB = -10.0, 30.0
"""Range of SNR that conditions are clipped to [dB]; recipes train on 0 to 20 dB."""


class AdaptiveJSCC(Codec):
    """A codec that adapts to SNR and bandwidth ratio, trained once.

    Both sides are residual networks of gated convolutions (`GatedBlock`), first on patches of 4 x 4 pixels, then on a
    grid of 8 x 8. Convolutions, not attention windows: they take any image size without a mask, run as a few matrix
    products on channels-last memory, and a block's cost per parameter is that of a dense layer.

    - A linear path, blocks of 8 x 8 pixels to latents and back, stands beside the networks, which weigh its latents and
      add to them. It starts as analogue transmission of DCT coefficients (`linear_start`), they start at zero: training
      begins with a codec that works, and learns where to spend power.
    - Latents of neighbouring blocks are alike: a further DCT over 4 x 4 of them (`LatentTransform`) sends each of its
      coefficients at a gain of its own. Convolutions, which treat all positions alike, couldn't.
    - SNR and bandwidth ratio scale and shift the normalised features of every block (FiLM, Perez et al., 2018). The
      decoder is told the mean SNR after equalisation, and by the same way the power's scale.
    - 34 bits of side information, counted, tell an image's mean colour, which isn't sent otherwise, and the scale that
      brings the rest to unit power: no power is spent on what a few bits can say, and a pale image and a vivid one are
      not the same symbols.
    - Latent channels are ordered: the network is trained on prefixes of several lengths, so that a lower bandwidth
      ratio is a prefix, and the first symbols carry what matters most.
    - The decoder gets each symbol's linear minimum mean square error estimate and the share of its energy that isn't
      noise, 1 / (1 + N0): faded symbols count less, unsent ones nothing.

    Args:
        max_ratio: Highest bandwidth ratio k/n.
        widths: Channels at 4 x 4 and 8 x 8 pixels.
        depths: Blocks at each, on each side.
        kernel: Of depthwise convolutions, odd.
        conditioning: Width of the features of SNR and ratio.
    """

    side_bits = 3 * 8 + SCALE_BITS

    def __init__(
        self,
        max_ratio: float | str | Fraction = 1 / 6,
        widths: Sequence[int] = (64, 96),
        depths: Sequence[int] = (3, 4),
        kernel: int = 5,
        conditioning: int = 24,
    ) -> None:
        super().__init__(max_ratio, stride=8)
        if len(widths) != 2 or len(depths) != 2 or min(depths) < 1 or kernel % 2 == 0:
            raise UsageError(
                f"widths and depths are two numbers each, and the kernel is odd: not {widths}, {depths}, {kernel}."
            )
        self.spread = LatentTransform(2 * self.pairs)
        self.gather = LatentTransform(2 * self.pairs, inverse=True)
        self.encoder = _Encoder(2 * self.pairs, widths, depths, kernel, conditioning)
        self.decoder = _Decoder(3 * self.pairs, widths, depths, kernel, conditioning)

    def encode(self, images: Tensor, snr_db: Tensor | float, ratio: Ratio | None = None) -> Transmission:
        """See `Codec.encode`."""
        snr_db = per_image(snr_db, images)
        width, uses, bits = self.budget(images, snr_db, ratio)
        padded = self.pad(images)
        mean = (255 * images.float().mean((2, 3))).round().clamp(0, 255) / 255
        conditions = self.conditions(snr_db, uses, images.shape[1:])
        latent = self.analysis(padded - mean[..., None, None] + 0.5, conditions)
        symbols, used = self.symbols(latent, width, uses)
        scale = power_scale(symbols, used, self.convention)
        side = torch.cat([self.told(scale).expand(len(images))[:, None], mean], 1)
        return Transmission(scaled(symbols, used, scale), used, bits, side)

    def told(self, scale: Tensor) -> Tensor:
        """A scale as side information tells it, `[batch]`; exact in training."""
        decibel = (20 * scale.log10()).clamp(LOWEST_SCALE_DB, HIGHEST_SCALE_DB)
        if not self.training:
            step = (HIGHEST_SCALE_DB - LOWEST_SCALE_DB) / (2**SCALE_BITS - 1)
            decibel = ((decibel - LOWEST_SCALE_DB) / step).round() * step + LOWEST_SCALE_DB
        return 10 ** (decibel / 20)

    def decode(self, received: Received, image_shape: tuple[int, int, int]) -> Tensor:
        """See `Codec.decode`."""
        used = received.used
        share = torch.where(used, received.power / (received.power + received.noise_variance), 0.0)
        side = received.side
        if side is None:  # as if it were grey, and its scale 1
            side = torch.tensor([received.power**0.5, 0.5, 0.5, 0.5], device=share.device).expand(len(share), -1)
        scale = share / (received.gain.clamp(min=1e-6) * side[:, :1])
        values = (scale * received.symbols.real, scale * received.symbols.imag, share)
        features = torch.cat([self.latent(value, image_shape) for value in values], 1)
        uses = used.sum(1)
        snr_db = torch.where(used, received.symbol_snr_db, 0.0).sum(1) / uses
        conditions = self.conditions(snr_db, uses, image_shape)
        conditions = torch.cat([conditions, 2 * (side[:, :1] / received.power**0.5).log10() - 1], 1)
        images = self.synthesis(features, conditions) + (side[:, 1:, None, None] - 0.5)
        return self.crop(images, image_shape)

    def analysis(self, images: Tensor, conditions: Tensor) -> Tensor:
        """See `Codec.analysis`; for the conditions see `conditions`."""
        latent: Tensor = self.spread(self.encoder(images, conditions))
        return latent

    def synthesis(self, features: Tensor, conditions: Tensor) -> Tensor:
        """See `Codec.synthesis`; the features are `[batch, 3 P, h, w]`: estimates, and their share of the energy.

        The conditions are those of the encoder and the scale [10 dB], `[batch, 3]`. Without the image's mean colour.
        """
        estimates = self.gather(features[:, : 2 * self.pairs])
        images: Tensor = self.decoder(torch.cat([estimates, features[:, 2 * self.pairs :]], 1), conditions)
        return images

    def conditions(self, snr_db: Tensor, uses: Tensor, image_shape: Sequence[int]) -> Tensor:
        """SNR and bandwidth ratio as the networks see them, about -1 to 1, `[batch, 2]`."""
        ratio = uses / (source_values((image_shape[0], image_shape[1], image_shape[2])) * float(self.max_ratio))
        snr = snr_db.float().clamp(LOWEST_SNR_DB, HIGHEST_SNR_DB) / 10 - 1
        return torch.stack([snr, 1 + ratio.float().clamp(min=1e-3).log2()], 1)


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


class _Encoder(nn.Module):
    """Images `[batch, 3, H, W]` to latents `[batch, channels, H/8, W/8]`."""

    def __init__(
        self, channels: int, widths: Sequence[int], depths: Sequence[int], kernel: int, conditioning: int
    ) -> None:
        super().__init__()
        fine, coarse = widths
        self.depth = depths[0]
        self.stem = nn.Linear(48, fine)
        self.trunk = _Trunk([fine] * depths[0] + [coarse] * depths[1], kernel, 2, conditioning)
        self.down = nn.Linear(4 * fine, coarse)
        self.head = _zero(nn.Linear(coarse, 2 * channels))
        self.linear = nn.Linear(192, channels)
        self.gain = _zero(nn.Linear(conditioning, channels))
        with torch.no_grad():
            self.linear.weight.copy_(linear_start(channels)[0])
            self.linear.bias.zero_()

    def forward(self, images: Tensor, conditions: Tensor) -> Tensor:
        embedded = self.trunk.embed(conditions)
        modulations = self.trunk.modulations(embedded)
        pixels = (2 * images - 1).permute(0, 2, 3, 1)
        linear = self.linear(_to_patches(pixels, 8)) * self.gain(embedded).exp()[:, None, None]
        x = self.stem(_to_patches(pixels, 4))
        for i, block in enumerate(self.trunk.blocks):
            if i == self.depth:
                x = self.down(_to_patches(x, 2))
            x = block(x, modulations[i])
        weight, added = self.head(_normalise(x)).chunk(2, -1)
        latent: Tensor = linear * (1 + weight) + added
        return latent.permute(0, 3, 1, 2)


class _Decoder(nn.Module):
    """Received latents `[batch, channels, H/8, W/8]` to images `[batch, 3, H, W]`."""

    def __init__(
        self, channels: int, widths: Sequence[int], depths: Sequence[int], kernel: int, conditioning: int
    ) -> None:
        super().__init__()
        fine, coarse = widths
        self.depth = depths[1]
        self.stem = nn.Linear(channels, coarse)
        self.trunk = _Trunk([coarse] * depths[1] + [fine] * depths[0], kernel, 3, conditioning)
        self.up = nn.Linear(coarse, 4 * fine)
        self.head = _zero(nn.Conv2d(fine, 48, 3, padding=1))
        self.latents = channels // 3 * 2
        self.weight = _zero(nn.Linear(coarse, self.latents))
        self.linear = nn.Linear(self.latents, 192)
        self.refine = nn.Linear(48, fine)
        with torch.no_grad():
            self.linear.weight.copy_(linear_start(self.latents)[1])
            self.linear.bias.zero_()

    def forward(self, features: Tensor, conditions: Tensor) -> Tensor:
        modulations = self.trunk.modulations(self.trunk.embed(conditions))
        received = features.permute(0, 2, 3, 1)
        x = self.stem(received)
        for i, block in enumerate(self.trunk.blocks):
            if i == self.depth:
                linear = self.linear(received[..., : self.latents] * (1 + self.weight(_normalise(x))))
                image = _from_patches(linear, 8)
                x = _from_patches(self.up(x), 2) + self.refine(_to_patches(image, 4))
            x = block(x, modulations[i])
        x = self.head(_normalise(x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return (0.5 + 0.5 * (image.float() + _from_patches(x, 4))).permute(0, 3, 1, 2)


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
