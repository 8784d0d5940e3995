"""One Sionna RT scene of this process, with one transmitter and a fixed row of receivers that are moved.

The number of receivers is fixed because Dr.Jit compiles kernels for it. Positions reach the scene through one array
that every receiver reads its own entry of: written as Python numbers they would be constants of the kernels, and each
solve would compile (and keep) some 250 new ones - seconds per solve, and memory that grows without end.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chanlab.channels.llvm import import_sionna_rt
from chanlab.channels.paths import Paths
from chanlab.errors import ChanlabError, UsageError

Array = NDArray[Any]

# Dr.Jit keeps freed memory for reuse; giving it back costs a solve's worth of page faults, so it is done now and then.
_SOLVES_BETWEEN_FLUSHES = 50
_FAR = 1e4  # [m], beyond any scene

CANDIDATE_TABLE = 67_108_879
"""Entries of the table in which Sionna looks up whether a chain of reflections and diffractions is new (a prime).

Chains of all receivers of a solve share it, and one that meets another in its entry is lost. Sionna's own 10⁶ entries
lose a tenth of the paths of 250 receivers (NMSE -15 dB to -19 dB of the CFR, mean over users); these, less than -75 dB.
"""


@dataclass(frozen=True)
class Physics:
    """What is traced: the arguments of `sionna.rt.PathSolver`, by the same names."""

    max_depth: int
    samples_per_src: int
    max_num_paths_per_src: int
    los: bool
    specular_reflection: bool
    diffuse_reflection: bool
    refraction: bool
    diffraction: bool
    edge_diffraction: bool
    diffraction_lit_region: bool


def scene_names() -> list[str]:
    """Names of the scenes that come with Sionna RT."""
    scenes = import_sionna_rt().scene
    return sorted(name for name, value in vars(scenes).items() if str(value).endswith(".xml"))


def scene_file(scene: str) -> str:
    """The file of a built-in scene, or `scene` itself if it is a Mitsuba file (.xml).

    Raises:
        UsageError: If it is neither.
    """
    if scene.endswith(".xml"):
        if Path(scene).is_file():
            return str(Path(scene).resolve())
        raise UsageError(f"scene file {scene} does not exist.")
    names = scene_names()
    if scene not in names:
        raise UsageError(
            f"no scene is called {scene!r}; give a Mitsuba scene file (.xml) or one of: {', '.join(names)}."
        )
    return str(vars(import_sionna_rt().scene)[scene])


@functools.lru_cache(maxsize=2)
def tracer(
    scene: str,
    carrier: float,
    tx_position: tuple[float, float, float],
    receivers: int,
    scattering_coefficient: float | None = None,
) -> Tracer:
    """The tracer of this process for these arguments: loaded once, then reused."""
    return Tracer(scene, carrier, tx_position, receivers, scattering_coefficient)


class Tracer:
    """A scene that traces `receivers` places at a time from one transmitter.

    Both ends hold one isotropic element with two polarizations at zero orientation: what it receives is the 2×2
    transfer matrix in the world's (θ̂, φ̂) basis.

    Args:
        scene: Name of a built-in scene or a Mitsuba scene file (.xml).
        carrier: Carrier frequency [Hz].
        tx_position: Transmitter position [m].
        receivers: Receivers per solve.
        scattering_coefficient: Scattering coefficient of every material, 0 to 1; None leaves the scene's.

    Raises:
        UsageError: If the scene is unknown.
        MissingDependencyError: If ray tracing does not work here.
    """

    def __init__(
        self,
        scene: str,
        carrier: float,
        tx_position: tuple[float, float, float],
        receivers: int,
        scattering_coefficient: float | None = None,
    ) -> None:
        rt = import_sionna_rt()
        self._dr: Any = importlib.import_module("drjit")
        self._mi: Any = importlib.import_module("mitsuba")
        self._solver = rt.PathSolver(deterministic=True)
        self.carrier = float(carrier)
        self.num_receivers = receivers
        self.scene = rt.load_scene(scene_file(scene))
        self.scene.frequency = self.carrier
        if scattering_coefficient is not None:
            for material in self.scene.radio_materials.values():
                material.scattering_coefficient = scattering_coefficient
        element = rt.PlanarArray(num_rows=1, num_cols=1, pattern="iso", polarization="VH")
        self.scene.tx_array = self.scene.rx_array = element
        self.scene.add(rt.Transmitter("tx", [float(x) for x in tx_position], orientation=[0.0, 0.0, 0.0]))
        self.tx_position = np.asarray(tx_position, dtype=np.float64)
        self._receivers = [rt.Receiver(f"rx-{i}", [0.0, 0.0, 0.0]) for i in range(receivers)]
        for receiver in self._receivers:
            self.scene.add(receiver)
        self._indices = [self._mi.UInt32(i) for i in range(receivers)]
        self._solves = 0

    def in_the_open(self, positions: Tensor) -> Tensor:
        """Which ways lead through open air only: sky above and ground below each anchor, nothing in between.

        Args:
            positions: `[user, anchor, 3]` [m].

        Returns:
            bool `[user]`.
        """
        flat = positions.reshape(-1, 3).numpy()
        up, down = (np.broadcast_to(np.array([0.0, 0.0, z]), flat.shape) for z in (1.0, -1.0))
        covered, grounded = self._blocked(flat, up, _FAR), self._blocked(flat, down, _FAR)
        is_open = (~covered & grounded).reshape(positions.shape[:2]).all(-1)
        if positions.shape[1] > 1:
            starts, steps = positions[:, :-1].reshape(-1, 3), positions.diff(dim=1).reshape(-1, 3)
            reach = torch.linalg.vector_norm(steps, dim=-1, keepdim=True).clamp_min(1e-9)
            walled = self._blocked(starts.numpy(), (steps / reach).numpy(), reach[:, 0].numpy())
            is_open &= ~walled.reshape(positions.shape[0], -1).any(-1)
        return torch.from_numpy(is_open)

    def _blocked(self, origins: Array, directions: Array, reach: Array | float) -> Array:
        mi = self._mi
        origin, direction = (np.ascontiguousarray(x.T, dtype=np.float32) for x in (origins, directions))
        ray = mi.Ray3f(mi.Point3f(origin), mi.Vector3f(direction))
        ray.maxt = mi.Float(np.broadcast_to(np.float32(reach), origins.shape[:1]).copy())
        return np.asarray(self.scene.mi_scene.ray_test(ray).numpy(), dtype=bool)

    def trace(self, positions: Array, velocities: Array, physics: Physics, seed: int) -> Paths:
        """Trace the paths of one solve.

        Args:
            positions: Receiver positions [m], `[receiver, 3]`.
            velocities: Receiver velocities [m/s], `[receiver, 3]`.
            physics: What is traced.
            seed: Seed of the solver's sampler.

        Returns:
            Paths `[receiver, path]`, float32, in canonical order.
        """
        self._place(positions, velocities)
        with _candidate_table(CANDIDATE_TABLE):
            traced = self._solver(self.scene, synthetic_array=True, seed=seed, **vars(physics))
        gain, delay = traced.cir(sampling_frequency=1.0, num_time_steps=1, normalize_delays=False, out_type="drjit")
        names = ("valid", "theta_t", "phi_t", "theta_r", "phi_r", "doppler", "interactions", "vertices")
        tensors = [*gain, delay, *(getattr(traced, name) for name in names)]
        self._dr.eval(tensors)
        arrays = dict(zip(("real", "imag", "delay", *names), (x.numpy() for x in tensors), strict=True))
        self._solves += 1
        if self._solves % _SOLVES_BETWEEN_FLUSHES == 0:
            del traced, gain, delay, tensors
            self._dr.flush_malloc_cache()
        return _to_paths(arrays, self.tx_position, positions, physics.max_depth, self.carrier)

    def _place(self, positions: Array, velocities: Array) -> None:
        dr, mi = self._dr, self._mi
        place = mi.Point3f(np.ascontiguousarray(positions.T, dtype=np.float32))
        velocity = mi.Vector3f(np.ascontiguousarray(velocities.T, dtype=np.float32))
        for receiver, index in zip(self._receivers, self._indices, strict=True):
            receiver.position = dr.gather(mi.Point3f, place, index)
            receiver.velocity = dr.gather(mi.Vector3f, velocity, index)


@contextlib.contextmanager
def _candidate_table(entries: int) -> Iterator[None]:
    """Let Sionna's solver use a table of so many entries.

    Its size is a constant of the solver's class. The argument that raises it, too, `max_num_paths_per_src`, would
    reserve some 150 bytes for each entry.
    """
    generator = importlib.import_module("sionna.rt.path_solvers.sb_candidate_generator").SBCandidateGenerator
    before = getattr(generator, "MIN_SPEC_COUNT_SIZE", None)
    if before is None:
        raise ChanlabError("this release of Sionna RT is not known to chanlab: pip install 'sionna-rt==2.2.*'")
    generator.MIN_SPEC_COUNT_SIZE = max(before, entries)
    try:
        yield
    finally:
        generator.MIN_SPEC_COUNT_SIZE = before


def _unit(zenith: Array, azimuth: Array) -> Array:
    """Unit vectors `[receiver, 3, path]`, computed in float64, from angles `[receiver, 1, path]`."""
    theta, phi = zenith.astype(np.float64), azimuth.astype(np.float64)
    return np.concatenate([np.sin(theta) * np.cos(phi), np.sin(theta) * np.sin(phi), np.cos(theta)], 1)


def _to_paths(arrays: dict[str, Array], tx_position: Array, positions: Array, max_depth: int, carrier: float) -> Paths:
    """`Paths` of what Sionna RT returns for one transmitter (axes rx, rx_ant, tx, tx_ant, path)."""
    gain = (arrays["real"] + 1j * arrays["imag"])[:, :, 0, :, :, 0]
    kinds = arrays["interactions"][:, :, 0].astype(np.int8)  # [depth, receiver, path]
    vertices = arrays["vertices"][:, :, 0]  # [depth, receiver, path, 3]
    depth, receivers, paths = kinds.shape
    interactions = np.zeros((receivers, max(max_depth, 1), paths), np.int8)
    interactions[:, :depth] = kinds.transpose(1, 0, 2)
    count = (kinds != 0).sum(0)
    last = np.take_along_axis(vertices, np.maximum(count - 1, 0)[None, ..., None], 0)[0]
    line_of_sight = (count == 0)[..., None]
    first = np.where(line_of_sight, positions[:, None], vertices[0] if depth else 0.0)
    last = np.where(line_of_sight, tx_position, last)
    real = np.float32
    return Paths(
        transfer=torch.from_numpy(gain.astype(np.complex64)),
        delay=torch.from_numpy(arrays["delay"][:, 0].astype(real)),
        departure=torch.from_numpy(_unit(arrays["theta_t"], arrays["phi_t"]).astype(real)),
        arrival=torch.from_numpy(_unit(arrays["theta_r"], arrays["phi_r"]).astype(real)),
        doppler=torch.from_numpy(arrays["doppler"][:, 0].astype(real)),
        interactions=torch.from_numpy(interactions),
        vertices=torch.from_numpy(np.stack([first, last], 1).transpose(0, 1, 3, 2).astype(real)),
        mask=torch.from_numpy(arrays["valid"][:, 0].astype(bool)),
        carrier=carrier,
    ).sort()
