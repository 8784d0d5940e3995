"""A Transformer block over tokens on a grid of beams and delay taps."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class AxialBlock(nn.Module):
    """Attention along taps, then along beams, then a feed-forward layer, each with its own pre-norm and residual.

    Args:
        dim: Width.
        heads: Heads of each attention.
    """

    compilable = True

    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__()
        self.along_taps = _Attention(dim, heads)
        self.along_beams = _Attention(dim, heads)
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 3 * dim)
        self.down = nn.Linear(3 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as its input, `[batch, column, row, tap, dim]`."""
        grid = x.flatten(1, 2)
        grid = grid + self.along_taps(grid)
        grid = grid + self.along_beams(grid.transpose(1, 2)).transpose(1, 2)
        grid = grid + self.down(functional.gelu(self.up(self.norm(grid))))
        result: Tensor = grid.reshape(x.shape)
        return result


class _Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.inputs = nn.Linear(dim, 3 * dim)
        self.output = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Attention along the last axis but one of `[batch, row, token, dim]`."""
        tokens = self.inputs(self.norm(x).flatten(0, 1)).unflatten(-1, (3, self.heads, -1))
        query, key, value = tokens.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(-2)).reshape(x.shape)
        return output
