"""Linear prediction of time series: the mathematics under AR and PAD, batched and in double precision.

A sum of K complex exponentials obeys x[t] = Σ a[k] x[t-k], k = 1 … p, exactly for every order p >= K (Prony); noise
is met by ridge, by truncation to the signal subspace (Tufts and Kumaresan, Proc. IEEE 1982) or by removing its known
power.
"""

from __future__ import annotations

import torch
from torch import Tensor


def window_gram(
    series: Tensor, order: int, forward_backward: bool = False, dtype: torch.dtype = torch.complex128
) -> Tensor:
    """Gram matrix of all windows of `order + 1` consecutive values: what the covariance method needs to know.

    Args:
        series: Complex `[..., series, time]`; the series of one item share their coefficients.
        order: p.
        forward_backward: Counts each window also reversed and conjugated: right for undamped exponentials, whose
            statistics don't change under time reversal, and twice the equations.
        dtype: Type of the arithmetic and of the result.

    Returns:
        `[..., p + 1, p + 1]`, ascending time: Σ conj(x[t-p+i]) x[t-p+j] over windows and series.
    """
    x = series.to(dtype)
    if x.shape[-2] > order:  # many series: one product over them, of which every window is a block
        whole = x.mH @ x
        blocks = [whole[..., t : t + order + 1, t : t + order + 1] for t in range(x.shape[-1] - order)]
        gram = torch.stack(blocks).sum(0)
    else:
        windows = x.unfold(-1, order + 1, 1).flatten(-3, -2)
        gram = windows.mH @ windows
    return gram + gram.flip(-1, -2).mT if forward_backward else gram


def num_equations(num_series: int, num_steps: int, order: int, forward_backward: bool = False) -> int:
    """Number of equations behind `window_gram`."""
    return num_series * (num_steps - order) * (2 if forward_backward else 1)


def coefficients(
    gram: Tensor, ridge: float = 0.0, threshold: Tensor | None = None, noise: Tensor | None = None
) -> Tensor:
    """Coefficients that predict the last value of a window from those before it, by (regularised) least squares.

    Args:
        gram: Of `window_gram`, `[..., p + 1, p + 1]`.
        ridge: Added to the diagonal, relative to its mean.
        threshold: Eigenvalues of the p × p matrix at or below it are left out (the noise subspace), `[...]`.
        noise: Noise power in each kept eigenvalue, subtracted from it, `[...]`: coefficients of the channel itself
            rather than of the best predictor for noisy input.

    Returns:
        complex128 `[..., p]`, ascending time: x[t] ≈ Σ c[i] x[t-p+i].
    """
    matrix, right = gram[..., :-1, :-1], gram[..., :-1, -1:]
    values, vectors = torch.linalg.eigh(matrix)
    level = values.mean(-1, keepdim=True)
    floor = 1e-13 * values[..., -1:]  # rank of sums of few exponentials, up to rounding in double precision
    if threshold is not None:
        floor = torch.maximum(floor, threshold[..., None])
    kept = values > floor
    if noise is not None:
        values = torch.maximum(values - noise[..., None], 0.1 * values)
    inverse = torch.where(kept, 1.0 / torch.where(kept, values + ridge * level, 1.0), 0.0)
    solution: Tensor = (vectors @ (inverse[..., None] * (vectors.mH @ right)))[..., 0]
    return solution


def stabilise(coefficients: Tensor) -> Tensor:
    """Moves poles outside the unit circle onto it: no path grows exponentially, but an iterated fit to noise may.

    Args:
        coefficients: `[..., p]`, ascending time.

    Returns:
        complex128 `[..., p]`; unchanged where all poles lie inside.
    """
    order = coefficients.shape[-1]
    companion = torch.diag_embed(torch.ones(order - 1, dtype=coefficients.dtype, device=coefficients.device), -1)
    companion = companion.expand(*coefficients.shape, order).clone()
    companion[..., 0, :] = coefficients.flip(-1)
    poles = torch.linalg.eigvals(companion)
    outside = poles.abs() > 1.0
    poles = torch.where(outside, poles / poles.abs(), poles)
    polynomial = torch.zeros(*coefficients.shape[:-1], order + 1, dtype=poles.dtype, device=poles.device)
    polynomial[..., 0] = 1.0
    for i in range(order):
        shifted = torch.nn.functional.pad(polynomial, (1, 0))[..., :-1]
        polynomial = polynomial - poles[..., i : i + 1] * shifted
    return torch.where(outside.any(-1, keepdim=True), -polynomial[..., 1:].flip(-1), coefficients)


def extrapolate(last: Tensor, coefficients: Tensor, horizons: int) -> Tensor:
    """Continues series by iterating their one-step prediction.

    Args:
        last: The last p values, complex `[..., series, p]`.
        coefficients: `[..., p]`, ascending time.
        horizons: Number of steps.

    Returns:
        `[..., series, horizon]` in the type of `last`.
    """
    order = coefficients.shape[-1]
    # Each step is a linear combination of the p last values; iterate the weights, then apply them once.
    eye = torch.eye(order, dtype=coefficients.dtype, device=coefficients.device)
    weights = [eye[i].expand_as(coefficients) for i in range(order)]
    for _ in range(horizons):
        recent = torch.stack(weights[-order:], dim=-2)  # [..., p, p]: the last p values as combinations
        weights.append((coefficients[..., None, :] @ recent)[..., 0, :])
    steps = torch.stack(weights[order:], dim=-1).to(last.dtype)
    return last @ steps
