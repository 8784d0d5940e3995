"""One definition of each metric: functions, torchmetrics classes that reduce over processes, bootstrap intervals."""

from chanlab.metrics.bootstrap import Interval, bootstrap_interval
from chanlab.metrics.classes import NMSE, SGCS, BeamGainLoss, NMSEByStep, SpectralEfficiency
from chanlab.metrics.functional import NMSEReduction, nmse, nmse_by_step, nmse_terms, sgcs, to_db
from chanlab.metrics.rates import (
    beam_gain_loss_db,
    beam_gain_ratio,
    beam_gains,
    mrt_precoder,
    multiuser_sinr,
    spectral_efficiency,
    sum_rate,
)

__all__ = [
    "NMSE",
    "SGCS",
    "BeamGainLoss",
    "Interval",
    "NMSEByStep",
    "NMSEReduction",
    "SpectralEfficiency",
    "beam_gain_loss_db",
    "beam_gain_ratio",
    "beam_gains",
    "bootstrap_interval",
    "mrt_precoder",
    "multiuser_sinr",
    "nmse",
    "nmse_by_step",
    "nmse_terms",
    "sgcs",
    "spectral_efficiency",
    "sum_rate",
    "to_db",
]
