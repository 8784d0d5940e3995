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

from chanlab.channels.source import CIRLinks, Links
from chanlab.data.fields import FIELDS_OF, Array
from chanlab.data.manifest import Manifest, read_manifest, shard_name
from chanlab.data.reader import ShardReader, runs_of
from chanlab.data.recipe import Recipe, parse_recipe
from chanlab.data.schema import SCHEMA_VERSION, links_of
from chanlab.errors import StoreError, UsageError

if TYPE_CHECKING:
    from chanlab.data.verify import VerifyReport

_OPEN_FILES = 64


class Store:
    """Channels on disk, as paths or impulse responses, with their users' motion and splits.

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
        self._files: OrderedDict[int, ShardReader] = OrderedDict()
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
    def payload(self) -> str:
        """What it holds: `paths`, or `cir` (impulse responses of models whose rays are private)."""
        return self.manifest.payload

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
        return self._open(next(iter(self.manifest.shards))).attributes.carrier

    @cached_property
    def sample_ids(self) -> npt.NDArray[np.int64]:
        """Ids of the users that can be read, ascending, int64 `[user]`."""
        return np.concatenate([np.arange(e.start, e.stop, dtype=np.int64) for e in self.manifest.shards.values()])

    @cached_property
    def splits(self) -> dict[str, npt.NDArray[np.int64]]:
        """Sample ids of each split by name, ascending; `guard` holds those that belong to none."""
        codes = np.concatenate([self._open(index).read("split") for index in self.manifest.shards])
        return {name: self.sample_ids[codes == code] for code, name in enumerate(self.manifest.split_names)}

    def links(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> Links:
        """Channels and motion of users.

        Args:
            ids: Sample ids in any order, repeated or not, at least one.

        Returns:
            `Links` in the order of `ids`: complex64 and float32 on the CPU (times float64), paths padded to the largest
            number in the shards they come from.

        Raises:
            UsageError: If an id is not in the store, or it holds impulse responses.
            StoreError: If a shard is damaged.
        """
        links = self.read(ids)
        if isinstance(links, CIRLinks):
            raise UsageError(f"{self.path} holds impulse responses, not paths: read them with Store.cir_links.")
        return links

    def cir_links(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> CIRLinks:
        """Impulse responses and motion of users, as `links` reads paths.

        Raises:
            UsageError: If an id is not in the store, or it holds paths.
            StoreError: If a shard is damaged.
        """
        links = self.read(ids)
        if isinstance(links, Links):
            raise UsageError(f"{self.path} holds paths, not impulse responses: read them with Store.links.")
        return links

    def read(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> Links | CIRLinks:
        """What `links` or `cir_links` returns, whichever the store holds."""
        wanted = np.asarray(ids, dtype=np.int64).reshape(-1)
        shards = wanted // self.manifest.shard_size
        known = np.isin(shards, list(self.manifest.shards)) & (wanted >= 0) & (wanted < self.manifest.samples)
        if not wanted.size or not known.all():
            bad = wanted[~known][:5].tolist()
            raise UsageError(f"{self.path} holds {self.num_samples} samples, but not {bad or 'the empty list of ids'}.")
        users = {int(index): np.flatnonzero(shards == index) for index in np.unique(shards)}
        readers = [(self._open(index), where) for index, where in users.items()]
        runs = [runs_of(wanted[where] - index * self.manifest.shard_size) for index, where in users.items()]
        names = [name for name in FIELDS_OF[self.payload] if name not in ("split", "sample_hashes")]
        arrays = {name: self._gather(name, readers, runs) for name in names}
        return links_of(arrays, readers[0][0].attributes.carrier)

    def verify(self, progress: bool = False) -> VerifyReport:
        """Check every file's checksum and schema, and the content hash; see `chanlab.data.verify.verify`."""
        from chanlab.data.verify import verify

        return verify(self.path, progress=progress)

    def close(self) -> None:
        """Close the open files; they open again when read."""
        while self._files:
            self._files.popitem()[1].close()

    def _gather(self, name: str, readers: list[tuple[ShardReader, Array]], runs: list[tuple[Array, Array]]) -> Array:
        """One dataset's rows from several shards, in the order asked for, padded to one shape."""
        field = FIELDS_OF[self.payload][name]
        if field.axes[0] != "user":
            return readers[0][0].read(name)  # the same in all shards
        parts = [reader.rows(name, *run) for (reader, _), run in zip(readers, runs, strict=True)]
        if len(parts) == 1:
            return parts[0]
        shape = np.max([part.shape[1:] for part in parts], axis=0) if parts[0].ndim > 1 else ()
        out = np.zeros((sum(map(len, parts)), *shape), field.dtype)
        for part, (_, where) in zip(parts, readers, strict=True):
            index: tuple[Any, ...] = (where, *(slice(length) for length in part.shape[1:]))
            out[index] = part
        return out

    def _open(self, index: int) -> ShardReader:
        """A shard, opened in this process."""
        if self._pid != os.getpid():  # after a fork: open our own
            self.close()
            self._pid = os.getpid()
        if index not in self._files:
            self._files[index] = ShardReader(self.path / shard_name(index), self.manifest.shards[index])
            if len(self._files) > _OPEN_FILES:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(index)
        return self._files[index]
