"""SOFTS: many series that talk through one core, at a cost linear in their number."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from chanlab.csi.predictor import check_history, check_made_for, normalise
from chanlab.errors import UsageError


class SOFTS(nn.Module):
    """Series-core fused forecasting: each series becomes one token, which learns of the others from a common core.

    Each series is normalised by its own mean and deviation (undone at the end), embedded whole by a linear layer,
    passed through layers of STAR and a feed-forward network with norms behind (post-norm), and projected to its future
    by a linear layer. Nothing tells the series apart but what they hold: permuted series give permuted predictions.

    The paper's series are real; a channel's are complex, so that a window holds real and imaginary parts. What is one
    series is a choice:

    - `antennas`: an antenna pair with all its subcarriers; the core joins the antennas. Bound to the numbers of
      snapshots and subcarriers.
    - `subcarriers`: one subcarrier of an antenna pair; the core joins the subcarriers of that pair. Bound to the number
      of snapshots only. A series can't know its frequency, so it can't learn another band (FDD).

    With the defaults and 300 subcarriers it has 10.5 M parameters.

    Source: L. Han, X.-Y. Chen, H.-J. Ye, D.-C. Zhan, "SOFTS: Efficient Multivariate Time Series Forecasting with
    Series-Core Fusion", NeurIPS 2024, arXiv 2404.14197.

    Args:
        num_subcarriers: Subcarriers of history and target; None, allowed with `subcarriers` only, is any number.
        history: Snapshots in the history.
        horizons: Number of steps predicted.
        series: What is one series.
        width: Size of a series' token.
        core: Size of the core.
        layers: Number of layers.
        feed_forward: Hidden size of the feed-forward networks.
        dropout: In training.
        instance_norm: Whether series are normalised by their own mean and deviation. Turn it off for targets on another
            band (FDD), which don't share the history's mean.

    Raises:
        UsageError: A size is below 1, or the number of subcarriers is missing.
    """

    def __init__(
        self,
        num_subcarriers: int | None = None,
        history: int = 16,
        horizons: int = 4,
        series: Literal["antennas", "subcarriers"] = "antennas",
        width: int = 512,
        core: int = 128,
        layers: int = 3,
        feed_forward: int = 512,
        dropout: float = 0.0,
        instance_norm: bool = True,
    ) -> None:
        super().__init__()
        if series not in ("antennas", "subcarriers"):
            raise UsageError(f"SOFTS: series must be antennas or subcarriers, not {series!r}")
        if series == "antennas" and num_subcarriers is None:
            raise UsageError("SOFTS: series of antennas need num_subcarriers, the number of the data")
        values = 2 if series == "subcarriers" else 2 * (num_subcarriers or 0)
        if min(values, history, horizons, width, core, layers, feed_forward) < 1:
            raise UsageError("SOFTS: every size must be at least 1")
        self.num_subcarriers, self.history, self.horizons = num_subcarriers, history, horizons
        self.series, self.instance_norm = series, instance_norm
        self.embed = nn.Linear(history * values, width)
        self.layers = nn.Sequential(*(SOFTSLayer(width, core, feed_forward, dropout) for _ in range(layers)))
        self.project = nn.Linear(width, horizons * values)

    def forward(self, history: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """Predicts complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`; see `Predictor`.

        Raises:
            UsageError: The history doesn't have the network's numbers of snapshots and subcarriers.
        """
        check_history(history)
        check_made_for("SOFTS", history, self.num_subcarriers, self.history)
        x, scale = normalise(history)
        if self.series == "antennas":
            windows = x.flatten(1, 2)  # [set of series, series, time, value]
        else:
            windows = x.flatten(0, 2).mT[..., None]
        if self.instance_norm:
            mean = windows.mean(2, keepdim=True)
            deviation = ((windows - mean).abs().square().mean((2, 3), keepdim=True) + 1e-5).sqrt()
            windows = (windows - mean) / deviation
        tokens = self.layers(self.embed(torch.view_as_real(windows.resolve_conj()).flatten(2)))
        future = self.project(tokens).float().unflatten(2, (self.horizons, -1, 2))
        prediction = torch.view_as_complex(future.contiguous())
        if self.instance_norm:
            prediction = prediction * deviation + mean
        if self.series == "subcarriers":
            prediction = prediction.squeeze(-1).mT
        return scale * prediction.reshape(*history.shape[:3], self.horizons, -1)


class STAR(nn.Module):
    """Star aggregate-redistribute: series give to a core and take from it; `[batch, series, width]` in and out.

    A feed-forward network makes of each series what it has to say. Stochastic pooling makes one core of it: for each
    feature one series is drawn, with the probability that a softmax over the series gives it; in evaluation the mean
    under these probabilities stands in its place. The core is appended to every series, and a second feed-forward
    network fuses the two. The cost is linear in the number of series.

    Args:
        width: Size of a series' token.
        core: Size of the core.
    """

    def __init__(self, width: int, core: int) -> None:
        super().__init__()
        self.aggregate = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, core))
        self.fuse = nn.Sequential(nn.Linear(width + core, width), nn.GELU(), nn.Linear(width, width))

    def core(self, series: Tensor) -> Tensor:
        """The core `[batch, 1, core]` of series `[batch, series, width]`."""
        said: Tensor = self.aggregate(series).float()
        share = said.softmax(1)
        if not self.training:
            return (share * said).sum(1, keepdim=True)
        chosen = torch.multinomial(share.mT.flatten(0, 1), 1).view(len(said), 1, -1)
        return said.gather(1, chosen)

    def redistribute(self, series: Tensor, core: Tensor) -> Tensor:
        """Each series fused with the core, `[batch, series, width]`."""
        fused: Tensor = self.fuse(torch.cat([series, core.to(series.dtype).expand(-1, series.shape[1], -1)], -1))
        return fused

    def forward(self, series: Tensor) -> Tensor:
        """Aggregates, then redistributes."""
        return self.redistribute(series, self.core(series))


class SOFTSLayer(nn.Module):
    """STAR, then a feed-forward network, each beside an identity and with a norm behind."""

    compilable = True

    def __init__(self, width: int, core: int, feed_forward: int, dropout: float) -> None:
        super().__init__()
        self.star = STAR(width, core)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, feed_forward), nn.GELU(), nn.Dropout(dropout), nn.Linear(feed_forward, width)
        )
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, series: Tensor) -> Tensor:
        """Tokens `[batch, series, width]` in and out."""
        series = self.norm1(series + self.dropout(self.star(series)))
        out: Tensor = self.norm2(series + self.dropout(self.feed_forward(series)))
        return out
