"""manifest.json: which shards of a store are complete, with their checksums."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from chanlab.data.schema import FORMAT, SCHEMA_VERSION, DamagedError, check_version
from chanlab.data.writer import write_file
from chanlab.errors import StoreError

MANIFEST = "manifest.json"


def shard_name(index: int) -> str:
    """File name of shard `index`."""
    return f"shard-{index:05d}.h5"


@dataclass(frozen=True)
class ShardEntry:
    """One complete shard.

    Attributes:
        file: Name in the store's folder.
        start: First sample id.
        stop: One past the last sample id.
        size: Size of the file [bytes].
        sha256: SHA-256 of the file.
        num_paths: Length of its path axis.
    """

    file: str
    start: int
    stop: int
    size: int
    sha256: str
    num_paths: int


@dataclass(frozen=True)
class Manifest:
    """What a store's folder holds so far.

    Attributes:
        recipe: The recipe's YAML.
        samples: Number of samples when complete.
        shard_size: Samples per shard.
        versions: Versions of what the channels depend on.
        split_names: Names of the split codes 0, 1, ...
        num_anchors: Anchors per user (None before the first shard).
        shards: Complete shards by index.
        content_hash: Hash of channels and labels (None until all shards are complete).
        payload: What the shards hold.
    """

    recipe: str
    samples: int
    shard_size: int
    versions: dict[str, str]
    split_names: tuple[str, ...]
    num_anchors: int | None = None
    shards: dict[int, ShardEntry] = field(default_factory=dict)
    content_hash: str | None = None
    payload: str = "paths"

    @property
    def num_shards(self) -> int:
        """Number of shards when complete."""
        return -(-self.samples // self.shard_size)

    def with_shard(self, index: int, entry: ShardEntry, num_anchors: int) -> Manifest:
        """A manifest that lists one more shard."""
        shards = dict(sorted({**self.shards, index: entry}.items()))
        return replace(self, shards=shards, num_anchors=num_anchors)

    def without_shard(self, index: int) -> Manifest:
        """A manifest that no longer lists a shard; the content hash goes with it."""
        return replace(self, shards={k: v for k, v in self.shards.items() if k != index}, content_hash=None)

    def to_bytes(self) -> bytes:
        """The file's bytes, checksum included."""
        body = {"format": FORMAT, "schema_version": SCHEMA_VERSION} | asdict(self)
        body["split_names"] = list(self.split_names)
        body["shards"] = [{"index": index, **asdict(entry)} for index, entry in self.shards.items()]
        return _dump(body)

    def write(self, folder: Path) -> None:
        """Replace the folder's manifest, durably and atomically."""
        write_file(folder / MANIFEST, self.to_bytes())


def read_manifest(folder: Path) -> Manifest:
    """Read and check a store's manifest.

    Raises:
        StoreError: If there is none, or it is damaged, foreign or of a newer schema; the message names the remedy.
    """
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        what = "there is no folder" if not folder.is_dir() else "no chanlab store is in"
        raise StoreError(f"{what} {folder}: make one with `chanlab generate RECIPE --out {folder}`.") from None
    except OSError as error:
        raise StoreError(f"can't read {path}: {error}") from error
    remedy = f"delete {MANIFEST} and run the same `chanlab generate` again, it is rebuilt from the shards."
    try:
        body = json.loads(data)
        is_ours = isinstance(body, dict) and body.get("format") == FORMAT
    except ValueError as error:
        raise DamagedError(f"{path} is damaged ({error}): {remedy}") from error
    if not is_ours:
        raise StoreError(f"{path} is not the manifest of a chanlab store: name another folder.")
    check_version(body.get("schema_version"), body.get("payload"), str(path))
    if _dump({key: value for key, value in body.items() if key != "sha256"}) != data:
        raise DamagedError(f"{path} is damaged (its checksum doesn't fit): {remedy}")
    return _from_body(body)


def _from_body(body: dict[str, Any]) -> Manifest:
    shards = {}
    for item in body["shards"]:
        index = item.pop("index")
        shards[index] = ShardEntry(**item)
    known = {key: value for key, value in body.items() if key in Manifest.__dataclass_fields__}
    return Manifest(**known | {"shards": shards, "split_names": tuple(body["split_names"])})


def _dump(body: dict[str, Any]) -> bytes:
    """JSON of `body` and, as its last entry, the SHA-256 of its JSON without that entry."""
    digest = hashlib.sha256(json.dumps(body, indent=1).encode()).hexdigest()
    return (json.dumps({**body, "sha256": digest}, indent=1) + "\n").encode()
