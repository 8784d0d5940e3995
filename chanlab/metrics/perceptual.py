"""LPIPS: distance of images in the features of a network trained on ImageNet.

Weights can't be trained here: torchmetrics ships those of the distance, the user brings those of AlexNet.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torchmetrics
from torch import Tensor, nn

from chanlab.errors import MissingDependencyError, UsageError
from chanlab.metrics.images import ImageReduction, check_images

BACKBONE = "alexnet-owt-7be5be79.pth"
"""torchvision's file of AlexNet's weights (`AlexNet_Weights.IMAGENET1K_V1`)."""

_CONVOLUTIONS = (0, 3, 6, 8, 10)
_MEAN = (-0.030, -0.088, -0.188)
_DEVIATION = (0.458, 0.448, 0.450)


class LPIPSNetwork(nn.Module):
    """Learned perceptual image patch similarity with AlexNet, version 0.1 (Zhang et al., arXiv 1801.03924).

    Features of five convolutions, normalised over channels; squared differences weighted per channel, averaged over the
    image and added up.

    Args:
        weights: AlexNet's weights, a state dict (`.pth` or `.safetensors`) with torchvision's names
            `features.0.weight` ...; None: `alexnet-owt-7be5be79.pth` in PyTorch's hub folder, where torchvision keeps
            it.

    Raises:
        MissingDependencyError: If there are no weights; the message says where to put them.
        UsageError: If the weights are others.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, weights: str | Path | None = None) -> None:
        super().__init__()
        self.features = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU()),
                nn.Sequential(nn.MaxPool2d(3, 2), nn.Conv2d(64, 192, 5, padding=2), nn.ReLU()),
                nn.Sequential(nn.MaxPool2d(3, 2), nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
                nn.Sequential(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
                nn.Sequential(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU()),
            ]
        )
        state = _backbone_weights(weights)
        for stage, place in zip(self.features, _CONVOLUTIONS, strict=True):
            convolution = next(m for m in stage.modules() if isinstance(m, nn.Conv2d))
            try:
                convolution.load_state_dict({k: state[f"features.{place}.{k}"] for k in ("weight", "bias")})
            except (KeyError, RuntimeError) as error:
                raise UsageError(f"{weights or BACKBONE} doesn't hold AlexNet's features.{place}: {error}") from error
        path = Path(torchmetrics.__file__).parent / "functional" / "image" / "lpips_models" / "alex.pth"
        heads = torch.load(path, map_location="cpu", weights_only=True)
        self.heads = nn.ParameterList([heads[f"lin{i}.model.1.weight"].flatten() for i in range(len(_CONVOLUTIONS))])
        self.register_buffer("shift", torch.tensor(_MEAN)[:, None, None], persistent=False)
        self.register_buffer("scale", torch.tensor(_DEVIATION)[:, None, None], persistent=False)
        self.requires_grad_(False).eval()

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Distance of each pair of images in [0, 1], float32 `[batch]`."""
        x = (torch.cat([prediction, target]) * 2 - 1 - self.shift) / self.scale
        distance = torch.zeros(len(target), device=target.device)
        for stage, head in zip(self.features, self.heads, strict=True):
            x = stage(x)
            unit = x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10)
            difference = (unit[: len(target)] - unit[len(target) :]).square()
            distance = distance + torch.einsum("bchw,c->bhw", difference, head).mean((1, 2))
        return distance


def lpips(
    prediction: Tensor,
    target: Tensor,
    reduction: ImageReduction = "mean",
    weights: str | Path | None = None,
    validate: bool = True,
) -> Tensor:
    """Learned perceptual image patch similarity, AlexNet; lower is better.

    Args:
        prediction: Received images, `[batch, 3, height, width]`.
        target: Sent images in [0, 1], same shape.
        reduction: `mean` over images, or `none`.
        weights: As `LPIPSNetwork`.
        validate: Check shapes and values; costs a synchronisation on a GPU.

    Raises:
        MissingDependencyError: If there are no weights; the message says where to put them.
        UsageError: If images don't fit, or a side is shorter than 31 pixels.
    """
    if validate:
        check_images(prediction, target)
    if target.shape[1] != 3 or min(target.shape[-2:]) < 31:
        raise UsageError(f"LPIPS needs three channels and at least 31x31 pixels, not {list(target.shape[1:])}.")
    values: Tensor = lpips_network(None if weights is None else str(weights)).to(target.device)(prediction, target)
    return values.mean() if reduction == "mean" else values


@functools.cache
def lpips_network(weights: str | None = None) -> LPIPSNetwork:
    """The network of `lpips`, loaded once; see `LPIPSNetwork`."""
    return LPIPSNetwork(weights)


def _backbone_weights(weights: str | Path | None) -> dict[str, Tensor]:
    path = Path(torch.hub.get_dir()) / "checkpoints" / BACKBONE if weights is None else Path(weights)
    if not path.is_file():
        raise MissingDependencyError(
            f"LPIPS needs AlexNet's ImageNet weights, and there is no {path}: copy torchvision's {BACKBONE} there "
            '(`torchvision.models.alexnet(weights="IMAGENET1K_V1")` fetches it), or name the file with weights=.'
        )
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises what its reader and its unpickler come across
        raise UsageError(f"{path} can't be read as a state dict ({error}): copy it anew.") from error
    return dict(state)
