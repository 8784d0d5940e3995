"""Recipes: the YAML that says which channels a store holds."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

import chanlab
from chanlab.errors import MissingDependencyError, UsageError

if TYPE_CHECKING:
    from chanlab.channels.source import Source


@dataclass(frozen=True)
class Recipe:
    """What a store holds and how it is divided.

    Attributes:
        name: Short name.
        seed: With the sample id it decides all that is random, >= 0.
        samples: Number of users (trajectories or drops).
        source: `{class_path, init_args}` of a `chanlab.channels.Source`.
        shard_size: Users per file, a multiple of the source's `group`. One shard is held in memory while it is made.
        splits: Arguments of `chanlab.data.splits.assign_splits`; empty leaves that function's defaults.
        view: Default arguments of the store's views (arrays, subcarriers, ...). They don't touch its content.
        description: One sentence for the card.
        text: The YAML as it was written; the store keeps it.
    """

    name: str
    seed: int
    samples: int
    source: dict[str, Any]
    shard_size: int = 256
    splits: dict[str, Any] = field(default_factory=dict)
    view: dict[str, Any] = field(default_factory=dict)
    description: str = ""
    text: str = field(default="", compare=False, repr=False)

    @property
    def num_shards(self) -> int:
        """Number of files."""
        return -(-self.samples // self.shard_size)

    def shard_range(self, index: int) -> range:
        """Sample ids of shard `index`."""
        return range(index * self.shard_size, min((index + 1) * self.shard_size, self.samples))

    def to_yaml(self) -> str:
        """The YAML as it was written, or one made of the values if they were changed since."""
        if self.text and parse_recipe(self.text) == self:
            return self.text
        return str(yaml.safe_dump(_as_dict(self), sort_keys=False))

    def differences(self, other: Recipe) -> list[str]:
        """Dotted keys in which two recipes differ; comments and formatting don't count."""
        return sorted(_differences(_as_dict(self), _as_dict(other)))


KEYS = tuple(f.name for f in fields(Recipe) if f.name != "text")
_REQUIRED = tuple(f.name for f in fields(Recipe) if f.default is MISSING and f.default_factory is MISSING)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, but 3.5e9 is a number and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1 and key != "<<"}
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"key given twice: {sorted(twice)}", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def parse_recipe(text: str, origin: str = "recipe") -> Recipe:
    """Read a recipe from YAML.

    Args:
        text: The YAML.
        origin: Name for error messages.

    Raises:
        UsageError: If it isn't YAML, or a key is unknown, missing or of the wrong type.
    """
    try:
        data = yaml.load(text, _Loader)  # a SafeLoader: builds plain values only
    except yaml.YAMLError as error:
        raise UsageError(f"{origin} is not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{origin} must be a mapping with the keys {', '.join(KEYS)}.")
    if "packages" in data:
        raise UsageError(f"{origin} lists photographs, not channels: `python datasets/gather_photos.py` gathers them.")
    unknown = sorted(str(key) for key in data if key not in KEYS)
    if unknown:
        raise UsageError(f"{origin}: unknown key {', '.join(unknown)}; known keys are {', '.join(KEYS)}.")
    missing = [key for key in _REQUIRED if key not in data]
    if missing:
        raise UsageError(f"{origin}: {', '.join(missing)} missing; a recipe needs {', '.join(_REQUIRED)}.")
    for key, kind in {"name": str, "description": str, "seed": int, "samples": int, "shard_size": int}.items():
        value = data.get(key)
        if key in data and (not isinstance(value, kind) or isinstance(value, bool)):
            raise UsageError(f"{origin}: {key} must be of type {kind.__name__}, not {value!r}.")
    for key, least in {"seed": 0, "samples": 1, "shard_size": 1}.items():
        if data.get(key, least) < least:
            raise UsageError(f"{origin}: {key} must be at least {least}, not {data[key]}.")
    for key in ("source", "splits", "view"):
        data[key] = {} if data.get(key) is None else data[key]
        if not isinstance(data[key], dict):
            raise UsageError(f"{origin}: {key} must be a mapping, not {data[key]!r}.")
    source = data["source"]
    if "class_path" not in source or set(source) - {"class_path", "init_args"}:
        raise UsageError(f"{origin}: source takes class_path and init_args, not {', '.join(source) or 'nothing'}.")
    return Recipe(**data, text=text)


def load_recipe(name_or_path: str | Path | Recipe) -> Recipe:
    """Load a recipe by short name (`two_ray`) or by path (`my/recipe.yaml`).

    Raises:
        UsageError: If there is no such recipe (the message lists the known ones) or it can't be read.
    """
    if isinstance(name_or_path, Recipe):
        return name_or_path
    path = find_recipe("datasets", name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"can't read the recipe {path}: {error}") from error
    return parse_recipe(text, str(path))


