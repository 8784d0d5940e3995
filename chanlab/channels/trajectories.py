"""Where users are and how they move: drawn from (seed, sample id) alone.

A trajectory is a row of anchors, equally spaced along the way: the places at which the paths of a moving user are
traced. Every user of a source has the same number of anchors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from chanlab.channels.source import Motion, sample_generator
from chanlab.errors import UsageError

Box = list[list[float]]
"""A rectangle on the ground, `[[x_low, x_high], [y_low, y_high]]` [m]."""

Accept = Callable[[Tensor], Tensor]
"""Says of positions `[user, anchor, 3]` [m] which users may be there, bool `[user]`."""

MAX_DRAWS = 2000
"""Draws of one user after which its area is taken to hold no permitted place."""


class Trajectories(ABC):
    """What places users: subclasses draw one user at a time, `motion` draws again those that may not be where they are.

    Args:
        area: One box `[[x0, x1], [y0, y1]]` or a list of boxes [m]; users are uniform over their total surface.
        height: Height z of the users' antennas [m].
        length: Length of the way of each user [m]; 0 for users that stay.
        anchor_spacing: Largest distance between neighbouring anchors [m].

    Raises:
        UsageError: If the area is not made of boxes, or the length or the spacing is negative.
    """

    def __init__(self, area: Box | list[Box], height: float, length: float, anchor_spacing: float) -> None:
        self.boxes = _boxes(area)
        self.height = float(height)
        self.length = float(length)
        if length < 0 or not anchor_spacing > 0:
            raise UsageError(f"length ({length} m) can't be negative, anchor_spacing ({anchor_spacing} m) must be > 0.")
        # 1e-9: a length of 0.3 m has three anchors 0.1 m apart after the first, though 0.3 / 0.1 > 3 in binary.
        self.num_anchors = 1 + max(0, math.ceil(self.length / anchor_spacing - 1e-9))

    @property
    def distances(self) -> Tensor:
        """Way travelled at each anchor [m], float64 `[anchor]`."""
        return torch.linspace(0.0, self.length, self.num_anchors, dtype=torch.float64)

    @abstractmethod
    def draw(self, generator: torch.Generator) -> tuple[Tensor, float] | None:
        """Draw one user.

        Args:
            generator: The user's own stream of random numbers.

        Returns:
            Heading [rad] and place on the ground [m] at each anchor, float64 `[anchor, 3]` (x, y, heading), and the
            speed [m/s]; None if the way drawn leaves its box.
        """

    def motion(self, ids: Sequence[int], seed: int, accept: Accept | None = None) -> Motion:
        """Trajectories of the users with these sample ids.

        A user who may not be where it was drawn is drawn again from its own stream, so that the result depends on
        (seed, id) and on `accept` alone.

        Args:
            ids: Sample ids.
            seed: Seed of the data set.
            accept: Which users may be where they are (outdoors, for instance); it must judge each user on its own.
                None accepts all.

        Returns:
            float64 tensors (see `Motion`). Antennas point along the way: orientation (heading, 0, 0).

        Raises:
            UsageError: If no permitted place is found for a user.
        """
        streams = [sample_generator(seed, sample_id) for sample_id in ids]
        ways = torch.zeros(len(ids), self.num_anchors, 3, dtype=torch.float64)
        speeds = torch.zeros(len(ids), dtype=torch.float64)
        pending = list(range(len(ids)))
        for _ in range(MAX_DRAWS):
            if not pending:
                break
            drawn = []
            for user in pending:
                way = self.draw(streams[user])
                if way is not None:
                    ways[user], speeds[user] = way[0], way[1]
                    drawn.append(user)
            allowed = set(drawn)
            if accept is not None and drawn:
                allowed = {u for u, ok in zip(drawn, accept(self._positions(ways[drawn])).tolist(), strict=True) if ok}
            pending = [user for user in pending if user not in allowed]
        if pending:
            raise UsageError(
                f"no permitted place for user {ids[pending[0]]} after {MAX_DRAWS} draws: is the area {self.boxes} in "
                f"the open, and are its boxes larger than the way of {self.length} m?"
            )
        return self._motion(ways, speeds)

    def _positions(self, ways: Tensor) -> Tensor:
        return torch.cat([ways[..., :2], torch.full_like(ways[..., :1], self.height)], -1)

    def _motion(self, ways: Tensor, speeds: Tensor) -> Motion:
        heading = ways[..., 2]
        zero = torch.zeros_like(heading)
        direction = torch.stack([heading.cos(), heading.sin(), zero], -1)
        return Motion(
            times=self.distances / speeds[:, None] if self.length > 0 else zero,
            positions=self._positions(ways),
            velocities=speeds[:, None, None] * direction,
            orientations=torch.stack([heading, zero, zero], -1),
        )

    def _place(self, generator: torch.Generator) -> tuple[Tensor, Box]:
        """A place, uniform over the boxes' total surface, and its box."""
        weights = torch.tensor([_surface(box) for box in self.boxes], dtype=torch.float64)
        edges = (weights / weights.sum()).cumsum(0)
        chosen, u, v = _uniform(generator, 3).unbind()
        box = self.boxes[min(int(torch.searchsorted(edges, chosen, right=True)), len(self.boxes) - 1)]
        (x0, x1), (y0, y1) = box
        return torch.stack([x0 + (x1 - x0) * u, y0 + (y1 - y0) * v]), box


