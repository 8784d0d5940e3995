"""Our codec: one network for all SNRs, bandwidth ratios and image sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from chanlab.errors import UsageError
from chanlab.jscc.adaptive_networks import MEANS, Decoder, Encoder
from chanlab.jscc.allocation import (
    LEVELS,
    STEP_DB,
    ActivityMap,
    at_places,
    level_order,
    symbol_order,
    symbol_places,
)
from chanlab.jscc.bases import Base, mean_colour
from chanlab.jscc.codec import Codec, Ratio, check_images
from chanlab.jscc.contract import (
    LEAST_BOOST,
    Received,
    Transmission,
    pair_iq,
    per_image,
    power_left,
    power_scale,
    scaled,
    side_information_uses,
    source_values,
)
from chanlab.jscc.latents import LatentTransform, latent_deviation_db
from chanlab.jscc.symbol_search import search_symbols

if TYPE_CHECKING:
    from chanlab.jscc.base_layer import BaseLayer

SCALE_BITS, LOWEST_SCALE_DB, HIGHEST_SCALE_DB = 9, -15.0, 25.0
"""Side information that tells the scale of symbols, in equal steps of its range [dB]."""
CONTRAST_BITS, LOWEST_CONTRAST_DB = 7, -60.0
"""The same of an image's contrast, whose range ends at 0 dB."""
MOST_OF_A_BASE = 0.95
"""Share of the channel uses that a base layer may take in training."""
USUAL_BITS = 4
"""What a block of the map is reckoned with there [bit]: most take less."""
MOST_SYMBOLS = 2
"""Most symbols of a latent position, over those that there are on average at the highest bandwidth ratio."""
LOWEST_SNR_DB, HIGHEST_SNR_DB = -10.0, 30.0
"""Range of SNR that conditions are clipped to [dB]; the recipe trains on -1 to 22 dB."""


