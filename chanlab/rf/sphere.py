"""The `torch.library` operator behind `rasterize_sphere` and its binding to the compiled kernels."""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chanlab.errors import ChanlabError, UsageError
from chanlab.rf.build import library
from chanlab.rf.panorama import Panorama
from chanlab.rf.plain import plain, refuse_tangents

TILE_WIDTH, TILE_HEIGHT = 16, 8
"""As in `kernels/sphere.h`."""

MAX_CHANNELS = 38
"""Of the CUDA kernels."""

ITEM_THREADS = 256
"""As in `kernels/sphere_lists.cuh`."""

INPUTS = ("means", "quaternions", "scales", "opacities", "signals", "receivers", "rotations")

_GIVEN = ", ".join(f"Tensor {name}" for name in INPUTS)
_ASKED = "int height, int width, float lowest, float highest, float start, float nearest, float blur"
torch.library.define(
    "chanlab::rasterize_sphere",
    f"({_GIVEN}, {_ASKED}, bool statistics, int capacity, int slot) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "chanlab::rasterize_sphere_backward",
    f"(Tensor by_image, Tensor by_transmittance, {_GIVEN}, Tensor transmittance, Tensor last, Tensor state, {_ASKED}, "
    "int capacity, bool poses) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


class _Problem(ctypes.Structure):
    """`sphere::Problem`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("gaussians", "receivers", "channels", "height", "width")),
        *((name, ctypes.c_double) for name in ("lowest", "row_step", "start", "column_step", "nearest", "blur")),
    )


class _Asked(NamedTuple):
    """Scalars of the operator, in its order."""

    height: int
    width: int
    lowest: float
    highest: float
    start: float
    nearest: float
    blur: float

    def problem(self, signals: Tensor, receivers: Tensor) -> _Problem:
        return _problem(self, signals.shape[0], receivers.shape[0], signals.shape[1])


@functools.lru_cache(maxsize=64)
def _problem(asked: _Asked, gaussians: int, receivers: int, channels: int) -> _Problem:
    image = Panorama(*asked[:5])
    sizes = (gaussians, receivers, channels, asked.height, asked.width)
    return _Problem(*sizes, asked.lowest, image.row_step, asked.start, image.column_step, asked.nearest, asked.blur)


def rasterize(
    inputs: tuple[Tensor, ...], panorama: Panorama, nearest: float, blur: float, statistics: bool, capacity: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Image, transmittance, radius, weight and peak (the last two empty without `statistics`), by the kernels."""
    refuse_tangents("rasterize_sphere", inputs)
    asked = (panorama.height, panorama.width, panorama.lowest, panorama.highest, panorama.start, nearest, blur)
    draw = _draw if plain(inputs) else torch.ops.chanlab.rasterize_sphere
    if inputs[0].device.type != "cuda":
        out = draw(*inputs, *asked, statistics, 0, -1)
        return tuple(out[:5])
    if inputs[0].dtype != torch.float32:
        raise UsageError("The CUDA kernels compute in float32: convert the inputs with .float(), or use `reference`.")
    if inputs[4].shape[1] > MAX_CHANNELS:
        raise UsageError(
            f"The CUDA kernels take up to {MAX_CHANNELS} channels, got {inputs[4].shape[1]}; render in parts."
        )
    room, slot = _ROOM.before(inputs[0], inputs[5].shape[0], panorama, capacity)
    try:
        out = draw(*inputs, *asked, statistics, room, slot)
    finally:
        _ROOM.after(slot)
    return tuple(out[:5])


def check() -> None:
    """Wait for the CUDA renderings of this process so far and raise if a tile list of one was too short.

    Raises:
        ChanlabError: If so; the images concerned are NaN.
    """
    _ROOM.check()


class _Room:
    """How many pairs of tile and Gaussian CUDA calls get room for: a quarter more than earlier calls needed.

    A call's count comes back without waiting for it: the device writes it into a slot of pinned memory, which is looked
    at when a later call is made. What was learnt is kept per Gaussian, for scenes grow while they are trained; it
    shrinks only after many calls that needed far less, for large and small scenes may take turns.
    """

    SLOTS = 64
    EMPTY = -1
    PATIENCE = 100
    """Calls in a row that must need less than a quarter of the room before it shrinks."""

    def __init__(self) -> None:
        self._rates: dict[tuple[Any, ...], float] = {}
        self._idle: dict[tuple[Any, ...], tuple[int, float]] = {}
        self._given: dict[int, tuple[tuple[Any, ...], int, int]] = {}
        self._pending: dict[int, tuple[tuple[Any, ...], int, int]] = {}
        self._free: list[int] = []
        self._calls = 0
        self._slots: Any = None
        self._pinned: Tensor | None = None
        self._lock = threading.Lock()

    def before(self, means: Tensor, receivers: int, panorama: Panorama, asked: int | None) -> tuple[int, int]:
        """Room for a call, and the slot for its count, numbered anew for every call; -1: none. `after` must follow."""
        items = means.shape[0] * receivers
        most = max(1, items * _tiles(panorama.height, panorama.width))
        guess = max(1 << 16, 24 * items)
        if torch.compiler.is_compiling():
            return min(most, asked or guess), -1
        capturing = torch.cuda.is_current_stream_capturing()
        key = (means.device.index, receivers, panorama)
        with self._lock:
            if not capturing:
                self._collect()
            rate = self._rates.get(key)
            learnt = guess if rate is None else max(1 << 12, math.ceil(rate * items))
            room = min(most, asked or learnt)
            if capturing or not items:
                return room, -1
            if self._pinned is None:
                self._pinned = torch.full((self.SLOTS,), self.EMPTY, dtype=torch.int64).pin_memory()
                self._slots = self._pinned.numpy()
                self._free = list(range(self.SLOTS))
            if not self._free:
                return room, -1
            self._calls += 1
            slot = self._free.pop() + self.SLOTS * self._calls
            self._given[slot] = (key, items, room)
            return room, slot

    def address(self, slot: int) -> int | None:
        """Of a slot, which the device will fill from now on."""
        if slot < 0 or self._pinned is None:
            return None
        with self._lock:
            self._pending[slot % self.SLOTS] = self._given.pop(slot)
        return self._pinned.data_ptr() + 8 * (slot % self.SLOTS)

    def after(self, slot: int) -> None:
        """Take the slot of a call back if nothing will fill it: it failed before, or was traced only."""
        if slot >= 0:
            with self._lock:
                if self._given.pop(slot, None):
                    self._free.append(slot % self.SLOTS)

    def check(self) -> None:
        """Look at all counts, waiting for them."""
        with self._lock:
            devices = {key[0] for key, *_ in self._pending.values()}
        for device in devices:
            torch.cuda.synchronize(device)
        with self._lock:
            self._collect()

    def _collect(self) -> None:
        short = None
        for slot in [slot for slot in self._pending if self._slots[slot] != self.EMPTY]:
            key, items, room = self._pending.pop(slot)
            need = int(self._slots[slot])
            self._slots[slot] = self.EMPTY
            self._free.append(slot)
            self._learn(key, 1.25 * need / items)
            if need > room:
                short = (need, room)
        if short:
            raise ChanlabError(
                f"rasterize_sphere: an earlier call needed room for {short[0]} pairs of tile and Gaussian and had "
                f"{short[1]}; its image is NaN. Repeat it (room is larger now), or pass capacity={short[0]}."
            )

    def _learn(self, key: tuple[Any, ...], wanted: float) -> None:
        held = self._rates.get(key, 0.0)
        if 4 * wanted >= held:
            self._rates[key] = max(wanted, held)
            self._idle.pop(key, None)
            return
        calls, largest = self._idle.get(key, (0, 0.0))
        self._idle[key] = (calls + 1, max(largest, wanted))
        if calls + 1 >= self.PATIENCE:
            self._rates[key] = self._idle.pop(key)[1]


_ROOM = _Room()


def _tiles(height: int, width: int) -> int:
    return -(-height // TILE_HEIGHT) * -(-width // TILE_WIDTH)


def _state_words(gaussians: int, receivers: int, height: int, width: int, capacity: int) -> int:
    """Size of what a CUDA backward pass needs from its forward pass [int32]; `State` in the kernels lays it out."""
    return 4 + 12 * gaussians * receivers + capacity + 2 * receivers * _tiles(height, width)


def _scratch_words(gaussians: int, receivers: int, height: int, width: int) -> int:
    """Size of what a CUDA forward pass needs for itself [int32]; `Scratch` in the kernels lays it out."""
    return receivers * (6 * gaussians + -(-gaussians // ITEM_THREADS) * _tiles(height, width))


def _check_sizes(asked: _Asked, items: int, receivers: int, capacity: int) -> None:
    """Refuse what the CUDA kernels can't count: a range of tiles is four 16-bit numbers, all else 32-bit ones."""
    across, up = -(-asked.width // TILE_WIDTH), -(-asked.height // TILE_HEIGHT)
    if max(across, up) >= 1 << 16:
        raise UsageError(
            f"rasterize_sphere: the CUDA kernels draw up to {TILE_HEIGHT * 0xFFFF} rows and {TILE_WIDTH * 0xFFFF} "
            f"columns, got {asked.height} x {asked.width}; render bands of the panorama."
        )
    if max(items, capacity, max(8 * receivers, 32) * across * up) >= 1 << 31:
        raise UsageError(
            f"rasterize_sphere: {items} Gaussians times receivers, room for {capacity} pairs and {receivers} images of "
            f"{asked.height} x {asked.width} pixels are too much at once; render fewer receivers in a call."
        )


def _laid_out(tensors: Sequence[Tensor]) -> list[Tensor]:
    """As pointers show them: contiguous, and with their signs, which imaginary parts of conjugates keep apart."""
    return [x.resolve_neg().contiguous() for x in tensors]


def _pointers(tensors: Sequence[Tensor | None]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))


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
        means.new_empty((b, height, width), dtype=torch.int32),
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
    cuda = means.device.type == "cuda"
    words = _state_words(means.shape[0], receivers.shape[0], height, width, capacity) if cuda else 0
    return _empty_outputs(means, signals, receivers, height, width, statistics, words)


@torch.library.register_fake("chanlab::rasterize_sphere_backward")  # type: ignore[untyped-decorator]
def _fake_backward(by_image: Tensor, by_transmittance: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in rest[:7])


def _cpu(*arguments: Any) -> tuple[Tensor, ...]:
    inputs = _laid_out(arguments[:7])
    asked = _Asked(*arguments[7:14])
    statistics = arguments[14]
    outputs = _empty_outputs(inputs[0], inputs[4], inputs[5], asked.height, asked.width, statistics, 0)
    shown = [*outputs[:3], *(outputs[3:5] if statistics else (None, None)), outputs[5]]
    wide = int(inputs[0].dtype == torch.float64)
    kernels = library("sphere_cpu.cpp")
    problem = asked.problem(inputs[4], inputs[5])
    _succeed(kernels.sphere_cpu_forward(ctypes.byref(problem), wide, _pointers(inputs), _pointers(shown)))
    return outputs


def _cpu_backward(*arguments: Any) -> tuple[Tensor, ...]:
    by_image, by_transmittance, *inputs = _laid_out(arguments[:9])
    transmittance, last = arguments[9:11]
    asked = _Asked(*arguments[12:19])
    outputs = tuple(torch.empty_like(x) for x in inputs)
    wide = int(inputs[0].dtype == torch.float64)
    kernels = library("sphere_cpu.cpp")
    problem = asked.problem(inputs[4], inputs[5])
    given = _pointers([*inputs, by_image, by_transmittance, transmittance, last])
    _succeed(kernels.sphere_cpu_backward(ctypes.byref(problem), wide, given, _pointers(outputs)))
    return outputs


def _cuda(*arguments: Any) -> tuple[Tensor, ...]:
    inputs = _laid_out(arguments[:7])
    asked = _Asked(*arguments[7:14])
    statistics, capacity, slot = arguments[14:]
    means, receivers = inputs[0], inputs[5]
    items = means.shape[0] * receivers.shape[0]
    _check_sizes(asked, items, receivers.shape[0], capacity)
    words = _state_words(means.shape[0], receivers.shape[0], asked.height, asked.width, capacity)
    outputs = _empty_outputs(means, inputs[4], receivers, asked.height, asked.width, statistics, words)
    if not items:
        for output, value in zip(outputs, (0, 1, 0, 0, 0, 0, 0), strict=True):
            output.fill_(value)
        return outputs
    kernels, problem = _cuda_library(), asked.problem(inputs[4], receivers)
    size = _scratch_words(means.shape[0], receivers.shape[0], asked.height, asked.width)
    scratch = means.new_empty(size, dtype=torch.int32)
    shown = [*outputs[:3], *(outputs[3:5] if statistics else (None, None)), *outputs[5:]]
    device, room, told = means.device.index, ctypes.c_int64(capacity), ctypes.c_void_p(_ROOM.address(slot))
    given, made, memory = _pointers(inputs), _pointers(shown), ctypes.c_void_p(scratch.data_ptr())
    stream = ctypes.c_void_p(_stream(device))
    _launched(kernels.sphere_cuda_forward(ctypes.byref(problem), room, device, given, made, memory, told, stream))
    return outputs


def _cuda_backward(*arguments: Any) -> tuple[Tensor, ...]:
    by_image, *inputs = _laid_out((arguments[0], *arguments[2:9]))
    by_transmittance = None if arguments[1] is None else _laid_out(arguments[1:2])[0]
    transmittance, last, state = arguments[9:12]
    asked = _Asked(*arguments[12:19])
    capacity, poses = arguments[19:21]
    means, signals, receivers = inputs[0], inputs[4], inputs[5]
    items = means.shape[0] * receivers.shape[0]
    if not items:
        return tuple(torch.zeros_like(x) for x in inputs)
    outputs = tuple(torch.empty_like(x) for x in inputs)
    kernels, problem = _cuda_library(), asked.problem(signals, receivers)
    sums = means.new_empty(items * (10 + signals.shape[1]))
    stream = ctypes.c_void_p(_stream(means.device.index))
    given = _pointers([*inputs, by_image, by_transmittance, transmittance, last, state])
    made, memory, room = _pointers(outputs), ctypes.c_void_p(sums.data_ptr()), ctypes.c_int64(capacity)
    device = means.device.index
    _launched(
        kernels.sphere_cuda_backward(ctypes.byref(problem), room, device, given, made, memory, int(poses), stream)
    )
    return outputs


def _stream(device: int) -> int:
    """The current stream, as CUDA knows it; without an object of torch's around it."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def _cuda_library() -> ctypes.CDLL:
    kernels = library("sphere.cu")
    kernels.sphere_cuda_error.restype = ctypes.c_char_p
    return kernels


def _launched(code: int) -> None:
    if code:
        said = _cuda_library().sphere_cuda_error(code).decode()
        raise ChanlabError(
            f"rasterize_sphere: CUDA says `{said}` ({code}). If it names the kernel image or the architecture, build "
            "for this GPU: CHANLAB_CUDA_ARCHS=MAJOR.MINOR python -m chanlab.rf.build cuda."
        )


def _succeed(code: int) -> None:
    if code:
        raise ChanlabError("rasterize_sphere: out of memory. Render fewer receivers, Gaussians or channels at once.")


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, transmittance, radius, weight, peak, last, state = output
    ctx.save_for_backward(*inputs[:7], transmittance, last, state)
    ctx.mark_non_differentiable(radius, weight, peak, last, state)
    ctx.asked, ctx.capacity = inputs[7:14], inputs[15]


def _pull(ctx: Any, by_image: Tensor | None, by_transmittance: Tensor | None, backward: Any) -> tuple[Any, ...]:
    *inputs, transmittance, last, state = ctx.saved_tensors
    means, signals = inputs[0], inputs[4]
    if by_transmittance is None and backward is not _cuda_backward:
        by_transmittance = torch.zeros_like(transmittance)
    if by_image is None:
        b, *size = transmittance.shape
        by_image = means.new_zeros(b, signals.shape[1], *size)
    poses = any(ctx.needs_input_grad[5:7])
    gradients = backward(
        by_image, by_transmittance, *inputs, transmittance, last, state, *ctx.asked, ctx.capacity, poses
    )
    wanted = (g if want else None for g, want in zip(gradients, ctx.needs_input_grad[:7], strict=True))
    return (*wanted, *(None,) * 10)


def _no_second_derivative(*_: Any) -> None:
    raise UsageError('rasterize_sphere: the kernels have no second derivatives; use backend="reference" for them.')


def _backward(ctx: Any, by_image: Tensor | None, by_transmittance: Tensor | None, *_: Any) -> tuple[Any, ...]:
    return _pull(ctx, by_image, by_transmittance, torch.ops.chanlab.rasterize_sphere_backward)


class _Draw(torch.autograd.Function):
    """The operator for plain tensors: the same kernels without the dispatcher, which takes longer than they do."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        output = (_cuda if arguments[0].is_cuda else _cpu)(*arguments)
        _keep(ctx, arguments, output)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_image: Tensor | None, by_transmittance: Tensor | None, *_: Any) -> tuple[Any, ...]:
        cuda = ctx.saved_tensors[0].is_cuda
        return _pull(ctx, by_image, by_transmittance, _cuda_backward if cuda else _cpu_backward)


def _draw(*arguments: Any) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled() and any(x.requires_grad for x in arguments[:7]):
        return _Draw.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]
    return (_cuda if arguments[0].is_cuda else _cpu)(*arguments)


torch.library.impl("chanlab::rasterize_sphere", "CPU", _cpu)
torch.library.impl("chanlab::rasterize_sphere_backward", "CPU", _cpu_backward)
torch.library.impl("chanlab::rasterize_sphere", "CUDA", _cuda)
torch.library.impl("chanlab::rasterize_sphere_backward", "CUDA", _cuda_backward)
torch.library.register_autograd("chanlab::rasterize_sphere", _backward, setup_context=_keep)
torch.library.register_autograd("chanlab::rasterize_sphere_backward", _no_second_derivative)
