"""One shard, from sample ids to a synced temporary file: what a worker does."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from chanlab.channels.source import CIRLinks, Links, Source
from chanlab.data.fields import Array
from chanlab.data.manifest import ShardEntry, shard_name
from chanlab.data.recipe import build_source, parse_recipe
from chanlab.data.schema import ShardAttributes, arrays_of, cat_links, encode_shard, payload_of, sample_hashes
from chanlab.data.writer import write_temporary
from chanlab.errors import ChanlabError

_BATCH = 64  # least number of users asked of a source at once


@dataclass(frozen=True)
class ShardTask:
    """What to make.

    Attributes:
        folder: The store.
        recipe: The recipe's YAML.
        index: Which shard.
        split: Split code of each of its users, int8 `[user]`.
        split_names: Names of the codes.
        versions: For the root attributes.
    """

    folder: Path
    recipe: str
    index: int
    split: Array
    split_names: tuple[str, ...]
    versions: dict[str, str]


@dataclass(frozen=True)
class ShardResult:
    """A shard that waits under a temporary name for the store's writer to commit it."""

    index: int
    temporary: Path
    entry: ShardEntry
    num_anchors: int


@lru_cache(maxsize=1)
def _source(text: str) -> Source:
    """The source of a recipe, built once per worker (a scene takes seconds to load)."""
    return build_source(parse_recipe(text))


def make_shard(
    task: ShardTask, source: Source | None = None, advance: Callable[[int], object] | None = None
) -> ShardResult:
    """Compute a shard and write it under a temporary name.

    Args:
        task: What to make.
        source: The recipe's source, if this process has it already.
        advance: Called with the number of samples as they are done.

    Raises:
        ChanlabError: If the source yields what no store can hold.
        WriteError: If it can't be written.
    """
    recipe = parse_recipe(task.recipe)
    source = source or _source(task.recipe)
    ids = recipe.shard_range(task.index)
    links = collect(source, ids, recipe.seed, advance)
    data = encode(links, task, ids, recipe.seed)
    target = task.folder / shard_name(task.index)
    entry = ShardEntry(
        file=target.name,
        start=ids.start,
        stop=ids.stop,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        num_paths=links.num_paths,
    )
    return ShardResult(task.index, write_temporary(target, data), entry, int(links.times.shape[1]))


def collect(source: Source, ids: range, seed: int, advance: Callable[[int], object] | None = None) -> Links | CIRLinks:
    """Links of consecutive ids, asked of the source in whole groups, trimmed to the paths in use.

    Raises:
        ChanlabError: If the source yields other users than it was asked for.
    """
    step = source.group * max(1, _BATCH // source.group)
    parts = []
    for start in range(ids.start, ids.stop, step):
        batch = range(start, min(start + step, ids.stop))
        links = source.links(batch, seed)
        if links.sample_ids.tolist() != list(batch):
            raise ChanlabError(f"{type(source).__name__} was asked for samples {batch} and yielded others.")
        parts.append(links)
        if advance is not None:
            advance(len(batch))
    return cat_links(parts).trim()


def encode(links: Links | CIRLinks, task: ShardTask, ids: range, seed: int) -> bytes:
    """The bytes of a shard's file."""
    arrays = arrays_of(links, task.split)
    arrays["sample_hashes"] = sample_hashes(arrays, links.carrier, payload_of(links))
    attributes = ShardAttributes(
        recipe=task.recipe,
        seed=seed,
        start=ids.start,
        stop=ids.stop,
        carrier=links.carrier,
        versions=task.versions,
        split_names=task.split_names,
        payload=payload_of(links),
    )
    return encode_shard(arrays, attributes)
