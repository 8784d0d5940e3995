"""The coherent sum over paths or primitives: CFR of every antenna pair and subcarrier, with gradients."""

from __future__ import annotations

import contextlib
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from chanlab.errors import UsageError
from chanlab.rf.coherent_gemm import coherent_sum_backward, coherent_sum_forward
from chanlab.rf.coherent_reference import coherent_sum_reference
from chanlab.rf.plain import plain, refuse_tangents

Backend = Literal["reference", "gemm", "cuda"]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def coherent_sum(
    gain: Tensor,
    delay: Tensor,
    departure: Tensor,
    arrival: Tensor,
    tx_positions: Tensor,
    rx_positions: Tensor,
    frequencies: Tensor,
    wavelength: float,
    transmittance: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Sum paths as complex waves, h = Σ_n g_n T_n exp(-j 2π f τ_n) exp(j 2π/λ (u_n·p + w_n·q)).

    With `frequencies` around zero and gains that carry the phase of the carrier, as `chanlab.channels.Paths` do, this
    is `chanlab.channels.cfr`. With absolute frequencies, carrier included, gains need no such phase: this is what
    primitives use, whose delays are learned through it. Array phases are those of plane waves at λ, as there.

    Differentiable in everything but frequencies and wavelength; gradients of gradients and forward
    mode (jvp) exist in the reference alone.

    Args:
        gain: g, amplitude [linear], complex `[..., path]`. Its precision is that of the products and the result.
        delay: τ [s], float64 `[..., path]`.
        departure: Unit vectors u from the transmitter, world axes, `[..., 3, path]`.
        arrival: Unit vectors w from the receiver towards where the wave comes from, `[..., 3, path]`.
        tx_positions: Antenna positions p relative to the transmitter, world axes [m], `[..., tx_ant, 3]`.
        rx_positions: Antenna positions q relative to the receiver [m], `[..., rx_ant, 3]`.
        frequencies: f [Hz], float64 `[subcarrier]`.
        wavelength: λ of the array phases [m].
        transmittance: T [linear], real or complex `[..., path]`; None is 1.
        backend: `reference` (dense, in float64 whatever the gain: the definition), `gemm` (matrix products over blocks
            of paths, on any device) or `cuda` (one fused kernel, complex64, compiled on first use); None is `cuda` for
            complex64 on a CUDA device and `gemm` for everything else.

    Returns:
        Complex `[..., rx_ant, tx_ant, subcarrier]`; the batch axes `...` are those of all inputs, broadcast.

    Raises:
        UsageError: If a shape, a dtype or the back end doesn't fit.
    """
    for name, wave in (("delay", delay), ("frequencies", frequencies)):
        if wave.dtype != torch.float64:
            raise UsageError(
                f"coherent_sum needs {name} in float64, not {_name(wave)}: single precision loses the phase f τ at a "
                f"carrier. Compute them in float64, or pass {name}.double() where f τ is small."
            )
    if not gain.is_complex():
        raise UsageError(f"gain must be complex, not {_name(gain)}: gain.to(torch.complex64).")
    if transmittance is not None:
        gain = gain * transmittance.to(gain.dtype if transmittance.is_complex() else gain.real.dtype)
    if wavelength <= 0:
        raise UsageError(f"wavelength must be > 0 m, not {wavelength}.")
    inputs, batch = _broadcast(gain, delay, departure, arrival, tx_positions, rx_positions, frequencies)
    if backend == "reference":
        result = coherent_sum_reference(*inputs, frequencies, wavelength).to(gain.dtype)
    elif backend is None or backend in get_args(Backend):
        if backend is None:
            backend = "cuda" if gain.is_cuda and gain.dtype == torch.complex64 else "gemm"
        refuse_tangents("coherent_sum", inputs)
        call = _call if plain((*inputs, frequencies)) else torch.ops.chanlab.coherent_sum
        result = call(*inputs, frequencies, wavelength, backend)
    else:
        raise UsageError(f"unknown back end {backend!r}; known are {', '.join(get_args(Backend))}.")
    return result.reshape(*batch, *result.shape[1:])


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _broadcast(*inputs: Tensor) -> tuple[Inputs, torch.Size]:
    """Inputs but the frequencies with one batch axis, geometry in float64, and the batch axes."""
    gain, delay, departure, arrival, tx_positions, rx_positions, frequencies = inputs
    paths = gain.shape[-1:]
    trailing = {
        "gain": (gain, paths),
        "delay": (delay, paths),
        "departure": (departure, (3, *paths)),
        "arrival": (arrival, (3, *paths)),
        "tx_positions": (tx_positions, (*tx_positions.shape[-2:-1], 3)),
        "rx_positions": (rx_positions, (*rx_positions.shape[-2:-1], 3)),
    }
    for name, (x, want) in trailing.items():
        if not want or x.shape[-len(want) :] != want:
            raise UsageError(
                f"{name} has shape {list(x.shape)}; with gain [..., {', '.join(map(str, paths))}] it must end in "
                f"{list(want)} (see chanlab.rf.coherent_sum)."
            )
        if x.device != gain.device:
            raise UsageError(f"{name} is on {x.device} and gain on {gain.device}; move both to one device.")
    if frequencies.ndim != 1:
        raise UsageError(f"frequencies must be [subcarrier], not {list(frequencies.shape)}.")
    if frequencies.device != gain.device:
        raise UsageError(f"frequencies are on {frequencies.device} and gain on {gain.device}; move both to one device.")
    try:
        shapes = [x.shape[: x.ndim - len(want)] for x, want in trailing.values()]
        batch = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    except RuntimeError:
        told = ", ".join(f"{name} {list(x.shape)}" for name, (x, _) in trailing.items())
        raise UsageError(f"the batch axes don't broadcast: {told}.") from None
    count = batch.numel()
    g, *geometry = (x.expand(*batch, *want).reshape(count, *want) for x, want in trailing.values())
    t, u, w, p, q = (x.double() for x in geometry)
    return (g, t, u, w, p, q), batch


def _compute(*arguments: Any) -> Tensor:
    *inputs, backend = arguments
    if backend == "cuda":
        from chanlab.rf.coherent_cuda import coherent_sum_forward as fused

        return fused(*inputs)
    with _no_autocast(inputs[0]):
        return coherent_sum_forward(*inputs)


def _compute_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    *inputs, backend = arguments
    if backend == "cuda":
        from chanlab.rf.coherent_cuda import coherent_sum_backward as fused

        return fused(*inputs)
    with _no_autocast(inputs[0]):
        return coherent_sum_backward(*inputs)


def _no_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """In which the matrix products keep the precision of the gain."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


class _Sum(torch.autograd.Function):
    """The operator for plain tensors, without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        _setup(ctx, arguments, arguments[0])
        return _compute(*arguments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # gradients of the gradients are asked for: the operator refuses them
            return _differentiate(ctx, grad)
        gradients = _compute_backward(grad, *ctx.saved_tensors, ctx.wavelength, ctx.backend)
        return (*gradients, None, None, None)


def _call(*arguments: Any) -> Tensor:
    if torch.is_grad_enabled() and any(x.requires_grad for x in arguments[:6]):
        return _Sum.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]
    return _compute(*arguments)


@torch.library.custom_op("chanlab::coherent_sum", mutates_args=())
def _forward(
    gain: Tensor,
    delay: Tensor,
    departure: Tensor,
    arrival: Tensor,
    tx_positions: Tensor,
    rx_positions: Tensor,
    frequencies: Tensor,
    wavelength: float,
    backend: str,
) -> Tensor:
    inputs = (gain, delay, departure, arrival, tx_positions, rx_positions, frequencies)
    return _compute(*inputs, wavelength, backend)


@_forward.register_fake
def _(
    gain: Tensor,
    delay: Tensor,
    departure: Tensor,
    arrival: Tensor,
    tx_positions: Tensor,
    rx_positions: Tensor,
    frequencies: Tensor,
    wavelength: float,
    backend: str,
) -> Tensor:
    return gain.new_empty(gain.shape[0], rx_positions.shape[1], tx_positions.shape[1], frequencies.shape[0])


@torch.library.custom_op("chanlab::coherent_sum_backward", mutates_args=())
def _backward(
    grad: Tensor,
    gain: Tensor,
    delay: Tensor,
    departure: Tensor,
    arrival: Tensor,
    tx_positions: Tensor,
    rx_positions: Tensor,
    frequencies: Tensor,
    wavelength: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (gain, delay, departure, arrival, tx_positions, rx_positions, frequencies)
    return _compute_backward(grad, *inputs, wavelength, backend)


@_backward.register_fake
def _(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:6])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.wavelength, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.chanlab.coherent_sum_backward(grad, *ctx.saved_tensors, ctx.wavelength, ctx.backend)
    return (*gradients, None, None, None)


def _no_second_derivative(*_: Any) -> None:
    raise UsageError("coherent_sum has no second derivatives; use coherent_sum_reference for them.")


_forward.register_autograd(_differentiate, setup_context=_setup)
_backward.register_autograd(_no_second_derivative)
