"""RNN, LSTM and GRU that predict snapshot after snapshot, as the published comparisons define them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from chanlab.csi.predictor import antenna_series, check_history, check_made_for, from_antenna_series, normalise
from chanlab.errors import UsageError

CELLS: dict[str, Callable[..., nn.RNNBase]] = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


class RNN(nn.Module):
    """A recurrent network that says the next snapshot of an antenna pair, and goes on from what it said.

    A linear encoder, recurrent layers and a linear decoder. The history runs through it; its answer to the last
    snapshot is the first prediction, and each prediction is the input of the next step, in training too. With targets
    on another band (FDD) the same network learns to say that band. Each antenna pair is a series of its own. Bound to a
    number of subcarriers, not of antennas or snapshots.

    The defaults are the public configuration of the RNN of CSI-4CAST (11.9 M parameters with 300 subcarriers; the
    paper's table counts more); it follows the RNN, LSTM and GRU of LLM4CP's comparison. Unlike `GRU` nothing is added
    to the last snapshot.

    Source: S. Cheng et al., "CSI-4CAST", arXiv 2510.12996, and its public configuration; B. Liu et al., "LLM4CP",
    JCIN 9(2), 2024.

    Args:
        num_subcarriers: Subcarriers of history and target.
        horizons: Number of steps predicted.
        cell: Kind of recurrent layers: `rnn` (tanh), `lstm` or `gru`.
        hidden: Size of a layer's state.
        layers: Stacked layers.
        dropout: Between layers, in training.

    Raises:
        UsageError: A size is below 1, or the cell is unknown.
    """

    def __init__(
        self,
        num_subcarriers: int,
        horizons: int = 4,
        cell: Literal["rnn", "lstm", "gru"] = "rnn",
        hidden: int = 1200,
        layers: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if min(num_subcarriers, horizons, hidden, layers) < 1:
            raise UsageError("RNN: every size must be at least 1")
        if cell not in CELLS:
            raise UsageError(f"RNN: cell must be one of {', '.join(CELLS)}, not {cell!r}")
        self.num_subcarriers, self.horizons = num_subcarriers, horizons
        values = 2 * num_subcarriers
        self.encoder = nn.Linear(values, values)
        self.recurrent = CELLS[cell](values, hidden, layers, batch_first=True, dropout=dropout)
        self.decoder = nn.Linear(hidden, values)

    def forward(self, history: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """Predicts complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`; see `Predictor`.

        Raises:
            UsageError: The history doesn't have the network's number of subcarriers.
        """
        check_history(history, min_time=1)
        check_made_for("RNN", history, self.num_subcarriers)
        x, scale = normalise(history)
        # cuDNN's recurrent layers under autocast are float16, whatever it was asked for: single precision instead.
        with torch.autocast(x.device.type, enabled=False):
            states, memory = self.recurrent(self.encoder(antenna_series(x)))
            steps = [self.decoder(states[:, -1:])]
            while len(steps) < self.horizons:
                states, memory = self.recurrent(self.encoder(steps[-1]), memory)
                steps.append(self.decoder(states))
        return scale * from_antenna_series(torch.cat(steps, dim=1), *history.shape[:3])
