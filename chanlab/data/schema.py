"""Schema version 1 of the store: what a shard holds. SCHEMA.md beside this file is its description for readers.

A shard is encoded in memory and only then written, so that a full disk is an ordinary error of a plain write and the
checksum is that of the bytes that were meant.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from chanlab.channels.paths import PATH_TENSORS, Paths
from chanlab.channels.source import Links
from chanlab.errors import ChanlabError, StoreError

FORMAT = "chanlab-store"
SCHEMA_VERSION = 1
PAYLOADS = ("paths",)
"""Payloads that this version reads; `cir` will stand beside `paths`."""

Array = npt.NDArray[Any]


class DamagedError(StoreError):
    """A file of the store is ours, but truncated or changed since it was written."""


@dataclass(frozen=True)
class Field:
    """One dataset of a shard: its type, unit and axes."""

    dtype: str
    units: str
    axes: tuple[str, ...]


FIELDS: dict[str, Field] = {
    "paths/transfer": Field("<c8", "1", ("user", "anchor", "rx_polarization", "tx_polarization", "path")),
    "paths/delay": Field("<f4", "s", ("user", "anchor", "path")),
    "paths/departure": Field("<f4", "1", ("user", "anchor", "xyz", "path")),
    "paths/arrival": Field("<f4", "1", ("user", "anchor", "xyz", "path")),
    "paths/doppler": Field("<f4", "Hz", ("user", "anchor", "path")),
    "paths/interactions": Field("|i1", "1", ("user", "anchor", "depth", "path")),
    "paths/vertices": Field("<f4", "m", ("user", "anchor", "first_last", "xyz", "path")),
    "paths/mask": Field("|b1", "1", ("user", "anchor", "path")),
    "times": Field("<f8", "s", ("user", "anchor")),
    "positions": Field("<f4", "m", ("user", "anchor", "xyz")),
    "velocities": Field("<f4", "m/s", ("user", "anchor", "xyz")),
    "orientations": Field("<f4", "rad", ("user", "anchor", "alpha_beta_gamma")),
    "sample_ids": Field("<i8", "1", ("user",)),
    "split": Field("|i1", "1", ("user",)),
    "sample_hashes": Field("|u1", "1", ("user", "byte")),
    "tx_positions": Field("<f4", "m", ("transmitter", "xyz")),
    "tx_orientations": Field("<f4", "rad", ("transmitter", "alpha_beta_gamma")),
}
_MOTION = ("times", "positions", "velocities", "orientations", "sample_ids")
_PER_USER = tuple(name for name, f in FIELDS.items() if f.axes[0] == "user" and name != "sample_hashes")


@dataclass(frozen=True)
class ShardAttributes:
    """Root attributes of a shard."""

    recipe: str
    seed: int
    start: int
    stop: int
    carrier: float
    versions: dict[str, str]
    split_names: tuple[str, ...]
    payload: str = "paths"


def arrays_of(links: Links, split: Array) -> dict[str, Array]:
    """The datasets of a shard, in the schema's types, without `sample_hashes`.

    Raises:
        ChanlabError: If the source yielded values that are not finite or that stand outside the mask.
    """
    tensors = {f"paths/{name}": getattr(links.paths, name) for name in PATH_TENSORS}
    tensors |= {
        name: getattr(links, name) for name in ("times", "positions", "velocities", "orientations", "sample_ids")
    }
    tensors |= {"tx_positions": links.tx_position[None], "tx_orientations": links.tx_orientation[None]}
    arrays = {name: _numpy(x, FIELDS[name].dtype) for name, x in tensors.items()}
    arrays["split"] = np.ascontiguousarray(split, dtype=FIELDS["split"].dtype)
    for name, x in arrays.items():
        if x.dtype.kind in "fc" and not np.isfinite(x).all():
            raise ChanlabError(f"the source yielded {name} that is not finite; nothing of this shard was stored.")
    if (arrays["paths/transfer"] != 0).any(axis=(2, 3))[~arrays["paths/mask"]].any():
        raise ChanlabError("the source yielded paths outside their mask; masked entries must be zero.")
    return arrays


def sample_hashes(arrays: Mapping[str, Array], carrier: float, payload: str = "paths") -> Array:
    """SHA-256 of each user's channel and labels, uint8 `[user, 32]`.

    It covers names, types, shapes and values, with the path and interaction axes trimmed to what the user needs, so
    that neither layout, padding, nor the division into shards enters it.
    """
    mask, kinds = arrays["paths/mask"], arrays["paths/interactions"]
    num_paths = _used(np.any(mask, axis=1))
    depth = _used(np.any(kinds != 0, axis=(1, 3)))
    common = hashlib.sha256(json.dumps([payload, float(carrier)]).encode())
    for name in ("tx_positions", "tx_orientations"):
        _update(common, name, arrays[name])
    digests = np.empty((mask.shape[0], 32), np.uint8)
    for user in range(mask.shape[0]):
        digest = common.copy()
        for name in _PER_USER:
            x = arrays[name][user]
            if name == "paths/interactions":
                x = x[:, : depth[user]]
            if name.startswith("paths/"):
                x = x[..., : num_paths[user]]
            _update(digest, name, x)
        digests[user] = np.frombuffer(digest.digest(), np.uint8)
    return digests


def content_hash(digests: Array) -> str:
    """Hash of a store's channels and labels: of all its `sample_hashes` in the order of sample ids, as hexadecimal."""
    return hashlib.sha256(b"chanlab content 1\n" + np.ascontiguousarray(digests, np.uint8).tobytes()).hexdigest()


