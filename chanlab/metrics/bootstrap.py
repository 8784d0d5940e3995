"""Bootstrap intervals over channel realisations."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chanlab.errors import UsageError

Values = npt.ArrayLike | Tensor
"""Anything that becomes a one-dimensional array: list, NumPy array, tensor on any device."""


class Interval(NamedTuple):
    """A figure with its bootstrap percentile interval.

    Attributes:
        value: The statistic on all data.
        low: Lower end.
        high: Upper end.
        deviation: Standard deviation of the resampled statistic.
    """

    value: float
    low: float
    high: float
    deviation: float


def bootstrap_interval(
    values: Values,
    denominators: Values | None = None,
    groups: Values | None = None,
    statistic: Literal["mean", "median"] = "mean",
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
    strata: Values | None = None,
) -> Interval:
    """Percentile interval of a mean, a ratio of sums or a median, resampling independent channel realisations.

    Windows of one trajectory see the same scatterers: they aren't independent, so that whole groups (sample ids) are
    resampled. With `denominators` the statistic is Σ values / Σ denominators, the pooled NMSE when both come from
    `nmse_terms`; without, the mean or median of `values`.

    Args:
        values: `[n]`: ratios, or numerators.
        denominators: `[n]`, for a ratio of sums.
        groups: `[n]`: the realisation (sample or trajectory id) of each value; None: every value is its own.
        statistic: `mean` or `median`; a ratio of sums is a `mean`.
        confidence: Probability inside the interval.
        resamples: Number of bootstrap samples.
        seed: Seed of the resampling.
        strata: `[n]`: the kind of channel of each value, where the data hold a set number of realisations of each: they
            are then resampled within their kind. A group lies in one stratum.

    Returns:
        An `Interval`, linear; `to_db` of its ends is the interval in dB.

    Raises:
        UsageError: If lengths differ, values aren't finite, there are fewer than two groups, or the median is asked of
            a ratio of sums.
    """
    x = _vector(values, "values")
    y = np.ones_like(x) if denominators is None else _vector(denominators, "denominators")
    keys = np.arange(x.size) if groups is None else _vector(groups, "groups")
    if not x.size == y.size == keys.size:
        raise UsageError(
            f"values, denominators and groups have lengths {x.size}, {y.size}, {keys.size}: they must agree."
        )
    if not 0 < confidence < 1 or resamples < 1:
        raise UsageError("confidence must lie between 0 and 1, and resamples must be at least 1.")
    names, index = np.unique(keys, return_inverse=True)
    if names.size < 2:
        raise UsageError(f"a bootstrap needs at least two independent realisations, got {names.size}.")
    draw = _Draw(names.size, index, strata, np.random.default_rng(seed))
    if statistic == "median":
        if denominators is not None:
            raise UsageError("statistic='median' takes ratios as values and no denominators.")
        value, drawn = float(np.median(x)), _medians(x, index, names.size, resamples, draw)
    elif statistic == "mean":
        top, bottom = _group_sums(index, x), _group_sums(index, y)
        if bottom.sum() <= 0:
            raise UsageError("the denominators sum to zero: the ratio is undefined.")
        value, drawn = float(top.sum() / bottom.sum()), _ratios(top, bottom, resamples, draw)
    else:
        raise UsageError(f"statistic must be 'mean' or 'median', not {statistic!r}.")
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(value, float(low), float(high), float(drawn.std()))


class _Draw:
    """Draws groups with replacement, as many as there are, within strata if there are any."""

    def __init__(
        self, groups: int, index: npt.NDArray[np.intp], strata: Values | None, rng: np.random.Generator
    ) -> None:
        self.groups = groups
        self.rng = rng
        self.order: npt.NDArray[np.intp] | None = None
        if strata is None:
            return
        kinds = _vector(strata, "groups")
        if kinds.size != index.size:
            raise UsageError(f"values and strata have lengths {index.size} and {kinds.size}: they must agree.")
        _, kind = np.unique(kinds, return_inverse=True)
        of_group = np.empty(groups, np.intp)
        of_group[index] = kind
        if (of_group[index] != kind).any():
            raise UsageError("a group lies in more than one stratum: resampling it has no meaning.")
        self.order = np.argsort(of_group, kind="stable")
        count = np.bincount(of_group)
        start = np.cumsum(count) - count
        self.start, self.count = start[of_group[self.order]], count[of_group[self.order]]

    def __call__(self) -> npt.NDArray[np.intp]:
        if self.order is None:
            return self.rng.integers(0, self.groups, self.groups)
        chosen = self.start + (self.rng.random(self.groups) * self.count).astype(np.intp)
        picked: npt.NDArray[np.intp] = self.order[chosen]
        return picked


def _vector(values: Values, name: str) -> npt.NDArray[Any]:
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.ndim != 1 or not array.size:
        raise UsageError(f"{name} must be a non-empty vector, got shape {list(array.shape)}.")
    if name != "groups":
        array = array.astype(np.float64)
        if not np.isfinite(array).all():
            raise UsageError(f"{name} holds NaN or infinity.")
    return array


def _group_sums(index: npt.NDArray[np.intp], x: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    return np.bincount(index, weights=x).astype(np.float64)


def _ratios(
    top: npt.NDArray[np.float64], bottom: npt.NDArray[np.float64], resamples: int, draw: _Draw
) -> npt.NDArray[np.float64]:
    drawn = np.empty(resamples)
    for i in range(resamples):
        chosen = draw()
        drawn[i] = top[chosen].sum() / bottom[chosen].sum()
    return drawn


def _medians(
    x: npt.NDArray[np.float64], index: npt.NDArray[np.intp], groups: int, resamples: int, draw: _Draw
) -> npt.NDArray[np.float64]:
    order = np.argsort(x, kind="stable")
    ascending, owner = x[order], index[order].astype(np.int32)
    drawn = np.empty(resamples)
    for i in range(resamples):
        # How often each value is drawn, added up in ascending order: where that passes the middle stands the median.
        upto = np.bincount(draw(), minlength=groups).astype(np.int32)[owner].cumsum(dtype=np.int64)
        middle = [(upto[-1] + 1) // 2, upto[-1] // 2 + 1]
        drawn[i] = ascending[np.searchsorted(upto, middle)].mean()
    return drawn
