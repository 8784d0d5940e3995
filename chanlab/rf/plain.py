"""When an operator may be called without torch's dispatcher, which takes longer than fast kernels do."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def plain(tensors: Iterable[Tensor]) -> bool:
    """Whether nothing but autograd looks on: no tracing or compiling, no transform, no subclass of tensors."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return all(type(x) is Tensor or type(x) is torch.nn.Parameter for x in tensors)