def encode_shard(arrays: Mapping[str, Array], attributes: ShardAttributes) -> bytes:
    """The bytes of a shard's HDF5 file.

    Datasets are contiguous and not compressed: a user's rows are then one read each. Compressed chunks made files about
    half as large but reading a batch of random users five to fifteen times slower.
    """
    import h5py

    # v110: attributes over 64 KiB (long recipes), readable by HDF5 1.10 and later.
    size = sum(x.nbytes for x in arrays.values())
    memory: dict[str, Any] = {"driver": "core", "backing_store": False, "block_size": size + 65536}
    with h5py.File("shard", "w", libver=("v110", "v110"), **memory) as file:
        file.attrs.update(
            format=FORMAT,
            schema_version=SCHEMA_VERSION,
            payload=attributes.payload,
            recipe=attributes.recipe,
            seed=attributes.seed,
            start=attributes.start,
            stop=attributes.stop,
            carrier=attributes.carrier,
            carrier_units="Hz",
            versions=json.dumps(attributes.versions, sort_keys=True),
            split_names=json.dumps(attributes.split_names),
        )
        for name, field in FIELDS.items():
            dataset = file.create_dataset(name, data=arrays[name], track_times=False)
            dataset.attrs["units"] = field.units
            dataset.attrs["axes"] = " ".join(field.axes)
        file.flush()
        image: bytes = file.id.get_file_image()
    return image


def decode_shard(data: bytes, origin: str) -> tuple[dict[str, Array], ShardAttributes]:
    """Read a whole shard from its bytes.

    Raises:
        StoreError: If it is no shard of this schema; the message names the remedy.
    """
    import h5py

    try:
        with h5py.File(io.BytesIO(data), "r") as file:
            attributes = check_shard(file, origin)
            return {name: file[name][...] for name in FIELDS}, attributes
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        raise damaged(origin, error) from error


