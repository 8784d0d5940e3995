"""`chanlab generate`: from a recipe to a store, resumable after a kill at any instant."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import chanlab
from chanlab.channels.source import Motion, Source
from chanlab.data import resume
from chanlab.data.executor import Executor, LocalExecutor
from chanlab.data.fields import Array
from chanlab.data.manifest import Manifest, shard_name
from chanlab.data.recipe import Recipe, build_source, load_recipe, parse_recipe
from chanlab.data.schema import arrays_of
from chanlab.data.shard import ShardResult, ShardTask, collect, encode, make_shard
from chanlab.data.store import Store
from chanlab.data.writer import WriteError, commit, explain, make_folder, remove_temporaries, tidy, writer_lock
from chanlab.errors import ChanlabError

_MOTION_BATCH = 4096
_MEASURE_SECONDS = 0.5


def generate(
    recipe: str | Path | Recipe,
    out: str | Path,
    workers: int = 1,
    executor: Executor | None = None,
    progress: bool = True,
) -> Store:
    """Make a store, or finish one that was interrupted.

    Shards are computed by the executor's workers, each written under a temporary name and synced; this process alone
    gives them their names and lists them in the manifest. Complete shards are never computed again.

    Args:
        recipe: Short name, path, or the recipe itself.
        out: Folder of the store, made if missing.
        workers: Number of local processes.
        executor: Another engine to run on, instead of `workers`.
        progress: Show a progress bar with samples/s and the time left.

    Returns:
        The complete store.

    Raises:
        UsageError: If the recipe can't be read or its source can't be built.
        StoreError: If the folder can't be written, is full, locked, foreign, or holds another recipe's store; the
            message names the remedy.
        ChanlabError: If the source or a worker fails.
        KeyboardInterrupt: On Ctrl-C; the message says what is complete.
    """
    recipe = load_recipe(recipe)
    folder = Path(out)
    if resume.is_complete(folder, recipe):
        tidy(folder)
        return Store(folder)
    executor = executor or LocalExecutor(workers)
    source = build_source(recipe)
    versions = library_versions(source)
    try:
        make_folder(folder)
        with writer_lock(folder):
            remove_temporaries(folder)
            manifest = resume.begin(folder, recipe, versions, _split_names(), getattr(source, "payload", "paths"))
            try:
                _fill(folder, manifest, source, executor, progress)
            finally:
                remove_temporaries(folder)
    except WriteError as error:
        raise explain(error, folder, resume.state(folder, recipe)) from error
    except KeyboardInterrupt:
        message = f"stopped: {resume.state(folder, recipe)} complete; run the same `chanlab generate` again to go on."
        raise KeyboardInterrupt(message) from None
    return Store(folder)


def _fill(folder: Path, manifest: Manifest, source: Source, executor: Executor, progress: bool) -> None:
    """Compute, commit and list the shards that are missing, then close the manifest with the content hash."""
    from tqdm import tqdm

    recipe = parse_recipe(manifest.recipe)
    missing = [index for index in range(recipe.num_shards) if index not in manifest.shards]
    done = sum(entry.stop - entry.start for entry in manifest.shards.values())
    with tqdm(total=recipe.samples, initial=done, desc=recipe.name, unit=" samples", disable=not progress) as bar:
        if missing:
            codes = split_codes(source, recipe)
            tasks = [
                ShardTask(
                    folder=folder,
                    recipe=manifest.recipe,
                    index=index,
                    split=codes[recipe.shard_range(index).start : recipe.shard_range(index).stop],
                    split_names=manifest.split_names,
                    versions=manifest.versions,
                )
                for index in missing
            ]
            in_process = isinstance(executor, LocalExecutor) and executor.workers == 1
            function = functools.partial(make_shard, source=source, advance=bar.update) if in_process else make_shard
            for result in _closing(executor.map_unordered(function, tasks)):
                manifest = _commit(folder, manifest, result)
                if not in_process:
                    bar.update(result.entry.stop - result.entry.start)
    resume.finish(folder, manifest)


def _commit(folder: Path, manifest: Manifest, result: ShardResult) -> Manifest:
    if manifest.num_anchors not in (None, result.num_anchors):
        raise ChanlabError(
            f"all users of a store have the same number of anchors, but the source yielded {manifest.num_anchors} and "
            f"{result.num_anchors}."
        )
    commit(result.temporary, folder / shard_name(result.index))
    manifest = manifest.with_shard(result.index, result.entry, result.num_anchors)
    manifest.write(folder)
    return manifest


def _closing(results: Iterator[ShardResult]) -> Iterator[ShardResult]:
    """Close an executor's iterator whatever ends the loop, so that its workers end too."""
    try:
        yield from results
    finally:
        close = getattr(results, "close", None)
        if close is not None:
            close()


