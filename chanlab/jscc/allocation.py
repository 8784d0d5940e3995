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
    distribution on either side of that; `bits` is the length that an arithmetic coder needs for it, to within two bits.

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
        """Levels of images of unit contrast.

        Args:
            difference: `[batch, 3, height, width]`, height and width multiples of 8.

        Returns:
            Int64 `[batch, rows, columns]`.
        """
        batch, _, height, width = difference.shape
        cells = difference.reshape(batch, 3, height // 8, 8, width // 8, 8)
        rest = (cells - cells.mean((3, 5), keepdim=True)).square().mean((1, 3, 5))
        energy = F.avg_pool2d(rest[:, None], self.block // 8, ceil_mode=True)[:, 0]
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


def level_order(ranks: Tensor, always: Tensor) -> Tensor:
    """Which levels of which channels are sent first.

    A latent's score is the level of its block plus the rank of its channel, as if it were the logarithm of its standard
    deviation: what is sent is what reverse water-filling would take.

    Args:
        ranks: Of channels, in levels, `[channels]`.
        always: Channels that are sent before all others, bool `[channels]`.

    Returns:
        Indices into `[channels, LEVELS]`, flat, int64.
    """
    score = (ranks * _UNITS).round().long() + always * (4 * LEVELS * _UNITS)
    scores = score[:, None] + torch.where(always[:, None], 0, torch.arange(LEVELS, device=ranks.device) * _UNITS)
    return scores.flatten().argsort(descending=True, stable=True)


def symbol_places(levels: Tensor, groups: Tensor, always: Tensor) -> Tensor:
    """Where each complex latent stands in the order in which they are sent.

    Latents of a channel and a level keep their order: places follow from counts, without sorting them.

    Args:
        levels: Of the positions of the latent, int64 `[batch, h, w]`.
        groups: See `level_order`.
        always: Channels that are sent before all others, bool `[channels]`.

    Returns:
        Places of latents `[channels, h, w]`, flat, int64 `[batch, channels h w]`.
    """
    flat, channels = levels.flatten(1), len(always)
    level = torch.arange(LEVELS, device=levels.device)
    of_level = flat[:, None] == level[:, None]
    within = (of_level.cumsum(2) - 1).gather(1, flat[:, None])
    # A channel that is always sent has one group, whatever the levels.
    whole = torch.where(level == 0, flat.shape[1], 0)
    sizes = torch.where(always[:, None], whole, of_level.sum(2)[:, None]).flatten(1)[:, groups]
    starts = torch.empty_like(sizes).scatter(1, groups.expand_as(sizes), sizes.cumsum(1) - sizes)
    starts = starts.view(-1, channels, LEVELS)
    places = starts.gather(2, flat[:, None].expand(-1, channels, -1)) + within
    index = torch.arange(flat.shape[1], device=levels.device)
    return torch.where(always[:, None], starts[..., :1] + index, places).flatten(1)


def symbol_order(places: Tensor) -> Tensor:
    """Which complex latents are sent first: indices into them, flat, int64 `[batch, channels h w]`."""
    index = torch.arange(places.shape[1], device=places.device).expand_as(places)
    return torch.empty_like(places).scatter(1, places, index)


def at_places(values: Tensor, places: Tensor) -> Tensor:
    """Values of the symbols that were sent, `[batch, k]`, at their places in the latent, flat; others are 0."""
    if values.requires_grad:  # the gradient of what is gathered would add up, symbol by symbol
        order = symbol_order(places)[:, : values.shape[1]]
        return values.new_zeros(places.shape).scatter(1, order, values)
    return F.pad(values, (0, 1)).gather(1, places.clamp(max=values.shape[1]))