class StraightTrajectories(Trajectories):
    """Users that walk or drive straight on, at constant speed, and stay in the box they start in.

    Args:
        area: One box `[[x0, x1], [y0, y1]]` or a list of boxes [m].
        height: Height z of the users' antennas [m].
        speed: Lowest and highest speed [m/s]; uniform between them.
        length: Length of the way [m].
        anchor_spacing: Largest distance between neighbouring anchors [m]. Paths extrapolated by their Doppler shift
            hold for a few centimetres at 3.5 GHz; 0.1 m to 0.25 m is what re-tracing needs.
        heading: Lowest and highest heading [rad], counted from x towards y; uniform between them.

    Raises:
        UsageError: If no box is long enough for the way, or speeds are not positive and ascending.
    """

    def __init__(
        self,
        area: Box | list[Box],
        height: float = 1.5,
        speed: tuple[float, float] = (1.0, 15.0),
        length: float = 2.0,
        anchor_spacing: float = 0.1,
        heading: tuple[float, float] = (0.0, 2 * math.pi),
    ) -> None:
        super().__init__(area, height, length, anchor_spacing)
        self.speed = _interval("speed", speed)
        self.heading = _interval("heading", heading)
        if length <= 0 or self.speed[0] <= 0:
            raise UsageError("length and speed must be > 0; for users that stay use Drops.")
        if all(math.hypot(box[0][1] - box[0][0], box[1][1] - box[1][0]) < length for box in self.boxes):
            raise UsageError(f"every box of {self.boxes} is shorter than the way of {length} m.")

    def draw(self, generator: torch.Generator) -> tuple[Tensor, float] | None:
        """Draw a start, a heading and a speed (see `Trajectories.draw`)."""
        start, box = self._place(generator)
        u, v = _uniform(generator, 2).tolist()
        speed = self.speed[0] + (self.speed[1] - self.speed[0]) * u
        heading = torch.tensor(self.heading[0] + (self.heading[1] - self.heading[0]) * v, dtype=torch.float64)
        step = torch.stack([heading.cos(), heading.sin()])
        places = start + self.distances[:, None] * step
        if not _inside(places[-1:], box):
            return None
        return torch.cat([places, heading.expand(self.num_anchors, 1)], -1), speed


