"""DeepJSCC: a convolutional encoder and decoder trained through the channel (Bourtsoulatze, Burth Kurka and Gündüz)."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor, nn

from chanlab.errors import UsageError
from chanlab.jscc.codec import Codec, Ratio
from chanlab.jscc.contract import Received, Transmission, per_image
from chanlab.jscc.gdn import GDN


class DeepJSCC(Codec):
    """DeepJSCC (Bourtsoulatze, Burth Kurka and Gündüz, 2019): five convolutions each side, strides 2, 2, 1, 1, 1.

    Encoder: convolution, GDN and PReLU, four times; a fifth convolution and GDN write the latent on a grid of 4 x 4
    pixels. Decoder: its mirror of transposed convolutions, IGDN and PReLU, a sigmoid at the end. That is the form of
    Xu et al. (2022), ADJSCC without attention, whose kernels are 9 and 5, with 256 filters; Burth Kurka and Gündüz
    (2020) have the same but for the outermost GDN on either side. The paper of 2019 has kernels of 5, filters of 16,
    32, 32, 32, no GDN, and a PReLU after the fifth convolution as well (`gdn=False`). The latent's channels are those
    of one bandwidth ratio, and networks are trained for one SNR.

    Args:
        ratio: Bandwidth ratio k/n that the codec is made for.
        filters: Of the first four convolutions; a number is that of each.
        kernels: Sizes of the five kernels, odd.
        gdn: Divisive normalisation after each convolution.
    """

    def __init__(
        self,
        ratio: float | str | Fraction = 1 / 6,
        filters: int | Sequence[int] = (16, 32, 32, 32),
        kernels: Sequence[int] = (5, 5, 5, 5, 5),
        gdn: bool = True,
    ) -> None:
        super().__init__(ratio, stride=4)
        filters = [filters] * 4 if isinstance(filters, int) else list(filters)
        if len(filters) != 4 or min(filters) < 1 or len(kernels) != 5 or any(size % 2 == 0 for size in kernels):
            raise UsageError(f"DeepJSCC has 4 numbers of filters and 5 odd kernels, not {filters} and {list(kernels)}.")
        self.filters = tuple(filters)
        widths = [3, *filters, 2 * self.pairs]
        strides = (2, 2, 1, 1, 1)
        self.encoder = nn.ModuleList(
            Stage(
                widths[i],
                widths[i + 1],
                kernels[i],
                strides[i],
                gdn,
                None if gdn and i == 4 else nn.PReLU(widths[i + 1]),
            )
            for i in range(5)
        )
        self.decoder = nn.ModuleList(
            TransposedStage(
                widths[i + 1], widths[i], kernels[i], strides[i], gdn, nn.PReLU(widths[i]) if i else nn.Sigmoid()
            )
            for i in reversed(range(5))
        )

    def encode(self, images: Tensor, snr_db: Tensor | float, ratio: Ratio | None = None) -> Transmission:
        """See `Codec.encode`; the only ratio is the codec's own."""
        if ratio is not None and (isinstance(ratio, Tensor) or not self.sends_at(ratio)):
            asked = "one per image" if isinstance(ratio, Tensor) else ratio
            raise UsageError(
                f"{type(self).__name__} sends at k/n {self.max_ratio} alone, not {asked}: train one for each."
            )
        snr_db = per_image(snr_db, images)
        width, uses, bits = self.budget(images, snr_db, None)
        return self.transmission(self.analysis(self.pad(images), snr_db), width, uses, bits)

    def sends_at(self, ratio: float | Fraction) -> bool:
        """See `Codec.sends_at`; the only ratio is the codec's own."""
        return abs(float(ratio) - float(self.max_ratio)) <= 1e-9

    def decode(self, received: Received, image_shape: tuple[int, int, int]) -> Tensor:
        """See `Codec.decode`."""
        in_phase = self.latent(received.symbols.real, image_shape)
        quadrature = self.latent(received.symbols.imag, image_shape)
        return self.crop(self.synthesis(torch.cat([in_phase, quadrature], 1), received.snr_db), image_shape)

    def analysis(self, images: Tensor, conditions: Tensor) -> Tensor:
        """See `Codec.analysis`; the conditions are SNRs [dB], `[batch]`."""
        for stage in self.encoder:
            images = stage(images)
        return images

    def synthesis(self, features: Tensor, conditions: Tensor) -> Tensor:
        """See `Codec.synthesis`; the features are a received latent, `[batch, 2 P, h, w]`."""
        for stage in self.decoder:
            features = stage(features)
        return features


class Stage(nn.Module):
    """Convolution, GDN, activation.

    Args:
        inputs: Channels.
        outputs: Filters.
        kernel: Size, odd.
        stride: Stride.
        gdn: Whether there is a normalisation.
        activation: None: none.
    """

    inverse = False

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int, gdn: bool, activation: nn.Module | None
    ) -> None:
        super().__init__()
        self.convolution = self.make(inputs, outputs, kernel, stride)
        self.normalisation = GDN(outputs, self.inverse) if gdn else nn.Identity()
        self.activation = activation or nn.Identity()

    def make(self, inputs: int, outputs: int, kernel: int, stride: int) -> nn.Module:
        """The convolution, which divides height and width by the stride (rounded up)."""
        return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        """Features `[batch, outputs, height, width]`."""
        x = self.activation(self.normalisation(self.convolution(x)))
        return x


class TransposedStage(Stage):
    """Transposed convolution, which multiplies height and width by the stride, IGDN, activation."""

    inverse = True

    def make(self, inputs: int, outputs: int, kernel: int, stride: int) -> nn.Module:
        """The convolution."""
        return nn.ConvTranspose2d(inputs, outputs, kernel, stride, kernel // 2, output_padding=stride - 1)
