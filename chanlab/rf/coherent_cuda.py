"""The coherent sum in one fused CUDA kernel (`kernels/coherent.cu`), compiled on first use."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from chanlab.errors import ChanlabError, UsageError
from chanlab.rf.build import library
from chanlab.rf.coherent_gemm import Gradients
from chanlab.rf.problem import laid_out

_BLOCKS = {"forward": 2, "backward": 4}  # resident blocks of a multiprocessor, by registers and shared memory


def coherent_sum_forward(
    gain: Tensor,
    delay: Tensor,
    departure: Tensor,
    arrival: Tensor,
    tx_positions: Tensor,
    rx_positions: Tensor,
    frequencies: Tensor,
    wavelength: float,
) -> Tensor:
    """As `coherent_sum_reference`, in complex64 on a CUDA device.

    Raises:
        UsageError: If the tensors are not on a CUDA device or the gain is not complex64.
        MissingDependencyError: If the kernel must be compiled and there is no compiler.
    """
    geometry = (delay, departure, arrival, tx_positions, rx_positions)
    held, sizes, lib = _prepare(gain, *geometry, frequencies, stage="forward")
    batch, _, num_rx, num_tx, tones, splits = sizes
    out = gain.new_zeros(batch, num_rx, num_tx, tones) if 0 in sizes else gain.new_empty(batch, num_rx, num_tx, tones)
    if 0 not in sizes:
        partial = gain.new_empty(splits, *out.shape) if splits > 1 else out
        _call(lib, "coherent_forward", sizes, wavelength, *held, partial, out)
    return out


def coherent_sum_backward(
    grad: Tensor,
    gain: Tensor,
    delay: Tensor,
    departure: Tensor,
    arrival: Tensor,
    tx_positions: Tensor,
    rx_positions: Tensor,
    frequencies: Tensor,
    wavelength: float,
) -> Gradients:
    """As `coherent_gemm.coherent_sum_backward`, in complex64 on a CUDA device."""
    geometry = (delay, departure, arrival, tx_positions, rx_positions)
    held, sizes, lib = _prepare(gain, *geometry, frequencies, stage="backward")
    batch, _, num_rx, num_tx, _, splits = sizes
    if 0 in sizes:
        g, t, u, w, p, q = (torch.zeros_like(x) for x in (gain, *geometry))
        return g, t, u, w, p, q
    gains, delays, departures, arrivals = (torch.empty_like(x) for x in held[:4])
    positions = delay.new_zeros(batch, splits, num_rx, num_tx, 6)
    (down,) = laid_out([grad.resolve_conj()])
    _call(lib, "coherent_backward", sizes, wavelength, down, *held, gains, delays, departures, arrivals, positions)
    whole = positions.sum(1)
    return gains, delays, departures, arrivals, whole[..., 3:].sum(1), whole[..., :3].sum(2)


def _prepare(*inputs: Tensor, stage: str) -> tuple[list[Tensor], tuple[int, ...], ctypes.CDLL]:
    """Contiguous inputs, the sizes that the kernels take, and their library."""
    gain, frequencies = inputs[0], inputs[6]
    _check(gain)
    lib = _library()
    batch, paths = gain.shape
    num_tx, num_rx, tones = inputs[4].shape[1], inputs[5].shape[1], frequencies.shape[0]
    pairs = num_tx * num_rx
    blocks = batch if stage == "backward" else int(lib.coherent_tiles(batch, pairs, tones))
    wanted = _multiprocessors(gain.device) * _BLOCKS[stage] // max(blocks, 1)
    splits = min(max(wanted, 1), int(lib.coherent_path_tiles(paths)))
    if max(blocks * splits, batch * pairs * tones // 32) >= 2**31:
        raise UsageError(
            f"coherent_sum of {batch} links of {pairs} antenna pairs is too large at once; split the batch."
        )
    held = laid_out([x.resolve_conj() for x in inputs])
    return held, (batch, paths, num_rx, num_tx, tones, splits), lib


def _check(gain: Tensor) -> None:
    if gain.device.type != "cuda" or gain.dtype != torch.complex64:
        kind = str(gain.dtype).removeprefix("torch.")
        raise UsageError(
            f'backend="cuda" takes complex64 gains on a CUDA device, not {kind} on {gain.device}; move and cast them, '
            'or use backend="gemm", which takes any.'
        )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _library() -> ctypes.CDLL:
    return declare(library("coherent.cu"))


def declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    """Give a library of `coherent.cu` the types of its functions."""
    lib.coherent_tiles.argtypes, lib.coherent_tiles.restype = [ctypes.c_int64] * 3, ctypes.c_int64
    lib.coherent_path_tiles.argtypes, lib.coherent_path_tiles.restype = [ctypes.c_int64], ctypes.c_int64
    lib.coherent_error.argtypes, lib.coherent_error.restype = [ctypes.c_int], ctypes.c_char_p
    for name, pointers in (("coherent_forward", 10), ("coherent_backward", 14)):
        function = getattr(lib, name)
        function.argtypes = [ctypes.POINTER(ctypes.c_int64), ctypes.c_double, *[ctypes.c_void_p] * pointers]
        function.restype = ctypes.c_int
    return lib


def _call(lib: ctypes.CDLL, name: str, sizes: tuple[int, ...], wavelength: float, *tensors: Tensor) -> None:
    """Launch on the current stream of the tensors' device; no synchronisation."""
    device = tensors[0].device
    with _stream(device) as stream:
        pointers = [x.data_ptr() for x in tensors]
        code = getattr(lib, name)((ctypes.c_int64 * len(sizes))(*sizes), wavelength, *pointers, stream)
    if code:
        raise ChanlabError(f"{name} failed on {device}: {lib.coherent_error(code).decode()}.")


@contextlib.contextmanager
def _stream(device: torch.device) -> Iterator[int]:
    """The handle of the current stream of a device, which is the current one meanwhile."""
    with torch.cuda.device(device):
        yield int(torch.cuda.current_stream(device).cuda_stream)
