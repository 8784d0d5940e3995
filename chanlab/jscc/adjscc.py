"""ADJSCC: DeepJSCC whose features are weighted by attention to the SNR (Xu et al.)."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor, nn

from chanlab.jscc.deepjscc import DeepJSCC


class ADJSCC(DeepJSCC):
    """ADJSCC (Xu et al., 2022): DeepJSCC with an attention feature module after each of four stages on both sides.

    One network serves a range of SNRs: each module weighs its stage's channels by what they hold and by the SNR. In the
    paper: 256 filters, kernels of 9 and 5, Adam at 1e-4, batches of 128, SNR drawn from 0 to 20 dB.

    Args:
        ratio: Bandwidth ratio k/n that the codec is made for.
        filters: Of the first four convolutions; a number is that of each.
        kernels: Sizes of the five kernels, odd.
        gdn: Divisive normalisation after each convolution.
    """

    def __init__(
        self,
        ratio: float | str | Fraction = 1 / 6,
        filters: int | Sequence[int] = 256,
        kernels: Sequence[int] = (9, 5, 5, 5, 5),
        gdn: bool = True,
    ) -> None:
        super().__init__(ratio, filters, kernels, gdn)
        self.encoder_attention = nn.ModuleList(AttentionFeature(count) for count in self.filters)
        self.decoder_attention = nn.ModuleList(AttentionFeature(count) for count in reversed(self.filters))

    def analysis(self, images: Tensor, conditions: Tensor) -> Tensor:
        """See `Codec.analysis`; the conditions are SNRs [dB], `[batch]`."""
        for i, stage in enumerate(self.encoder):
            images = stage(images)
            if i < 4:
                images = self.encoder_attention[i](images, conditions)
        return images

    def synthesis(self, features: Tensor, conditions: Tensor) -> Tensor:
        """See `Codec.synthesis`; the features are a received latent, `[batch, 2 P, h, w]`."""
        for i, stage in enumerate(self.decoder):
            features = stage(features)
            if i < 4:
                features = self.decoder_attention[i](features, conditions)
        return features


class AttentionFeature(nn.Module):
    """Attention feature (AF) module: channel means and SNR, dense C/16 with ReLU, dense C with sigmoid, scale.

    Args:
        channels: C, at least 16.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(channels + 1, max(1, channels // 16))
        self.excite = nn.Linear(max(1, channels // 16), channels)

    def forward(self, x: Tensor, snr_db: Tensor) -> Tensor:
        """Features weighted by channel.

        Args:
            x: `[batch, channels, height, width]`.
            snr_db: SNR per complex symbol [dB], `[batch]`.
        """
        context = torch.cat([x.mean((2, 3)), snr_db[:, None].to(x.dtype)], 1)
        weight: Tensor = self.excite(self.squeeze(context).relu()).sigmoid()
        return x * weight[..., None, None].to(x.dtype)
