"""The CUDA kernel of `chanlab.csi.hermitian`, in Triton."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SYSTEMS = 2
"""Systems per program."""


@triton.jit
def _sweep(
    matrix, right, solution, count, size, columns: tl.constexpr, padded: tl.constexpr, systems: tl.constexpr
) -> None:
    """-A⁻¹ by sweeping every pivot, then -(-A⁻¹) B; real and imaginary parts lie side by side."""
    system = tl.program_id(0).to(tl.int64) * systems + tl.arange(0, systems)
    index = tl.arange(0, padded)
    which, row, column = system[:, None, None], index[None, :, None], index[None, None, :]
    inside = (which < count) & (row < size) & (column < size)
    place = matrix + 2 * ((which * size + row) * size + column)
    real = tl.load(place, inside, 0.0)
    imaginary = tl.load(place + 1, inside, 0.0)
    real = tl.where((row == column) & (inside == 0), 1.0, real)
    for pivot in range(size):
        in_row, in_column = row == pivot, column == pivot
        left_real = tl.sum(tl.where(in_column, real, 0.0), 2)
        left_imaginary = tl.sum(tl.where(in_column, imaginary, 0.0), 2)
        top_real = tl.sum(tl.where(in_row, real, 0.0), 1)
        top_imaginary = tl.sum(tl.where(in_row, imaginary, 0.0), 1)
        at_pivot = index[None, :] == pivot
        scale = 1.0 / tl.sum(tl.where(at_pivot, left_real, 0.0), 1)[:, None, None]
        left_real = tl.where(at_pivot, -1.0, left_real)[:, :, None]
        left_imaginary = tl.where(at_pivot, 0.0, left_imaginary)[:, :, None]
        top_real = tl.where(at_pivot, -1.0, top_real)[:, None, :] * scale
        top_imaginary = tl.where(at_pivot, 0.0, top_imaginary)[:, None, :] * scale
        swept = in_row | in_column
        real = tl.where(swept, 0.0, real) - (left_real * top_real - left_imaginary * top_imaginary)
        imaginary = tl.where(swept, 0.0, imaginary) - (left_real * top_imaginary + left_imaginary * top_real)
    given = (which < count) & (column < size)
    asked = (system[:, None] < count) & (index[None, :] < size)
    for k in tl.static_range(columns):
        there = right + 2 * ((which * size + column) * columns + k)
        right_real = tl.load(there, given, 0.0)
        right_imaginary = tl.load(there + 1, given, 0.0)
        here = solution + 2 * ((system[:, None] * size + index[None, :]) * columns + k)
        tl.store(here, -tl.sum(real * right_real - imaginary * right_imaginary, 2), asked)
        tl.store(here + 1, -tl.sum(real * right_imaginary + imaginary * right_real, 2), asked)


def solve(matrix: Tensor, right: Tensor) -> Tensor:
    """See `chanlab.csi.hermitian.solve_hermitian`; CUDA tensors only."""
    size, columns = right.shape[-2:]
    count = matrix[..., 0, 0].numel()
    left, given = (torch.view_as_real(x.resolve_conj().contiguous()) for x in (matrix, right))
    solution = torch.empty_like(given)
    grid = (triton.cdiv(count, SYSTEMS),)
    padded = triton.next_power_of_2(size)
    with torch.cuda.device(matrix.device):
        _sweep[grid](left, given, solution, count, size, columns, max(2, padded), SYSTEMS, num_warps=4)
    return torch.view_as_complex(solution)
