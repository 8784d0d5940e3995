"""The reader of a store."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from chanlab.channels.source import Links
from chanlab.data.manifest import Manifest, read_manifest, shard_name
from chanlab.data.recipe import Recipe, parse_recipe
from chanlab.data.schema import FIELDS, SCHEMA_VERSION, Array, cat_links, check_shard, damaged, links_of
from chanlab.errors import StoreError, UsageError

if TYPE_CHECKING:
    from chanlab.data.verify import VerifyReport

_OPEN_FILES = 64


class Store:
    """Channels on disk, as paths, with their users' motion and splits.

    Files are opened when first read, in each process anew, and never pickled: a store may be handed to the workers of a
    DataLoader by fork or by spawn.

    Args:
        path: The folder that `chanlab generate` wrote.
        partial: Accept a store that is not complete and read what there is.

    Raises:
        StoreError: If there is no store, it is not complete (unless `partial`), damaged, foreign, or of a newer schema.
            Files are checked when they are opened; `verify` checks all of them.
    """

    def __init__(self, path: str | Path, partial: bool = False) -> None:
        self.path = Path(path)
        self.partial = partial
        self.manifest: Manifest = read_manifest(self.path)
        self._files: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._pid = os.getpid()
        if not self.complete and not partial:
            raise StoreError(
                f"{self.path} is not complete ({len(self.manifest.shards)} of {self.manifest.num_shards} shards): run "
                "the same `chanlab generate` again to finish it, or read what there is with Store(path, partial=True)."
            )
        if not self.manifest.shards:
            raise StoreError(f"{self.path} holds no complete shard yet: run the same `chanlab generate` again.")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict()}

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r}, samples={self.num_samples})"

    def __len__(self) -> int:
        return self.num_samples

    @property
    def complete(self) -> bool:
        """Whether all shards are there."""
        return self.manifest.content_hash is not None

    @property
    def schema_version(self) -> int:
        """Version of the store's schema as this chanlab reads it."""
        return SCHEMA_VERSION

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe the store was made from; `.text` is the YAML as it was written."""
        return parse_recipe(self.manifest.recipe, f"the recipe in {self.path}")

    @property
    def versions(self) -> dict[str, str]:
        """Versions of what the channels depend on."""
        return dict(self.manifest.versions)

    @property
    def content_hash(self) -> str:
        """SHA-256 of channels and labels, hexadecimal; independent of timestamps, layout, shards and workers.

        Raises:
            StoreError: If the store is not complete.
        """
        if self.manifest.content_hash is None:
            raise StoreError(
                f"{self.path} is not complete, it has no content hash: run the same `chanlab generate` again."
            )
        return self.manifest.content_hash

    @property
    def num_samples(self) -> int:
        """Number of users that can be read."""
        return sum(entry.stop - entry.start for entry in self.manifest.shards.values())

    @property
    def num_anchors(self) -> int:
        """Anchors per user; 1 for static drops."""
        assert self.manifest.num_anchors is not None
        return self.manifest.num_anchors

    @cached_property
    def carrier(self) -> float:
        """Carrier frequency [Hz]."""
        return float(self._open(next(iter(self.manifest.shards)))["carrier"])

    @cached_property
    def sample_ids(self) -> npt.NDArray[np.int64]:
        """Ids of the users that can be read, ascending, int64 `[user]`."""
        return np.concatenate([np.arange(e.start, e.stop, dtype=np.int64) for e in self.manifest.shards.values()])

    @cached_property
    def splits(self) -> dict[str, npt.NDArray[np.int64]]:
        """Sample ids of each split by name, ascending; `guard` holds those that belong to none."""
        codes = np.concatenate([self._open(index)["split"][...] for index in self.manifest.shards])
        return {name: self.sample_ids[codes == code] for code, name in enumerate(self.manifest.split_names)}

    def links(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> Links:
        """Channels and motion of users.

        Args:
            ids: Sample ids in any order, repeated or not, at least one.

        Returns:
            `Links` in the order of `ids`: complex64 and float32 on the CPU (times float64), paths padded to the largest
            number in the shards they come from.

        Raises:
            UsageError: If an id is not in the store.
            StoreError: If a shard is damaged.
        """
        wanted = np.asarray(ids, dtype=np.int64).reshape(-1)
        shards = wanted // self.manifest.shard_size
        known = np.isin(shards, list(self.manifest.shards)) & (wanted >= 0) & (wanted < self.manifest.samples)
        if not wanted.size or not known.all():
            bad = wanted[~known][:5].tolist()
            raise UsageError(f"{self.path} holds {self.num_samples} samples, but not {bad or 'the empty list of ids'}.")
        order = np.argsort(shards, kind="stable")
        parts = []
        for index in np.unique(shards):
            rows = wanted[shards == index] - index * self.manifest.shard_size
            parts.append(self._read(int(index), rows))
        if len(parts) == 1:
            return parts[0]
        return _reordered(cat_links(parts), np.argsort(order, kind="stable"))

    def verify(self, progress: bool = False) -> VerifyReport:
        """Check every file's checksum and schema, and the content hash; see `chanlab.data.verify.verify`."""
        from chanlab.data.verify import verify

        return verify(self.path, progress=progress)

    def close(self) -> None:
        """Close the open files; they open again when read."""
        for datasets in self._files.values():
            if self._pid == os.getpid():
                datasets["file"].close()
        self._files.clear()

    def _read(self, index: int, rows: Array) -> Links:
        datasets = self._open(index)
        unique, inverse = np.unique(rows, return_inverse=True)
        start, stop = int(unique[0]), int(unique[-1]) + 1
        selection = slice(start, stop) if stop - start == len(unique) else unique
        ordered = len(rows) == len(unique) and bool((np.diff(rows) > 0).all())
        arrays = {}
        try:
            for name, field in FIELDS.items():
                if field.axes[0] != "user":
                    arrays[name] = datasets[name][...]
                elif name not in ("split", "sample_hashes"):
                    x = datasets[name][selection]
                    arrays[name] = x if ordered else x[inverse]
        except (OSError, RuntimeError) as error:
            raise damaged(str(self.path / shard_name(index)), error) from error
        return links_of(arrays, datasets["carrier"])

    def _open(self, index: int) -> dict[str, Any]:
        """The datasets of a shard, opened in this process."""
        if self._pid != os.getpid():  # after a fork: the parent's handles are not ours to use
            self._files = OrderedDict()
            self._pid = os.getpid()
        if index in self._files:
            self._files.move_to_end(index)
            return self._files[index]
        import h5py

        path = self.path / shard_name(index)
        entry = self.manifest.shards[index]
        try:
            if path.stat().st_size != entry.size:
                raise damaged(str(path), f"{path.stat().st_size} bytes instead of {entry.size}")
            # HDF5 takes a shared lock if the file system has locks; other readers in this process may open the file too.
            file = h5py.File(path, "r", locking="best-effort")
            attributes = check_shard(file, str(path))
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            raise damaged(str(path), error) from error
        self._files[index] = {name: file[name] for name in FIELDS} | {"file": file, "carrier": attributes.carrier}
        while len(self._files) > _OPEN_FILES:
            self._files.popitem(last=False)[1]["file"].close()
        return self._files[index]


def _reordered(links: Links, order: Array) -> Links:
    return Links(
        paths=links.paths[order],
        times=links.times[order],
        positions=links.positions[order],
        velocities=links.velocities[order],
        orientations=links.orientations[order],
        tx_position=links.tx_position,
        tx_orientation=links.tx_orientation,
        sample_ids=links.sample_ids[order],
    )
