"""`chanlab verify` and `chanlab info`: is a store what it claims to be, and what is that."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chanlab.channels.source import CIRLinks
from chanlab.data.fields import Array
from chanlab.data.manifest import MANIFEST, Manifest, ShardEntry, read_manifest
from chanlab.data.recipe import parse_recipe
from chanlab.data.schema import SCHEMA_VERSION, DamagedError, content_hash, decode_shard, sample_hashes
from chanlab.data.store import Store
from chanlab.errors import StoreError


@dataclass(frozen=True)
class Problem:
    """What is wrong with one file.

    Attributes:
        file: Name in the store's folder.
        message: What is wrong.
        remedy: What to do about it.
    """

    file: str
    message: str
    remedy: str


@dataclass(frozen=True)
class VerifyReport:
    """Result of `verify`.

    Attributes:
        path: The store.
        problems: What is wrong; empty if nothing is.
        shards: Number of shards that are sound.
        samples: Number of samples in them.
        complete: Whether all shards of the recipe are listed.
        content_hash: Hash recomputed from the channels (None if not all of them are sound).
    """

    path: Path
    problems: tuple[Problem, ...]
    shards: int
    samples: int
    complete: bool
    content_hash: str | None

    @property
    def ok(self) -> bool:
        """Whether the store is complete and sound."""
        return self.complete and not self.problems


def verify(path: str | Path, progress: bool = False) -> VerifyReport:
    """Check the manifest's and every shard's checksum, every shard's schema, and the content hash.

    Args:
        path: The store.
        progress: Show a progress bar.

    Raises:
        StoreError: If there is no store, or it is of a newer schema.
    """
    from tqdm import tqdm

    folder = Path(path)
    try:
        manifest = read_manifest(folder)
    except DamagedError:
        remedy = f"delete {MANIFEST} and run the same `chanlab generate` again: it is rebuilt from the shards"
        problem = Problem(MANIFEST, "it is damaged, its checksum does not fit", remedy)
        return VerifyReport(folder, (problem,), 0, 0, False, None)
    problems = []
    digests: list[Array] = []
    for entry in tqdm(manifest.shards.values(), desc="verify", unit="shard", disable=not progress):
        try:
            digests.append(_verify_shard(folder, entry, manifest))
        except StoreError as error:
            remedy = f"delete {entry.file} and run the same `chanlab generate` again: only what is missing is computed"
            problems.append(Problem(entry.file, str(error), remedy))
    listed = {entry.file for entry in manifest.shards.values()}
    problems += [
        Problem(
            file.name, "it is not in the manifest", "run the same `chanlab generate` again: it is checked and adopted"
        )
        for file in sorted(folder.glob("shard-*.h5"))
        if file.name not in listed
    ]
    complete = len(manifest.shards) == manifest.num_shards and manifest.content_hash is not None
    if not complete:
        message = f"only {len(manifest.shards)} of {manifest.num_shards} shards are complete"
        problems.append(Problem(MANIFEST, message, "run the same `chanlab generate` again: it computes the others"))
    found = content_hash(np.concatenate(digests)) if len(digests) == manifest.num_shards else None
    if complete and found not in (None, manifest.content_hash):
        message = "the content hash is not that of the shards"
        problems.append(Problem(MANIFEST, message, f"delete {MANIFEST} and run the same `chanlab generate` again"))
    samples = sum(len(d) for d in digests)
    return VerifyReport(folder, tuple(problems), len(digests), samples, complete, found)


def _verify_shard(folder: Path, entry: ShardEntry, manifest: Manifest) -> Array:
    """Check one shard; returns its sample hashes, uint8 `[user, 32]`."""
    try:
        data = (folder / entry.file).read_bytes()
    except FileNotFoundError:
        raise StoreError("it is missing") from None
    except OSError as error:
        raise StoreError(f"it can't be read: {error}") from error
    if len(data) != entry.size:
        raise StoreError(f"it has {len(data)} bytes instead of {entry.size}: truncated, or another file")
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise StoreError("its SHA-256 differs from the manifest's: bytes were changed after it was written")
    arrays, attributes = decode_shard(data, entry.file)
    same_recipe = attributes.recipe == manifest.recipe or parse_recipe(attributes.recipe) == parse_recipe(
        manifest.recipe
    )
    if (attributes.start, attributes.stop) != (entry.start, entry.stop) or not same_recipe:
        raise StoreError("it belongs to another store")
    digests = sample_hashes(arrays, attributes.carrier, attributes.payload)
    if not np.array_equal(digests, arrays["sample_hashes"]):
        raise StoreError("its channels are not those that were hashed when it was written")
    return digests


def info(path: str | Path) -> dict[str, Any]:
    """The card of a store, complete or not, as plain values for JSON.

    Returns:
        `path, schema_version, payload, name, description, samples, samples_expected, complete, shards, anchors,
        max_paths` (or taps), `carrier` [Hz], `duration` [s] of a trajectory, `snapshots` (of
        impulse responses, else None), `size` [bytes], `splits` (samples by name),
        `content_hash` (None unless complete), `seed, recipe` (YAML) and `versions`.

    Raises:
        StoreError: If there is no store, it can't be read, or no shard is complete yet.
    """
    store = Store(path, partial=True)
    manifest = store.manifest
    first = store.read(store.sample_ids[:1])
    times = first.snapshots if isinstance(first, CIRLinks) else first.times
    return {
        "path": str(path),
        "schema_version": SCHEMA_VERSION,
        "payload": manifest.payload,
        "name": store.recipe.name,
        "description": store.recipe.description,
        "samples": store.num_samples,
        "samples_expected": manifest.samples,
        "complete": store.complete,
        "shards": len(manifest.shards),
        "anchors": store.num_anchors,
        "max_paths": max(entry.num_paths for entry in manifest.shards.values()),
        "carrier": store.carrier,
        "duration": float(times[0, -1]),
        "snapshots": times.shape[1] if isinstance(first, CIRLinks) else None,
        "size": sum(entry.size for entry in manifest.shards.values()),
        "splits": {name: len(ids) for name, ids in store.splits.items()},
        "content_hash": manifest.content_hash,
        "seed": store.recipe.seed,
        "recipe": manifest.recipe,
        "versions": store.versions,
    }
