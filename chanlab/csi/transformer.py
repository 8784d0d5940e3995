"""Transformer: a small encoder over time, trained from scratch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from chanlab.csi.predictor import antenna_series, check_history, from_antenna_series, normalise
from chanlab.errors import UsageError


class Transformer(nn.Module):
    """An encoder whose tokens are the snapshots of one antenna pair and a query for each future step.

    The same network serves every antenna pair; the input is scaled to unit power per sample, and what the queries
    become is added to the last snapshot, so that training starts from "no prediction". Bound to the numbers of
    subcarriers and of snapshots.

    Args:
        num_subcarriers: Subcarriers of the channel.
        history: Snapshots in the history.
        horizons: Number of steps predicted.
        width: Size of a token.
        layers: Encoder layers.
        heads: Attention heads.
        dropout: In training.
        residual: Whether the last snapshot is added; turn it off for targets on another band (FDD).
    """

    def __init__(
        self,
        num_subcarriers: int,
        history: int = 16,
        horizons: int = 4,
        width: int = 64,
        layers: int = 3,
        heads: int = 4,
        dropout: float = 0.0,
        residual: bool = True,
    ) -> None:
        super().__init__()
        if width % heads:
            raise UsageError(f"width must be a multiple of heads: {width} is none of {heads}")
        self.num_subcarriers = num_subcarriers
        self.history = history
        self.horizons = horizons
        self.residual = residual
        self.embed = nn.Linear(2 * num_subcarriers, width)
        self.position = nn.Parameter(0.02 * torch.randn(history, width))
        self.query = nn.Parameter(0.02 * torch.randn(horizons, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        layer.compilable = True  # type: ignore[assignment]
        self.encoder = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 2 * num_subcarriers)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, history: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """Predicts complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`; see `Predictor`."""
        check_history(history)
        batch, num_rx, num_tx, num_steps, num_subcarriers = history.shape
        if (num_steps, num_subcarriers) != (self.history, self.num_subcarriers):
            raise UsageError(
                f"This Transformer was made for {self.history} snapshots of {self.num_subcarriers} subcarriers, "
                f"not {num_steps} of {num_subcarriers}"
            )
        x, scale = normalise(history)
        tokens = self.embed(antenna_series(x)) + self.position
        queries = self.query.expand(tokens.shape[0], -1, -1)
        encoded = self.encoder(torch.cat([tokens, queries], dim=1))[:, -self.horizons :]
        future = from_antenna_series(self.head(encoded).float(), batch, num_rx, num_tx)
        return scale * (x[:, :, :, -1:] + future if self.residual else future)
