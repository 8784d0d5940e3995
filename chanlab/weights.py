"""Weights of learners as small files: the trained part alone, in eight bits where that is wanted, never a pickle."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from chanlab.errors import ChanlabError, UsageError

FORMAT = "chanlab-weights-1"
SCALE = ".scale"
SMALL = 4096
"""Tensors with fewer entries, vectors among them, are kept in float32: they weigh little and are felt most."""


def learner(module: nn.Module) -> nn.Module:
    """What a LightningModule trains, whose weights are kept: its `predictor` or `codec`, or itself."""
    part: nn.Module = getattr(module, "predictor", getattr(module, "codec", module))
    return part


def trained_state(module: nn.Module) -> dict[str, Tensor]:
    """What a module's state dict holds beyond the frozen weights of pre-trained backbones, which come back by name.

    A random backbone, though frozen, is part of it: no name brings it back.
    """
    frozen, _ = reloadable(module)
    return {name: value.detach() for name, value in module.state_dict().items() if name not in frozen}


def reloadable(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, dict[str, str]]]:
    """Frozen weights inside a module that can be loaded again by name, and where each backbone's come from.

    A backbone is a part with an `origin`: the name it was loaded by, and the checksum of its weights.

    Returns:
        The weights by their names in the module's state dict; name and checksum of each backbone by its place.
    """
    frozen: dict[str, Tensor] = {}
    origins: dict[str, dict[str, str]] = {}
    for prefix, child in module.named_modules():
        if isinstance(origin := getattr(child, "origin", None), dict):
            origins[prefix] = origin
            frozen |= {f"{prefix}.{k}": p.detach() for k, p in child.named_parameters() if not p.requires_grad}
    return frozen, origins


def check_origins(module: nn.Module, origins: Mapping[str, Mapping[str, str]], source: str) -> None:
    """Checks that a module's backbones are those that stored weights were trained on.

    Args:
        module: The module.
        origins: What `reloadable` said of the module that was stored.
        source: What was stored, for the message.

    Raises:
        ChanlabError: A backbone is another one.
    """
    _, here = reloadable(module)
    for place, origin in origins.items():
        if here.get(place, origin) != origin:
            raise ChanlabError(
                f"{source} was trained on backbone {origin['name']!r} with weights {origin['sha256'][:12]}…; "
                f"here are {here[place]['name']!r} with {here[place]['sha256'][:12]}…: fetch the same one again"
            )


def save_weights(module: nn.Module, path: str | os.PathLike[str], bits: Literal[6, 8, 16, 32] = 8) -> None:
    """Writes the trained part of a module as safetensors.

    In 8 (6) bits each row of a matrix (each output of a convolution) is an integer times a scale in float16: no entry
    moves by more than 1/253 (1/61) of the largest magnitude in its row.

    Args:
        module: Any predictor.
        path: File to write; its folder is made.
        bits: 6 or 8: large tensors as integers of so many bits, others in float32; 16: all in float16; 32: float32.

    Raises:
        UsageError: Unknown `bits`.
        ChanlabError: A weight is too large for 6, 8 or 16 bits, infinite or not a number.
    """
    if bits not in (6, 8, 16, 32):
        raise UsageError(f"bits must be 6, 8, 16 or 32, not {bits!r}")
    packed: dict[str, Tensor] = {}
    rows = []
    for name, value in trained_state(module).items():
        packed[name], scale = _pack(name, value.cpu(), bits)
        if scale is not None:
            packed[name + SCALE] = scale
            rows.append(name)
    _, origins = reloadable(module)
    header = {"bits": bits, "module": type(module).__name__, "in_rows": rows, "backbones": origins}
    _write(packed, header, Path(path))


def save_part(module: nn.Module, part: str, source: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Writes a file of weights again with one part of it from a module, in float32; all else stays to the bit.

    Writing all anew in fewer bits would round what is rounded already.

    Args:
        module: Holds the part, among its trained state.
        part: Beginning of the names that are replaced, or added.
        source: A file that `save_weights` wrote of such a module.
        path: File to write, which may be the source.

    Raises:
        UsageError: The module has no such part; there is no source.
        ChanlabError: The source holds no weights of the module.
    """
    own = {n: v.float().cpu().contiguous() for n, v in trained_state(module).items() if n.startswith(part)}
    if not own:
        raise UsageError(f"{type(module).__name__} has no part named {part!r}: name the beginning of its state's names")
    load_weights(copy.deepcopy(module), source)
    with safetensors.safe_open(source, framework="pt") as file:
        header = json.loads(file.metadata()[FORMAT])
    kept = {n: v for n, v in safetensors.torch.load_file(source).items() if not n.startswith(part)}
    header["in_rows"] = [name for name in header["in_rows"] if not name.startswith(part)]
    _write({**kept, **own}, header, Path(path))


