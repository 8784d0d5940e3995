"""LLM-based CSI prediction: a pre-trained decoder reads the channel's history and writes the filter that predicts it."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from chanlab.errors import MissingDependencyError, UsageError

Tuning = Literal["norms", "lora", "frozen", "full"]


class LLM(nn.Module):
    """Predicts future CSI with the first layers of a pre-trained causal language model.

    After LLM4CP (Liu et al., "LLM4CP: Adapting Large Language Models for Channel Prediction", JCIN 2024): delay-domain
    preprocessing, patches over time, a truncated pre-trained decoder that stays frozen but for its norms (or LoRA), and
    a head. Two things differ, both so that a few thousand windows suffice:

    - *Input.* The tokens don't carry channel coefficients but second-order statistics: for each group of delay taps the
      temporal covariance over the antennas, of which a patch of `patch` snapshots holds that many rows. They are
      invariant to a common phase and independent of the number of antennas.
    - *Output.* The head doesn't write channel coefficients but, for each group of delay taps, the complex weights of a
      linear filter over the history (`horizons` x `history` weights), which is applied to the noisy history. So the
      prediction is equivariant to phase and scale, and begins as "no prediction".

    Everything is computed per sample: a prediction never depends on its batch companions. The network is bound to the
    number of history snapshots, not to antennas or subcarriers.

    Args:
        history: Snapshots T in the history.
        horizons: Future steps, 1 to `horizons` snapshot intervals ahead.
        backbone: Name fetched by `chanlab backbone fetch`, a folder, or a hub id of any causal model of transformers.
        layers: Decoder layers kept, counted from the input.
        pretrained: False starts from the same network with random weights (an ablation).
        tuning: `norms`: all frozen but the norms; `lora`: norms and low-rank updates of every linear projection through
            peft; `frozen`: nothing of the language model is trained; `full`: everything.
        lora_rank: Rank of the updates with `tuning="lora"`.
        domain: `delay` (groups are delay taps) or `frequency` (groups are equal sub-bands).
        groups: Number of groups of taps (or sub-bands) that get a filter of their own. In the delay domain the last
            group holds all remaining taps, far from the energy: what leaks there is filtered alike.
        patch: Snapshots per token; must divide `history`.
        features: Width of the per-group encoder and decoder.
        dropout: Dropout before the head.

    Raises:
        UsageError: Patch does not divide the history, or an unknown option.
    """

    trainable = True

    def __init__(
        self,
        history: int = 16,
        horizons: int = 4,
        backbone: str = "smollm2-135m",
        layers: int = 4,
        pretrained: bool = True,
        tuning: Tuning = "norms",
        lora_rank: int = 8,
        domain: Literal["delay", "frequency"] = "delay",
        groups: int = 13,
        patch: int = 4,
        features: int = 96,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if history % patch:
            raise UsageError(f"LLM: patch={patch} must divide history={history}.")
        if domain not in ("delay", "frequency"):
            raise UsageError(f"LLM: domain must be delay or frequency, not {domain!r}.")
        from chanlab.csi.backbone import load_backbone

        self.history, self.horizons, self.patch, self.groups, self.domain = history, horizons, patch, groups, domain
        self.backbone = load_backbone(backbone, layers, pretrained)
        _set_tuning(self.backbone, tuning, lora_rank)
        width = self.backbone.width
        tokens = history // patch
        self.encode = nn.Sequential(
            nn.Linear(2 * patch * history + 2, 2 * features), nn.GELU(), nn.Linear(2 * features, features)
        )
        self.position = nn.Parameter(0.02 * torch.randn(tokens, 1, features))
        self.group = nn.Parameter(0.02 * torch.randn(groups, features))
        self.to_llm = nn.Linear(groups * features, width)
        self.from_llm = nn.Linear(width, groups * features)
        self.norm = nn.LayerNorm(width)
        self.decode = nn.Sequential(
            nn.LayerNorm(2 * tokens * features),
            nn.Linear(2 * tokens * features, 4 * features),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(4 * features, 2 * horizons * history),
        )
        nn.init.zeros_(self.decode[-1].weight)
        nn.init.zeros_(self.decode[-1].bias)
        # Embeddings enter at the scale that the language model's own token embeddings have.
        nn.init.normal_(self.to_llm.weight, std=0.1 / math.sqrt(groups * features))

    def forward(self, history: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """Predicts the next snapshots.

        Args:
            history: Noisy CSI, complex `[batch, rx_ant, tx_ant, time, subcarrier]`.
            noise_variance: Variance of the history's noise per entry, `[batch]`; not used.

        Returns:
            `[batch, rx_ant, tx_ant, horizon, subcarrier]`, complex.

        Raises:
            UsageError: The history's length isn't the network's.
        """
        if history.dim() != 5 or history.shape[-2] != self.history:
            raise UsageError(
                f"LLM takes a history [batch, rx_ant, tx_ant, {self.history}, subcarrier], not {list(history.shape)}; "
                "train one with history= that length."
            )
        taps, group = self._analyse(history)
        filters = self._filters(taps, group)
        per_tap = filters.gather(1, group[:, :, None, None].expand(-1, -1, *filters.shape[2:]))
        prediction = torch.einsum("bnht,batn->bahn", per_tap, taps)
        if self.domain == "delay":
            prediction = torch.fft.fft(prediction, dim=-1, norm="ortho")
        return prediction.unflatten(1, history.shape[1:3])

    def _analyse(self, history: Tensor) -> tuple[Tensor, Tensor]:
        """Taps or subcarriers `[batch, antenna, time, tap]` and the group of each `[batch, tap]`."""
        x = history.flatten(1, 2)
        n = x.shape[-1]
        if self.groups > n:
            raise UsageError(f"LLM: {self.groups} groups need at least as many subcarriers, not {n}.")
        index = torch.arange(n, device=x.device)
        if self.domain == "frequency":
            return x, (index * self.groups // n).expand(x.shape[0], n)
        x = torch.fft.ifft(x, dim=-1, norm="ortho")
        # The circular window of `groups - 1` taps with the most energy gets a filter per tap.
        power = x.abs().square().mean((1, 2))
        start = _circular_window(power, self.groups - 1).argmax(-1, keepdim=True)
        return x, ((index - start) % n).clamp(max=self.groups - 1)

    def _filters(self, taps: Tensor, group: Tensor) -> Tensor:
        """Filter weights of each group, complex `[batch, group, horizon, time]`."""
        batch, antennas, time, n = taps.shape
        member = nn.functional.one_hot(group, self.groups).to(taps.real.dtype)
        per_tap = torch.einsum("batn,basn->bnts", taps, taps.conj())
        covariance = torch.einsum("bnts,bng->bgts", per_tap, member.to(taps.dtype))
        power = covariance.diagonal(dim1=-2, dim2=-1).real.mean(-1)
        covariance = covariance / power.clamp(min=torch.finfo(power.dtype).tiny)[..., None, None]
        per_entry = power / member.sum(1).clamp(min=1)
        level = (per_entry / per_entry.amin(-1, keepdim=True).clamp(min=torch.finfo(power.dtype).tiny)).log10()
        share = (power / power.sum(-1, keepdim=True)).clamp(min=1e-8).log10()
        rows = torch.view_as_real(covariance).unflatten(2, (-1, self.patch)).flatten(3)
        scalars = torch.stack([level, share], -1)[:, :, None].expand(-1, -1, rows.shape[2], -1)
        encoded = self.encode(torch.cat([rows, scalars], -1)) + self.group[None, :, None] + self.position[None, :, 0]
        tokens = self.to_llm(encoded.transpose(1, 2).flatten(2))
        hidden = self.from_llm(self.norm(self.backbone(tokens)))
        hidden = hidden.unflatten(-1, (self.groups, -1)).transpose(1, 2)
        weights = self.decode(torch.cat([encoded, hidden], -1).flatten(2))
        weights = torch.view_as_complex(weights.unflatten(-1, (self.horizons, time, 2)).contiguous())
        last = torch.zeros_like(weights[0, 0])
        last[:, -1] = 1.0
        return weights + last


def _circular_window(power: Tensor, length: int) -> Tensor:
    """Energy of each circular window of `length` taps, indexed by its first tap, `[batch, tap]`."""
    wrapped = torch.cat([power, power[..., : length - 1]], -1)
    return wrapped.unfold(-1, length, 1).sum(-1)


def _set_tuning(backbone: nn.Module, tuning: Tuning, rank: int) -> None:
    if tuning not in ("norms", "lora", "frozen", "full"):
        raise UsageError(f"LLM: tuning must be norms, lora, frozen or full, not {tuning!r}.")
    if tuning == "lora":
        try:
            import peft
        except ImportError as error:
            raise MissingDependencyError("LoRA needs peft: pip install 'chanlab[llm]'") from error
        config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        peft.inject_adapter_in_model(config, backbone)
    for name, parameter in backbone.named_parameters():
        is_norm = "norm" in name.lower() or ".ln_" in name.lower()
        parameter.requires_grad_(tuning == "full" or (tuning != "frozen" and is_norm) or "lora_" in name)
