"""The baseline every predictor has to beat: the channel stays as it was last seen."""

from __future__ import annotations

from torch import Tensor, nn

from chanlab.csi.predictor import check_history
from chanlab.errors import UsageError


class NoPrediction(nn.Module):
    """Repeats the last snapshot, noise included: what a link does that doesn't predict ("outdated CSI").

    Args:
        horizons: Number of steps.
    """

    def __init__(self, horizons: int = 4) -> None:
        super().__init__()
        if horizons < 1:
            raise UsageError(f"horizons must be at least 1, not {horizons}")
        self.horizons = horizons

    def forward(self, history: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """Predicts complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`; see `Predictor`."""
        check_history(history, min_time=1)
        return history[:, :, :, -1:].expand(-1, -1, -1, self.horizons, -1).clone()
