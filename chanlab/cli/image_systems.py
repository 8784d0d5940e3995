"""Channels, codecs and images of a simulation, from what is written on a command line."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from chanlab.errors import ChanlabError, UsageError

CHANNELS = {
    "awgn": ("AWGN", {}),
    "slow-rayleigh": ("Rayleigh", {}),
    "fast-rayleigh": ("Rayleigh", {"coherence": 1}),
    "block-rayleigh": ("Rayleigh", {"coherence": 64}),
    "rician": ("Rician", {}),
    "mimo": ("MIMO", {}),
}
"""Channels by name: a class of `chanlab.jscc`, and arguments that the name stands for."""
SMALL = ("shrunk", "crops", "none")
"""What images of 96x96 are: photographs as a whole, crops at their own size, or nothing."""
CSI = ("perfect", "lmmse", "ls", "phase", "none")
CDL_DEFAULTS: Mapping[str, Any] = {"delay_spread": 300e-9, "speed": [0.0, 30.0], "carrier": 3.5e9, "block": 8}
"""Of `ofdm:cdl-*`; the arrays have one element each."""
IMAGE_CODECS = {"jpeg": "JPEG", "jpeg2000": "JPEG 2000", "webp": "WebP", "avif": "AVIF", "bpg": "BPG"}
"""Image codecs of the separation baseline, and what tables call them."""
SPEC = "NAME[,argument=value...]"


def make_channel(spec: str, csi: str | None = None, seed: int = 1) -> Any:
    """A channel with its receiver.

    Args:
        spec: A name of `CHANNELS`; `ofdm:cdl-a` to `ofdm:cdl-e`; `ofdm:` and a store's folder or a dataset recipe whose
            source has paths; a YAML file with `class_path` and `init_args`. Arguments of the classes behind a name
            follow: `slow-rayleigh,csi=lmmse,pilots=2`, `ofdm:cdl-c,speed=30,num_subcarriers=128`.
        csi: What the receiver knows; it replaces what the spec says.
        seed: Of realisations, where an argument doesn't say otherwise.

    Returns:
        A `chanlab.jscc.SymbolChannel`.

    Raises:
        UsageError: If there is no such channel, or an argument doesn't fit.
    """
    from chanlab.jscc import SymbolChannel

    name, options = split_spec(spec)
    if csi is not None:
        options = {**options, "csi": csi}
    if name.endswith((".yaml", ".yml")):
        node = _read_yaml(Path(name))
        _place(options, [node], spec)
    elif name.startswith("ofdm:"):
        node = _ofdm(name.removeprefix("ofdm:"), options, seed, spec)
    elif name in CHANNELS:
        cls, known = CHANNELS[name]
        node = {"class_path": f"chanlab.jscc.{cls}", "init_args": dict(known)}
        _place(options, [node], spec)
    else:
        raise UsageError(
            f"unknown channel {name!r}: it is one of {', '.join(CHANNELS)}, ofdm:cdl-c (a to e), ofdm:STORE, "
            "ofdm:RECIPE, or a YAML file with class_path and init_args."
        )
    return _instantiate(node, SymbolChannel, spec)


def make_receivers(spec: str, csi: Sequence[str], seed: int = 1) -> dict[str, Any]:
    """Channels that differ in what the receiver knows, each with the same pilots.

    Args:
        spec: See `make_channel`.
        csi: What they know: `perfect`, `lmmse`, `ls`, `phase` or `none`, as far as the channel has it; empty: what the
            spec says.
        seed: See `make_channel`.

    Returns:
        Channels by what the receiver knows; for a channel without such a choice the key is empty.
    """
    if not csi:
        channel = make_channel(spec, None, seed)
        return {getattr(channel, "csi", ""): channel}
    if not hasattr(make_channel(spec, None, seed), "csi"):
        raise UsageError(f"{spec} has no choice of csi: leave --csi out.")
    found = {known: make_channel(spec, known, seed) for known in dict.fromkeys(csi)}
    most = max((getattr(channel, "pilots", 0) for channel in found.values()), default=0)
    for known, channel in found.items():
        if getattr(channel, "pilots", most) < most:  # a receiver that needs none gets no channel uses back
            found[known] = make_channel(f"{spec},pilots={most}", known, seed)
    return found


def channel_name(spec: str) -> str:
    """What records call a channel: its spec without the folders of a store, and without csi."""
    name, options = split_spec(spec)
    kind, colon, source = name.rpartition(":")
    words = [f"{key}={value}" for key, value in sorted(options.items()) if key != "csi"]
    return ",".join([f"{kind}{colon}{Path(source).name}", *words])


def make_codec(spec: str, map_location: str = "cpu") -> Any:
    """A trained codec.

    Args:
        spec: A checkpoint of `chanlab fit` (`out/ours/best.ckpt`), or `RECIPE[,argument=value...][:WEIGHTS]`: the class
            and arguments of the codec in a recipe of `models/jscc`, arguments replaced, and weights that
            `chanlab.weights.save_weights` wrote; without these those that the recipe names, or that lie beside it.
        map_location: Device.

    Returns:
        A `chanlab.jscc.Codec` in evaluation mode.

    Raises:
        UsageError: If there is no such file or recipe, or the recipe has no weights.
        ChanlabError: If a file can't be read, or its weights are another codec's.
    """
    from chanlab.cli.demo.models import read
    from chanlab.cli.lightning import find_weights
    from chanlab.data.recipe import find_recipe
    from chanlab.jscc import Codec, load_codec
    from chanlab.weights import load_weights

    if spec.endswith(".ckpt"):
        try:
            return load_codec(spec, map_location)
        except UsageError:
            raise
        except Exception as error:  # whatever is wrong with a file that somebody names
            said = type(error).__name__
            raise ChanlabError(f"{spec} is no checkpoint of a codec that `chanlab fit` wrote ({said}).") from error
    if spec.endswith(".safetensors") and ":" not in spec:
        raise UsageError(f"{spec} holds weights alone: name the recipe too, as in ours:{spec}.")
    described, _, weights = spec.partition(":")
    name, options = split_spec(described)
    recipe = read(name)
    node = (recipe["model"].get("init_args") or {}).get("codec")
    if not isinstance(node, dict):
        raise UsageError(f"recipe {name} has no codec: take one of models/jscc.")
    _place(options, [node], spec)
    beside = find_recipe("models", name).with_suffix(".safetensors")
    weights = weights or recipe.get("weights") or (str(beside) if beside.is_file() else "")
    if not weights:
        raise UsageError(f"recipe {name} comes without weights: give a checkpoint, or {name}:WEIGHTS.safetensors.")
    codec = _instantiate(node, Codec, spec).to(map_location)
    load_weights(codec, find_weights(weights))
    return codec.eval()


def split_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """Name and arguments of `name,key=value,...`; values are read as YAML, brackets keep commas together."""
    words, depth, begin = [], 0, 0
    for i, letter in enumerate(spec):
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and depth == 0:
            words.append(spec[begin:i])
            begin = i + 1
    words.append(spec[begin:])
    options: dict[str, Any] = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not (key.strip() and equals):
            raise UsageError(f"{spec!r}: arguments are written {SPEC}, not {word!r}.")
        options[key.strip()] = _value(value)
    if not words[0].strip():
        raise UsageError(f"{spec!r} has no name: it is written {SPEC}.")
    return words[0].strip(), options


def image_batches(
    images: Path, split: str, size: tuple[int, int] | int, count: int | None, batch_size: int, seed: int = 1
) -> list[dict[str, Any]]:
    """Held-out images of one size.

    Args:
        images: Folder of photographs; see `chanlab.jscc.ImageDataModule`.
        split: `val` or `test`.
        size: Height and width that photographs are shrunk and cut to; or the side of square crops.
        count: Photographs at most (None: all); or crops from each photograph.
        batch_size: Images in a batch.
        seed: Of splits and crops.

    Returns:
        `{"image", "id", "name"}`: images in [0, 1], ids, and names of the photographs.
    """
    from chanlab.jscc.images import ImageDataModule

    crops = isinstance(size, int)
    how: dict[str, Any] = {"eval_crop": size, "eval_crops": count} if crops else {"eval_size": size}
    data = ImageDataModule(images=images, eval_batch_size=batch_size, seed=seed, **how)
    found, left = [], None if crops else count
    for batch in data.batches(split):
        kept = {"image": batch["image"][:left], "id": batch["id"][:left]}
        left = None if left is None else max(0, left - len(batch["id"]))
        if len(kept["id"]):
            found.append({**kept, "name": [data.picture(split, i) for i in kept["id"].tolist()]})
        if left == 0:
            break
    return found


def add_small(parser: argparse.ArgumentParser) -> None:
    """Options of a script that say which images of 96x96 it sends."""
    parser.add_argument(
        "--small",
        choices=SMALL,
        default="shrunk",
        help="images of 96x96: `shrunk`, photographs shrunk until they just cover 96x96 and cut around their middle, "
        "as small data sets of the field are made (CIFAR-10, STL-10, CelebA); `crops` of photographs at their own "
        "size, whose content is smoother (default: shrunk)",
    )
    parser.add_argument("--crops", type=int, default=2, help="from each photograph, with --small crops (default: 2)")


def _ofdm(source: str, options: Mapping[str, Any], seed: int, spec: str) -> dict[str, Any]:
    """An OFDM link over a CDL model, a store, or the source of a recipe."""
    realisations: dict[str, Any]
    nodes = []
    if source.lower().startswith("cdl-"):
        array = {"class_path": "chanlab.channels.PlanarArray"}
        model = {"model": source[4:].upper(), **CDL_DEFAULTS, "bs_array": array, "ut_array": array}
        nodes = [{"class_path": "chanlab.channels.CDL", "init_args": model}]
        realisations = {"class_path": "chanlab.jscc.ModelRealisations", "init_args": {"model": nodes[0], "seed": seed}}
    elif Path(source).is_dir():
        held = {"store": source, "split": "test", "seed": seed}
        realisations = {"class_path": "chanlab.jscc.StoreRealisations", "init_args": held}
    else:
        held = {"source": source, "seed": seed}
        realisations = {"class_path": "chanlab.jscc.SourceRealisations", "init_args": held}
    link = {"class_path": "chanlab.jscc.OFDMLink", "init_args": {"realisations": realisations}}
    _place(options, [link, realisations, *nodes], spec)
    return link


def _place(options: Mapping[str, Any], nodes: Sequence[dict[str, Any]], spec: str) -> None:
    """Give each argument to the first class that takes it."""
    taken = [list(inspect.signature(_class(node)).parameters) for node in nodes]
    for key, value in options.items():
        for node, names in zip(nodes, taken, strict=True):
            if key in names:
                node["init_args"] = {**(node.get("init_args") or {}), key: value}
                break
        else:
            known = ", ".join(name for names in taken for name in names)
            raise UsageError(f"{spec}: there is no argument {key!r}; there are {known}.")


def _class(node: Mapping[str, Any]) -> Callable[..., Any]:
    import importlib

    module, _, name = str(node.get("class_path", "")).rpartition(".")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"class_path {node.get('class_path')!r} can't be imported: {error}") from error
    return found


def _instantiate(node: dict[str, Any], base: type, spec: str) -> Any:
    from chanlab.cli.demo.models import instantiate

    try:
        return instantiate(node, base)
    except (ChanlabError, TypeError, ValueError) as error:
        raise UsageError(f"{spec}: {_brief(str(error))}") from error


def _brief(text: str) -> str:
    """The line of a message of jsonargparse that says what is wrong, and the argument's name."""
    frame = ("Parser key", "Problem with", "Does not validate", "Subtypes", "Errors", "Given value", "chanlab.")
    lines = [line.strip().removeprefix("- ") for line in text.splitlines()]
    said = [i for i, line in enumerate(lines) if line and not line.startswith(frame) and "'NoneType'" not in line]
    if len(lines) == 1 or not said:
        return text
    names = re.findall(r'Parser key "(.*?)"', "\n".join(lines[: said[0]]))
    return f"{names[-1]}: {lines[said[0]]}" if len(names) > 1 else lines[said[0]]


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UsageError(f"there is no channel {path}.")
    node = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(node, dict) or "class_path" not in node:
        raise UsageError(f"{path} describes no channel: it needs class_path, and init_args if there are any.")
    return node


def _value(text: str) -> Any:
    """A value as YAML reads it, numbers such as 3e-7 too."""
    value = yaml.safe_load(text)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
