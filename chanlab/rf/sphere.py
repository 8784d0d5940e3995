"""The `torch.library` operator behind `rasterize_sphere`, its gradients, and its way around torch's dispatcher."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from chanlab.errors import ChanlabError, UsageError
from chanlab.rf import sphere_cuda
from chanlab.rf.build import library
from chanlab.rf.panorama import Panorama
from chanlab.rf.plain import plain, refuse_tangents
from chanlab.rf.problem import Asked, laid_out, pack_problem
from chanlab.rf.room import ROOM

INPUTS = ("means", "quaternions", "scales", "opacities", "signals", "receivers", "rotations")

_GIVEN = ", ".join(f"Tensor {name}" for name in INPUTS)
_ASKED = "int height, int width, float lowest, float highest, float start, float nearest, float blur"
torch.library.define(
    "chanlab::rasterize_sphere",
    f"({_GIVEN}, {_ASKED}, bool statistics, int capacity, int slot) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "chanlab::rasterize_sphere_backward",
    f"(Tensor by_image, Tensor by_transmittance, {_GIVEN}, Tensor transmittance, Tensor state, {_ASKED}, "
    "int capacity, bool poses) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)

_Made = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def rasterize(
    inputs: tuple[Tensor, ...], panorama: Panorama, nearest: float, blur: float, statistics: bool, capacity: int | None
) -> _Made:
    """Image, transmittance, radius, weight and peak (the last two only with `statistics`), by the kernels."""
    refuse_tangents("rasterize_sphere", inputs)
    asked = (panorama.height, panorama.width, panorama.lowest, panorama.highest, panorama.start, nearest, blur)
    draw = _draw if plain(inputs) else _dispatch
    means, receivers = inputs[0], inputs[5].shape[0]
    if not means.is_cuda:
        return draw(inputs, asked, statistics, 0, -1)
    if means.dtype != torch.float32:
        raise UsageError("The CUDA kernels compute in float32: convert the inputs with .float(), or use `reference`.")
    if inputs[4].shape[1] > sphere_cuda.MAX_CHANNELS:
        raise UsageError(
            f"The CUDA kernels take up to {sphere_cuda.MAX_CHANNELS} channels, got {inputs[4].shape[1]}; render in "
            "parts."
        )
    device, items = means.get_device(), means.shape[0] * receivers
    most = max(1, items * sphere_cuda.tiles(panorama.height, panorama.width))
    room, slot = ROOM.before((device, receivers, panorama), items, most, capacity, device)
    try:
        return draw(inputs, asked, statistics, room, slot)
    finally:
        ROOM.after(slot)


def check() -> None:
    """Wait for the CUDA renderings of this process so far and raise if a tile list of one was too short.

    Raises:
        ChanlabError: If so; the images concerned are NaN.
    """
    ROOM.check()


def _empty_outputs(
    means: Tensor, signals: Tensor, receivers: Tensor, height: int, width: int, statistics: bool, words: int
) -> tuple[Tensor, ...]:
    b, n = receivers.shape[0], means.shape[0]
    seen = (b, n) if statistics else (0,)
    return (
        means.new_empty(b, signals.shape[1], height, width),
        means.new_empty(b, height, width),
        means.new_empty(b, n),
        means.new_empty(seen),
        means.new_empty(seen),
        means.new_empty(words, dtype=torch.int32),
    )


@torch.library.register_fake("chanlab::rasterize_sphere")  # type: ignore[untyped-decorator]
def _fake(
    means: Tensor,
    quaternions: Tensor,
    scales: Tensor,
    opacities: Tensor,
    signals: Tensor,
    receivers: Tensor,
    rotations: Tensor,
    height: int,
    width: int,
    lowest: float,
    highest: float,
    start: float,
    nearest: float,
    blur: float,
    statistics: bool,
    capacity: int,
    slot: int,
) -> tuple[Tensor, ...]:
    words = receivers.shape[0] * height * width
    if means.device.type == "cuda":
        words = sphere_cuda.state_words(means.shape[0], receivers.shape[0], height, width, capacity)
    return _empty_outputs(means, signals, receivers, height, width, statistics, words)


@torch.library.register_fake("chanlab::rasterize_sphere_backward")  # type: ignore[untyped-decorator]
def _fake_backward(by_image: Tensor, by_transmittance: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in rest[:7])


def _cpu(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, asked, statistics = laid_out(arguments[:7]), arguments[7:14], arguments[14]
    words = inputs[5].shape[0] * asked[0] * asked[1]
    outputs = _empty_outputs(inputs[0], inputs[4], inputs[5], asked[0], asked[1], statistics, words)
    shown = [*outputs[:3], *(outputs[3:5] if statistics else (None, None)), outputs[5]]
    wide = int(inputs[0].dtype == torch.float64)
    forward = library("sphere_cpu.cpp").sphere_cpu_forward
    _succeed(forward(_problem(inputs, asked), wide, _pointers(inputs), _pointers(shown)))
    return outputs


def _cpu_backward(*arguments: Any) -> tuple[Tensor, ...]:
    by_image, by_transmittance, *inputs = laid_out(arguments[:9])
    transmittance, last = arguments[9:11]
    outputs = tuple(torch.empty_like(x) for x in inputs)
    wide = int(inputs[0].dtype == torch.float64)
    backward = library("sphere_cpu.cpp").sphere_cpu_backward
    given = _pointers([*inputs, by_image, by_transmittance, transmittance, last])
    _succeed(backward(_problem(inputs, arguments[11:18]), wide, given, _pointers(outputs)))
    return outputs


def _problem(inputs: Sequence[Tensor], asked: Asked) -> bytes:
    return pack_problem(asked, inputs[0].shape[0], inputs[5].shape[0], inputs[4].shape[1])


def _pointers(tensors: Sequence[Tensor | None]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))


def _cuda(*arguments: Any) -> tuple[Tensor, ...]:
    statistics, capacity, slot = arguments[14:]
    made = sphere_cuda.forward(arguments[:7], arguments[7:14], statistics, capacity, slot, keep=True)
    return tuple(arguments[0].new_empty(0) if x is None else x for x in made)


def _cuda_backward(*arguments: Any) -> tuple[Tensor, ...]:
    by_image, by_transmittance, *inputs = arguments[:9]
    transmittance, state, *asked = arguments[9:18]
    capacity, poses = arguments[18:]
    return sphere_cuda.backward(by_image, by_transmittance, inputs, transmittance, state, tuple(asked), capacity, poses)


def _succeed(code: int) -> None:
    if code:
        raise ChanlabError("rasterize_sphere: out of memory. Render fewer receivers, Gaussians or channels at once.")


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, transmittance, radius, weight, peak, state = output
    ctx.save_for_backward(*inputs[:7], transmittance, state)
    ctx.mark_non_differentiable(radius, weight, peak, state)
    ctx.asked, ctx.capacity = inputs[7:14], inputs[15]


def _pull(ctx: Any, by_image: Tensor | None, by_transmittance: Tensor | None, backward: Any) -> tuple[Any, ...]:
    *inputs, transmittance, state = ctx.saved_tensors
    if by_transmittance is None and backward is not _cuda_backward:
        by_transmittance = torch.zeros_like(transmittance)
    if by_image is None:
        b, *size = transmittance.shape
        by_image = transmittance.new_zeros(b, inputs[4].shape[1], *size)
    wanted = ctx.needs_input_grad
    poses = wanted[5] or wanted[6]
    gradients = backward(by_image, by_transmittance, *inputs, transmittance, state, *ctx.asked, ctx.capacity, poses)
    return tuple(g if want else None for g, want in zip(gradients, wanted[:7], strict=True))


def _no_second_derivative(*_: Any) -> None:
    raise UsageError('rasterize_sphere: the kernels have no second derivatives; use backend="reference" for them.')


def _backward(ctx: Any, by_image: Tensor | None, by_transmittance: Tensor | None, *_: Any) -> tuple[Any, ...]:
    return (*_pull(ctx, by_image, by_transmittance, torch.ops.chanlab.rasterize_sphere_backward), *(None,) * 10)


class _Draw(torch.autograd.Function):
    """Gradients of what was drawn without torch's dispatcher, which takes longer than the kernels do.

    The drawing is done before autograd hears of it, so that the device need not wait for its bookkeeping.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> _Made:
        ctx.set_materialize_grads(False)
        inputs, ((*made, state), ctx.asked, ctx.capacity) = arguments[:7], arguments[7:]
        ctx.pull = _cuda_backward if inputs[0].is_cuda else _cpu_backward
        ctx.save_for_backward(*inputs, made[1], state)
        ctx.mark_non_differentiable(*(x for x in made[2:] if x is not None))
        return tuple(made)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_image: Tensor | None, by_transmittance: Tensor | None, *_: Any) -> tuple[Any, ...]:
        return (*_pull(ctx, by_image, by_transmittance, ctx.pull), *(None,) * 3)


