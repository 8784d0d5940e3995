"""The small protocol behind which every source of channels stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

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
    """

    carrier: float
    group: int

    def motion(self, ids: Sequence[int], seed: int) -> Motion:
        """Trajectories of the users with these sample ids."""
        ...

    def links(self, ids: Sequence[int], seed: int) -> Links:
        """Paths of the users with these sample ids, in canonical order."""
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
