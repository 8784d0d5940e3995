"""What a codec is, and what codecs share: padding, and the way from latents to symbols and back."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chanlab.errors import UsageError
from chanlab.jscc.contract import (
    STANDARD,
    Convention,
    Received,
    Transmission,
    channel_uses,
    exact_ratio,
    normalise_power,
    pair_iq,
    side_information_uses,
    source_values,
)

Ratio = float | Fraction | Tensor
"""A bandwidth ratio agreed beforehand, or one per image, float64 `[batch]`, which the receiver must be told."""


class Codec(nn.Module):
    """Images to channel symbols and back, under the contract of `chanlab.jscc.contract`.

    A codec's latent has 2 P real channels, P complex ones, on a grid of one position per `stride` x `stride` pixels of
    the image, padded at the bottom and right where it has to be. Symbols are ordered by channel, then by position, and
    what is sent is the first k of them, k = floor(ratio C H W) to the symbol: a lower rate is a prefix of a higher one,
    and padding costs no channel use, it spreads those there are over more positions.

    Args:
        max_ratio: Highest bandwidth ratio k/n, for which the latent has channels.
        stride: Pixels per latent position and dimension.

    Attributes:
        convention: Of the channel, whose power constraint symbols keep to.
        side_bits: Side information about each image, whatever its rate [bit].
        checks_budget: Whether ratios of a tensor and what side information leaves are checked in evaluation.
        tells_bases: Whether `encode` takes a base, which symbols refine.
    """

    convention: Convention = STANDARD
    side_bits = 0
    checks_budget = True
    tells_bases = False

    def __init__(self, max_ratio: float | str | Fraction, stride: int) -> None:
        super().__init__()
        self.max_ratio = as_ratio(max_ratio)
        self.stride = stride
        self.pairs = math.ceil(self.max_ratio * 3 * stride**2)

    def encode(self, images: Tensor, snr_db: Tensor | float, ratio: Ratio | None = None) -> Transmission:
        """Symbols of images.

        Args:
            images: `[batch, 3, height, width]`, in [0, 1].
            snr_db: SNR per complex symbol that the encoder is told [dB], `[batch]`, or one for all.
            ratio: Bandwidth ratio k/n up to `max_ratio`, which is taken for None. A number is agreed beforehand. A
                tensor is chosen per image: the number of symbols is told as side information, whose channel uses come
                out of the image's own. (In training, where ratios are drawn, each counts as agreed.)

        Returns:
            A `Transmission` of k = floor(ratio C H W) symbols, side information included; for a tensor it is as wide as
            `max_ratio` allows.

        Raises:
            UsageError: If shapes don't fit, or the codec can't send at that ratio (in training, ratios of a tensor
                aren't checked, and those above `max_ratio` are cut to it).
        """
        raise NotImplementedError

    def sends_at(self, ratio: float | Fraction) -> bool:
        """Whether the codec was built for a bandwidth ratio."""
        return float(ratio) <= float(self.max_ratio) + 1e-9

    def decode(self, received: Received, image_shape: tuple[int, int, int]) -> Tensor:
        """Images of what was received.

        Args:
            received: What the receiver knows. A codec that rests on bases ends with `Received.shown`.
            image_shape: (3, height, width).

        Returns:
            `[batch, 3, height, width]`: in [0, 1] in evaluation, not clipped in training.
        """
        raise NotImplementedError

    def analysis(self, images: Tensor, conditions: Tensor) -> Tensor:
        """The encoder's network alone: images, padded, to their latents, `[batch, 2 P, h, w]`."""
        raise NotImplementedError

    def synthesis(self, features: Tensor, conditions: Tensor) -> Tensor:
        """The decoder's network alone: what was received, in its places in the latent, to padded images."""
        raise NotImplementedError

    def grid(self, image_shape: tuple[int, int, int]) -> tuple[int, int]:
        """Height and width of the latent of an image (channels, height, width)."""
        return -(-image_shape[1] // self.stride), -(-image_shape[2] // self.stride)

    def pad(self, images: Tensor) -> Tensor:
        """Images whose height and width are multiples of the stride, the last row and column repeated.

        Raises:
            UsageError: If they are no batch of RGB images in floating point.
        """
        check_images(images)
        height, width = (-size % self.stride for size in images.shape[2:])
        return F.pad(images, (0, width, 0, height), mode="replicate") if height or width else images

    def budget(
        self,
        images: Tensor,
        snr_db: Tensor,
        ratio: Ratio | None,
        more_bits: Tensor | float = 0.0,
        taken: Tensor | float = 0,
    ) -> tuple[int, Tensor, Tensor]:
        """Width of a transmission, the symbols that each image sends, int64 `[batch]`, and its side information [bit].

        An image that has exactly the channel uses of `side_bits` and the rate left sends these alone: no symbol, and
        not `more_bits`.

        Args:
            images: `[batch, 3, height, width]`.
            snr_db: Nominal SNR, `[batch]` [dB].
            ratio: See `encode`.
            more_bits: Side information beside `side_bits` and the rate, `[batch]` [bit].
            taken: Channel uses of an image that are spent already, int64 `[batch]`.

        Raises:
            UsageError: If a ratio is above `max_ratio`, or leaves no symbol (ratios of a tensor: in evaluation).
        """
        shape = (images.shape[1], images.shape[2], images.shape[3])
        most = channel_uses(shape, self.max_ratio)
        snr_db = snr_db + self.convention.offset_db  # as channels count
        if isinstance(ratio, Tensor):
            if ratio.shape != images.shape[:1] or ratio.dtype != torch.float64:
                raise UsageError(
                    f"ratios are float64 [{len(images)}], one per image, not {ratio.dtype} {list(ratio.shape)}."
                )
            bits = self.side_bits + (0 if self.training else math.ceil(math.log2(most)))
            width, uses = most, torch.floor(ratio * source_values(shape) + 1e-6).long()
        else:
            width = channel_uses(shape, self.max_ratio if ratio is None else ratio)
            if width > most:
                raise UsageError(
                    f"this codec sends at k/n up to {self.max_ratio}, not {ratio}: build it with another max_ratio."
                )
            bits, uses = self.side_bits, torch.full((len(images),), width, device=images.device)
        side = images.new_full((len(images),), bits, dtype=torch.float32)
        left = uses.clamp(max=most) - taken
        spent = (left == side_information_uses(side, snr_db)) & (taken > 0)
        side = side + torch.where(spent, 0.0, more_bits)
        sent = left - side_information_uses(side, snr_db)
        captured = images.is_cuda and torch.cuda.is_current_stream_capturing()  # a check would wait for the device
        if bits and self.checks_budget and not self.training and not captured:
            self._check_budget(uses / source_values(shape), uses, sent.where(~spent, 1), most)
        return width, sent, side

    def _check_budget(self, ratio: Tensor, uses: Tensor, sent: Tensor, most: int) -> None:
        if (uses > most).any():
            raise UsageError(
                f"this codec sends at k/n up to {self.max_ratio}, not {float(ratio.max()):.4g}: build it with another "
                "max_ratio."
            )
        if (sent < 1).any():
            worst = int(sent.argmin())
            raise UsageError(
                f"a bandwidth ratio of {float(ratio[worst]):.4g} leaves no symbol beside the side information, whose "
                f"channel uses come out of the image's {int(uses[worst])}: raise it."
            )

    def transmission(self, latent: Tensor, width: int, uses: Tensor, side_bits: Tensor) -> Transmission:
        """The first symbols of latents, at unit power per image.

        Args:
            latent: Real `[batch, 2 P, h, w]`: P in-phase channels, then P quadratures.
            width: Symbols of the widest image.
            uses: Symbols that each image sends, `[batch]`.
            side_bits: `[batch]` [bit].
        """
        symbols, used = self.symbols(latent, width, uses)
        return Transmission(normalise_power(symbols, used, self.convention), used, side_bits)

    def symbols(self, latent: Tensor, width: int, uses: Tensor) -> tuple[Tensor, Tensor]:
        """Symbols of latents before their power is normalised, and which of them are sent; see `transmission`."""
        return pair_iq(latent)[:, :width], torch.arange(width, device=uses.device) < uses[:, None]

    def latent(self, values: Tensor, image_shape: tuple[int, int, int]) -> Tensor:
        """Real values of symbols `[batch, k]` at their places in the latent `[batch, P, h, w]`; unsent ones are 0."""
        height, width = self.grid(image_shape)
        missing = self.pairs * height * width - values.shape[1]
        if missing < 0:
            raise UsageError(
                f"{values.shape[1]} symbols are more than an image {image_shape} has at k/n {self.max_ratio}."
            )
        return F.pad(values, (0, missing)).view(len(values), self.pairs, height, width)

    def crop(self, images: Tensor, image_shape: tuple[int, int, int]) -> Tensor:
        """The image without its padding; clipped to [0, 1] in evaluation."""
        images = images[..., : image_shape[1], : image_shape[2]].float()
        return images if self.training else images.clamp(0, 1)


def check_images(images: Tensor) -> None:
    """Refuses what no codec takes.

    Raises:
        UsageError: If they are no batch of RGB images in floating point.
    """
    if images.ndim != 4 or images.shape[1] != 3 or not images.is_floating_point():
        raise UsageError(
            f"images are floats [batch, 3, height, width] in [0, 1], not {images.dtype} {list(images.shape)}."
        )


def as_ratio(ratio: float | str | Fraction) -> Fraction:
    """The fraction that a codec's bandwidth ratio stands for; see `exact_ratio`.

    Raises:
        UsageError: If it is no number above 0 and not above 1.
    """
    exact = exact_ratio(ratio)
    if not 0 < exact <= 1:
        raise UsageError(f"a bandwidth ratio lies above 0 and not above 1, not {ratio}.")
    return exact