class RandomWaypoints(Trajectories):
    """Users that walk straight to a place drawn in their box, from there to the next one, at constant speed.

    Args:
        area: One box `[[x0, x1], [y0, y1]]` or a list of boxes [m].
        height: Height z of the users' antennas [m].
        speed: Lowest and highest speed [m/s]; uniform between them.
        length: Length of the way [m].
        anchor_spacing: Largest distance between neighbouring anchors along the way [m].

    Raises:
        UsageError: If the length is not positive, or speeds are not positive and ascending.
    """

    def __init__(
        self,
        area: Box | list[Box],
        height: float = 1.5,
        speed: tuple[float, float] = (1.0, 15.0),
        length: float = 2.0,
        anchor_spacing: float = 0.1,
    ) -> None:
        super().__init__(area, height, length, anchor_spacing)
        self.speed = _interval("speed", speed)
        if length <= 0 or self.speed[0] <= 0:
            raise UsageError("length and speed must be > 0; for users that stay use Drops.")

    def draw(self, generator: torch.Generator) -> tuple[Tensor, float] | None:
        """Draw a start, a speed and waypoints until the way is long enough (see `Trajectories.draw`)."""
        start, box = self._place(generator)
        speed = self.speed[0] + (self.speed[1] - self.speed[0]) * float(_uniform(generator, 1))
        low, high = torch.tensor(box, dtype=torch.float64).unbind(-1)
        corners, ends = [start], [0.0]
        while ends[-1] < self.length:
            corners.append(low + (high - low) * _uniform(generator, 2))
            ends.append(ends[-1] + float(torch.linalg.vector_norm(corners[-1] - corners[-2])))
        corner, end = torch.stack(corners), torch.tensor(ends, dtype=torch.float64)
        leg = (torch.searchsorted(end, self.distances, right=True) - 1).clamp(0, len(corners) - 2)
        way = corner.diff(dim=0)
        unit = way / torch.linalg.vector_norm(way, dim=-1, keepdim=True)
        places = corner[leg] + (self.distances - end[leg])[:, None] * unit[leg]
        heading = torch.atan2(unit[leg, 1], unit[leg, 0])
        return torch.cat([places, heading[:, None]], -1), speed


class Drops(Trajectories):
    """Users at one place each, facing any direction.

    Args:
        area: One box `[[x0, x1], [y0, y1]]` or a list of boxes [m].
        height: Height z of the users' antennas [m].
        speed: Lowest and highest speed [m/s], uniform between them: the place stays, the paths have a Doppler shift.

    Raises:
        UsageError: If speeds are negative or not ascending.
    """

    def __init__(
        self,
        area: Box | list[Box],
        height: float = 1.5,
        speed: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        super().__init__(area, height, length=0.0, anchor_spacing=1.0)
        self.speed = _interval("speed", speed)
        if self.speed[0] < 0:
            raise UsageError(f"speed {speed} can't be negative.")

    def draw(self, generator: torch.Generator) -> tuple[Tensor, float] | None:
        """Draw a place, a heading and a speed (see `Trajectories.draw`)."""
        place, _ = self._place(generator)
        u, v = _uniform(generator, 2)
        speed = self.speed[0] + (self.speed[1] - self.speed[0]) * float(u)
        return torch.cat([place, 2 * math.pi * v[None]])[None], speed


def _uniform(generator: torch.Generator, count: int) -> Tensor:
    return torch.rand(count, generator=generator, dtype=torch.float64)


def _surface(box: Box) -> float:
    return (box[0][1] - box[0][0]) * (box[1][1] - box[1][0])


def _inside(places: Tensor, box: Box) -> bool:
    low, high = torch.tensor(box, dtype=torch.float64).unbind(-1)
    return bool(((places >= low) & (places <= high)).all())


def _interval(name: str, values: Sequence[float]) -> tuple[float, float]:
    if len(values) != 2 or not values[0] <= values[1]:
        raise UsageError(f"{name} must be [lowest, highest], not {list(values)}.")
    return float(values[0]), float(values[1])


def _boxes(area: Box | list[Box]) -> list[Box]:
    """The boxes of an area as nested floats."""
    try:
        boxes = torch.tensor(area, dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise UsageError(f"area must be [[x0, x1], [y0, y1]] or a list of such boxes, not {area}.") from error
    if boxes.ndim == 2:
        boxes = boxes[None]
    if boxes.ndim != 3 or boxes.shape[1:] != (2, 2) or not (boxes[..., 0] < boxes[..., 1]).all():
        raise UsageError(f"area must be [[x0, x1], [y0, y1]] with x0 < x1 and y0 < y1, or a list of such, not {area}.")
    return [[[float(low), float(high)] for low, high in box] for box in boxes.tolist()]
