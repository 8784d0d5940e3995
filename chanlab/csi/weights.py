"""Weights of predictors as small files: `chanlab.weights`, under the name that CSI prediction knows it by."""

from __future__ import annotations

from chanlab.weights import load_weights, save_weights, trained_state

__all__ = ["load_weights", "save_weights", "trained_state"]
