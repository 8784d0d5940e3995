"""The small protocol behind which every source of channels stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from chanlab.channels.cir import CIR
from chanlab.channels.paths import Paths


@dataclass(frozen=True)
class Links:
    """One transmitter and a batch of users with their paths.

    Static drops have one anchor. Moving users have several: the places along a trajectory at which the paths are exact;
    views in between come from the neighbouring anchors (`chanlab.channels.cfr_along`).

    Attributes:
        paths: `[user, anchor, path]`.
        times: Time of each anchor [s], float64 `[user, anchor]`, ascending, starting at 0.
        positions: Receiver positions [m], `[user, anchor, 3]`, z up.
        velocities: Receiver velocities [m/s], `[user, anchor, 3]`.
        orientations: Receiver orientations (α, β, γ) about z, y, x [rad], `[user, anchor, 3]`.
        tx_position: Transmitter position [m], `[3]`.
        tx_orientation: Transmitter orientation [rad], `[3]`.
        sample_ids: Global sample id of each user, int64 `[user]`: with the seed it decides all that is random.
    """

    paths: Paths
    times: Tensor
    positions: Tensor
    velocities: Tensor
    orientations: Tensor
    tx_position: Tensor
    tx_orientation: Tensor
    sample_ids: Tensor

    @property
    def num_users(self) -> int:
        """Number of users."""
        return int(self.sample_ids.shape[0])

    @property
    def num_paths(self) -> int:
        """Length of the path axis."""
        return self.paths.num_paths

    @property
    def carrier(self) -> float:
        """[Hz]."""
        return self.paths.carrier

    def trim(self) -> Links:
        """Without trailing entries that no link uses."""
        return replace(self, paths=self.paths.trim() if self.num_paths else self.paths)


@dataclass(frozen=True)
class CIRLinks:
    """One transmitter and a batch of users with their impulse responses, of models whose rays are private.

    Attributes:
        cir: Coefficients `[user, rx_ant, tx_ant, time, tap]`, delays `[user, tap]`.
        snapshots: Times of the axis `time` [s], float64 `[user, time]`, ascending from 0, the same for all users.
        model: Which of the source's models a user was drawn from, int16 `[user]`.
        times: As in `Links`, with one anchor, the first snapshot: `[user, 1]`.
        positions: `[user, 1, 3]` [m]; NaN in models without places.
        velocities: `[user, 1, 3]` [m/s]; a model without directions has its speed along x.
        orientations: `[user, 1, 3]` [rad].
        tx_position: `[3]` [m]; 0 in models without places.
        tx_orientation: `[3]` [rad].
        sample_ids: int64 `[user]`.
    """

    cir: CIR
    snapshots: Tensor
    model: Tensor
    times: Tensor
    positions: Tensor
    velocities: Tensor
    orientations: Tensor
    tx_position: Tensor
    tx_orientation: Tensor
    sample_ids: Tensor

    @property
    def num_users(self) -> int:
        """Number of users."""
        return int(self.sample_ids.shape[0])

    @property
    def num_paths(self) -> int:
        """Length of the tap axis."""
        return self.cir.num_taps

    @property
    def carrier(self) -> float:
        """[Hz]."""
        return self.cir.carrier

    def trim(self) -> CIRLinks:
        """Without trailing taps that have no power in any link."""
        return replace(self, cir=self.cir.trim())


@dataclass(frozen=True)
class Motion:
    """Where users are, without their channels: cheap, so that splits and dry runs need no tracing.

    Attributes:
        times: `[user, anchor]` [s], float64.
        positions: `[user, anchor, 3]` [m].
        velocities: `[user, anchor, 3]` [m/s].
        orientations: `[user, anchor, 3]` [rad].
    """

    times: Tensor
    positions: Tensor
    velocities: Tensor
    orientations: Tensor


@runtime_checkable
class Source(Protocol):
    """Where channels come from.

    A sample's randomness depends on (seed, sample id) alone. `group` consecutive ids, aligned to multiples of `group`,
    are solved together; a source is always asked for whole groups (the last one may be short).

    A source of impulse responses has an attribute `payload` = "cir" and yields `CIRLinks`. One whose samples depend on
    one another has an attribute `together`: that many consecutive ids go to the same split.
    """

    carrier: float
    group: int

    def motion(self, ids: Sequence[int], seed: int) -> Motion:
        """Trajectories of the users with these sample ids."""
        ...

    def links(self, ids: Sequence[int], seed: int) -> Links | CIRLinks:
        """Paths of the users with these sample ids, in canonical order, or their impulse responses."""
        ...

    def versions(self) -> dict[str, str]:
        """Versions (and variants) of what the result depends on, for the store's attributes."""
        ...


def sample_generator(seed: int, sample_id: int, stream: int = 0) -> torch.Generator:
    """A CPU generator that depends on (seed, sample id, stream) alone.

    Streams keep independent uses apart (0: trajectories, 1: noise of a window, 2: where a window starts, ...).
    """
    import numpy as np

    state = np.random.SeedSequence([seed, sample_id, stream]).generate_state(2, dtype=np.uint32)
    value = (int(state[0]) << 31) ^ int(state[1])
    return torch.Generator().manual_seed(value)
