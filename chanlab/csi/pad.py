"""PAD: Prony's method on every significant bin of the angle-delay domain."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from chanlab.csi.angle_delay import strong_bins
from chanlab.csi.linear_prediction import coefficients, extrapolate, num_equations, stabilise, window_gram
from chanlab.csi.predictor import check_history
from chanlab.errors import UsageError

CHUNK = 16384
"""Bins solved at once: bounds the memory, never changes a result."""


class PAD(nn.Module):
    """Prony-based angular-delay domain prediction.

    The channel is taken to the angle-delay domain by DFTs over transmit antennas (the base station's) and subcarriers;
    each bin holds few paths, so that its course in time is a sum of few exponentials, continued by linear prediction of
    its own; bins without significant power are set to zero. Source: Yin, Wang, Liu, Gesbert, "Addressing the curse of
    mobility in massive MIMO with Prony-based angular-delay domain channel predictions", IEEE JSAC 38(12), 2020.

    With `denoise`, the noise's known variance decides what is significant: bins whose power exceeds that of noise, and
    in each bin the signal subspace of its normal equations (Tufts and Kumaresan, Proc. IEEE 1982). Without it, linear
    prediction of high order from 16 noisy snapshots amplifies the noise beyond use.

    Args:
        horizons: Number of steps predicted.
        order: Order of linear prediction, capped at half the history (a bin gives as many equations as that). The
            literature takes 8; of 16 noisy snapshots 6 leaves more equations.
        power: Fraction of a sample's power that the kept bins hold together, the strongest first.
        denoise: Leaves noise out by its variance; `forward` needs `noise_variance` then.
        margin: With `denoise`, a bin is kept if its mean power exceeds the noise's by this many standard deviations.
        forward_backward: Fits the time-reversed conjugate too (undamped exponentials).
        stable: Moves poles outside the unit circle onto it.
        tx_shape: Shape of the grid that the transmit ports form, the last axis running fastest; the DFT goes over each
            axis. A `chanlab.channels.PlanarArray` of 4 rows and 4 columns, cross-polarized, is `[8, 4]`: the columns of
            both polarizations, then rows. None: one line of ports.
    """

    def __init__(
        self,
        horizons: int = 4,
        order: int = 6,
        power: float = 1.0,
        denoise: bool = True,
        margin: float = 2.0,
        forward_backward: bool = True,
        stable: bool = True,
        tx_shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        if horizons < 1 or order < 1:
            raise UsageError(f"horizons and order must be at least 1, not {horizons} and {order}")
        if not 0.0 < power <= 1.0:
            raise UsageError(f"power is a fraction in (0, 1], not {power}")
        self.horizons = horizons
        self.order = order
        self.power = power
        self.denoise = denoise
        self.margin = margin
        self.forward_backward = forward_backward
        self.stable = stable
        self.tx_shape = None if tx_shape is None else tuple(tx_shape)

    def forward(self, history: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """Predicts complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`; see `Predictor`."""
        check_history(history, min_time=2)
        if self.denoise and noise_variance is None:
            raise UsageError("PAD(denoise=True) needs noise_variance; give it or set denoise to False")
        bins = self._transform(history).movedim(3, -1)  # [batch, rx, angle, delay, time]
        mean_power = bins.abs().square().mean(-1)
        told = noise_variance if self.denoise else None
        noise, strong = strong_bins(mean_power, told, bins.shape[-1], self.margin, torch.finfo(history.dtype).eps)
        kept = strong & self._significant(mean_power)
        future = bins.new_zeros(*mean_power.shape, self.horizons)
        future[kept] = self._continue(bins[kept], noise[kept])
        return self._transform(future.movedim(-1, 3), inverse=True)

    def _significant(self, mean_power: Tensor) -> Tensor:
        """Which bins hold `power` together, the strongest first; bool like `mean_power`."""
        if self.power >= 1.0:
            return torch.ones_like(mean_power, dtype=torch.bool)
        ordered, index = mean_power.flatten(1).sort(descending=True)
        before = ordered.cumsum(1) - ordered
        within = before < self.power * ordered.sum(1, keepdim=True)
        return torch.zeros_like(within).scatter(1, index, within).view_as(mean_power)

    def _continue(self, series: Tensor, noise: Tensor) -> Tensor:
        """Linear prediction of each bin, `[bin, time]` to `[bin, horizon]`."""
        num_steps = series.shape[-1]
        order = min(self.order, num_steps // 2)
        rows = num_equations(1, num_steps, order, self.forward_backward)
        edge = (math.sqrt(rows) + math.sqrt(order)) ** 2  # largest eigenvalue of unit noise (Marchenko and Pastur)
        steps = []
        for part, level in zip(torch.split(series, CHUNK), torch.split(noise, CHUNK), strict=True):
            gram = window_gram(part[:, None], order, self.forward_backward)
            fitted = coefficients(gram, threshold=level.double() * edge)
            fitted = stabilise(fitted) if self.stable else fitted
            steps.append(extrapolate(part[:, None, -order:], fitted, self.horizons)[:, 0])
        return torch.cat(steps) if steps else series.new_zeros(0, self.horizons)

    def _transform(self, channels: Tensor, inverse: bool = False) -> Tensor:
        """Unitary DFTs between `[batch, rx_ant, tx_ant, time, subcarrier]` and the angle-delay domain."""
        num_tx = channels.shape[2]
        shape = self.tx_shape or (num_tx,)
        if math.prod(shape) != num_tx:
            raise UsageError(f"tx_shape {list(shape)} has {math.prod(shape)} ports, the channel {num_tx}")
        x = channels.reshape(*channels.shape[:2], *shape, *channels.shape[3:])
        grid = tuple(range(2, 2 + len(shape)))
        if inverse:
            x = torch.fft.fft(torch.fft.ifftn(x, dim=grid, norm="ortho"), dim=-1, norm="ortho")
        else:
            x = torch.fft.ifft(torch.fft.fftn(x, dim=grid, norm="ortho"), dim=-1, norm="ortho")
        transformed: Tensor = x.reshape(channels.shape)
        return transformed
