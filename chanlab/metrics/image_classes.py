"""Image metrics as torchmetrics classes: means over images that don't depend on batches or processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from chanlab.errors import UsageError
from chanlab.metrics import images as F
from chanlab.metrics.classes import _Mean


class _ImageMean(_Mean):
    is_differentiable = False

    def _add(self, values: Tensor) -> None:
        self.total += values.detach().double().sum()
        self.count += values.numel()

    def compute(self) -> Tensor:
        """Mean over all images."""
        return self._mean()


class PSNR(_ImageMean):
    """`chanlab.metrics.psnr` over batches and processes: mean of the images' decibels [dB]."""

    higher_is_better = True

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Add images, both `[batch, channel, height, width]`, sent ones in [0, 1]."""
        self._add(F.psnr(prediction, target, "none"))


class SSIM(_ImageMean):
    """`chanlab.metrics.ssim` over batches and processes."""

    higher_is_better = True

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Add images, both `[batch, channel, height, width]`, sent ones in [0, 1]."""
        self._add(F.ssim(prediction, target, "none"))


class MSSSIM(_ImageMean):
    """`chanlab.metrics.ms_ssim` over batches and processes.

    Args:
        scales: As in `ms_ssim`.
        **kwargs: Of `torchmetrics.Metric`.
    """

    higher_is_better = True

    def __init__(self, scales: int = 5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scales = scales

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Add images, both `[batch, channel, height, width]`, sent ones in [0, 1]."""
        self._add(F.ms_ssim(prediction, target, self.scales, "none"))


class LPIPS(_ImageMean):
    """`chanlab.metrics.lpips` over batches and processes.

    Args:
        weights: As in `lpips`; they are looked for at once.
        **kwargs: Of `torchmetrics.Metric`.

    Raises:
        MissingDependencyError: If there are none.
    """

    higher_is_better = False

    def __init__(self, weights: str | Path | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        from chanlab.metrics.perceptual import lpips_network

        self.weights = None if weights is None else str(weights)
        lpips_network(self.weights)

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Add images, both `[batch, 3, height, width]`, sent ones in [0, 1]."""
        from chanlab.metrics.perceptual import lpips

        self._add(lpips(prediction, target, "none", self.weights))


class DownstreamAccuracy(_ImageMean):
    """Share of received images that a classifier puts into their class.

    Args:
        classifier: Gives scores `[batch, class]` of images `[batch, channel, height, width]` in [0, 1].
        **kwargs: Of `torchmetrics.Metric`.
    """

    higher_is_better = True

    def __init__(self, classifier: Callable[[Tensor], Tensor], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.classifier = classifier

    def update(self, prediction: Tensor, label: Tensor) -> None:
        """Add received images `[batch, channel, height, width]` and their classes, int64 `[batch]`."""
        scores = self.classifier(prediction)
        if scores.ndim != 2 or len(scores) != len(label):
            raise UsageError(
                f"the classifier must give scores [batch, class] of {len(label)} images, not {list(scores.shape)}."
            )
        self._add((scores.argmax(1) == label).double())
