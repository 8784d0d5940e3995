"""AR: one autoregressive model per window, shared by all antennas and subcarriers."""

from __future__ import annotations

from torch import Tensor, nn

from chanlab.csi.linear_prediction import coefficients, extrapolate, num_equations, stabilise, window_gram
from chanlab.csi.predictor import check_history
from chanlab.errors import UsageError


class AR(nn.Module):
    """Autoregressive prediction of order p, fitted to each window alone and iterated step by step.

    All antenna pairs and subcarriers see the same Dopplers, so that one set of coefficients is fitted to all of them
    by least squares, forward and backward in time. Least squares on the noisy history finds the best one-step predictor
    *for noisy input*; removing the noise power from the normal equations (`compensate`) finds the channel's own
    coefficients, which amplify the history's noise: it is there to be compared with.

    Args:
        horizons: Number of steps predicted.
        order: p, below the history's length. When not given, the highest with four equations per coefficient: wide
            arrays and bands carry the highest order there is. Check it on validation data
            (`chanlab validate --config ar --model.predictor.order P`).
        ridge: Added to the diagonal of the normal equations, relative to its mean.
        forward_backward: Fits the time-reversed conjugate too.
        compensate: Removes the noise's known power from the normal equations; needs `noise_variance`.
        stable: Moves poles outside the unit circle onto it.
    """

    def __init__(
        self,
        horizons: int = 4,
        order: int | None = None,
        ridge: float = 0.0,
        forward_backward: bool = True,
        compensate: bool = False,
        stable: bool = True,
    ) -> None:
        super().__init__()
        if horizons < 1 or (order is not None and order < 1):
            raise UsageError(f"horizons and order must be at least 1, not {horizons} and {order}")
        self.horizons = horizons
        self.order = order
        self.ridge = ridge
        self.forward_backward = forward_backward
        self.compensate = compensate
        self.stable = stable

    def forward(self, history: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """Predicts complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`; see `Predictor`."""
        check_history(history, min_time=2 if self.order is None else self.order + 1)
        batch, num_rx, num_tx, num_steps, num_subcarriers = history.shape
        series = history.movedim(3, -1).flatten(1, 3)  # [batch, series, time]
        order = self.order or self._highest_order(series.shape[1], num_steps)
        noise = None
        if self.compensate:
            if noise_variance is None:
                raise UsageError("AR(compensate=True) needs noise_variance; give it or set compensate to False")
            rows = num_equations(series.shape[1], num_steps, order, self.forward_backward)
            noise = noise_variance.double() * rows
        gram = window_gram(series, order, self.forward_backward)
        fitted = coefficients(gram, self.ridge, noise=noise)
        fitted = stabilise(fitted) if self.stable else fitted
        future = extrapolate(series[..., -order:], fitted, self.horizons)
        return future.reshape(batch, num_rx, num_tx, num_subcarriers, self.horizons).movedim(-1, 3)

    def _highest_order(self, num_series: int, num_steps: int) -> int:
        for order in range(num_steps - 1, 1, -1):
            if num_equations(num_series, num_steps, order, self.forward_backward) >= 4 * order:
                return order
        return 1
