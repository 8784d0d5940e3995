"""A small image classifier, to ask what received images are still good for."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from chanlab.errors import UsageError
from chanlab.jscc.image_crops import ImageBatch
from chanlab.schedule import warmup_cosine

_WARMUP = 0.3  # of the steps


class ImageClassifier(LightningModule):
    """Residual network of ten convolutions for images from 32×32 on (0.5 million parameters), trained on clean ones.

    `chanlab.metrics.DownstreamAccuracy(classifier)` counts how many received images it still puts into their class.

    Args:
        classes: Number of classes.
        width: Channels of the first stage; each of the next two has twice as many.
        lr: Peak learning rate of AdamW: reached after three tenths of the steps, then along a cosine to 0.
        weight_decay: Of AdamW.

    Raises:
        UsageError: In training, if images have no labels.
    """

    def __init__(self, classes: int = 10, width: int = 32, lr: float = 2e-3, weight_decay: float = 5e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.weight_decay = weight_decay
        self.stem = _convolution(3, width)
        self.stages = nn.Sequential(_Stage(width, width), _Stage(width, 2 * width), _Stage(2 * width, 4 * width))
        self.scores = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Scores `[batch, class]` of images `[batch, 3, height, width]` in [0, 1]."""
        x: Tensor = self.scores(self.stages(self.stem(2 * images - 1)).mean((-2, -1)))
        return x

    def training_step(self, batch: ImageBatch, batch_idx: int) -> Tensor:
        """Cross entropy."""
        loss = F.cross_entropy(self(batch["image"]), _labels(batch))
        self.log("train/loss", loss, batch_size=len(batch["id"]))
        return loss

    def validation_step(self, batch: ImageBatch, batch_idx: int) -> None:
        """Logs `val/accuracy`."""
        self._score(batch, "val")

    def test_step(self, batch: ImageBatch, batch_idx: int) -> None:
        """Logs `test/accuracy`."""
        self._score(batch, "test")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Sets the learning rate from the number of steps done and to come."""
        factor = warmup_cosine(self.trainer.global_step, self.trainer.estimated_stepping_batches, _WARMUP)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = self.lr * factor

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)

    def _score(self, batch: ImageBatch, split: str) -> None:
        right = (self(batch["image"]).argmax(1) == _labels(batch)).float().mean()
        self.log(f"{split}/accuracy", right, prog_bar=True, batch_size=len(batch["id"]), sync_dist=True)


class _Stage(nn.Module):
    """A convolution, halving, and a residual block of two."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.first = nn.Sequential(_convolution(channels, out), nn.MaxPool2d(2))
        self.residual = nn.Sequential(_convolution(out, out), _convolution(out, out))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.residual(x)  # type: ignore[no-any-return]


def _convolution(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU())


def _labels(batch: ImageBatch) -> Tensor:
    if "label" not in batch:
        raise UsageError("these images have no classes: take CIFAR-10, or labels='folder' with a folder of each class.")
    return batch["label"]