def check_shard(file: Any, origin: str) -> ShardAttributes:
    """Check an open HDF5 file's schema and return its root attributes.

    Raises:
        StoreError: If it is foreign, newer, or lacks a dataset.
    """
    attrs = dict(file.attrs)
    if attrs.get("format") != FORMAT:
        raise StoreError(
            f"{origin} is HDF5, but not a shard of a chanlab store (no format attribute says so): move it away."
        )
    check_version(attrs.get("schema_version"), attrs.get("payload"), origin)
    lengths: dict[str, int] = {"byte": 32, "xyz": 3, "rx_polarization": 2, "tx_polarization": 2, "first_last": 2}
    for name, field in FIELDS.items():
        if name not in file:
            raise damaged(origin, f"dataset {name} is missing")
        dataset = file[name]
        if dataset.dtype != np.dtype(field.dtype) or dataset.ndim != len(field.axes):
            raise damaged(origin, f"dataset {name} is {dataset.dtype} {dataset.shape}")
        for axis, length in zip(field.axes, dataset.shape, strict=True):
            if lengths.setdefault(axis, length) != length:
                raise damaged(origin, f"dataset {name} has {length} along {axis}, not {lengths[axis]}")
    return ShardAttributes(
        recipe=str(attrs["recipe"]),
        seed=int(attrs["seed"]),
        start=int(attrs["start"]),
        stop=int(attrs["stop"]),
        carrier=float(attrs["carrier"]),
        versions=json.loads(attrs["versions"]),
        split_names=tuple(json.loads(attrs["split_names"])),
        payload=str(attrs["payload"]),
    )


def check_version(version: Any, payload: Any, origin: str) -> None:
    """Refuse a schema or payload that this chanlab doesn't know."""
    if not isinstance(version, int | np.integer) or version < 1:
        raise damaged(origin, f"its schema version is {version!r}")
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{origin} has schema version {version}, this chanlab reads up to {SCHEMA_VERSION}: "
            "upgrade it with `pip install --upgrade chanlab`."
        )
    if payload not in PAYLOADS:
        raise StoreError(
            f"{origin} holds the payload {payload!r}, this chanlab reads {', '.join(PAYLOADS)}: upgrade it."
        )


def damaged(origin: str, why: object) -> DamagedError:
    """The error for a shard that can't be read."""
    return DamagedError(
        f"{origin} is truncated or damaged ({why}): delete it and run the same `chanlab generate` again; "
        "only what is missing is computed."
    )


def links_of(arrays: Mapping[str, Array], carrier: float) -> Links:
    """`Links` of a shard's datasets (or of rows of them)."""
    tensors = {name: torch.from_numpy(x) for name, x in arrays.items()}
    return Links(
        paths=Paths(**{name: tensors[f"paths/{name}"] for name in PATH_TENSORS}, carrier=carrier),
        **{name: tensors[name] for name in _MOTION},
        tx_position=tensors["tx_positions"][0],
        tx_orientation=tensors["tx_orientations"][0],
    )


def cat_links(items: Sequence[Links]) -> Links:
    """Concatenate links of one transmitter along users, padding to the largest number of paths.

    Raises:
        ChanlabError: If the transmitters or the numbers of anchors differ.
    """
    first = items[0]
    for other in items[1:]:
        if not torch.equal(first.tx_position, other.tx_position) or not torch.equal(
            first.tx_orientation, other.tx_orientation
        ):
            raise ChanlabError("a store holds one transmitter set, but the source's changed between samples.")
        if first.times.shape[1:] != other.times.shape[1:]:
            raise ChanlabError(
                f"all users of a store have the same number of anchors, but the source yielded {first.times.shape[1]} "
                f"and {other.times.shape[1]}."
            )
    return Links(
        paths=Paths.cat([item.paths for item in items]),
        **{name: torch.cat([getattr(item, name) for item in items]) for name in _MOTION},
        tx_position=first.tx_position,
        tx_orientation=first.tx_orientation,
    )


def _numpy(x: torch.Tensor, dtype: str) -> Array:
    return np.ascontiguousarray(x.detach().cpu().resolve_conj().numpy(), dtype=dtype)


def _used(flags: Array) -> list[int]:
    """Per user, the number of leading entries up to the last True."""
    length = flags.shape[1]
    last = length - np.argmax(flags[:, ::-1], axis=1) if length else np.zeros(len(flags), int)
    return [int(n) for n in np.where(flags.any(axis=1), last, 0)]


def _update(digest: Any, name: str, x: Array) -> None:
    digest.update(f"{name} {x.dtype.str} {x.shape}\n".encode())
    digest.update(x.tobytes())