class AdaptiveJSCC(Codec):
    """A codec that adapts to SNR and bandwidth ratio, trained once.

    Both sides are residual networks of gated convolutions (`GatedBlock`), first on patches of 4 x 4 pixels, then on a
    grid of 8 x 8. Convolutions, not attention windows: they take any image size without a mask, run as a few matrix
    products on channels-last memory, and a block's cost per parameter is that of a dense layer.

    - A linear path, blocks of 8 x 8 pixels to latents and back, stands beside the networks, which weigh its latents and
      add to them. It starts as analogue transmission of DCT coefficients (`linear_start`), they start at zero: training
      begins with a codec that works, and learns where to spend power.
    - Means of neighbouring blocks are alike: a further DCT over 4 x 4 of them (`LatentTransform`) sends each of its
      coefficients at a gain of its own. Convolutions, which treat all positions alike, couldn't.
    - A map of local activity, coded and counted as side information (`ActivityMap`), decides where symbols go: busy
      blocks get up to twice as many as there are on average at `max_ratio`, even ones few (`level_order`).
    - SNR and bandwidth ratio scale and shift the normalised features of every block (FiLM, Perez et al., 2018). The
      decoder is told the mean SNR after equalisation, and by the same way the power's scale.
    - What is sent is the difference from a base that the receiver has, brought to unit contrast. Without more the base
      is the image's mean colour. It can be a compressed image (`chanlab.jscc.bases`), sent by a digital link in a part
      of the channel uses: a hybrid of digital and analogue transmission, whose symbols refine what the file left out,
      and still gain where the channel is better than the link asks for. Both sides see the base, and know how the
      image's power is shared between its symbols and these (`Base.power`).
    - 41 bits of side information beside the map tell the mean colour, or how long a compressed base is, the contrast,
      and the scale that brings symbols to unit power: no power is spent on what a few bits can say.
    - A base may take all channel uses that these bits and a told rate leave. Its length tells the receiver that neither
      map nor symbol follows, for which there is no room: it is shown as it is.
    - Latents are ordered: the network is trained on prefixes of several lengths, so that a lower bandwidth ratio is a
      prefix, and the first symbols carry what matters most.
    - The decoder gets each symbol's linear minimum mean square error estimate and the share of its energy that isn't
      noise, 1 / (1 + N0): faded symbols count less, unsent ones nothing.

    Args:
        max_ratio: Highest bandwidth ratio k/n.
        widths: Channels at 4 x 4 and 8 x 8 pixels.
        depths: Blocks at each, on each side.
        kernel: Of depthwise convolutions, odd.
        conditioning: Width of the features of SNR and ratio.
        block: Height and width of the blocks of the map of activity, a multiple of 8 [pixel].
        base: Image codec of base layers in evaluation (`avif`), over AWGN; None: mean colours.
        shares: Shares of the channel uses that are tried for a base; see `BaseLayer`.
        search: Steps of gradient descent on the symbols of each image in evaluation, see `search_symbols`; a base is
            chosen with a sixth of them.

    Attributes:
        base_layer: Finds base layers; None without.
    """

    groups: Tensor
    always: Tensor
    side_bits = 1 + 3 * 8 + SCALE_BITS + CONTRAST_BITS
    tells_bases = True

    def __init__(
        self,
        max_ratio: float | str | Fraction = 1 / 6,
        widths: Sequence[int] = (64, 96),
        depths: Sequence[int] = (3, 4),
        kernel: int = 5,
        conditioning: int = 24,
        block: int = 16,
        base: str | None = None,
        shares: Sequence[float] = (0.3, 0.5, 0.7, 0.85, 0.95, 1.0),
        search: int = 0,
    ) -> None:
        super().__init__(max_ratio, stride=8)
        if len(widths) != 2 or len(depths) != 2 or min(depths) < 1 or kernel % 2 == 0:
            raise UsageError(
                f"widths and depths are two numbers each, and the kernel is odd: not {widths}, {depths}, {kernel}."
            )
        self.base_layer: BaseLayer | None = None
        if base is not None:
            from chanlab.jscc.base_layer import BaseLayer

            self.base_layer = BaseLayer(base, shares)
        if search < 0:
            raise UsageError(f"search is a number of steps, not {search}.")
        self.search = search
        if block < 8 or block % 8:
            raise UsageError(f"the map of activity has blocks of a multiple of 8 pixels, not {block}.")
        self.pairs *= MOST_SYMBOLS
        self.map = ActivityMap(block)
        self.spread = LatentTransform(2 * MEANS)
        self.gather = LatentTransform(2 * MEANS, inverse=True)
        # What a compressed base leaves is about as strong in all coefficients: no gains to begin with.
        self.base_gain = nn.Parameter(-self.spread.gain.detach())
        self.base_loss = nn.Parameter(-self.gather.gain.detach())
        always = torch.arange(self.pairs) < MEANS
        self.register_buffer("always", always, persistent=False)
        groups = level_order(latent_deviation_db(self.pairs) / STEP_DB, always)
        self.register_buffer("groups", groups, persistent=False)
        self.encoder = Encoder(2 * self.pairs, widths, depths, kernel, conditioning)
        self.decoder = Decoder(3 * self.pairs, widths, depths, kernel, conditioning)

    def extra_repr(self) -> str:
        """What isn't in the weights."""
        layer, text = self.base_layer, f"max_ratio={self.max_ratio}, block={self.map.block}"
        if self.search:
            text += f", search={self.search}"
        if layer is None:
            return text
        return f"{text}, base={layer.codec.codec.name}, shares={layer.shares}, error={layer.error}, powers"

    def encode(
        self, images: Tensor, snr_db: Tensor | float, ratio: Ratio | None = None, base: Base | None = None
    ) -> Transmission:
        """See `Codec.encode`.

        Args:
            images: See `Codec.encode`.
            snr_db: See `Codec.encode`.
            ratio: See `Codec.encode`.
            base: What the receiver has of the images by other means, whose channel uses come out of the images' own;
                None: in evaluation the best of `base_layer`, if there is one, else their mean colours. In training
                bases that don't fit give way to mean colours.
        """
        check_images(images)
        snr_db = per_image(snr_db, images)
        if base is None and self.base_layer is not None and not self.training:
            base = self.base_layer.best(self, images, snr_db, ratio)
        image, taken = self._base(images, base, snr_db, ratio)
        difference = images.float() - image
        contrast = told(difference.square().mean((1, 2, 3)).sqrt(), CONTRAST_BITS, LOWEST_CONTRAST_DB, 0.0)
        difference = self.pad(difference / contrast[:, None, None, None])
        levels = self.map.levels(difference)
        width, uses, bits = self.budget(images, snr_db, ratio, self.map.bits(levels), taken)
        refines = (taken > 0).float()
        loss, share = (None, None) if base is None or self.training else (base.loss, base.power)
        if share is not None and self.convention.power_over != "image":
            raise UsageError(f"under {self.convention.name} bases have no power of their own: images share theirs.")
        boosted_db = snr_db  # at symbols that have more power or less than the base
        if share is not None:
            boosted_db = snr_db + 10 * power_left(uses, taken, share).clamp(min=LEAST_BOOST).log10()
        conditions = self.conditions(boosted_db, uses, images.shape[1:], contrast, refines)
        inputs = torch.cat([difference / 2, self.pad(image) * 2 - 1], 1)
        order = symbol_order(self.places(levels, images.shape[1:]))[:, :width]
        symbols = pair_iq(self.analysis(inputs, conditions, levels), order)
        used = torch.arange(width, device=uses.device) < uses[:, None]
        power = power_scale(symbols, used, self.convention)
        scale = power.expand(len(images))
        if not self.training:
            scale = told(scale, SCALE_BITS, LOWEST_SCALE_DB, HIGHEST_SCALE_DB)
        side = torch.cat([torch.stack([scale, contrast, refines], 1), levels.flatten(1), image.flatten(1)], 1)
        sent = Transmission(scaled(symbols, used, power), used, bits, side, taken, loss, share)
        return search_symbols(self, images, sent, snr_db, self.search) if self.search and not self.training else sent

    def _base(self, images: Tensor, base: Base | None, snr_db: Tensor, ratio: Ratio | None) -> tuple[Tensor, Tensor]:
        """Bases as the receiver has them, and the channel uses that they take, int64 `[batch]`."""
        mean = mean_colour(images)[..., None, None].expand(-1, -1, *images.shape[2:])
        none = torch.zeros(len(images), dtype=torch.int64, device=images.device)
        if base is None:
            return mean, none
        if base.image.shape != images.shape:
            raise UsageError(f"a base has the shape of its images, {list(images.shape)}, not {list(base.image.shape)}.")
        taken = base.taken
        if self.training:
            k_over_n = self.max_ratio if ratio is None else ratio
            limit = (k_over_n if isinstance(k_over_n, Tensor) else float(k_over_n)) * images[0].numel()
            blocks = math.prod(self.map.shape(images.shape[2], images.shape[3]))
            bits = taken.new_full(taken.shape, self.side_bits + USUAL_BITS * blocks)
            side = side_information_uses(bits, snr_db + self.convention.offset_db)
            taken = torch.where(taken < MOST_OF_A_BASE * limit - side, taken, 0)
        return torch.where((taken > 0)[:, None, None, None], base.image.float(), mean), taken

    def decode(self, received: Received, image_shape: tuple[int, int, int]) -> Tensor:
        """See `Codec.decode`."""
        used = received.used
        share = torch.where(used, received.power / (received.power + received.noise_variance), 0.0)
        side = received.side
        blocks = self.map.shape(image_shape[1], image_shape[2])
        if side is None:  # as if it were grey, its scale 1, its contrast 1/4, and all of it as busy
            numbers = torch.tensor([received.power**0.5, 0.25, 0.0], device=share.device).expand(len(share), -1)
            levels = torch.full((len(share), *blocks), LEVELS - 2, device=share.device)
            base = torch.full((len(share), *image_shape), 0.5, device=share.device)
        else:
            numbers, levels, base = torch.split(side, [3, math.prod(blocks), math.prod(image_shape)], 1)
            levels, base = levels.long().view(-1, *blocks), base.view(-1, *image_shape)
        power, contrast, refines = numbers.unbind(1)
        places = self.places(levels, image_shape)
        scale = share / (received.gain.clamp(min=1e-6) * power[:, None])
        values = (scale * received.symbols.real, scale * received.symbols.imag, share)
        grid = (self.pairs, *self.grid(image_shape))
        features = torch.cat([at_places(value, places).view(-1, *grid) for value in values], 1)
        uses = used.sum(1).clamp(min=1)
        snr_db = torch.where(used, received.symbol_snr_db, 0.0).sum(1) / uses
        conditions = self.conditions(snr_db, uses, image_shape, contrast, refines)
        conditions = torch.cat([conditions, 2 * (power[:, None] / received.power**0.5).log10() - 1], 1)
        padded = self.pad(base)
        difference = self.synthesis(features, conditions, padded * 2 - 1, levels)
        contrast = torch.where(used.any(1), contrast, 0.0)  # without a symbol the base is all that there is
        return received.shown(self.crop(padded + 2 * contrast[:, None, None, None] * difference, image_shape))

    def places(self, levels: Tensor, image_shape: Sequence[int]) -> Tensor:
        """Where latents stand among an image's symbols, as both sides know it from the map; see `symbol_places`."""
        height, width = self.grid((image_shape[0], image_shape[1], image_shape[2]))
        cells = self.map.block // self.stride
        positions = levels.repeat_interleave(cells, 1).repeat_interleave(cells, 2)[:, :height, :width]
        return symbol_places(positions, self.groups, self.always)

    def analysis(self, images: Tensor, conditions: Tensor, levels: Tensor | None = None) -> Tensor:
        """See `Codec.analysis`.

        Args:
            images: Differences at half of unit contrast, and bases in [-1, 1], `[batch, 6, height, width]`.
            conditions: See `conditions`.
            levels: Of the map of activity, int64 `[batch, rows, columns]`; None: of these images.
        """
        if levels is None:
            levels = self.map.levels(2 * images[:, :3])
        activity = self.map.activity(levels, 4, images.shape[2] // 4, images.shape[3] // 4)
        return self._means(self.encoder(images, conditions, activity), conditions, self.spread, self.base_gain)

    def synthesis(
        self, features: Tensor, conditions: Tensor, base: Tensor | None = None, levels: Tensor | None = None
    ) -> Tensor:
        """See `Codec.synthesis`; differences from a base, at half of unit contrast, `[batch, 3, height, width]`.

        Args:
            features: `[batch, 3 P, h, w]`: estimates of symbols, and their share of the energy.
            conditions: Those of the encoder and the scale [10 dB], `[batch, 5]`.
            base: In [-1, 1], `[batch, 3, height, width]`; None: grey.
            levels: See `analysis`; None: the same everywhere.
        """
        h, w = features.shape[-2:]
        height, width = self.stride * h, self.stride * w
        if base is None:
            base = features.new_zeros(len(features), 3, height, width)
        if levels is None:
            shape = (len(features), *self.map.shape(height, width))
            levels = torch.full(shape, LEVELS - 2, device=features.device)
        estimates = self._means(features[:, : 2 * self.pairs], conditions, self.gather, self.base_loss)
        received = torch.cat([estimates, features[:, 2 * self.pairs :]], 1)
        images: Tensor = self.decoder(received, conditions, base, self.map.activity(levels, self.stride, h, w))
        return images

    def _means(self, latent: Tensor, conditions: Tensor, transform: LatentTransform, gain: Tensor) -> Tensor:
        """Latents whose channels of block means are transformed; `gain` is that of images that refine a base."""
        in_phase, quadrature = latent.chunk(2, 1)
        means = torch.cat([in_phase[:, :MEANS], quadrature[:, :MEANS]], 1)
        height, width = means.shape[-2:]
        tiles = gain.repeat(1, -(-height // gain.shape[1]), -(-width // gain.shape[2]))[:, :height, :width]
        more = (conditions[:, 3, None, None, None] * tiles).exp()
        means = transform(means * more) if transform.inverse else transform(means) * more
        left, right = means.chunk(2, 1)
        return torch.cat([left, in_phase[:, MEANS:], right, quadrature[:, MEANS:]], 1)

    def conditions(
        self, snr_db: Tensor, uses: Tensor, image_shape: Sequence[int], contrast: Tensor, refines: Tensor
    ) -> Tensor:
        """SNR, bandwidth ratio, contrast and whether a base is refined, as networks see them, `[batch, 4]`."""
        ratio = uses / (source_values((image_shape[0], image_shape[1], image_shape[2])) * float(self.max_ratio))
        snr = snr_db.float().clamp(LOWEST_SNR_DB, HIGHEST_SNR_DB) / 10 - 1
        ratio = 1 + ratio.float().clamp(min=1e-3).log2()
        return torch.stack([snr, ratio, 1 + contrast.log10(), refines], 1)


def told(value: Tensor, bits: int, lowest_db: float, highest_db: float) -> Tensor:
    """Positive values as side information tells them, in equal steps of a range [dB] at whose ends they are cut."""
    step = (highest_db - lowest_db) / (2**bits - 1)
    decibel = 20 * value.float().clamp(min=1e-9).log10().clamp(lowest_db / 20, highest_db / 20)
    rounded: Tensor = 10 ** ((((decibel - lowest_db) / step).round() * step + lowest_db) / 20)
    return rounded
