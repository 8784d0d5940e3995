"""A gated block of `chanlab.jscc.adaptive_networks` in two kernels, without gradients."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

WIDEST = 128
"""Channels of which a tile fits into registers."""

_has_kernel = importlib.util.find_spec("triton") is not None


def fits(x: Tensor) -> bool:
    """Whether `gated_block` takes these features: bfloat16 on a CUDA device with Triton, no gradients."""
    return (
        _has_kernel
        and x.is_cuda
        and x.dtype == torch.bfloat16
        and x.shape[-1] <= WIDEST
        and x.numel() < 2**30  # places are counted in 32 bits, for twice as many channels
        and not torch.is_grad_enabled()
    )


def use_kernel(use: bool) -> None:
    """Whether `fits` may say so, where Triton is installed."""
    global _has_kernel
    _has_kernel = use and importlib.util.find_spec("triton") is not None


def gated_block(x: Tensor, modulation: Tensor, layers: Sequence[torch.nn.Linear | torch.nn.Conv2d]) -> Tensor:
    """What `GatedBlock.forward` returns, sums in float32.

    One kernel normalises, modulates and widens, the other does the rest.

    Args:
        x: `[batch, height, width, C]`, bfloat16; see `fits`.
        modulation: `[batch, 1, 1, 4 C]`: scale and shift of either branch.
        layers: Those of the block, in the order in which it runs them; all have a bias.

    Returns:
        As `x`.
    """
    weights = [value for layer in layers for value in (layer.weight, layer.bias) if value is not None]
    out: Tensor = _gated_block(x, modulation, weights)
    return out


@torch.library.custom_op(
    "chanlab::gated_block", mutates_args=(), schema="(Tensor x, Tensor modulation, Tensor[] weights) -> Tensor"
)
def _gated_block(x: Tensor, modulation: Tensor, weights: list[Tensor]) -> Tensor:
    from chanlab.jscc.gated_kernel import gated_block

    return gated_block(x, modulation, weights)


@_gated_block.register_fake
def _(x: Tensor, modulation: Tensor, weights: list[Tensor]) -> Tensor:
    return x.new_empty(x.shape)
