"""Pictures of one scene that were taken for two: a codec tested on them has seen them in training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy.ndimage import gaussian_filter

from chanlab.jscc.pixels import Picture

THRESHOLD = 0.65
"""Correlation above which two pictures count as one scene."""

_SIDE = 48
_WINDOW = 32


def thumbnail(picture: Picture) -> npt.NDArray[np.float32]:
    """Luminance on 48 × 48 pixels without its large-scale part (Gaussian, σ = 4), float32 `[48, 48]`."""
    grey = Image.fromarray(picture).convert("L").resize((_SIDE, _SIDE), Image.Resampling.BOX)
    values = np.asarray(grey, np.float32)
    return np.asarray(values - gaussian_filter(values, 4.0), np.float32)


def near_duplicates(
    first: Sequence[npt.NDArray[np.float32]],
    second: Sequence[npt.NDArray[np.float32]],
    threshold: float = THRESHOLD,
) -> list[tuple[int, int, float]]:
    """Pairs of pictures that show the same scene, also shifted against each other by up to a sixth of a side.

    The middle two thirds of one thumbnail is correlated with all windows of the other. Copies at another size,
    neighbouring frames and stereo pairs are found (0.69 and more among the photographs of `datasets/photos.yaml`, where
    unrelated ones reach 0.62); two views from different places are not.

    Args:
        first: Thumbnails (`thumbnail`).
        second: Thumbnails to compare them with.
        threshold: Normalised correlation, -1 to 1.

    Returns:
        (index in `first`, index in `second`, correlation), the most alike first.
    """
    if not len(first) or not len(second):
        return []
    a, b = np.stack(first), np.stack(second)
    best = np.full((len(a), len(b)), -1.0, np.float32)
    middle = (_SIDE - _WINDOW) // 2
    centre_a, centre_b = _windows(a, middle, middle), _windows(b, middle, middle)
    for top in range(_SIDE - _WINDOW + 1):
        for left in range(_SIDE - _WINDOW + 1):
            np.maximum(best, centre_a @ _windows(b, top, left).T, out=best)
            np.maximum(best, _windows(a, top, left) @ centre_b.T, out=best)
    found = [(int(i), int(j), float(best[i, j])) for i, j in np.argwhere(best > threshold)]
    return sorted(found, key=lambda pair: -pair[2])


def _windows(x: npt.NDArray[np.float32], top: int, left: int) -> npt.NDArray[np.float32]:
    """Windows at one place, of mean 0 and length 1, `[picture, pixel]`."""
    flat = x[:, top : top + _WINDOW, left : left + _WINDOW].reshape(len(x), -1)
    flat = flat - flat.mean(1, keepdims=True)
    length = np.linalg.norm(flat, axis=1, keepdims=True)
    return np.asarray(flat / np.maximum(length, 1e-6), np.float32)
