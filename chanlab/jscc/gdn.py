"""Generalised divisive normalisation, the nonlinearity of learned image codecs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FLOOR = 1e-6
"""Smallest β: keeps the root away from 0."""


class GDN(nn.Module):
    """y_i = x_i / √(β_i + Σ_j γ_ij x_j²) at each position; the inverse multiplies.

    Ballé, Laparra and Simoncelli, "Density modeling of images using a generalized normalization transformation" (2016).

    β and γ stay non-negative because their square roots are what is learnt (β above 1e-6).

    Args:
        channels: Number of channels.
        inverse: IGDN, the decoder's.
        gamma: Diagonal of γ at the start; β starts at 1, other entries of γ at 1e-4.
    """

    def __init__(self, channels: int, inverse: bool = False, gamma: float = 0.1) -> None:
        super().__init__()
        self.inverse = inverse
        self.root_beta = nn.Parameter(torch.ones(channels))
        start = torch.full((channels, channels), 1e-2)
        start.fill_diagonal_(gamma**0.5)
        self.root_gamma = nn.Parameter(start)

    @property
    def beta(self) -> Tensor:
        """β, `[channels]`."""
        return self.root_beta.square() + FLOOR

    @property
    def gamma(self) -> Tensor:
        """γ, `[channels, channels]`."""
        return self.root_gamma.square()

    def forward(self, x: Tensor) -> Tensor:
        """Normalised features.

        Args:
            x: `[batch, channels, height, width]`.
        """
        energy = F.conv2d(x.square(), self.gamma[..., None, None], self.beta)
        return x * (energy.sqrt() if self.inverse else energy.rsqrt())
