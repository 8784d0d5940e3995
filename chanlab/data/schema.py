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
import torch

from chanlab.channels.paths import PATH_TENSORS, Paths
from chanlab.channels.source import CIRLinks, Links
from chanlab.data.cir_payload import cat_cir_links, cir_arrays, cir_links_of, leading_true, used_taps
from chanlab.data.fields import FIELDS_OF, MOTION, Array
from chanlab.errors import ChanlabError, StoreError

FORMAT = "chanlab-store"
SCHEMA_VERSION = 1
PAYLOADS = tuple(FIELDS_OF)
"""Payloads that this version reads."""


class DamagedError(StoreError):
    """A file of the store is ours, but truncated or changed since it was written."""


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


def payload_of(links: Links | CIRLinks) -> str:
    """Name of what links hold."""
    return "cir" if isinstance(links, CIRLinks) else "paths"


def arrays_of(links: Links | CIRLinks, split: Array) -> dict[str, Array]:
    """The datasets of a shard, in the schema's types, without `sample_hashes`.

    Raises:
        ChanlabError: If the source yielded values that are not finite or that stand outside the mask.
    """
    tensors = (
        cir_arrays(links)
        if isinstance(links, CIRLinks)
        else {f"paths/{name}": getattr(links.paths, name) for name in PATH_TENSORS}
    )
    tensors |= {name: getattr(links, name) for name in MOTION}
    tensors |= {"tx_positions": links.tx_position[None], "tx_orientations": links.tx_orientation[None]}
    fields = FIELDS_OF[payload_of(links)]
    arrays = {name: _numpy(x, fields[name].dtype) for name, x in tensors.items()}
    arrays["split"] = np.ascontiguousarray(split, dtype=fields["split"].dtype)
    for name, x in arrays.items():
        placeless = name == "positions" and isinstance(links, CIRLinks) and np.isnan(x).all()
        if x.dtype.kind in "fc" and not placeless and not np.isfinite(x).all():
            raise ChanlabError(f"the source yielded {name} that is not finite; nothing of this shard was stored.")
    if isinstance(links, Links) and (arrays["paths/transfer"] != 0).any(axis=(2, 3))[~arrays["paths/mask"]].any():
        raise ChanlabError("the source yielded paths outside their mask; masked entries must be zero.")
    return arrays


def sample_hashes(arrays: Mapping[str, Array], carrier: float, payload: str = "paths") -> Array:
    """SHA-256 of each user's channel and labels, uint8 `[user, 32]`.

    It covers names, types, shapes and values, with the path and interaction axes trimmed to what the user needs, so
    that neither layout, padding, nor the division into shards enters it.
    """
    fields = FIELDS_OF[payload]
    # Axes that are as long as the shard's other users need, cut to what this one needs.
    lengths = {"tap": used_taps(arrays)} if payload == "cir" else _used_paths(arrays)
    common = hashlib.sha256(json.dumps([payload, float(carrier)]).encode())
    for name in ("tx_positions", "tx_orientations"):
        _update(common, name, arrays[name])
    per_user = [name for name, field in fields.items() if field.axes[0] == "user" and name != "sample_hashes"]
    digests = np.empty((len(arrays["sample_ids"]), 32), np.uint8)
    for user in range(len(digests)):
        digest = common.copy()
        for name in per_user:
            cut = tuple(
                slice(lengths[axis][user]) if axis in lengths else slice(None) for axis in fields[name].axes[1:]
            )
            _update(digest, name, arrays[name][user][cut])
        digests[user] = np.frombuffer(digest.digest(), np.uint8)
    return digests


def _used_paths(arrays: Mapping[str, Array]) -> dict[str, list[int]]:
    mask, kinds = arrays["paths/mask"], arrays["paths/interactions"]
    return {"path": leading_true(np.any(mask, axis=1)), "depth": leading_true(np.any(kinds != 0, axis=(1, 3)))}


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
        for name, field in FIELDS_OF[attributes.payload].items():
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
            return {name: file[name][...] for name in FIELDS_OF[attributes.payload]}, attributes
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
    for name, field in FIELDS_OF[str(attrs["payload"])].items():
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


def links_of(arrays: Mapping[str, Array], carrier: float) -> Links | CIRLinks:
    """`Links` or `CIRLinks` of a shard's datasets (or of rows of them)."""
    tensors = {name: torch.from_numpy(x) for name, x in arrays.items()}
    common = {name: tensors[name] for name in MOTION}
    common |= {"tx_position": tensors["tx_positions"][0], "tx_orientation": tensors["tx_orientations"][0]}
    if "cir/delay" in tensors:
        return cir_links_of(tensors, carrier, common)
    return Links(paths=Paths(**{name: tensors[f"paths/{name}"] for name in PATH_TENSORS}, carrier=carrier), **common)


def cat_links(items: Sequence[Links | CIRLinks]) -> Links | CIRLinks:
    """Concatenate links of one transmitter along users, padding to the largest number of paths or taps.

    Raises:
        ChanlabError: If the transmitters, the numbers of anchors or the snapshots differ.
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
    common = {name: torch.cat([getattr(item, name) for item in items]) for name in MOTION}
    common |= {"tx_position": first.tx_position, "tx_orientation": first.tx_orientation}
    cirs, paths = [x for x in items if isinstance(x, CIRLinks)], [x.paths for x in items if isinstance(x, Links)]
    if cirs and paths:
        raise ChanlabError("a store holds paths or impulse responses, but the source yielded both.")
    return cat_cir_links(cirs, common) if cirs else Links(paths=Paths.cat(paths), **common)


def _numpy(x: torch.Tensor, dtype: str) -> Array:
    return np.ascontiguousarray(x.detach().cpu().resolve_conj().numpy(), dtype=dtype)


def _update(digest: Any, name: str, x: Array) -> None:
    digest.update(f"{name} {x.dtype.str} {x.shape}\n".encode())
    digest.update(x.tobytes())
