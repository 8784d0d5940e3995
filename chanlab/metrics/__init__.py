"""One definition of each metric: functions, torchmetrics classes that reduce over processes, bootstrap intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chanlab.metrics.bootstrap import Interval, bootstrap_interval
from chanlab.metrics.functional import NMSEReduction, nmse, nmse_by_step, nmse_terms, sgcs, to_db
from chanlab.metrics.images import ms_ssim, psnr, ssim
from chanlab.metrics.rates import (
    beam_gain_loss_db,
    beam_gain_ratio,
    beam_gains,
    mrt_precoder,
    multiuser_sinr,
    spectral_efficiency,
    sum_rate,
)

if TYPE_CHECKING:
    from chanlab.metrics.classes import NMSE, SGCS, BeamGainLoss, NMSEByStep, SpectralEfficiency
    from chanlab.metrics.image_classes import LPIPS, MSSSIM, PSNR, SSIM, DownstreamAccuracy
    from chanlab.metrics.perceptual import lpips

__all__ = [
    "LPIPS",
    "MSSSIM",
    "NMSE",
    "PSNR",
    "SGCS",
    "SSIM",
    "BeamGainLoss",
    "DownstreamAccuracy",
    "Interval",
    "NMSEByStep",
    "NMSEReduction",
    "SpectralEfficiency",
    "beam_gain_loss_db",
    "beam_gain_ratio",
    "beam_gains",
    "bootstrap_interval",
    "lpips",
    "mrt_precoder",
    "ms_ssim",
    "multiuser_sinr",
    "nmse",
    "nmse_by_step",
    "nmse_terms",
    "psnr",
    "sgcs",
    "spectral_efficiency",
    "ssim",
    "sum_rate",
    "to_db",
]


def __getattr__(name: str) -> Any:
    """The classes, when first asked for: torchmetrics takes seconds to import, and functions don't need it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from chanlab.metrics import classes, image_classes, perceptual

    return next(getattr(home, name) for home in (classes, image_classes, perceptual) if hasattr(home, name))
