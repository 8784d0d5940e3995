"""Predictors that tests name by class path."""

from pathlib import Path

import torch
from torch import Tensor, nn

from chanlab.csi.backbone import load_backbone
from chanlab.csi.predictor import normalise


class OnBackbone(nn.Module):
    """A frozen language model between two trained layers, over time."""

    def __init__(self, backbone: str, num_subcarriers: int = 8, horizons: int = 4, pretrained: bool = True) -> None:
        super().__init__()
        self.horizons = horizons
        self.backbone = load_backbone(backbone, layers=2, pretrained=pretrained)
        for name, parameter in self.backbone.named_parameters():
            parameter.requires_grad_("norm" in name)
        self.enter = nn.Linear(2 * num_subcarriers, self.backbone.width)
        self.leave = nn.Linear(self.backbone.width, horizons * 2 * num_subcarriers)

    def forward(self, history: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        x, scale = normalise(history)
        batch, num_rx, num_tx, _, num_subcarriers = x.shape
        tokens = self.enter(torch.view_as_real(x.flatten(0, 2)).flatten(-2))
        out = self.leave(self.backbone(tokens)[:, -1])
        out = torch.view_as_complex(out.reshape(batch, num_rx, num_tx, self.horizons, num_subcarriers, 2))
        return scale * (x[:, :, :, -1:] + out)


class Interrupted(nn.Module):
    """No prediction with one parameter; where a file `lost` lies, its n-th training step raises."""

    def __init__(self, fail_at: int = 0, horizons: int = 4) -> None:
        super().__init__()
        self.horizons = horizons
        self.gain = nn.Parameter(torch.ones(()))
        self.fail_at = fail_at
        self.steps = 0

    def forward(self, history: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        if self.training:
            self.steps += 1
            if self.steps == self.fail_at and Path("lost").exists():
                raise RuntimeError("the machine is lost")
        return self.gain * history[:, :, :, -1:].expand(-1, -1, -1, self.horizons, -1)
