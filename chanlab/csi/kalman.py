"""Vector Kalman filter: every significant bin of the angle-delay domain as an autoregressive process seen in noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from chanlab.csi.angle_delay import from_angle_delay, strong_bins, to_angle_delay
from chanlab.csi.linear_prediction import coefficients, num_equations, stabilise, window_gram
from chanlab.csi.predictor import check_history
from chanlab.errors import UsageError

CHUNK = 32768
"""Bins filtered at once: bounds the memory, never changes a result."""

LEAST_INNOVATION = 1e-6
"""Of a process, relative to its power: no fit to few values is certain."""


class VectorKalman(nn.Module):
    """Kalman filter whose state holds the last p values of an angle-delay bin, and p-fold iterated prediction.

    The channel is taken to the angle-delay domain by DFTs over the transmit array and the subcarriers. There a bin is
    modelled as autoregressive of order p, x[t] = Σ a[k] x[t-k] + u[t], observed in white noise of known variance. Its
    coefficients are fitted to the window itself; the innovation's variance is what the fit leaves unexplained, less the
    noise's share. The filter runs from a state of the bin's power, of which nothing else is known. Source: Kim, Kim,
    Lee, Jang, Choi, Choi, "Massive MIMO channel prediction: Kalman filtering vs. machine learning", IEEE Trans. Commun.
    69(1), 2021, whose autoregressive parameters are Yule and Walker's.

    Args:
        horizons: Number of steps predicted.
        order: p, at most half the history.
        fit: `subspace`: least squares, forward and backward, within the signal subspace of the normal equations, which
            the noise's variance tells (Tufts and Kumaresan, Proc. IEEE 1982); `yule_walker`: from unbiased
            autocovariances with the noise's variance taken off lag 0, as in the literature. Of 16 snapshots the first
            predicts far better.
        margin: A bin is predicted if its mean power exceeds the noise's by this many standard deviations.
        tx_shape: `(polarizations, columns, rows)` of the transmit array, ports in the order of
            `chanlab.channels.PlanarArray`; None: a line of ports.
    """

    def __init__(
        self,
        horizons: int = 4,
        order: int = 6,
        fit: Literal["subspace", "yule_walker"] = "subspace",
        margin: float = 2.0,
        tx_shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        if horizons < 1 or order < 1:
            raise UsageError(f"horizons and order must be at least 1, not {horizons} and {order}")
        if fit not in ("subspace", "yule_walker"):
            raise UsageError(f"fit is 'subspace' or 'yule_walker', not {fit!r}")
        if tx_shape is not None and len(tx_shape) != 3:
            raise UsageError(f"tx_shape is [polarizations, columns, rows], not {list(tx_shape)}")
        self.horizons = horizons
        self.order = order
        self.fit = fit
        self.margin = margin
        self.tx_shape = None if tx_shape is None else tuple(tx_shape)

    def forward(self, history: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """Predicts complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`; see `Predictor`.

        Raises:
            UsageError: Without `noise_variance`, or if the history is shorter than two states.
        """
        check_history(history, min_time=2 * self.order)
        if noise_variance is None:
            raise UsageError("VectorKalman needs noise_variance: it is the filter's observation noise")
        polarizations, columns, rows = self.tx_shape or (1, history.shape[2], 1)
        bins = to_angle_delay(history, (polarizations, columns, rows)).to(torch.complex128)
        mean_power = bins.abs().square().mean(-1)
        eps = torch.finfo(history.dtype).eps
        noise, kept = strong_bins(mean_power, noise_variance, bins.shape[-1], self.margin, eps)
        future = bins.new_zeros(*mean_power.shape, self.horizons)
        chunks = (torch.split(x[kept], CHUNK) for x in (bins, noise))
        parts = [self._filter(*chunk) for chunk in zip(*chunks, strict=True)]
        if parts:
            future[kept] = torch.cat(parts)
        return from_angle_delay(future).to(history.dtype)

    def _filter(self, series: Tensor, noise: Tensor) -> Tensor:
        """Filters `[bin, time]` through the window and predicts `[bin, horizon]`."""
        power = (series.abs().square().mean(-1) - noise).clamp(min=0.0)
        fitted, innovation = self._fitted(series, noise)
        innovation = torch.maximum(innovation, LEAST_INNOVATION * power)
        transition = _companion(fitted)
        state = series.new_zeros(*fitted.shape, 1)
        covariance = power[:, None, None] * torch.eye(self.order, dtype=series.dtype, device=series.device)
        for t in range(series.shape[-1]):
            if t:
                state = transition @ state
                covariance = transition @ covariance @ transition.mH
                covariance[:, 0, 0] += innovation
            gain = covariance[:, :, :1] / (covariance[:, :1, :1].real + noise[:, None, None])
            state = state + gain * (series[:, t, None, None] - state[:, :1])
            covariance = covariance - gain @ covariance[:, :1]
            covariance = (covariance + covariance.mH) / 2
        steps = []
        for _ in range(self.horizons):
            state = transition @ state
            steps.append(state[:, 0, 0])
        return torch.stack(steps, -1)

    def _fitted(self, series: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Coefficients `[bin, p]`, ascending time, and the innovation's variance `[bin]`."""
        if self.fit == "subspace":
            rows = num_equations(1, series.shape[-1], self.order, forward_backward=True)
            gram = window_gram(series[:, None], self.order, forward_backward=True) / rows
            edge = (1.0 + math.sqrt(self.order / rows)) ** 2  # largest eigenvalue of unit noise (Marchenko and Pastur)
            fitted = coefficients(gram, threshold=noise * edge)
        else:
            gram = _toeplitz(_autocovariance(series, self.order))
            fitted = coefficients(gram, noise=noise)
        fitted = stabilise(fitted)
        error = torch.cat([-fitted, torch.ones_like(fitted[:, :1])], 1)
        left: Tensor = torch.einsum("bi,bij,bj->b", error.conj(), gram, error).real
        return fitted, left - noise * error.abs().square().sum(1)


def _autocovariance(series: Tensor, order: int) -> Tensor:
    """Unbiased autocovariances at lags 0 … p, E x[t] conj(x[t-k]), `[..., p + 1]`."""
    steps = series.shape[-1]
    lags = [(series[..., k:] * series[..., : steps - k].conj()).mean(-1) for k in range(order + 1)]
    return torch.stack(lags, -1)


def _toeplitz(autocovariance: Tensor) -> Tensor:
    """Gram matrix in ascending time: entry (i, j) is E conj(x[i]) x[j], `[..., n, n]`."""
    n = autocovariance.shape[-1]
    index = torch.arange(n, device=autocovariance.device)
    both = torch.cat([autocovariance[..., 1:].flip(-1).conj(), autocovariance], -1)
    return both[..., index[None] - index[:, None] + n - 1]


def _companion(fitted: Tensor) -> Tensor:
    """Transition of the state (x[t], x[t-1], …), `[..., p, p]`."""
    order = fitted.shape[-1]
    companion = torch.diag_embed(torch.ones(order - 1, dtype=fitted.dtype, device=fitted.device), -1)
    companion = companion.expand(*fitted.shape, order).clone()
    companion[..., 0, :] = fitted.flip(-1)
    return companion
