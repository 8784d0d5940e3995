"""A network for each band, side by side as one predictor."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from chanlab.errors import UsageError


class PerBand(nn.Module):
    """Predicts the history's band by one network and the other band by another.

    Most networks predict one band: the one that their targets in training were on. Two of them, trained apart, are
    judged together on `StreamedCSI(duplex="both")`, whose targets are the history's band, then the other one.

    Args:
        tdd: Predictor of the history's band.
        fdd: Predictor of the other band, of as many steps.

    Raises:
        UsageError: Their horizons differ.
    """

    def __init__(self, tdd: nn.Module, fdd: nn.Module) -> None:
        super().__init__()
        if tdd.horizons != fdd.horizons:
            raise UsageError(
                f"The predictors of the two bands differ in horizons, {tdd.horizons} and {fdd.horizons}: "
                "set horizons of both to the same number"
            )
        self.tdd, self.fdd = tdd, fdd
        self.horizons = int(tdd.horizons)  # type: ignore[arg-type]

    def forward(self, history: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """Predicts complex `[batch, rx_ant, tx_ant, horizon, 2 * subcarrier]`; see `Predictor`."""
        return torch.cat([network(history, noise_variance) for network in (self.tdd, self.fdd)], -1)
