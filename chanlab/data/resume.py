"""What is already there: begin a store or go on with one, and never compute a complete shard again."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np

from chanlab.data.manifest import MANIFEST, Manifest, ShardEntry, read_manifest, shard_name
from chanlab.data.reader import ShardReader
from chanlab.data.recipe import Recipe, parse_recipe
from chanlab.data.schema import DamagedError, ShardAttributes, content_hash, damaged, decode_shard, sample_hashes
from chanlab.data.writer import is_leftover
from chanlab.errors import ChanlabError, StoreError

_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"


def is_complete(folder: Path, recipe: Recipe) -> bool:
    """Whether the folder holds the recipe's store and all of its files are there.

    Raises:
        StoreError: If it holds another recipe's store, or the manifest is damaged.
    """
    if not (folder / MANIFEST).is_file():
        return False
    manifest = read_manifest(folder)
    _same_recipe(folder, parse_recipe(manifest.recipe), recipe)
    return manifest.content_hash is not None and all(_intact(folder, e) for e in manifest.shards.values())


def begin(
    folder: Path, recipe: Recipe, versions: dict[str, str], split_names: tuple[str, ...], payload: str = "paths"
) -> Manifest:
    """The manifest to go on with: complete shards listed, those that a killed writer didn't list adopted.

    Only while holding the folder's lock.

    Raises:
        StoreError: If the folder holds something else, another recipe, or shards made with other versions.
        WriteError: If the manifest can't be written.
    """
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(folder)
        _same_recipe(folder, parse_recipe(manifest.recipe), recipe)
        _same_versions(folder, manifest.versions, versions)
    else:
        _only_ours(folder)
        manifest = Manifest(recipe.to_yaml(), recipe.samples, recipe.shard_size, versions, split_names, payload=payload)
    before = manifest
    for index in range(manifest.num_shards):
        entry = manifest.shards.get(index)
        if entry is not None and not _intact(folder, entry):
            manifest = manifest.without_shard(index)
        if index not in manifest.shards and (folder / shard_name(index)).exists():
            manifest = _adopt(folder, manifest, recipe, index)
    if manifest != before or not (folder / MANIFEST).is_file():
        manifest.write(folder)
    return manifest


def finish(folder: Path, manifest: Manifest) -> None:
    """Close the manifest of a store whose shards are all there with its content hash.

    Raises:
        StoreError: If a shard can't be read back.
        ChanlabError: If the transmitter set is not the same in all shards.
        WriteError: If the manifest can't be written.
    """
    readers = [ShardReader(folder / entry.file, entry) for entry in manifest.shards.values()]
    digests = np.concatenate([reader.read("sample_hashes") for reader in readers])
    for name in ("tx_positions", "tx_orientations"):
        if not all(np.array_equal(reader.read(name), readers[0].read(name)) for reader in readers):
            raise ChanlabError(f"a store holds one transmitter set, but the source's {name} changed between shards.")
    complete = replace(manifest, content_hash=content_hash(digests))
    if complete != manifest:
        complete.write(folder)


def state(folder: Path, recipe: Recipe) -> str:
    """How far a store is, as the beginning of a sentence: "3 of 10 shards are"."""
    done = 0
    with contextlib.suppress(StoreError):
        done = len(read_manifest(folder).shards)
    return f"{done} of {recipe.num_shards} shards are"


def _intact(folder: Path, entry: ShardEntry) -> bool:
    path = folder / entry.file
    return path.is_file() and path.stat().st_size == entry.size


def _same_recipe(folder: Path, stored: Recipe, recipe: Recipe) -> None:
    different = stored.differences(recipe)
    if different:
        raise StoreError(
            f"{folder} holds the store of another recipe (it differs in {', '.join(different)}): choose another --out "
            "folder, or delete this one."
        )


def _same_versions(folder: Path, stored: dict[str, str], now: dict[str, str]) -> None:
    different = [
        f"{name} {stored.get(name, 'none')} then, {now.get(name, 'none')} now"
        for name in sorted(stored.keys() | now.keys())
        if stored.get(name) != now.get(name)
    ]
    if different:
        raise StoreError(
            f"{folder} was begun with other versions ({'; '.join(different)}), so its shards would not fit together: "
            "install those again, or choose another --out folder."
        )


def _only_ours(folder: Path) -> None:
    """Refuse a folder that holds files but no store."""
    foreign = [p.name for p in folder.iterdir() if not is_leftover(p.name) and not p.match("shard-[0-9]*.h5")]
    if foreign:
        raise StoreError(
            f"{folder} is not empty and holds no chanlab store (but {', '.join(sorted(foreign)[:3])}): choose another "
            "--out folder."
        )


def _adopt(folder: Path, manifest: Manifest, recipe: Recipe, index: int) -> Manifest:
    """List a shard that is there but not in the manifest, if it is sound; a damaged one will be computed again."""
    path = folder / shard_name(index)
    data = path.read_bytes()
    if data and not data.startswith(_HDF5_SIGNATURE):
        raise StoreError(f"{path} is no HDF5 file, so not a shard of this store: move it away or delete it.")
    try:
        arrays, attributes = decode_shard(data, str(path))
        if not np.array_equal(arrays["sample_hashes"], sample_hashes(arrays, attributes.carrier, attributes.payload)):
            raise damaged(str(path), "its content hash doesn't fit")
    except DamagedError:
        warnings.warn(f"{path} is truncated or damaged and is computed again.", stacklevel=2)
        return manifest
    _belongs(folder, attributes, manifest, recipe, index)
    entry = ShardEntry(
        file=path.name,
        start=attributes.start,
        stop=attributes.stop,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        num_paths=arrays["cir/delay" if attributes.payload == "cir" else "paths/delay"].shape[-1],
    )
    return manifest.with_shard(index, entry, arrays["times"].shape[1])


def _belongs(folder: Path, attributes: ShardAttributes, manifest: Manifest, recipe: Recipe, index: int) -> None:
    _same_recipe(folder, parse_recipe(attributes.recipe), recipe)
    _same_versions(folder, attributes.versions, manifest.versions)
    ids = recipe.shard_range(index)
    if (attributes.start, attributes.stop) != (ids.start, ids.stop):
        raise StoreError(
            f"{folder / shard_name(index)} holds samples {attributes.start} to {attributes.stop - 1}, not {ids.start} "
            f"to {ids.stop - 1}: it was renamed; delete it and run again."
        )