def _outputs(
    inputs: tuple[Tensor, ...], asked: Asked, statistics: bool, capacity: int, slot: int, keep: bool
) -> tuple[Any, ...]:
    if inputs[0].is_cuda:
        return sphere_cuda.forward(inputs, asked, statistics, capacity, slot, keep)
    return _cpu(*inputs, *asked, statistics, capacity, slot)


def _draw(inputs: tuple[Tensor, ...], asked: Asked, statistics: bool, capacity: int, slot: int) -> _Made:
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    made = _outputs(inputs, asked, statistics, capacity, slot, keep)
    if keep:
        return _Draw.apply(*inputs, made, asked, capacity)  # type: ignore[no-any-return, no-untyped-call]
    return made[:5]


def _dispatch(inputs: tuple[Tensor, ...], asked: Asked, statistics: bool, capacity: int, slot: int) -> _Made:
    return tuple(torch.ops.chanlab.rasterize_sphere(*inputs, *asked, statistics, capacity, slot)[:5])


torch.library.impl("chanlab::rasterize_sphere", "CPU", _cpu)
torch.library.impl("chanlab::rasterize_sphere_backward", "CPU", _cpu_backward)
torch.library.impl("chanlab::rasterize_sphere", "CUDA", _cuda)
torch.library.impl("chanlab::rasterize_sphere_backward", "CUDA", _cuda_backward)
torch.library.register_autograd("chanlab::rasterize_sphere", _backward, setup_context=_keep)
torch.library.register_autograd("chanlab::rasterize_sphere_backward", _no_second_derivative)
