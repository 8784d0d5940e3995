"""What the datasets of a shard are, for each payload: types, units and axes (SCHEMA.md beside this file)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Field:
    """One dataset of a shard: its type, unit and axes."""

    dtype: str
    units: str
    axes: tuple[str, ...]


_PATHS = {
    "paths/transfer": Field("<c8", "1", ("user", "anchor", "rx_polarization", "tx_polarization", "path")),
    "paths/delay": Field("<f4", "s", ("user", "anchor", "path")),
    "paths/departure": Field("<f4", "1", ("user", "anchor", "xyz", "path")),
    "paths/arrival": Field("<f4", "1", ("user", "anchor", "xyz", "path")),
    "paths/doppler": Field("<f4", "Hz", ("user", "anchor", "path")),
    "paths/interactions": Field("|i1", "1", ("user", "anchor", "depth", "path")),
    "paths/vertices": Field("<f4", "m", ("user", "anchor", "first_last", "xyz", "path")),
    "paths/mask": Field("|b1", "1", ("user", "anchor", "path")),
}
_CIR = {
    "cir/coefficients": Field("<c8", "1", ("user", "rx_ant", "tx_ant", "time", "tap")),
    "cir/delay": Field("<f4", "s", ("user", "tap")),
    "cir/snapshots": Field("<f8", "s", ("user", "time")),
    "cir/model": Field("<i2", "1", ("user",)),
}
_COMMON = {
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

FIELDS_OF: dict[str, dict[str, Field]] = {"paths": _PATHS | _COMMON, "cir": _CIR | _COMMON}
"""Datasets of a shard by payload."""

FIELDS = FIELDS_OF["paths"]
"""Datasets of a shard of paths."""

MOTION = ("times", "positions", "velocities", "orientations", "sample_ids")
"""What `Links` and `CIRLinks` hold under the same names."""
