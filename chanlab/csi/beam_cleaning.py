"""Beams of a delay tap cleaned by their coherence with each other."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from chanlab.csi.axial import AxialBlock
from chanlab.csi.beam_taps import NUM_FEATURES


class BeamCleaning(nn.Module):
    """Takes from each beam what it shares with the others of its tap, or adds it, by learned signs of their coherence.

    The weight of beam j in beam i is a learned real number times their measured complex coherence: what is added has
    the phase of beam i, whatever the common phase.
    """

    def __init__(self, dim: int, heads: int = 4, head_dim: int = 64) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Linear(NUM_FEATURES, dim)
        self.block = AxialBlock(dim)
        self.norm = nn.LayerNorm(dim)
        self.query = nn.Linear(dim, heads * head_dim)
        self.key = nn.Linear(dim, heads * head_dim)
        self.strength = nn.Parameter(torch.zeros(heads))

    def forward(self, taps: Tensor, seen: Tensor, place: Tensor, level: Tensor) -> Tensor:
        """Cleaned taps, same shape `[batch, series, column, row, tap, time]`."""
        hidden = self.norm(self.block(self.embed(seen) + place)).flatten(1, 2)
        query, key = (f(hidden).unflatten(-1, (self.heads, -1)).permute(0, 3, 2, 1, 4) for f in (self.query, self.key))
        signs = torch.tanh((query @ key.mT).float() / math.sqrt(query.shape[-1]))
        with torch.autocast(taps.device.type, enabled=False):
            beams = taps.flatten(2, 3).permute(0, 3, 2, 1, 4).flatten(3)  # [batch, tap, beam, series * time]
            covariance = beams @ beams.mH / beams.shape[-1]
            power = covariance.diagonal(dim1=-2, dim2=-1).real + 0.3 * level[:, None, None]
            coherence = covariance / (power[..., :, None] * power[..., None, :]).sqrt()
            weights = (signs * self.strength[:, None, None, None].float()).sum(1) * coherence
            beams = beams + weights @ beams
        shape = taps.shape
        return beams.reshape(shape[0], shape[4], -1, shape[1], shape[5]).permute(0, 3, 2, 1, 4).reshape(shape)
