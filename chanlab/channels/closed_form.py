"""Sources in closed form, from geometry alone: free space and two rays. No ray tracer is needed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from chanlab.channels.geometric import free_space_paths, two_ray_paths
from chanlab.channels.paths import Paths
from chanlab.channels.source import Links, Motion
from chanlab.channels.trajectories import Trajectories
from chanlab.errors import UsageError

ORIGIN = [0.0, 0.0, 0.0]


class Ring(Trajectories):
    """Users at random distances around a point, that go straight on in any direction or stay where they are.

    Args:
        distance: Smallest and largest distance on the ground [m]; uniform between them, as is the azimuth.
        center: The point (x, y) [m].
        height: Height z of the users' antennas [m].
        speed: Lowest and highest speed [m/s]; uniform between them.
        length: Length of the way [m]; 0 for users that stay (their speed still gives a Doppler shift).
        anchor_spacing: Largest distance between neighbouring anchors [m].

    Raises:
        UsageError: If an interval is not positive and ascending.
    """

    def __init__(
        self,
        distance: list[float] = [20.0, 500.0],  # noqa: B006 - read only; jsonargparse shows it as the default
        center: list[float] = [0.0, 0.0],  # noqa: B006
        height: float = 1.5,
        speed: list[float] = [1.0, 15.0],  # noqa: B006
        length: float = 2.0,
        anchor_spacing: float = 0.1,
    ) -> None:
        for name, interval in (("distance", distance), ("speed", speed)):
            if len(interval) != 2 or not 0 <= interval[0] <= interval[1]:
                raise UsageError(f"{name} must be [lowest, highest], not negative, not {list(interval)}.")
        if length > 0 and speed[0] <= 0:
            raise UsageError(f"users that move {length} m need a lowest speed > 0, not {speed[0]} m/s.")
        if distance[1] <= 0:
            raise UsageError("the largest distance must be > 0.")
        reach = distance[1]
        super().__init__([[c - reach, c + reach] for c in center], height, length, anchor_spacing)
        self.center, self.distance, self.speed = center, distance, speed

    def draw(self, generator: torch.Generator) -> tuple[Tensor, float] | None:
        """Draw a place, a heading and a speed (see `Trajectories.draw`)."""
        u = torch.rand(4, generator=generator, dtype=torch.float64)
        radius = self.distance[0] + (self.distance[1] - self.distance[0]) * u[0]
        azimuth, heading = 2 * math.pi * u[1], 2 * math.pi * u[2]
        start = torch.tensor(self.center, dtype=torch.float64) + radius * torch.stack([azimuth.cos(), azimuth.sin()])
        places = start + self.distances[:, None] * torch.stack([heading.cos(), heading.sin()])
        speed = self.speed[0] + (self.speed[1] - self.speed[0]) * float(u[3])
        return torch.cat([places, heading.expand(self.num_anchors, 1)], -1), speed


class ClosedForm(ABC):
    """What closed forms share: one transmitter, users solved one by one, float64 inside and float32 paths outside."""

    def __init__(self, carrier: float, tx_position: list[float], tx_orientation: list[float], group: int = 1) -> None:
        if carrier <= 0 or group < 1:
            raise UsageError(f"carrier must be > 0 Hz and group >= 1, not {carrier} and {group}.")
        if len(tx_position) != 3 or len(tx_orientation) != 3:
            raise UsageError("tx_position is [x, y, z] in metres and tx_orientation [alpha, beta, gamma] in radians.")
        self.carrier = float(carrier)
        self.group = group
        self.tx_position = torch.tensor(tx_position, dtype=torch.float64)
        self.tx_orientation = torch.tensor(tx_orientation, dtype=torch.float64)

    @abstractmethod
    def motion(self, ids: Sequence[int], seed: int) -> Motion:
        """Trajectories of the users with these sample ids."""

    @abstractmethod
    def _paths(self, motion: Motion, ids: Sequence[int], seed: int) -> Paths:
        """Paths `[user, anchor, path]` in float64."""

    def links(self, ids: Sequence[int], seed: int) -> Links:
        """Paths of the users with these sample ids, in canonical order, complex64."""
        motion = self.motion(ids, seed)
        return Links(
            paths=self._paths(motion, ids, seed).sort().to(dtype=torch.float32),
            times=motion.times,
            positions=motion.positions,
            velocities=motion.velocities,
            orientations=motion.orientations,
            tx_position=self.tx_position,
            tx_orientation=self.tx_orientation,
            sample_ids=torch.tensor(list(ids), dtype=torch.int64),
        )

    def versions(self) -> dict[str, str]:
        """Versions of what the result depends on."""
        return {"torch": str(torch.__version__)}


class FreeSpace(ClosedForm):
    """Line of sight alone (Friis).

    Args:
        carrier: Carrier frequency [Hz].
        users: Where users are and how they move; None is `Ring()`.
        tx_position: Transmitter (x, y, z) [m].
        tx_orientation: Transmitter orientation (α, β, γ) [rad].
        group: Users asked for together.

    Raises:
        UsageError: If an argument is out of range.
    """

    def __init__(
        self,
        carrier: float = 3.5e9,
        users: Trajectories | None = None,
        tx_position: list[float] = [0.0, 0.0, 10.0],  # noqa: B006
        tx_orientation: list[float] = ORIGIN,
        group: int = 1,
    ) -> None:
        super().__init__(carrier, tx_position, tx_orientation, group)
        self.users = users or Ring()

    def motion(self, ids: Sequence[int], seed: int) -> Motion:
        """Trajectories of the users with these sample ids."""
        return self.users.motion(ids, seed)

    def _paths(self, motion: Motion, ids: Sequence[int], seed: int) -> Paths:
        return free_space_paths(self.tx_position, motion.positions, motion.velocities, self.carrier)


class TwoRay(FreeSpace):
    """Line of sight and a reflection from flat ground at z = 0, exact in geometry and Fresnel coefficients.

    Args:
        carrier: Carrier frequency [Hz].
        users: Where users are and how they move, above ground; None is `Ring()`.
        tx_position: Transmitter (x, y, z) [m], z > 0.
        tx_orientation: Transmitter orientation (α, β, γ) [rad].
        relative_permittivity: ε_r of the ground (default: concrete, ITU-R P.2040-3).
        conductivity: σ of the ground [S/m] (default: concrete at 3.5 GHz).
        group: Users asked for together.

    Raises:
        UsageError: If an argument is out of range.
    """

    def __init__(
        self,
        carrier: float = 3.5e9,
        users: Trajectories | None = None,
        tx_position: list[float] = [0.0, 0.0, 10.0],  # noqa: B006
        tx_orientation: list[float] = ORIGIN,
        relative_permittivity: float = 5.24,
        conductivity: float = 0.123,
        group: int = 1,
    ) -> None:
        super().__init__(carrier, users, tx_position, tx_orientation, group)
        if relative_permittivity < 1 or conductivity < 0:
            raise UsageError("the ground needs relative_permittivity >= 1 and conductivity >= 0 S/m.")
        self.relative_permittivity = relative_permittivity
        self.conductivity = conductivity

    def _paths(self, motion: Motion, ids: Sequence[int], seed: int) -> Paths:
        ground = (self.relative_permittivity, self.conductivity)
        return two_ray_paths(self.tx_position, motion.positions, motion.velocities, self.carrier, *ground)
