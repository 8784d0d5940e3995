"""Depthwise convolution of features whose channels lie last."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_has_kernel = importlib.util.find_spec("triton") is not None


def depthwise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A kernel for each channel, zeros beyond the edges.

    On a CUDA device with Triton its own kernels run (sums in float32): libraries are slow at its gradients on
    channels-last memory. Elsewhere it is `torch.nn.functional.conv2d`.

    Args:
        x: `[batch, height, width, C]`.
        weight: As `torch.nn.Conv2d(C, C, k, groups=C)` has it, `[C, 1, k, k]`, k odd.
        bias: `[C]`.

    Returns:
        Features of the shape and, on a CUDA device, the dtype of `x`.
    """
    if x.is_cuda and _has_kernel:
        result: Tensor = _convolve(x, weight, bias)
        return result
    return _plain(x, weight, bias)


def use_kernel(use: bool) -> None:
    """Whether `depthwise` takes its own kernels on CUDA devices, where Triton is installed."""
    global _has_kernel
    _has_kernel = use and importlib.util.find_spec("triton") is not None


def _plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    out = F.conv2d(x.permute(0, 3, 1, 2), weight, bias, padding=weight.shape[-1] // 2, groups=len(weight))
    return out.permute(0, 2, 3, 1)


# Operators of their own, so that torch.compile leaves the kernels as they are.


@torch.library.custom_op(
    "chanlab::depthwise", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor bias) -> Tensor"
)
def _convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    from chanlab.jscc.depthwise_kernel import convolve

    return convolve(x, weight, bias)


@torch.library.custom_op(
    "chanlab::depthwise_weight", mutates_args=(), schema="(Tensor x, Tensor gradient, int size) -> Tensor"
)
def _correlate(x: Tensor, gradient: Tensor, size: int) -> Tensor:
    from chanlab.jscc.depthwise_kernel import correlate

    return correlate(x, gradient, size)


@_convolve.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@_correlate.register_fake
def _(x: Tensor, gradient: Tensor, size: int) -> Tensor:
    return x.new_empty((x.shape[-1], 1, size, size), dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    gradient = gradient.contiguous()
    of_x = _convolve(gradient, weight.flip((2, 3)), weight.new_zeros(len(weight)))
    of_weight = _correlate(x, gradient, weight.shape[-1])
    return of_x, of_weight.to(weight.dtype), gradient.float().sum((0, 1, 2)).to(weight.dtype)


_convolve.register_autograd(_backward, setup_context=_save)
