"""LLM-based CSI prediction: a pre-trained decoder reads the history and steers the prediction of every path."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from chanlab.csi.angle_delay import from_angle_delay, to_angle_delay
from chanlab.csi.pooled_prediction import Statistics
from chanlab.csi.predictor import check_history
from chanlab.errors import MissingDependencyError, UsageError

Tuning = Literal["norms", "lora", "frozen", "full"]

# How far each bin borrows from its neighbours, its delay tap and the whole channel, and how much noise its equations
# are loaded with, before anything is learned: a good point of a coarse grid on ray-traced channels.
INITIAL = (0.3, 0.1, 0.03, 4.0)


class LLM(nn.Module):
    """Predicts future CSI with the first layers of a pre-trained causal language model.

    As in LLM4CP (Liu et al., "LLM4CP: Adapting Large Language Models for Channel Prediction", JCIN 2024) the history is
    taken to the delay domain, cut into patches over time and read by a truncated pre-trained decoder that stays frozen
    but for its norms (or LoRA). Two things differ, so that a few thousand windows suffice:

    - *Input.* Tokens carry second-order statistics instead of coefficients: a patch of snapshots is that many rows of
      the temporal covariance of each group of delay taps. They don't depend on a common phase.
    - *Output.* The head writes no coefficients but steers linear prediction in the angle-delay domain (PAD; Yin et
      al., JSAC 2020): for each strong bin, how much its normal equations borrow from those of neighbouring bins, of its
      delay tap and of the whole channel, how strongly they are regularised, and a gain per horizon. So the prediction
      is equivariant to scale and phase, and sound before training.

    Everything is computed per sample: a prediction never depends on its batch companions.

    Args:
        history: Snapshots T in the history.
        horizons: Future steps, 1 to `horizons` snapshot intervals ahead.
        backbone: Name fetched by `chanlab backbone fetch`, a folder, or a hub id of any causal model of transformers.
        layers: Decoder layers kept, counted from the input.
        pretrained: False starts from the same network with random weights (an ablation).
        tuning: `norms`: all frozen but the norms; `lora`: norms and low-rank updates of every linear projection through
            peft; `frozen`: nothing of the language model is trained; `full`: everything.
        lora_rank: Rank of the updates with `tuning="lora"`.
        tx_shape: `[polarizations, columns, rows]` of the transmit array; None takes the antennas as one line.
        patch: Snapshots per token; must divide `history`.
        taps: Consecutive delay taps, those with the most energy, that the language model sees one by one; all others
            are seen together.
        order: Order of linear prediction, below `history`.
        bins: Number of strongest angle-delay bins that are steered one by one; the others follow their tap.
        features: Width of the encoder of statistics.
        doppler_shift: In training each sample is shifted in frequency by up to this many cycles per snapshot and
            conjugated at random, and its prediction shifted back: any such channel is a channel again.

    Raises:
        UsageError: Patch does not divide the history, or an option is out of range.
        MissingDependencyError: transformers, or peft for LoRA, is not installed.
    """

    def __init__(
        self,
        history: int = 16,
        horizons: int = 4,
        backbone: str = "smollm2-135m",
        layers: int = 4,
        pretrained: bool = True,
        tuning: Tuning = "norms",
        lora_rank: int = 8,
        tx_shape: Sequence[int] | None = None,
        patch: int = 4,
        taps: int = 16,
        order: int = 8,
        bins: int = 256,
        features: int = 64,
        doppler_shift: float = 0.15,
    ) -> None:
        super().__init__()
        if history % patch:
            raise UsageError(f"LLM: patch={patch} must divide history={history}")
        if not 1 <= order < history:
            raise UsageError(f"LLM: order={order} must be at least 1 and below history={history}")
        if taps < 1 or bins < 1:
            raise UsageError(f"LLM: taps={taps} and bins={bins} must be at least 1")
        if tx_shape is not None and len(tx_shape) != 3:
            raise UsageError(f"LLM: tx_shape is [polarizations, columns, rows], not {list(tx_shape)}")
        from chanlab.csi.backbone import load_backbone

        self.history, self.horizons, self.patch = history, horizons, patch
        self.taps, self.order, self.bins, self.doppler_shift = taps, order, bins, doppler_shift
        self.tx_shape = None if tx_shape is None else (int(tx_shape[0]), int(tx_shape[1]), int(tx_shape[2]))
        self.backbone = load_backbone(backbone, layers, pretrained)
        set_tuning(self.backbone, tuning, lora_rank)
        width, tokens, groups = self.backbone.width, history // patch, taps + 1
        self.encode = nn.Sequential(
            nn.Linear(2 * patch * history + 2, 2 * features), nn.GELU(), nn.Linear(2 * features, features)
        )
        self.place = nn.Parameter(0.02 * torch.randn(groups, tokens, features))
        self.embed = nn.Linear(groups * features, width)
        nn.init.normal_(self.embed.weight, std=0.1 / math.sqrt(groups * features))  # the scale of token embeddings
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, groups * features))
        self.context = nn.Sequential(nn.LayerNorm(2 * tokens * features), nn.Linear(2 * tokens * features, features))
        self.steer = nn.Sequential(
            nn.Linear(features + 7, features), nn.GELU(), nn.Linear(features, features), nn.GELU()
        )
        self.controls = nn.Linear(features, len(INITIAL) + horizons)
        nn.init.zeros_(self.controls.weight)
        with torch.no_grad():
            self.controls.bias.copy_(torch.tensor([*map(math.log, INITIAL), *[3.0] * horizons]))
        self.others = nn.Parameter(torch.tensor([math.log(0.1), math.log(4.0)]))

    def forward(self, history: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """Predicts the next snapshots.

        Args:
            history: Noisy CSI, complex `[batch, rx_ant, tx_ant, time, subcarrier]`.
            noise_variance: Variance of the history's noise per entry, `[batch]`; estimated from the weakest bins where
                not given.

        Returns:
            Complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`.

        Raises:
            UsageError: The history's length isn't the network's.
        """
        check_history(history, self.history)
        if history.shape[3] != self.history:
            raise UsageError(
                f"This LLM was built for {self.history} snapshots, not {history.shape[3]}: set history to that number"
            )
        shape = self.tx_shape or (1, history.shape[2], 1)
        if self.training and self.doppler_shift:
            turn, flip = self._draw_shift(history)
            turned = torch.where(flip, history.conj(), history) * turn[:, :, :, : self.history]
            future = self._predict(to_angle_delay(turned, shape), noise_variance) * turn[:, :, :, self.history :].conj()
            return torch.where(flip, future.conj(), future)
        return self._predict(to_angle_delay(history, shape), noise_variance)

    def _draw_shift(self, history: Tensor) -> tuple[Tensor, Tensor]:
        """A rotation per snapshot `[batch, 1, 1, time + horizon, 1]` and a random bit per sample."""
        size = (history.shape[0], 1, 1, 1, 1)
        cycles = self.doppler_shift * (2 * torch.rand(size, device=history.device) - 1)
        steps = torch.arange(self.history + self.horizons, device=history.device)[:, None]
        phase = 2 * math.pi * cycles * steps
        return torch.polar(torch.ones_like(phase), phase), torch.rand(size, device=history.device) < 0.5

    def _predict(self, x: Tensor, noise_variance: Tensor | None) -> Tensor:
        """From bins `[batch, rx_ant, polarization, column, row, delay, time]` to the future channel."""
        with torch.no_grad():
            noise = _noise(x.abs().square().mean(-1), noise_variance)
            stats = Statistics(x, noise, self.order, self.bins)
            patches, group = self._patches(x)
        context = self._read(patches)  # [batch, group, features]
        at_bin = context.gather(1, group.gather(1, stats.tap_of_bin)[..., None].expand(-1, -1, context.shape[-1]))
        controls = self.controls(self.steer(torch.cat([at_bin, stats.features], -1)))
        weights, loading = controls[..., :3].exp(), controls[..., 3].exp()
        strong = stats.predict(weights, loading, self.horizons, stable=not self.training)
        strong = strong * torch.sigmoid(controls[..., 4:])
        others = self.others.exp()
        future = stats.predict_by_tap(others[0], others[1], self.horizons).flatten(1, 5)
        future = future.scatter(1, stats.index[..., None].expand_as(strong), strong)
        return from_angle_delay(future.reshape(*x.shape[:6], self.horizons))

    def _patches(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Temporal covariance and level by groups of delay taps; each tap's group.

        The `taps` consecutive taps with the most energy are groups of their own, all others together are the last.

        Returns:
            Patches, real `[batch, group, token, ...]`, and int64 `[batch, delay]`.
        """
        series = x.movedim(5, 1).flatten(2, 5)  # [batch, delay, antenna, time]
        power = series.abs().square().mean((2, 3))
        num_taps = power.shape[1]
        if self.taps >= num_taps:
            raise UsageError(f"LLM: taps={self.taps} must be below the number of subcarriers, {num_taps}")
        window = torch.cat([power, power[:, : self.taps - 1]], -1).unfold(-1, self.taps, 1).sum(-1)
        delay = torch.arange(num_taps, device=x.device)
        group = ((delay - window.argmax(-1, keepdim=True)) % num_taps).clamp(max=self.taps)
        member = nn.functional.one_hot(group, self.taps + 1).to(power)
        covariance = torch.einsum("bnts,bng->bgts", series.mT @ series.conj(), member.to(x.dtype))
        level = covariance.diagonal(dim1=-2, dim2=-1).real.mean(-1)
        tiny = torch.finfo(level.dtype).tiny
        covariance = covariance / level.clamp(min=tiny)[..., None, None]
        mean = level / member.sum(1)
        scalars = torch.stack([mean / mean[:, -1:].clamp(min=tiny), level / level.sum(-1, keepdim=True)], -1)
        scalars = scalars.nan_to_num().clamp(1e-6, 1e6).log10()
        rows = torch.view_as_real(covariance).reshape(*level.shape, self.history // self.patch, -1)
        return torch.cat([rows, scalars[:, :, None].expand(-1, -1, rows.shape[2], -1)], -1), group

    def _read(self, patches: Tensor) -> Tensor:
        """What the language model makes of patches `[batch, group, token, ...]`: `[batch, group, features]`."""
        encoded = self.encode(patches) + self.place
        hidden = self.head(self.backbone(self.embed(encoded.transpose(1, 2).flatten(2))))
        hidden = hidden.reshape(*hidden.shape[:2], self.taps + 1, -1).transpose(1, 2)
        context: Tensor = self.context(torch.cat([encoded, hidden], -1).flatten(2))
        return context


def set_tuning(backbone: nn.Module, tuning: Tuning, lora_rank: int) -> None:
    """Freezes a backbone but for what `tuning` trains; see `LLM`.

    Raises:
        UsageError: Unknown `tuning`.
        MissingDependencyError: LoRA without peft.
    """
    if tuning not in ("norms", "lora", "frozen", "full"):
        raise UsageError(f"tuning must be norms, lora, frozen or full, not {tuning!r}")
    if tuning == "lora":
        try:
            import peft
        except ImportError as error:
            raise MissingDependencyError("LoRA needs peft: pip install 'chanlab[llm]'") from error
        config = peft.LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear")
        peft.inject_adapter_in_model(config, backbone)
    for name, parameter in backbone.named_parameters():
        is_norm = "norm" in name.lower() or ".ln_" in name.lower()
        parameter.requires_grad_(tuning == "full" or (tuning != "frozen" and is_norm) or "lora_" in name)


def _noise(power: Tensor, noise_variance: Tensor | None) -> Tensor:
    """Noise variance `[batch]`, at least what single precision adds; without knowledge, that of the weakest bins."""
    flat = power.flatten(1)
    known = flat.quantile(0.25, dim=1) if noise_variance is None else noise_variance.to(flat)
    return torch.maximum(known, 1e-5 * flat.mean(1)).clamp(min=torch.finfo(flat.dtype).tiny)