def split_codes(source: Source, recipe: Recipe) -> Array:
    """Split code of every sample, int8 `[samples]`, from the users' motion alone."""
    from chanlab.data.splits import assign_splits

    together = getattr(source, "together", 1)
    return np.asarray(assign_splits(all_motion(source, recipe), recipe.splits, recipe.seed, together=together), np.int8)


def all_motion(source: Source, recipe: Recipe) -> Motion:
    """Motion of all samples of a recipe, `[samples, anchor]`."""
    step = source.group * max(1, _MOTION_BATCH // source.group)
    starts = range(0, recipe.samples, step)
    parts = [source.motion(range(start, min(start + step, recipe.samples)), recipe.seed) for start in starts]
    names = ("times", "positions", "velocities", "orientations")
    return Motion(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def library_versions(source: Source) -> dict[str, str]:
    """Versions of what the channels depend on: chanlab, Sionna's packages, and what the source adds."""
    versions = {"chanlab": chanlab.__version__}
    for package in ("sionna", "sionna-rt", "mitsuba"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions | source.versions()


def plan(recipe: str | Path | Recipe, workers: int = 1) -> dict[str, Any]:
    """What `generate` would make: nothing is written, a few groups of users are computed to measure it.

    Args:
        recipe: Short name, path, or the recipe itself.
        workers: Number of local processes that would run; they share the cores that one leaves idle.

    Returns:
        `name, samples, shards, shard_size, anchors, paths` (the most of any user measured), `splits` (samples by name),
        `bytes`, `seconds` (both estimated) and `measured_samples`.

    Raises:
        UsageError: If the recipe can't be read or its source can't be built.
    """
    recipe = load_recipe(recipe)
    source = build_source(recipe)
    codes = split_codes(source, recipe)
    collect(source, range(min(source.group, recipe.samples)), recipe.seed)  # loads and compiles: not measured
    start, busy, ids = time.perf_counter(), time.process_time(), range(0)
    while not ids or (ids.stop < recipe.samples and time.perf_counter() - start < _MEASURE_SECONDS):
        size = max(source.group, 2 * len(ids))  # whole groups, twice as many each time
        ids = range(ids.stop, min(ids.stop + size, recipe.samples))
        links = collect(source, ids, recipe.seed)
    measured, elapsed = ids.stop, time.perf_counter() - start
    cores = max(1.0, (time.process_time() - busy) / elapsed)  # that one process keeps busy: ray tracing takes all
    speedup = max(1.0, min(workers, recipe.num_shards, (os.cpu_count() or 1) / cores))
    start = time.perf_counter()
    task = ShardTask(Path(), recipe.to_yaml(), 0, codes[ids.start : ids.stop], _split_names(), library_versions(source))
    size = len(encode(links, task, ids, recipe.seed))
    encoding = time.perf_counter() - start
    payload = sum(x.nbytes for x in arrays_of(links, task.split).values()) + 32 * len(ids)
    names, counts = _split_names(), np.bincount(codes, minlength=len(_split_names()))
    return {
        "name": recipe.name,
        "samples": recipe.samples,
        "shards": recipe.num_shards,
        "shard_size": recipe.shard_size,
        "anchors": int(links.times.shape[1]),
        "paths": links.num_paths,
        "splits": {name: int(count) for name, count in zip(names, counts, strict=True)},
        "bytes": math.ceil(payload / len(ids) * recipe.samples + (size - payload) * recipe.num_shards),
        "seconds": (elapsed / measured * recipe.samples + encoding * recipe.num_shards) / speedup,
        "measured_samples": measured,
    }


def _split_names() -> tuple[str, ...]:
    from chanlab.data.splits import SPLITS

    return tuple(SPLITS)
