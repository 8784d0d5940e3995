"""Linear prediction of angle-delay bins whose normal equations borrow from their surroundings."""

from __future__ import annotations

import torch
from torch import Tensor

from chanlab.csi.angle_delay import neighbours
from chanlab.csi.linear_prediction import extrapolate, num_equations, stabilise, window_gram

GROWTH = 1.5
"""Growth in power above which a prediction is looked at for unstable poles."""


class Statistics:
    """Normal equations of the strongest bins and of their surroundings, and features that tell how good they are.

    PAD fits each bin alone, AR fits all together; in between, a bin's Gram matrix is its own plus those of its
    neighbours, of its delay tap and of the whole channel, each scaled to the bin's level and weighted.

    Attributes:
        index: The strong bins, in the flattened bins, int64 `[batch, bin]`.
        tap_of_bin: Their delay tap, int64 `[batch, bin]`.
        features: Per strong bin: log10 of its SNR, of its neighbours' SNR and of its share of the power; coherence
            (magnitude of the lag-one autocorrelation) of itself, its neighbours, its tap and the whole; real
            `[batch, bin, 7]`.
    """

    num_features = 7

    def __init__(self, x: Tensor, noise: Tensor, order: int, bins: int) -> None:
        """Collects the statistics.

        Args:
            x: Angle-delay bins, complex `[batch, rx, polarization, column, row, delay, time]`.
            noise: Noise variance per bin, `[batch]`.
            order: Order p of linear prediction.
            bins: How many bins are strong ones.
        """
        self.x, self.noise, self.order = x, noise, order
        self.rows = num_equations(1, x.shape[-1], order, forward_backward=True)
        self.tap = self._gram(x.movedim(5, 1).flatten(2, 5))  # [batch, tap, p + 1, p + 1]
        self.whole = self.tap.sum(1, keepdim=True)
        power = x.abs().square().mean(-1)
        self.shrink = ((power - _expand(noise, power)) / power.clamp(min=_tiny(power))).clamp(min=0)
        flat = power.flatten(1)
        self.index = flat.topk(min(bins, flat.shape[1]), dim=1).indices
        self.tap_of_bin = self.index % x.shape[5]
        series = x.flatten(1, 5)
        own = self._pick(series, self.index)
        self.last = own[..., -order:]
        index, weight = neighbours(x.shape[1:6], x.device)
        around = self._pick(series, index[self.index].flatten(1)).reshape(*own.shape[:2], len(weight), -1)
        self.own = self._gram(own[..., None, :])
        around = self._gram(around * weight.sqrt()[:, None])
        pick = self.tap_of_bin[..., None, None].expand_as(self.own)
        tap, whole = self.tap.gather(1, pick), self.whole.expand_as(self.own)
        self.level = _level(self.own)
        self.sources = [_unit(around), _unit(tap), _unit(self.whole)]
        snr = flat.gather(1, self.index) / noise[:, None]
        around_snr = _level(around) / (self.rows * noise[:, None])
        share = self.level / _level(self.whole).clamp(min=_tiny(power))
        logs = torch.stack([snr, around_snr, share]).clamp(1e-6, 1e6).log10()
        self.features = torch.stack([*logs, *(_coherence(g) for g in (self.own, around, tap, whole))], -1)

    def _gram(self, series: Tensor) -> Tensor:
        return window_gram(series, self.order, forward_backward=True, dtype=series.dtype)

    @staticmethod
    def _pick(series: Tensor, index: Tensor) -> Tensor:
        return series.gather(1, index[..., None].expand(-1, -1, series.shape[-1]))

    def predict(self, weights: Tensor, loading: Tensor, horizons: int, stable: bool = False) -> Tensor:
        """Predicts the strong bins, complex `[batch, bin, horizon]`.

        Args:
            weights: How much each bin borrows from its neighbours, its tap and the whole, `[batch, bin, 3]`.
            loading: Diagonal loading in units of the noise, `[batch, bin]`.
            horizons: Number of steps.
            stable: Moves poles outside the unit circle onto it, in bins whose prediction grows beyond `GROWTH` times
                the mean power of what it is made from: no path grows, but a fit to noise may. Not for training, as
                poles have no useful gradient.
        """
        borrowed = sum(w[..., None, None] * source for w, source in zip(weights.unbind(-1), self.sources, strict=True))
        matrix = self.own + self.level[..., None, None] * borrowed
        coefficients = _solve(matrix, loading * self.rows * self.noise[:, None])
        future = extrapolate(self.last[..., None, :], coefficients, horizons)[..., 0, :]
        if stable:
            grown = future.abs().square().amax(-1) > GROWTH * self.last.abs().square().mean(-1)
            steady = stabilise(coefficients[grown]).to(future.dtype)
            future = future.clone()
            future[grown] = extrapolate(self.last[grown][:, None], steady, horizons)[:, 0]
        return future

    def predict_by_tap(self, whole: Tensor, loading: Tensor, horizons: int) -> Tensor:
        """Predicts every bin with its tap's coefficients, shrunk by its signal share.

        Args:
            whole: How much a tap borrows from the whole channel, a scalar.
            loading: Diagonal loading in units of the noise, a scalar.
            horizons: Number of steps.

        Returns:
            Complex `[batch, rx, polarization, column, row, delay, horizon]`.
        """
        level = _level(self.tap)
        noise = self.rows * self.x[0, ..., 0, 0].numel() * self.noise[:, None] / level.clamp(min=_tiny(level))
        coefficients = _solve(_unit(self.tap) + whole * _unit(self.whole), loading * noise)
        series = self.x.movedim(5, 1)
        future = extrapolate(series[..., -self.order :].flatten(2, 5), coefficients, horizons)
        future = future.reshape(*series.shape[:-1], horizons).movedim(1, 5)
        return future * self.shrink[..., None]


def _solve(gram: Tensor, loading: Tensor) -> Tensor:
    """Coefficients of the normal equations `[..., p + 1, p + 1]` with `loading` `[...]` added to the diagonal."""
    matrix = gram[..., :-1, :-1] + torch.diag_embed(loading[..., None].expand(*gram.shape[:-2], gram.shape[-1] - 1))
    solution: Tensor = torch.linalg.solve(matrix, gram[..., :-1, -1])
    return solution


def _tiny(x: Tensor) -> float:
    return torch.finfo(x.dtype).tiny


def _expand(noise: Tensor, like: Tensor) -> Tensor:
    return noise.reshape(-1, *(1,) * (like.ndim - 1))


def _level(gram: Tensor) -> Tensor:
    return gram.diagonal(dim1=-2, dim2=-1).real.mean(-1)


def _unit(gram: Tensor) -> Tensor:
    return gram / _level(gram).clamp(min=_tiny(gram))[..., None, None]


def _coherence(gram: Tensor) -> Tensor:
    """Magnitude of the autocorrelation at lag one relative to the power: one for a single noiseless Doppler."""
    lag = gram.diagonal(offset=1, dim1=-2, dim2=-1).mean(-1).abs()
    return lag / _level(gram).clamp(min=_tiny(lag))
