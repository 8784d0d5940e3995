"""Definitions of channel-prediction metrics as pure functions.

Tensors are `[batch, rx_ant, tx_ant, time, subcarrier]` unless a function says otherwise, complex (or real), on any
device. Targets carry no noise: with a noisy target no error can fall below the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from chanlab.errors import UsageError

NMSEReduction = Literal["pooled", "per_sample", "per_antenna_step", "median"]
"""How ratios of error to power become one figure; see `nmse`."""

TIME_AXIS = -2
"""Axis of time (history, horizon) in `[batch, rx_ant, tx_ant, time, subcarrier]`."""


def to_db(ratio: Tensor | float) -> Tensor:
    """A power ratio in decibels, 10 log10(ratio): take it of the mean, never average decibels.

    Args:
        ratio: Non-negative ratio of powers, any shape; 0 gives -inf.
    """
    return 10.0 * torch.log10(torch.as_tensor(ratio))


def median(values: Tensor, dim: int = 0) -> Tensor:
    """Median along an axis; with an even count the mean of the two middle values (unlike `torch.median`)."""
    ordered = values.sort(dim).values
    n = values.shape[dim]
    return (ordered.select(dim, (n - 1) // 2) + ordered.select(dim, n // 2)) / 2


def check_pair(prediction: Tensor, target: Tensor, min_axes: int = 1) -> None:
    """Check that a prediction can be compared with a target.

    Raises:
        UsageError: If shapes differ, axes are missing, a tensor is empty, or entries are NaN or infinite.
    """
    if prediction.shape != target.shape:
        raise UsageError(
            f"prediction has shape {list(prediction.shape)}, target {list(target.shape)}; they must agree "
            "(axes [batch, rx_ant, tx_ant, time, subcarrier])."
        )
    if target.ndim < min_axes:
        raise UsageError(f"this metric needs at least {min_axes} axes, the tensors have shape {list(target.shape)}.")
    if target.numel() == 0:
        raise UsageError(f"nothing to compare: the tensors are empty, shape {list(target.shape)}.")
    for name, tensor in (("prediction", prediction), ("target", target)):
        check_finite(name, tensor)


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise `UsageError` if a tensor holds NaN or infinity."""
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        raise UsageError(
            f"{name} holds {bad} of {tensor.numel()} entries that are NaN or infinite; no metric is defined on them."
        )


def _square(x: Tensor) -> Tensor:
    return x.real.square() + x.imag.square() if x.is_complex() else x.square()


def nmse_terms(
    prediction: Tensor, target: Tensor, dim: int | Sequence[int] | None = None, validate: bool = True
) -> tuple[Tensor, Tensor]:
    """Squared error Σ|ĥ - h|² and power Σ|h|², the numerator and denominator of every NMSE.

    Args:
        prediction: ĥ, `[batch, ...]`.
        target: h, `[batch, ...]`.
        dim: Axes over which both are summed; None: all but the first, which leaves one pair per sample.
        validate: Check shapes and values; costs a synchronisation on a GPU.

    Returns:
        Error and power, real, the shape of the axes that are left. Fit for `bootstrap_interval`.

    Raises:
        UsageError: If shapes differ or entries are not finite.
    """
    if validate:
        check_pair(prediction, target)
    axes = _axes(dim, target.ndim) if dim is not None else tuple(range(1, target.ndim))
    error, power = _square(prediction - target), _square(target)
    return (error.sum(axes), power.sum(axes)) if axes else (error, power)


def nmse(
    prediction: Tensor,
    target: Tensor,
    reduction: NMSEReduction = "pooled",
    dim: int | Sequence[int] | None = None,
    validate: bool = True,
) -> Tensor:
    """Normalised mean squared error, linear.

    - `pooled`: Σ|e|² / Σ|h|² over everything: one ratio.
    - `per_sample`: one ratio per entry of the first axis, then their mean.
    - `per_antenna_step`: one ratio over subcarriers per sample, antenna pair and step, then their mean (as in
      CSI-4CAST, arXiv 2510.12996). Under fading these ratios are heavy-tailed: show pooled and median beside.
    - `median`: the median of the ratios per sample.

    Args:
        prediction: ĥ, `[batch, rx_ant, tx_ant, time, subcarrier]` (any axes after the first, if `dim` is given).
        target: h, noiseless, same shape.
        reduction: As above.
        dim: Axes summed inside each ratio, in place of the default of `per_sample`, `per_antenna_step` and `median`.
        validate: Check shapes and values; costs a synchronisation on a GPU, so that a training loss may leave it out.

    Returns:
        A real scalar; `to_db` of it is the figure in dB. Differentiable.

    Raises:
        UsageError: If shapes differ, entries are not finite, a ratio's target has no power, or `pooled` is given `dim`.
    """
    axes = ratio_axes(reduction, dim, target.ndim)
    error, power = nmse_terms(prediction, target, axes, validate)
    if validate:
        check_power(power)
    ratio = error / power
    return median(ratio.flatten()) if reduction == "median" else ratio.mean()


