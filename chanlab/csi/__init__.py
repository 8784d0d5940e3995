"""CSI prediction: predictors behind one protocol, and the LightningModule that trains them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chanlab.csi.ar import AR
    from chanlab.csi.baselines import NoPrediction
    from chanlab.csi.class_genie import ClassGenie, PortwiseGenie, RayClass, ray_class
    from chanlab.csi.cnn import CNN
    from chanlab.csi.doppler_codebook import DopplerCodebook
    from chanlab.csi.esprit import ESPRIT
    from chanlab.csi.gru import GRU
    from chanlab.csi.kalman import VectorKalman
    from chanlab.csi.learned_wiener import CachedPrediction, LearnedWiener
    from chanlab.csi.llm import LLM
    from chanlab.csi.llm4cp import LLM4CP
    from chanlab.csi.matrix_pencil import MatrixPencil
    from chanlab.csi.module import CSIPredictionModule, load_predictor
    from chanlab.csi.pad import PAD
    from chanlab.csi.per_band import PerBand
    from chanlab.csi.predictor import Predictor, is_trainable
    from chanlab.csi.protocol_evaluation import (
        ProtocolResult,
        evaluate_protocol,
        few_cells,
        join_results,
        protocol_records,
    )
    from chanlab.csi.ray_pursuit import RayPursuit
    from chanlab.csi.rnn import RNN
    from chanlab.csi.softs import SOFTS
    from chanlab.csi.student_t import ComplexStudentT
    from chanlab.csi.transformer import Transformer
    from chanlab.csi.weights import load_weights, save_weights, trained_state
    from chanlab.csi.wifo import WiFo
    from chanlab.csi.writer import PredictionWriter, WeightsWriter

_HOMES = {
    "AR": "ar",
    "ClassGenie": "class_genie",
    "PortwiseGenie": "class_genie",
    "RayClass": "class_genie",
    "RayPursuit": "ray_pursuit",
    "ray_class": "class_genie",
    "CNN": "cnn",
    "CSIPredictionModule": "module",
    "CachedPrediction": "learned_wiener",
    "ComplexStudentT": "student_t",
    "DopplerCodebook": "doppler_codebook",
    "ESPRIT": "esprit",
    "GRU": "gru",
    "LLM": "llm",
    "LearnedWiener": "learned_wiener",
    "LLM4CP": "llm4cp",
    "MatrixPencil": "matrix_pencil",
    "NoPrediction": "baselines",
    "PAD": "pad",
    "PerBand": "per_band",
    "PredictionWriter": "writer",
    "Predictor": "predictor",
    "ProtocolResult": "protocol_evaluation",
    "RNN": "rnn",
    "SOFTS": "softs",
    "Transformer": "transformer",
    "VectorKalman": "kalman",
    "WeightsWriter": "writer",
    "WiFo": "wifo",
    "evaluate_protocol": "protocol_evaluation",
    "few_cells": "protocol_evaluation",
    "is_trainable": "predictor",
    "join_results": "protocol_evaluation",
    "load_predictor": "module",
    "load_weights": "weights",
    "protocol_records": "protocol_evaluation",
    "save_weights": "weights",
    "trained_state": "weights",
}

__all__ = [
    "AR",
    "CNN",
    "ESPRIT",
    "GRU",
    "LLM",
    "LLM4CP",
    "PAD",
    "RNN",
    "SOFTS",
    "CSIPredictionModule",
    "CachedPrediction",
    "ClassGenie",
    "ComplexStudentT",
    "DopplerCodebook",
    "LearnedWiener",
    "MatrixPencil",
    "NoPrediction",
    "PerBand",
    "PortwiseGenie",
    "PredictionWriter",
    "Predictor",
    "ProtocolResult",
    "RayClass",
    "RayPursuit",
    "Transformer",
    "VectorKalman",
    "WeightsWriter",
    "WiFo",
    "evaluate_protocol",
    "few_cells",
    "is_trainable",
    "join_results",
    "load_predictor",
    "load_weights",
    "protocol_records",
    "ray_class",
    "save_weights",
    "trained_state",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
