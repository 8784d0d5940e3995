"""Where an image's symbols go: a map of its local activity, told as side information, and the order that it implies."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LEVELS, STEP_DB, HIGHEST_DB = 8, 6.0, 6.0
"""Levels of activity, their distance, and the highest one's activity over the image's contrast [dB]."""
_SLOPE = 1.5  # of -log2 of the probability of a level, over its distance from what its neighbours predict
_UNITS = 16  # of scores per level


class ActivityMap(nn.Module):
    """Levels of local activity of an image, and what telling them costs.

    The activity of a block is the root mean square of what the means of its 8 x 8 pixels leave, over the image's
    contrast. A level is coded in raster order given the mean of those to its left and above it, by a fixed geometric
    distribution on either side of that; `bits` is the length that an arithmetic coder needs for it.

    Args:
        block: Height and width of a block [pixel], a multiple of 8.
    """

    cost: Tensor

    def __init__(self, block: int = 16) -> None:
        super().__init__()
        self.block = block
        level, predicted = torch.arange(LEVELS), torch.arange(0, LEVELS - 0.5, 0.5)
        weight = 2.0 ** (-_SLOPE * (level - predicted[:, None]).abs())
        self.register_buffer("cost", -(weight / weight.sum(1, keepdim=True)).log2(), persistent=False)

    def shape(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of blocks of an image."""
        return -(-height // self.block), -(-width // self.block)

    @torch.no_grad()
    def levels(self, difference: Tensor) -> Tensor:
        """Levels, int64 `[batch, rows, columns]`, of images of unit contrast `[batch, 3, height, width]`."""
        means = F.interpolate(F.avg_pool2d(difference, 8, ceil_mode=True), scale_factor=8.0)
        rest = (difference - means[..., : difference.shape[2], : difference.shape[3]]).square().mean(1, keepdim=True)
        energy = F.avg_pool2d(rest, self.block, ceil_mode=True)[:, 0]
        level = ((10 * energy.clamp(min=1e-9).log10() - HIGHEST_DB) / STEP_DB).round() + LEVELS - 1
        return level.clamp(0, LEVELS - 1).long()

    def bits(self, levels: Tensor) -> Tensor:
        """Length of the code of a map [bit], float `[batch]`."""
        left, above = F.pad(levels, (1, 0))[..., :-1], F.pad(levels, (0, 0, 1, 0))[:, :-1]
        predicted = left + above  # in halves
        predicted = torch.cat([2 * above[..., :1], predicted[..., 1:]], 2)
        first = torch.cat([predicted.new_full((len(levels), 1, 1), LEVELS), 2 * left[:, :1, 1:]], 2)
        predicted = torch.cat([first, predicted[:, 1:]], 1)
        return self.cost[predicted, levels].sum((1, 2))

    def activity(self, levels: Tensor, size: int, height: int, width: int) -> Tensor:
        """Log of the activity for a grid of cells of size x size pixels, about -1 to 1, `[batch, height, width]`."""
        cells = self.block // size
        spread = levels.repeat_interleave(cells, 1).repeat_interleave(cells, 2)[:, :height, :width]
        return 2 * spread.float() / (LEVELS - 1) - 1


def symbol_order(levels: Tensor, ranks: Tensor, always: Tensor) -> Tensor:
    """Which complex latents are sent first.

    A latent's score is the level of its block plus the rank of its channel, as if it were the logarithm of its standard
    deviation: what is sent is what reverse water-filling would take.

    Args:
        levels: Of the positions of the latent, int64 `[batch, h, w]`.
        ranks: Of channels, in levels, `[channels]`.
        always: Channels that are sent before all others, bool `[channels]`.

    Returns:
        Indices into `[channels, h, w]`, flat, int64 `[batch, channels h w]`.
    """
    score = (ranks * _UNITS).round().long() + always * (4 * LEVELS * _UNITS)
    scores = score[:, None, None] + torch.where(always[:, None, None], 0, levels[:, None] * _UNITS)
    return scores.flatten(1).argsort(dim=1, descending=True, stable=True)
