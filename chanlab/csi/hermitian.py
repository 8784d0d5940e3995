"""Many small Hermitian systems at once, with the gradient written out."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

LARGEST_IN_KERNEL = 32
"""Systems up to this size are solved by one kernel on CUDA; larger ones by Cholesky factors."""


def solve_hermitian(matrix: Tensor, right: Tensor) -> Tensor:
    """X of A X = B for Hermitian positive definite matrices A, in double precision.

    On a CUDA device with Triton one kernel inverts small matrices in registers (sweep operator, no pivots); elsewhere
    LAPACK's Cholesky factors are used. The gradient takes one more solve with the same matrices instead of going back
    through a factorisation. Source: J. H. Goodnight, "A tutorial on the SWEEP operator", Am. Stat. 33(3), 1979.

    Args:
        matrix: A, complex128 `[..., n, n]`.
        right: B, complex128 `[..., n, k]`, the same leading axes.

    Returns:
        Complex128 `[..., n, k]`. A matrix that is not positive definite gives numbers without meaning, or NaN.
    """
    result: Tensor = _Solve.apply(matrix, right)  # type: ignore[no-untyped-call]
    return result


class _Solve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, right: Tensor) -> Tensor:
        solution = _solve(matrix, right)
        ctx.save_for_backward(matrix, solution)
        return solution

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        matrix, solution = ctx.saved_tensors
        right = solve_hermitian(matrix, gradients[0])
        return -right @ solution.mH, right


def _solve(matrix: Tensor, right: Tensor) -> Tensor:
    if matrix.is_cuda and matrix.shape[-1] <= LARGEST_IN_KERNEL and importlib.util.find_spec("triton"):
        from chanlab.csi.hermitian_kernel import solve

        return solve(matrix, right)
    factor = torch.linalg.cholesky_ex(matrix)[0]
    return torch.cholesky_solve(right, factor)
