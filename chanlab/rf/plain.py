"""When an operator may be called without torch's dispatcher, which takes longer than fast kernels do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from chanlab.errors import UsageError

_PLAIN = {Tensor, torch.nn.Parameter}


def plain(tensors: Sequence[Tensor]) -> bool:
    """Whether nothing but autograd looks on: no tracing, compiling, transform, dispatch mode or subclass of tensors."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return False
    return _PLAIN.issuperset([type(x) for x in tensors])


def refuse_tangents(name: str, tensors: Sequence[Tensor]) -> None:
    """Raise for forward-mode differentiation, which kernels don't have: torch would take their derivative for zero.

    Raises:
        UsageError: If a tensor has a tangent.
    """
    if forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):  # type: ignore[no-untyped-call]
        raise UsageError(
            f'{name}: this back end has no forward-mode derivative (jvp); use backend="reference", or reverse mode '
            "(backward, vjp)."
        )
