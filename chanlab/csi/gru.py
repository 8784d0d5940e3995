"""GRU: a recurrent network over time, each antenna pair a series of its own."""

from __future__ import annotations

from torch import Tensor, nn

from chanlab.csi.predictor import antenna_series, check_history, from_antenna_series, normalise
from chanlab.errors import UsageError


class GRU(nn.Module):
    """A gated recurrent network that reads the history of one antenna pair and writes all future steps at once.

    The same network serves every antenna pair; the input is scaled to unit power per sample, and the output is added
    to the last snapshot, so that training starts from "no prediction". (`RNN` with its cell `gru` is the published
    baseline, which predicts snapshot after snapshot.) Bound to a number of subcarriers, not of
    antennas or snapshots.

    Args:
        num_subcarriers: Subcarriers of the channel.
        horizons: Number of steps predicted.
        hidden: Size of the hidden state.
        layers: Stacked layers.
        dropout: Between layers, in training.
        residual: Whether the last snapshot is added; turn it off for targets on another band (FDD).
    """

    def __init__(
        self,
        num_subcarriers: int,
        horizons: int = 4,
        hidden: int = 128,
        layers: int = 2,
        dropout: float = 0.0,
        residual: bool = True,
    ) -> None:
        super().__init__()
        self.num_subcarriers = num_subcarriers
        self.horizons = horizons
        self.residual = residual
        self.gru = nn.GRU(2 * num_subcarriers, hidden, layers, batch_first=True, dropout=dropout)
        self.head = nn.Linear(hidden, horizons * 2 * num_subcarriers)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, history: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """Predicts complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`; see `Predictor`."""
        check_history(history, min_time=1)
        batch, num_rx, num_tx, _, num_subcarriers = history.shape
        if num_subcarriers != self.num_subcarriers:
            raise UsageError(f"This GRU was made for {self.num_subcarriers} subcarriers, not {num_subcarriers}")
        x, scale = normalise(history)
        states, _ = self.gru(antenna_series(x))
        change = self.head(states[:, -1]).float().reshape(-1, self.horizons, 2 * num_subcarriers)
        future = from_antenna_series(change, batch, num_rx, num_tx)
        return scale * (x[:, :, :, -1:] + future if self.residual else future)