def load_weights(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Puts weights that `save_weights` wrote into a module of the same kind, in place, on its device.

    A module may name beginnings of names in `added_later`: parts that are zero where a file has nothing of them.

    Args:
        module: The predictor, built with the arguments that it was trained with.
        path: The file.

    Raises:
        UsageError: There is no such file.
        ChanlabError: It is no file of weights, it lacks some of the module's or has others, or it was trained on
            another backbone; the module is left as it was.
    """
    if not os.path.isfile(path):
        raise UsageError(f"There are no weights {os.fspath(path)}: write them with chanlab.weights.save_weights")
    try:
        packed = safetensors.torch.load_file(path)
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except safetensors.SafetensorError as error:
        raise ChanlabError(f"{os.fspath(path)} is not a whole safetensors file: {error}") from error
    if FORMAT not in metadata:
        raise ChanlabError(f"{os.fspath(path)} holds no weights written by chanlab.weights.save_weights")
    header = json.loads(metadata[FORMAT])
    check_origins(module, header["backbones"], os.fspath(path))
    state = trained_state(module)
    remedy = f"build {type(module).__name__} with the arguments that it was trained with"
    scales = {name: packed.pop(name + SCALE) for name in header["in_rows"]}
    names = set(packed)
    later = {part: {n for n in state if n.startswith(part)} for part in getattr(module, "added_later", ())}
    absent = {n for part in later.values() if not part & names for n in part}
    if lacking := set(state) - names - absent:
        raise ChanlabError(f"{os.fspath(path)} lacks {_some(lacking)}: {remedy}")
    if names - set(state):
        raise ChanlabError(f"{os.fspath(path)} has {_some(names - set(state))}, which the module has not: {remedy}")
    values = {}
    for name, value in packed.items():
        shape = _stored(state[name]).shape
        found = _shape(value, shape) if name in scales and header["bits"] == 6 else value.shape
        if found != shape:
            raise ChanlabError(f"{os.fspath(path)}: {name} is {list(value.shape)}, not {list(shape)}: {remedy}")
        values[name] = _unpack(value, scales.get(name), shape)
    with torch.no_grad():
        for name, value in values.items():
            _stored(state[name]).copy_(value)
        for name in absent:
            state[name].zero_()


def _write(packed: dict[str, Tensor], header: dict[str, Any], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        # One key: safetensors writes several in any order, and equal weights should make equal files. Bytes: its own
        # files can be read by their owner alone.
        scratch.write_bytes(safetensors.torch.save(packed, {FORMAT: json.dumps(header, sort_keys=True)}))
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)


def _stored(value: Tensor) -> Tensor:
    """A view of a tensor as it is stored: complex numbers as pairs of real ones."""
    return torch.view_as_real(value) if value.is_complex() else value


def _pack(name: str, value: Tensor, bits: int) -> tuple[Tensor, Tensor | None]:
    """What is written of a tensor: itself in fewer bits, and the scales of its rows."""
    value = _stored(value).contiguous().clone()  # tied weights may share memory, which safetensors refuses
    if not value.is_floating_point():
        return value, None
    if bits == 32 or (bits <= 8 and (value.ndim < 2 or value.numel() < SMALL)):
        return value.float(), None
    if bits == 16:
        return _finite(name, value.half()), None
    rows = value.float().flatten(1)
    largest = 2 ** (bits - 1) - 1
    # A little more than the largest magnitude asks for, so that rounding the scale to float16 never clips it.
    scale = _finite(name, (rows.abs().amax(1) / largest * (1 + 2**-10) + 2**-24).half())
    whole = (rows / scale[:, None].float()).round()
    return (_in_six_bits(whole) if bits == 6 else whole.to(torch.int8).view(value.shape)), scale


def _unpack(value: Tensor, scale: Tensor | None, shape: torch.Size) -> Tensor:
    if scale is None:
        return value
    whole = _from_six_bits(value)[:, : shape[1:].numel()] if value.dtype == torch.uint8 else value.flatten(1).float()
    return (whole * scale[:, None].float()).view(shape)


def _in_six_bits(whole: Tensor) -> Tensor:
    """Integers from -31 to 31, four of a row in three bytes, uint8 `[row, byte]`."""
    padded = nn.functional.pad(whole, (0, -whole.shape[1] % 4)) + 31
    a, b, c, d = padded.to(torch.int32).unflatten(1, (-1, 4)).unbind(-1)  # type: ignore[no-untyped-call]
    joined = a | b << 6 | c << 12 | d << 18
    return torch.stack([joined & 255, joined >> 8 & 255, joined >> 16], -1).flatten(1).to(torch.uint8)


def _from_six_bits(packed: Tensor) -> Tensor:
    low, middle, high = packed.to(torch.int32).unflatten(1, (-1, 3)).unbind(-1)  # type: ignore[no-untyped-call]
    joined = low | middle << 8 | high << 16
    return torch.stack([joined >> 6 * i & 63 for i in range(4)], -1).flatten(1).float() - 31


def _shape(packed: Tensor, shape: torch.Size) -> torch.Size:
    """The shape asked for, if a tensor of six-bit integers can have it."""
    width = -(-shape[1:].numel() // 4) * 3
    return shape if packed.shape == (shape[0], width) else packed.shape


def _finite(name: str, value: Tensor) -> Tensor:
    if not value.isfinite().all():
        raise ChanlabError(f"{name} holds values beyond float16 or not finite: save it with bits=32, and look at it")
    return value


def _some(names: set[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
