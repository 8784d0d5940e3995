"""What a CSI prediction is worth on a link: multi-user precoding, spectral efficiency, coded block errors."""

from chanlab.link.codedlink import BlerResult, CodedLink, Transmission
from chanlab.link.ensemble import (
    NO_PREDICTION,
    PERFECT,
    CSIEnsemble,
    CSIPredictor,
    Windows,
    collect,
    group_users,
)
from chanlab.link.evaluate import evaluate_csi, evaluate_ensemble
from chanlab.link.precoding import PrecoderName, effective_gain, mrt, precode, regularised_zero_forcing
from chanlab.link.predictions import read_predictions

__all__ = [
    "NO_PREDICTION",
    "PERFECT",
    "BlerResult",
    "CSIEnsemble",
    "CSIPredictor",
    "CodedLink",
    "PrecoderName",
    "Transmission",
    "Windows",
    "collect",
    "effective_gain",
    "evaluate_csi",
    "evaluate_ensemble",
    "group_users",
    "mrt",
    "precode",
    "read_predictions",
    "regularised_zero_forcing",
]
