"""LLM4CP as published: a frozen language model between networks that read and write the channel of one antenna."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from chanlab.csi.backbone import Backbone, load_backbone
from chanlab.csi.matched_trunk import MatchedTrunk, match
from chanlab.csi.predictor import check_history
from chanlab.errors import UsageError


class LLM4CP(nn.Module):
    """Predicts future CSI with a frozen language model, its layer norms trained, as published in 2024.

    Each antenna pair is a series of its own. Two branches, one over subcarriers and one over delay taps (inverse
    Fourier transform), see it as an image of two planes, real and imaginary part, over time and subcarriers: a linear
    layer over the snapshots of each patch, then residual convolutions with CSI attention. Their sum is embedded by a
    convolution over time, with sinusoidal positions; a linear layer over time follows, the first layers of the language
    model, and linear heads over features and over time. With targets on another band (FDD) the same network learns to
    predict that band.

    Trained besides these layers: norms and learned positions (GPT-2's) of the language model, nothing else of it.

    Where this follows the paper and not its code: each series is scaled to unit power by itself, planes are what they
    are said to be, each branch has its own patch layer, and the Fourier transform is unitary.

    Source: B. Liu, X. Liu, S. Gao, X. Cheng, L. Yang, "LLM4CP: Adapting Large Language Models for Channel Prediction",
    JCIN 9(2), 2024, arXiv 2406.14440.

    Args:
        num_subcarriers: Subcarriers of history and target.
        history: Snapshots in the history, a multiple of `patch`.
        horizons: Future steps, 1 to `horizons` snapshot intervals ahead.
        backbone: Name fetched by `chanlab backbone fetch`, a folder, or a hub id of any causal model of transformers
            (published: `gpt2`). None is an ablation: a transformer trained from scratch in its place, sized so that as
            many parameters are trained as on a Llama of width `matched_width`.
        layers: Decoder layers kept, counted from the input.
        pretrained: False starts from the same network with random weights, frozen and trained alike (an ablation).
        patch: Snapshots that the first linear layer takes together.
        features: Feature maps of the convolutions.
        blocks: Residual blocks of each branch.
        dropout: Of the embedding, in training.
        matched_width: See `backbone`; that of SmolLM2-135M.

    Raises:
        UsageError: `patch` doesn't divide `history`, or a size is below 1.
        MissingDependencyError: transformers is not installed.
    """

    positions: Tensor

    def __init__(
        self,
        num_subcarriers: int,
        history: int = 16,
        horizons: int = 4,
        backbone: str | None = "smollm2-135m",
        layers: int = 6,
        pretrained: bool = True,
        patch: int = 4,
        features: int = 64,
        blocks: int = 4,
        dropout: float = 0.1,
        matched_width: int = 576,
    ) -> None:
        super().__init__()
        if min(num_subcarriers, history, horizons, layers, patch, features, blocks, matched_width) < 1:
            raise UsageError("LLM4CP: every size must be at least 1")
        if history % patch:
            raise UsageError(f"LLM4CP: history={history} must be a multiple of patch={patch}")
        self.num_subcarriers, self.history, self.horizons = num_subcarriers, history, horizons
        self.frequency = Branch(patch, features, blocks)
        self.delay = Branch(patch, features, blocks)
        values = 2 * num_subcarriers
        self.backbone: Backbone | MatchedTrunk
        if backbone is None:
            per_width = 3 * values + values  # embedding and head
            self.backbone = match(matched_width * (per_width + 2 * layers + 1), per_width, layers)
        else:
            self.backbone = load_backbone(backbone, layers, pretrained)
            freeze(self.backbone)
        width = self.backbone.width
        # Circular padding is the published one; the linear layer over time sees all snapshots anyway.
        self.embed = nn.Conv1d(values, width, 3, padding=1, padding_mode="circular", bias=False)
        nn.init.kaiming_normal_(self.embed.weight, nonlinearity="leaky_relu")
        self.register_buffer("positions", sinusoids(history, width), persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.mix = nn.Linear(history, history)
        self.to_values = nn.Linear(width, values)
        self.to_horizons = nn.Linear(history, horizons)

    def forward(self, history: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """Predicts complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`; see `Predictor`.

        Raises:
            UsageError: The history doesn't have the network's numbers of snapshots and subcarriers.
        """
        check_history(history)
        if history.shape[3:] != (self.history, self.num_subcarriers):
            raise UsageError(
                f"This LLM4CP was made for {self.history} snapshots of {self.num_subcarriers} subcarriers, "
                f"not {history.shape[3]} of {history.shape[4]}: set history and num_subcarriers to those of the data"
            )
        x, scale = normalise_series(history.flatten(0, 2))
        image = self.frequency(planes(x)) + self.delay(planes(torch.fft.ifft(x, norm="ortho")))
        tokens = self.embed(image.transpose(1, 2).flatten(2).mT).mT  # [series, time, width]
        tokens = self.dropout(tokens + self.positions)
        hidden = self.backbone(self.mix(tokens.mT).mT)
        future = self.to_horizons(self.to_values(hidden).mT).mT.float()  # [series, horizon, plane * subcarrier]
        real, imaginary = future.chunk(2, dim=-1)
        return (torch.complex(real, imaginary) * scale).reshape(*history.shape[:3], self.horizons, -1)


class Branch(nn.Module):
    """Patches, then residual convolutions with CSI attention; an image in, an image out, `[series, 2, time, bin]`.

    Args:
        patch: Snapshots that are taken together by the linear layer.
        features: Feature maps.
        blocks: Residual blocks.
    """

    compilable = True

    def __init__(self, patch: int, features: int, blocks: int) -> None:
        super().__init__()
        self.patch = nn.Linear(patch, patch)
        self.convolutions = nn.Sequential(
            nn.Conv2d(2, features, 3, padding=1),
            *(ResidualBlock(features) for _ in range(blocks)),
            nn.Conv2d(features, 2, 3, padding=1),
        )

    def forward(self, image: Tensor) -> Tensor:
        """The image that the branch makes of one."""
        size = self.patch.in_features
        patches = image.reshape(*image.shape[:2], -1, size, image.shape[3]).mT  # [series, 2, patch, bin, time within]
        mixed = self.patch(patches).mT.flatten(2, 3)
        out: Tensor = self.convolutions(mixed.contiguous(memory_format=torch.channels_last))
        return out


class ResidualBlock(nn.Module):
    """Two convolutions, weighted by CSI attention, beside an identity; `[series, feature, time, bin]`."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(features, features, 3, padding=1)
        self.second = nn.Conv2d(features, features, 3, padding=1)
        self.attention = CSIAttention(features)

    def forward(self, x: Tensor) -> Tensor:
        """Adds what the convolutions find."""
        out: Tensor = x + self.attention(self.second(nn.functional.relu(self.first(x))))
        return out


class CSIAttention(nn.Module):
    """A gate between 0 and 1 for each feature map, from its mean and its maximum over time and bins."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(features, features, bias=False)
        self.excite = nn.Linear(features, features, bias=False)

    def gate(self, maps: Tensor) -> Tensor:
        """Gates `[series, feature]` of feature maps `[series, feature, time, bin]`."""
        pooled = torch.stack([maps.mean((2, 3)), maps.amax((2, 3))])
        return torch.sigmoid(self.excite(nn.functional.relu(self.squeeze(pooled))).sum(0))

    def forward(self, maps: Tensor) -> Tensor:
        """Feature maps times their gates."""
        # Under autocast the gates' sum is single precision; the maps, most of the memory traffic, need not become so.
        return maps * self.gate(maps).to(maps.dtype)[:, :, None, None]


def freeze(backbone: nn.Module) -> None:
    """Leaves only norms and learned positions of a language model trainable."""
    for name, parameter in backbone.named_parameters():
        lower = name.lower()
        parameter.requires_grad_("norm" in lower or ".ln_" in lower or "wpe" in lower or "position" in lower)


def planes(x: Tensor) -> Tensor:
    """Real and imaginary part as planes of an image: complex `[series, time, bin]` to real `[series, 2, time, bin]`."""
    return torch.stack([x.real, x.imag], 1)


def normalise_series(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scales each series `[series, time, bin]` to unit mean power by itself: `(x / scale, scale)`."""
    power = x.abs().square().mean((1, 2), keepdim=True)
    scale = power.sqrt().where(power > 0, 1.0)
    return x / scale, scale


def sinusoids(length: int, width: int) -> Tensor:
    """Fixed positional embedding `[length, width]` (Vaswani et al., "Attention is all you need", 3.5)."""
    rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angle = torch.arange(length)[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :width]