def nmse_by_step(
    prediction: Tensor,
    target: Tensor,
    reduction: NMSEReduction = "pooled",
    time_dim: int = TIME_AXIS,
    validate: bool = True,
) -> Tensor:
    """NMSE at each step of the horizon: `nmse` of every step alone.

    Args:
        prediction: ĥ, `[batch, rx_ant, tx_ant, time, subcarrier]`.
        target: h, noiseless, same shape.
        reduction: As in `nmse`; `per_sample` and `median` take ratios per sample and step.
        time_dim: The axis of steps.
        validate: Check shapes and values.

    Returns:
        Real, `[time]`, linear. Its mean equals `nmse` for `per_antenna_step` only.

    Raises:
        UsageError: As `nmse`.
    """
    error, power = step_terms(prediction, target, reduction, time_dim, validate)
    if validate:
        check_power(power)
    ratio = error / power
    return median(ratio) if reduction == "median" else ratio.mean(0)


def step_terms(
    prediction: Tensor, target: Tensor, reduction: NMSEReduction, time_dim: int = TIME_AXIS, validate: bool = True
) -> tuple[Tensor, Tensor]:
    """Error and power of each ratio by step, both `[ratio, time]` (one ratio if pooled)."""
    if validate:
        check_pair(prediction, target, min_axes=3)
    error, power = (_square(x).movedim(time_dim, 1) for x in (prediction - target, target))
    axes = {"pooled": (0, *range(2, error.ndim)), "per_antenna_step": (-1,)}.get(reduction, tuple(range(2, error.ndim)))
    check_reduction(reduction)
    error, power = error.sum(axes), power.sum(axes)
    if reduction == "pooled":
        return error[None], power[None]
    return tuple(x.movedim(1, -1).flatten(0, -2) for x in (error, power))  # type: ignore[return-value]


def sgcs(
    prediction: Tensor,
    target: Tensor,
    dim: int | Sequence[int] = (-4, -3),
    by_step: bool = False,
    validate: bool = True,
) -> Tensor:
    """Squared generalised cosine similarity |h^H ĥ|² / (‖h‖² ‖ĥ‖²), averaged; 1 is perfect.

    The vectors run over the axes `dim`, by default all antenna pairs; there is one per sample, step and subcarrier. The
    value doesn't change when a vector is scaled or turned in phase, as a precoder's use of it doesn't either (the
    intermediate metric of 3GPP TR 38.843, there on precoding vectors per sub-band). A zero prediction counts 0.

    Args:
        prediction: ĥ, `[batch, rx_ant, tx_ant, time, subcarrier]`.
        target: h, same shape.
        dim: Axes of the vector: (-4, -3) antenna pairs, -3 transmit antennas only.
        by_step: Leave the axis of time (-2).
        validate: Check shapes and values.

    Returns:
        Real scalar in [0, 1], or `[time]`.

    Raises:
        UsageError: If shapes differ, entries are not finite, or a target vector has no power.
    """
    similarity = sgcs_values(prediction, target, dim, validate)
    return similarity.mean((*range(similarity.ndim - 2), -1)) if by_step else similarity.mean()


def sgcs_values(
    prediction: Tensor, target: Tensor, dim: int | Sequence[int] = (-4, -3), validate: bool = True
) -> Tensor:
    """SGCS of every vector, `[batch, (antennas not in dim), time, subcarrier]`; see `sgcs`."""
    if validate:
        check_pair(prediction, target, min_axes=3)
    axes = _axes(dim, target.ndim)
    power = _square(target).sum(axes)
    if validate:
        check_power(power)
    predicted = _square(prediction).sum(axes)
    inner = _square((target.conj() * prediction).sum(axes))
    found = predicted > 0
    similarity = inner / (power * torch.where(found, predicted, torch.ones_like(predicted)))
    return torch.where(found, similarity, torch.zeros_like(similarity)).clamp(max=1.0)


def check_reduction(reduction: str) -> None:
    """Raise `UsageError` if this is no `NMSEReduction`."""
    known = get_args(NMSEReduction)
    if reduction not in known:
        raise UsageError(f"NMSE reduction {reduction!r} is unknown; use one of {', '.join(known)}.")


def ratio_axes(reduction: NMSEReduction, dim: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Axes summed inside each ratio of `nmse`."""
    check_reduction(reduction)
    if reduction == "pooled":
        if dim is not None:
            raise UsageError("NMSE 'pooled' sums over every axis: leave out dim, or take reduction='per_sample'.")
        return tuple(range(ndim))
    if dim is not None:
        return _axes(dim, ndim)
    return (ndim - 1,) if reduction == "per_antenna_step" else tuple(range(1, ndim))


def check_power(power: Tensor) -> None:
    """Raise `UsageError` if a ratio's denominator is zero."""
    empty = int((power <= 0).sum())
    if empty:
        raise UsageError(
            f"{empty} of {power.numel()} targets have no power (a link without paths?): their ratio is undefined. "
            "Leave such links out, or use the pooled NMSE."
        )


def _axes(dim: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    axes = (dim,) if isinstance(dim, int) else tuple(dim)
    if not axes or any(not -ndim <= a < ndim for a in axes) or len({a % ndim for a in axes}) < len(axes):
        raise UsageError(f"dim={dim!r} names no distinct axes of a tensor with {ndim} axes.")
    return tuple(a % ndim for a in axes)
