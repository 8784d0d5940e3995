"""Channels of a scene traced by Sionna RT."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence

import numpy as np
import torch

from chanlab.channels.paths import Paths
from chanlab.channels.source import Links, Motion
from chanlab.channels.tracer import Physics, Tracer, tracer
from chanlab.channels.trajectories import Trajectories
from chanlab.errors import UsageError

MAX_RECEIVERS = 256
"""Most receivers of one solve."""

MAX_LANES = 40_000_000
"""Most rays × bounces × receivers of one solve: at up to 50 bytes each, a process stays near 2 GB."""


class SceneSource:
    """Users of one transmitter in a ray-traced scene; a `Source`.

    Users that move are traced anew at every anchor of their trajectory, so that paths are born and die along it.
    `group` users are traced together, in solves whose receivers are decided by sample ids alone: where diffraction
    meets refraction, Sionna's result for a receiver depends on the others of its solve. The last group of a data set is
    traced whole, whatever is asked of it.

    Loaded scenes are kept per process; pickling sends the arguments only.

    Args:
        scene: Name of a scene that comes with Sionna RT, or a Mitsuba scene file (.xml).
        carrier: Carrier frequency [Hz].
        tx_position: Transmitter position [m].
        trajectories: Where users are and how they move.
        tx_orientation: Transmitter orientation (α, β, γ) about z, y, x [rad].
        max_depth: Most interactions of a path.
        samples_per_src: Rays shot from the transmitter.
        max_num_paths_per_src: Room for candidate paths of one solve.
        los: Trace line-of-sight paths.
        specular_reflection: Trace specular reflections.
        diffuse_reflection: Trace diffuse reflections: repeatable to about 1e-6 only. The scenes of Sionna RT scatter
            nothing by themselves: give a `scattering_coefficient`, too.
        scattering_coefficient: Scattering coefficient of every material, 0 to 1; None leaves the scene's.
        refraction: Trace paths through walls.
        diffraction: Trace first-order diffraction on wedges.
        edge_diffraction: Trace diffraction on free edges, too.
        diffraction_lit_region: Keep diffracted paths where there is line of sight, too.
        outdoors: Draw users again that are not in the open (sky above, ground below, no wall on the way).
        group: Users solved together; None chooses as many as memory and `MAX_RECEIVERS` allow.

    Raises:
        UsageError: If an argument is out of range, or diffuse paths could overflow `max_num_paths_per_src`.
    """

    def __init__(
        self,
        scene: str,
        carrier: float,
        tx_position: tuple[float, float, float],
        trajectories: Trajectories,
        tx_orientation: tuple[float, float, float] = (0.0, 0.0, 0.0),
        max_depth: int = 3,
        samples_per_src: int = 100_000,
        max_num_paths_per_src: int = 1_000_000,
        los: bool = True,
        specular_reflection: bool = True,
        diffuse_reflection: bool = False,
        scattering_coefficient: float | None = None,
        refraction: bool = True,
        diffraction: bool = False,
        edge_diffraction: bool = False,
        diffraction_lit_region: bool = True,
        outdoors: bool = True,
        group: int | None = None,
    ) -> None:
        if max_depth < 0 or samples_per_src < 1 or carrier <= 0 or (group is not None and group < 1):
            raise UsageError(
                f"carrier ({carrier} Hz), samples_per_src ({samples_per_src}) and group ({group}) must be positive and "
                f"max_depth ({max_depth}) not negative."
            )
        if len(tx_position) != 3 or len(tx_orientation) != 3:
            raise UsageError("tx_position and tx_orientation hold three numbers each.")
        if scattering_coefficient is not None and not 0 <= scattering_coefficient <= 1:
            raise UsageError(f"scattering_coefficient must lie between 0 and 1, not {scattering_coefficient}.")
        self.scene = scene
        self.scattering_coefficient = scattering_coefficient
        self.carrier = float(carrier)
        self.tx_position = (float(tx_position[0]), float(tx_position[1]), float(tx_position[2]))
        self.tx_orientation = (float(tx_orientation[0]), float(tx_orientation[1]), float(tx_orientation[2]))
        self.trajectories = trajectories
        self.outdoors = outdoors
        self.physics = Physics(
            max_depth=max_depth,
            samples_per_src=samples_per_src,
            max_num_paths_per_src=max_num_paths_per_src,
            los=los,
            specular_reflection=specular_reflection,
            diffuse_reflection=diffuse_reflection,
            refraction=refraction,
            diffraction=diffraction,
            edge_diffraction=edge_diffraction,
            diffraction_lit_region=diffraction_lit_region,
        )
        room = self._room()
        anchors = trajectories.num_anchors
        self.group = max(1, room // anchors) if group is None else group
        self._solves = -(-self.group * anchors // room)
        self.receivers_per_solve = -(-self.group * anchors // self._solves)

    def _room(self) -> int:
        """Most receivers of one solve."""
        lanes = max(self.physics.max_depth, 1) * self.physics.samples_per_src
        if not self.physics.diffuse_reflection:
            return max(1, min(MAX_RECEIVERS, MAX_LANES // lanes))
        # Every bounce of every ray can reach every receiver: candidates beyond the buffer would be lost without a word.
        if lanes > self.physics.max_num_paths_per_src:
            raise UsageError(
                f"diffuse reflection of {self.physics.samples_per_src} rays over {self.physics.max_depth} bounces can "
                f"give {lanes} paths per receiver, more than max_num_paths_per_src "
                f"({self.physics.max_num_paths_per_src}): lower samples_per_src or raise max_num_paths_per_src."
            )
        return min(MAX_RECEIVERS, self.physics.max_num_paths_per_src // lanes, max(1, MAX_LANES // lanes))

    def _tracer(self) -> Tracer:
        return tracer(self.scene, self.carrier, self.tx_position, self.receivers_per_solve, self.scattering_coefficient)

    def motion(self, ids: Sequence[int], seed: int) -> Motion:
        """Trajectories of the users with these sample ids, float64 (see `Trajectories.motion`)."""
        return self.trajectories.motion(ids, seed, self._tracer().in_the_open if self.outdoors else None)

    def links(self, ids: Sequence[int], seed: int) -> Links:
        """Paths of the users with these sample ids.

        Whole groups are traced, and the users asked for are returned in the order asked for.

        Args:
            ids: Sample ids.
            seed: Seed of the data set.

        Returns:
            Paths `[user, anchor, path]` in canonical order; as many entries as the longest link needs.

        Raises:
            UsageError: If `ids` is empty, or the scene is unknown.
            MissingDependencyError: If ray tracing does not work here.
        """
        if not len(ids):
            raise UsageError("SceneSource.links needs at least one sample id.")
        groups: dict[int, list[int]] = {}
        for place, sample_id in enumerate(ids):
            groups.setdefault(int(sample_id) // self.group, []).append(place)
        motions, paths, places = [], [], []
        for number, wanted in groups.items():
            members = range(number * self.group, (number + 1) * self.group)
            motion = self.motion(members, seed)
            rows = [int(ids[place]) - members[0] for place in wanted]
            motions.append({name: x[rows] for name, x in vars(motion).items()})
            paths.append(_rows(self._trace(motion, seed), rows))
            places += wanted
        order = sorted(range(len(places)), key=places.__getitem__)
        found = _rows(_cat(paths), order)
        merged = {name: torch.cat([m[name] for m in motions])[order] for name in motions[0]}
        return Links(
            paths=found.trim() if found.num_paths else found,
            times=merged["times"],
            positions=merged["positions"].float(),
            velocities=merged["velocities"].float(),
            orientations=merged["orientations"].float(),
            tx_position=torch.tensor(self.tx_position),
            tx_orientation=torch.tensor(self.tx_orientation),
            sample_ids=torch.tensor([int(i) for i in ids], dtype=torch.int64),
        )

    def _trace(self, motion: Motion, seed: int) -> Paths:
        """Trace one group, `[user, anchor, path]`; the last solve is filled up by repeating the last receiver."""
        shape = motion.positions.shape[:2]
        total, size = self.group * shape[1], self.receivers_per_solve
        rows = np.minimum(np.arange(self._solves * size), total - 1)
        positions = motion.positions.reshape(-1, 3).numpy()[rows]
        velocities = motion.velocities.reshape(-1, 3).numpy()[rows]
        solves = [
            self._tracer().trace(positions[i : i + size], velocities[i : i + size], self.physics, seed % 2**32)
            for i in range(0, len(rows), size)
        ]
        flat = _cat(solves)[:total]
        return Paths(
            **{name: x.reshape(*shape, *x.shape[1:]) for name, x in vars(flat).items() if name != "carrier"},
            carrier=flat.carrier,
        )

    def versions(self) -> dict[str, str]:
        """Versions of what traces, and the Mitsuba variant."""
        self._tracer()
        found = {name: importlib.metadata.version(name) for name in ("sionna", "sionna-rt", "mitsuba", "drjit")}
        return found | {"mitsuba-variant": str(sys.modules["mitsuba"].variant())}


def _cat(parts: list[Paths]) -> Paths:
    return parts[0] if len(parts) == 1 else Paths.cat(parts)


def _rows(paths: Paths, rows: list[int]) -> Paths:
    """These rows of the first axis; no copy if they are all of them in order."""
    return paths if rows == list(range(len(paths.mask))) else paths[torch.tensor(rows)]
