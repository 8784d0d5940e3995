"""CNN: the channel of one antenna as an image over time and subcarriers."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from chanlab.csi.predictor import check_history, check_made_for, normalise
from chanlab.errors import UsageError


class CNN(nn.Module):
    """A convolutional autoencoder over time and subcarriers, then a convolution that turns snapshots into future steps.

    The image of an antenna pair has two planes, real and imaginary part. Convolutions of 3 x 3 double the number of
    feature maps level by level and halve it again, a tanh after each; the image keeps its size. The last convolution
    takes the snapshots as its channels and runs over three subcarriers, alike for both planes. Each antenna pair is a
    series of its own. Bound to a number of snapshots, not of antennas or subcarriers.

    With the defaults it has the 0.2 M parameters of the CNN in CSI-4CAST's comparison, which it follows but for the
    last convolution: there it runs over real and imaginary parts in turns.

    Source: S. Cheng et al., "CSI-4CAST", arXiv 2510.12996; M. S. Safari, V. Pourahmadi, S. Sodagari, "Deep UL2DL:
    data-driven channel knowledge transfer from uplink to downlink", IEEE OJVT 1, 2020.

    Args:
        history: Snapshots in the history.
        horizons: Number of steps predicted.
        levels: Convolutions of the encoder, and of the decoder; the widest has `2 ** (levels + 1)` feature maps.

    Raises:
        UsageError: A size is below 1.
    """

    def __init__(self, history: int = 16, horizons: int = 4, levels: int = 6) -> None:
        super().__init__()
        if min(history, horizons, levels) < 1:
            raise UsageError("CNN: every size must be at least 1")
        self.history, self.horizons = history, horizons
        up = [2 ** (level + 1) for level in range(levels + 1)]
        maps = [*up, *up[-2::-1]]
        self.autoencoder = nn.Sequential()
        for before, after in pairwise(maps):
            convolution = nn.Conv2d(before, after, 3, padding=1)
            nn.init.xavier_uniform_(convolution.weight, nn.init.calculate_gain("tanh"))
            nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
            self.autoencoder.extend([convolution, nn.Tanh()])
        self.autoencoder.compilable = True  # type: ignore[assignment]
        self.to_horizons = nn.Conv1d(history, horizons, 3, padding=1)

    def forward(self, history: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """Predicts complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`; see `Predictor`.

        Raises:
            UsageError: The history doesn't have the network's number of snapshots.
        """
        check_history(history)
        check_made_for("CNN", history, steps=self.history)
        x, scale = normalise(history)
        series = x.flatten(0, 2)
        image = torch.stack([series.real, series.imag], 1)  # [series, plane, time, subcarrier]
        maps = self.autoencoder(image.contiguous(memory_format=torch.channels_last))
        future = self.to_horizons(maps.flatten(0, 1)).float().unflatten(0, (-1, 2))
        prediction = torch.complex(future[:, 0], future[:, 1])
        return scale * prediction.reshape(*history.shape[:3], self.horizons, -1)