def recipe_folders(kind: str) -> list[Path]:
    """Folders that hold recipes of a kind ("datasets" or "models"), in the order in which they are searched.

    The working directory's, the source checkout's, and those inside the installed wheel.
    """
    package = Path(chanlab.__file__).resolve().parent
    candidates = [Path.cwd() / kind]
    if (package.parent / "pyproject.toml").is_file():
        candidates.append(package.parent / kind)
    candidates.append(package / "_recipes" / kind)
    unique = {path.resolve(): path for path in reversed(candidates) if path.is_dir()}
    return [path for path in candidates if unique.get(path.resolve()) is path]


def find_recipe(kind: str, name: str | Path) -> Path:
    """Find the YAML of a recipe.

    Args:
        kind: "datasets" or "models".
        name: A path to a YAML file, or a short name: `two_ray` finds datasets/two_ray.yaml, `csi/pad` or `pad`
            finds models/csi/pad.yaml.

    Raises:
        UsageError: If there is none (the message lists the known ones) or a short name fits several.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if path.is_file():
            return path
        raise UsageError(f"there is no recipe file {path}; give a path to a YAML file or a short name{_known(kind)}")
    for folder in recipe_folders(kind):
        found = [p for p in _yaml_files(folder) if p.stem == path.name and _fits(p.relative_to(folder), path)]
        if len(found) > 1:
            names = ", ".join(str(p.relative_to(folder).with_suffix("")) for p in found)
            raise UsageError(f"{name} fits several recipes in {folder}: {names}; name one of them.")
        if found:
            return found[0]
    raise UsageError(f"there is no recipe named {name}; give a path to a YAML file or a short name{_known(kind)}")


def build_source(recipe: Recipe) -> Source:
    """Build the recipe's source; its `init_args` are typed arguments read by jsonargparse.

    Raises:
        UsageError: If the class can't be found, isn't a `Source`, or an argument is unknown or of the wrong type.
        MissingDependencyError: If the source needs a package or library that is missing.
    """
    from chanlab.channels.source import Source

    class_path = recipe.source["class_path"]
    init_args = recipe.source.get("init_args") or {}
    source = _instantiate(_import_class(class_path), class_path, init_args)
    if not isinstance(source, Source):
        raise UsageError(
            f"{class_path} is not a chanlab.channels.Source: it lacks one of carrier, group, motion, links, versions."
        )
    if recipe.shard_size % source.group and recipe.num_shards > 1:
        size = -(-recipe.shard_size // source.group) * source.group
        raise UsageError(
            f"recipe {recipe.name}: shard_size {recipe.shard_size} must be a multiple of the {source.group} users that "
            f"{class_path} solves together; use {size}."
        )
    return source


def _import_class(class_path: Any) -> type:
    module, _, name = str(class_path).rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except MissingDependencyError:
        raise
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"source class_path {class_path!r} can't be imported ({error}); it is written as package.module.Class, "
            "for example chanlab.channels.TwoRay."
        ) from error
    if not isinstance(found, type):
        raise UsageError(f"source class_path {class_path!r} names no class.")
    return found


def _instantiate(cls: type, class_path: str, init_args: Mapping[str, Any]) -> Any:
    from jsonargparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, "init_args")
    known = [a.dest.removeprefix("init_args.") for a in parser._actions if a.dest.startswith("init_args.")]
    unknown = sorted(set(init_args) - {name.split(".")[0] for name in known})
    if unknown:
        raise UsageError(f"{class_path} has no argument {', '.join(unknown)}; it takes {', '.join(known) or 'none'}.")
    try:
        # A copy: jsonargparse puts what it builds into nested lists.
        config = parser.parse_object({"init_args": copy.deepcopy(dict(init_args))} if init_args else {})
        return parser.instantiate(config).init_args
    except ArgumentError as error:
        raise UsageError(f"{class_path}: {error}") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{class_path}: {error}") from error


def _yaml_files(folder: Path) -> list[Path]:
    """Recipes lie in the folder or one below; deeper may lie somebody's million images."""
    return sorted([*folder.glob("*.yaml"), *folder.glob("*/*.yaml")])


def _fits(found: Path, wanted: Path) -> bool:
    """Whether csi/pad.yaml is meant by pad or csi/pad, and two_ray/two_ray.yaml by two_ray."""
    parts = found.with_suffix("").parts
    return parts[-len(wanted.parts) :] == wanted.parts


def _known(kind: str) -> str:
    names = sorted({str(p.relative_to(f).with_suffix("")) for f in recipe_folders(kind) for p in _yaml_files(f)})
    return f"; known {kind} are {', '.join(names)}." if names else f"; no folder '{kind}' with recipes is in sight."


def _as_dict(recipe: Recipe) -> dict[str, Any]:
    return {key: getattr(recipe, key) for key in KEYS}


def _differences(a: Any, b: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in a.keys() | b.keys():
            yield from _differences(a.get(key, MISSING), b.get(key, MISSING), f"{prefix}.{key}" if prefix else str(key))
    elif a != b:
        yield prefix
