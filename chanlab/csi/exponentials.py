"""Sums of complex exponentials: what ESPRIT and the matrix pencil share, which is all but how they find the poles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from chanlab.csi.angle_delay import from_angle_delay, strong_bins, to_angle_delay
from chanlab.csi.linear_prediction import window_gram
from chanlab.csi.predictor import check_history
from chanlab.errors import UsageError

CHUNK = 32768
"""Items solved at once: bounds the memory, never changes a result."""

Order = int | Literal["noise", "mdl"]
"""Number of exponentials, or how it is found."""


class Exponentials(nn.Module):
    """Predicts each angle-delay bin, or all bins of a delay together, as a sum of exponentials with common poles.

    A method says how it finds the poles: `subspace` of the windows' Gram matrix and `poles` from it. Amplitudes follow
    by least squares over the history.

    Args:
        horizons: Number of steps predicted.
        window: Values in a window; None: seven eighths of the history where many series share their poles, three
            quarters otherwise.
        order: Number of exponentials: a number, of which a series that holds fewer gets those it holds; `noise`:
            eigenvalues above what the noise's variance explains; `mdl`: by minimum description length (Wax and Kailath,
            IEEE Trans. ASSP 33(2), 1985), with no noise variance.
        share: `tap`: all antennas, or beams, of a delay share their poles; `bin`: each bin has its own.
        unit_modulus: Moves all poles onto the unit circle. Otherwise those outside only.
        forward_backward: Counts each window also reversed and conjugated.
        margin: A bin is predicted if its mean power exceeds the noise's by this many standard deviations.
        tx_shape: `(polarizations, columns, rows)` of the transmit array; None: a line of ports.
    """

    def __init__(
        self,
        horizons: int,
        window: int | None,
        order: Order,
        share: Literal["tap", "bin"],
        unit_modulus: bool,
        forward_backward: bool,
        margin: float,
        tx_shape: Sequence[int] | None,
    ) -> None:
        super().__init__()
        if horizons < 1 or (window is not None and window < 2):
            raise UsageError(f"horizons must be at least 1 and window 2, not {horizons} and {window}")
        if order not in ("noise", "mdl") and (not isinstance(order, int) or order < 1):
            raise UsageError(f"order is a number >= 1, 'noise' or 'mdl', not {order!r}")
        if share not in ("tap", "bin"):
            raise UsageError(f"share is 'tap' or 'bin', not {share!r}")
        if tx_shape is not None and len(tx_shape) != 3:
            raise UsageError(f"tx_shape is [polarizations, columns, rows], not {list(tx_shape)}")
        self.horizons = horizons
        self.window = window
        self.order = order
        self.share = share
        self.unit_modulus = unit_modulus
        self.forward_backward = forward_backward
        self.margin = margin
        self.tx_shape = None if tx_shape is None else tuple(tx_shape)

    def subspace(self, gram: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues, ascending, and eigenvectors of which the last ones span the signal's subspace.

        Args:
            gram: Of `window_gram`, per equation, complex128 `[item, window, window]`.
        """
        raise NotImplementedError

    def poles(self, gram: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
        """Poles `[item, order]`, complex.

        Args:
            gram: As for `subspace`.
            values: The largest eigenvalues that it gave, `[item, order]`.
            vectors: Their eigenvectors, `[item, size, order]`.
        """
        raise NotImplementedError

    def forward(self, history: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """Predicts complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`; see `Predictor`.

        Raises:
            UsageError: If the history is shorter than the window or `order="noise"` lacks `noise_variance`.
        """
        check_history(history, min_time=max(3, self.window or 0))
        if noise_variance is None and self.order == "noise":
            name = type(self).__name__
            raise UsageError(f"{name}(order='noise') needs noise_variance; give it, or take order='mdl' or a number")
        polarizations, columns, rows = self.tx_shape or (1, history.shape[2], 1)
        bins = to_angle_delay(history, (polarizations, columns, rows)).to(torch.complex128)
        mean_power = bins.abs().square().mean(-1)
        eps = torch.finfo(history.dtype).eps
        noise, kept = strong_bins(mean_power, noise_variance, bins.shape[-1], self.margin, eps)
        if self.share == "bin":
            items, level = bins[kept][:, None], noise[kept]
        else:  # the bins of a delay together; those without a path are left out of the result, not of the fit
            items, level = bins.movedim(5, 1).flatten(2, 5).flatten(0, 1), noise.movedim(5, 1).flatten(2).amax(-1)
            level = level.flatten()
        chunks = zip(torch.split(items, CHUNK), torch.split(level, CHUNK), strict=True)
        parts = [self._continue(*chunk) for chunk in chunks]
        found = torch.cat(parts) if parts else items.new_zeros(0, 1, self.horizons)
        future = bins.new_zeros(*mean_power.shape, self.horizons)
        if self.share == "bin":
            future[kept] = found[:, 0]
        else:
            shape = (len(bins), bins.shape[5], *bins.shape[1:5], self.horizons)
            future = found.reshape(shape).movedim(1, 5) * kept[..., None]
        return from_angle_delay(future).to(history.dtype)

    def _continue(self, series: Tensor, noise: Tensor) -> Tensor:
        """`[item, series, time]` to `[item, series, horizon]`; the series of an item share their poles."""
        num_series, steps = series.shape[1:]
        window = self.window or max(2, math.ceil((0.875 if self.share == "tap" else 0.75) * steps))
        count = num_series * (steps - window + 1)
        gram = window_gram(series, window - 1, self.forward_backward) / (count * (2 if self.forward_backward else 1))
        values, vectors = self.subspace(gram)
        orders = self._orders(values.flip(-1), noise, count).clamp(max=window - 1)
        future = series.new_zeros(*series.shape[:2], self.horizons)
        for order in range(1, window):
            chosen = orders == order
            if chosen.any():
                poles = self.poles(gram[chosen], values[chosen, -order:], vectors[chosen][..., -order:])
                future[chosen] = self._extrapolate(series[chosen], self._inside(poles), noise[chosen])
        return future

    def _orders(self, values: Tensor, noise: Tensor, count: int) -> Tensor:
        """Number of exponentials in each item, from descending eigenvalues `[item, size]`."""
        size, rounding = values.shape[-1], 1e-13 * values[:, :1]
        rank = (values > rounding).sum(-1)
        if isinstance(self.order, int):
            return rank.clamp(max=self.order)
        floor = torch.maximum(noise[:, None], rounding)
        if self.order == "noise":
            rows = count * (2 if self.forward_backward else 1)
            edge = (1.0 + math.sqrt(size / rows)) ** 2  # largest eigenvalue of unit noise (Marchenko and Pastur)
            return (values > floor * edge).sum(-1)
        values = torch.maximum(values, rounding)
        tail = torch.arange(size, 0, -1, device=values.device)  # eigenvalues beyond the k largest, k = 0 …
        arithmetic = values.flip(-1).cumsum(-1).flip(-1) / tail
        geometric = values.log().flip(-1).cumsum(-1).flip(-1) / tail
        k = torch.arange(size, device=values.device)
        length = count * tail * (arithmetic.log() - geometric) + 0.5 * k * (2 * size - k) * math.log(max(2, count))
        return torch.minimum(length.argmin(-1), rank)

    def _inside(self, poles: Tensor) -> Tensor:
        """Poles outside the unit circle, or all of them, moved onto it."""
        modulus = poles.abs().clamp(min=torch.finfo(poles.real.dtype).tiny)
        moved = torch.ones_like(modulus, dtype=torch.bool) if self.unit_modulus else modulus > 1.0
        return torch.where(moved, poles / modulus, poles)

    def _extrapolate(self, series: Tensor, poles: Tensor, noise: Tensor) -> Tensor:
        """Amplitudes by least squares, with the noise's share of a path's power as ridge, then the next steps."""
        steps = series.shape[-1]
        times = torch.arange(steps + self.horizons, device=series.device)
        waves = poles[:, None] ** times[:, None]  # [item, time, order]
        past = waves[:, :steps]
        power = series.abs().square().mean((1, 2)) / poles.shape[-1]
        normal = past.mH @ past
        normal.diagonal(dim1=1, dim2=2).add_((noise / power.clamp(min=1e-300))[:, None])
        amplitude = torch.linalg.solve(normal, past.mH @ series.mT)
        future: Tensor = (waves[:, steps:] @ amplitude).mT
        return future
