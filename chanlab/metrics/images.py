"""Definitions of image-quality metrics as pure functions.

Images are float `[batch, channel, height, width]` in [0, 1], on any device. Each metric has one value per image; the
figure of a set is the mean over its images, for PSNR the mean of decibels.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as nn
from torch import Tensor

from chanlab.errors import UsageError
from chanlab.metrics.functional import check_finite

ImageReduction = Literal["mean", "none"]
"""`mean` over images, or `none`: one value per image, `[batch]`."""

SCALE_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
"""Exponents of MS-SSIM from the finest scale to the coarsest (Wang, Simoncelli and Bovik 2003, section 3.2)."""

_WINDOW = 11
_SIGMA = 1.5
_C1 = 0.01**2
_C2 = 0.03**2


def psnr(prediction: Tensor, target: Tensor, reduction: ImageReduction = "mean", validate: bool = True) -> Tensor:
    """Peak signal-to-noise ratio, -10 log10 of an image's mean squared error over all its values [dB].

    Args:
        prediction: Received images, `[batch, channel, height, width]`, taken as they are: neither clipped nor rounded.
        target: Sent images in [0, 1], same shape.
        reduction: `mean` of the images' decibels, or `none`.
        validate: Check shapes and values; costs a synchronisation on a GPU.

    Returns:
        A number, or `[batch]`; infinite for an image received without any error.

    Raises:
        UsageError: If shapes differ, or images aren't in [0, 1].
    """
    if validate:
        check_images(prediction, target)
    error = (prediction - target).square().flatten(1).double().mean(1)
    return _reduced(-10.0 * torch.log10(error), reduction)


def ssim(prediction: Tensor, target: Tensor, reduction: ImageReduction = "mean", validate: bool = True) -> Tensor:
    """Structural similarity (Wang, Bovik, Sheikh and Simoncelli 2004): mean over all windows and channels.

    Windows are Gaussian, 11x11 with σ = 1.5, and lie within the image: as their authors' code, and scikit-image's with
    `gaussian_weights=True, use_sample_covariance=False`. Others pad the image and get other values along its borders.

    Args:
        prediction: Received images, `[batch, channel, height, width]`.
        target: Sent images in [0, 1], same shape.
        reduction: `mean` over images, or `none`.
        validate: Check shapes and values; costs a synchronisation on a GPU.

    Raises:
        UsageError: As `psnr`, or if a side is shorter than 11 pixels.
    """
    if validate:
        check_images(prediction, target)
    if min(target.shape[-2:]) < _WINDOW:
        raise UsageError(f"SSIM needs images of at least {_WINDOW}x{_WINDOW} pixels, not {_size(target)}.")
    similarity, _ = _similarity(prediction, target)
    return _reduced(similarity.mean(1), reduction)


def ms_ssim(
    prediction: Tensor,
    target: Tensor,
    scales: int = 5,
    reduction: ImageReduction = "mean",
    validate: bool = True,
) -> Tensor:
    """Multi-scale structural similarity (Wang, Simoncelli and Bovik 2003).

    The contrast and structure terms of each scale and the similarity at the coarsest one, with exponents
    `SCALE_WEIGHTS`; negative terms count as 0. Images are halved by averaging 2x2 pixels. Multiplied per channel, then
    averaged over channels, as TensorFlow's and pytorch-msssim.

    Args:
        prediction: Received images, `[batch, channel, height, width]`.
        target: Sent images in [0, 1], same shape.
        scales: Number of scales, 5 as published; with fewer the exponents are scaled to add up to 1, and
            values of different numbers of scales don't compare.
        reduction: `mean` over images, or `none`.
        validate: Check shapes and values; costs a synchronisation on a GPU.

    Raises:
        UsageError: As `psnr`, or if an image is too small for so many scales: 176 pixels for 5, 88 for 4, 44 for 3.
    """
    if not 1 <= scales <= len(SCALE_WEIGHTS):
        raise UsageError(f"scales must be 1 to {len(SCALE_WEIGHTS)}, not {scales}.")
    if validate:
        check_images(prediction, target)
    fitting = fitting_scales(min(target.shape[-2:]))
    if fitting < scales:
        least = _WINDOW << (scales - 1)
        remedy = f"take scales={fitting}" if fitting else "take larger images"
        raise UsageError(
            f"MS-SSIM with {scales} scales needs images from {least}x{least} pixels on, not {_size(target)}: {remedy}."
        )
    weights = list(SCALE_WEIGHTS[:scales])
    if scales < len(SCALE_WEIGHTS):
        weights = [weight / sum(weights) for weight in weights]
    product = torch.ones((), device=target.device)
    for scale, weight in enumerate(weights):
        similarity, contrast = _similarity(prediction, target)
        last = scale == scales - 1
        term = similarity if last else contrast
        positive = term > 0  # two steps, since the power's gradient at 0 is infinite
        product = product * torch.where(positive, torch.where(positive, term, 1.0) ** weight, 0.0)
        if not last:
            prediction, target = nn.avg_pool2d(prediction, 2), nn.avg_pool2d(target, 2)
    return _reduced(product.mean(1), reduction)


def fitting_scales(side: int) -> int:
    """Scales of `ms_ssim`, 0 to 5, that images fit whose shorter side has so many pixels."""
    return sum(side >> scale >= _WINDOW for scale in range(len(SCALE_WEIGHTS)))


def check_images(prediction: Tensor, target: Tensor) -> None:
    """Check that received images can be compared with sent ones.

    Raises:
        UsageError: If shapes differ or aren't `[batch, channel, height, width]`, values aren't real and finite, or sent
            ones lie outside [0, 1].
    """
    if prediction.shape != target.shape or target.ndim != 4 or not target.numel():
        raise UsageError(
            f"prediction has shape {list(prediction.shape)}, target {list(target.shape)}; both must be "
            "[batch, channel, height, width], the same and not empty."
        )
    if not (prediction.is_floating_point() and target.is_floating_point()):
        raise UsageError(f"images must be floats in [0, 1], not {prediction.dtype} and {target.dtype}: divide by 255.")
    check_finite("prediction", prediction)
    low, high = (float(x) for x in torch.aminmax(target))
    if low < 0 or high > 1:
        raise UsageError(f"sent images must lie in [0, 1], these in [{low:g}, {high:g}]: divide 8-bit values by 255.")


def _similarity(prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Similarity, and its contrast and structure terms alone, averaged over windows, `[batch, channel]` each."""
    channels = target.shape[1]
    position = torch.arange(_WINDOW, dtype=target.dtype, device=target.device) - _WINDOW // 2
    window = torch.exp(-0.5 * (position / _SIGMA).square())
    window = (window / window.sum()).expand(channels, 1, -1)

    def filtered(x: Tensor) -> Tensor:
        return nn.conv2d(nn.conv2d(x, window[..., None], groups=channels), window[..., None, :], groups=channels)

    moments = torch.cat([prediction, target, prediction.square(), target.square(), prediction * target])
    mean_p, mean_t, square_p, square_t, product = filtered(moments).chunk(5)
    variance = square_p - mean_p.square() + square_t - mean_t.square()
    covariance = product - mean_p * mean_t
    contrast = (2 * covariance + _C2) / (variance + _C2)
    luminance = (2 * mean_p * mean_t + _C1) / (mean_p.square() + mean_t.square() + _C1)
    return (luminance * contrast).mean((-2, -1)), contrast.mean((-2, -1))


def _reduced(values: Tensor, reduction: ImageReduction) -> Tensor:
    if reduction not in ("mean", "none"):
        raise UsageError(f"reduction must be mean or none, not {reduction!r}.")
    return values.mean() if reduction == "mean" else values


def _size(images: Tensor) -> str:
    return f"{images.shape[-2]}x{images.shape[-1]}"
