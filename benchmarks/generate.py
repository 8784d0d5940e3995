"""What generation costs over ray tracing itself, and whether a long run grows.

    python benchmarks/generate.py                        # time against bare loops
    python benchmarks/generate.py --links 100000         # peak memory of a long run

Time: `chanlab.data.generate`, writing and checksums included, against loops written by hand over Sionna RT that keep
the same tensors in memory: one tuned like ours (positions reach the scene as arrays, room for all candidate paths), and
with `--numbers` one as in Sionna's examples (positions set as Python numbers; each solve compiles new kernels). Scene,
users and receivers per solve are the same. The loops take turns, each round with users of its own; the first round
compiles and does not count.

Memory: the peak of a process that generates so many links into a store, with the recipe's rays unless `--rays` says
otherwise, and the resident memory after a tenth of them and at the end.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from chanlab.channels import SceneSource
from chanlab.channels.llvm import import_sionna_rt
from chanlab.channels.tracer import CANDIDATE_TABLE
from chanlab.data.generate import generate
from chanlab.data.recipe import Recipe, build_source, load_recipe
from chanlab.records import record, save_records

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1.15
MEMORY_LIMIT = 6.0  # GB
TENSORS = ("valid", "tau", "theta_t", "phi_t", "theta_r", "phi_r", "doppler", "interactions", "vertices")


def main() -> int:
    """Measure, print, record; returns 1 if a limit is missed."""
    parser = argparse.ArgumentParser(description="Time of generation over bare ray tracing; memory of a long run.")
    parser.add_argument("--recipe", default="street_canyon", help="data set recipe of a SceneSource")
    parser.add_argument("--solves", type=int, default=3, help="solves of each loop in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--numbers", action="store_true", help="also the loop of Sionna's examples")
    parser.add_argument("--links", type=int, help="measure the memory of a run of so many links instead")
    parser.add_argument("--rays", type=int, help="rays per solve, in place of the recipe's")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results.json", help="where records go")
    args = parser.parse_args()
    recipe = load_recipe(args.recipe)
    if args.rays:
        init = recipe.source["init_args"] | {"samples_per_src": args.rays}
        recipe = replace(recipe, source=recipe.source | {"init_args": init})
    if args.links:
        return memory(recipe, args.links, args.results)
    return overhead(recipe, args.solves, args.rounds, args.numbers, args.results)


def overhead(recipe: Recipe, solves: int, rounds: int, numbers: bool, results: Path) -> int:
    """Time generation and the bare loops in turn."""
    source = build_source(recipe)
    assert isinstance(source, SceneSource)
    samples = solves * source.group
    # No user may fall to the guard: the time of the splits is part of it, their outcome isn't.
    recipe = replace(recipe, samples=samples, shard_size=samples, splits={"fractions": {"train": 1.0}})
    bare = BareLoop(source)
    loops: dict[str, Callable[[int], Any]] = {
        "bare Sionna RT loop": lambda seed: bare.run(users(source, samples, seed), bare.place),
        "chanlab generate": lambda seed: generated(replace(recipe, seed=seed)),
    }
    if numbers:
        loops["bare Sionna RT loop, positions as numbers"] = lambda seed: bare.run(
            users(source, samples, seed), bare.place_numbers
        )
    times: dict[str, list[float]] = {name: [] for name in loops}
    for round_ in tqdm(range(rounds + 1), desc="rounds", unit="round"):
        for name, loop in loops.items():
            start = time.perf_counter()
            waited = loop(1000 + round_)
            if round_:
                times[name].append(time.perf_counter() - start - waited)
    bare_time = statistics.median(times["bare Sionna RT loop"])
    ratios = [a / b for a, b in zip(times["chanlab generate"], times["bare Sionna RT loop"], strict=True)]
    condition = {"receivers": source.receivers_per_solve, "solves": solves, "rays": source.physics.samples_per_src}
    records = []
    for name, values in times.items():
        value = statistics.median(values)
        print(f"{name:<45} {value:7.2f} s  {value / bare_time:5.2f} of the bare loop")
        records.append(
            record(
                system=name,
                data=recipe.name,
                condition=condition,
                metric="generation_time",
                value=value,
                deviation=statistics.stdev(values) if len(values) > 1 else None,
                n=rounds,
                unit="s",
                **({} if name == "bare Sionna RT loop" else {"peer": bare_time, "ratio": value / bare_time}),
            )
        )
    ratio = statistics.median(ratios)
    print(
        f"chanlab generate over the bare loop: {ratio:.3f}, median over rounds ({min(ratios):.3f} to {max(ratios):.3f})"
    )
    save_records(results, records)
    return int(ratio > LIMIT)


def users(source: SceneSource, samples: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Positions and velocities of each solve, `[receiver, 3]`: drawn before the clock matters to the bare loop."""
    motion = source.motion(range(samples), seed)
    size = source.receivers_per_solve
    positions = motion.positions.reshape(-1, size, 3).numpy()
    velocities = motion.velocities.reshape(-1, size, 3).numpy()
    return zip(positions, velocities, strict=True)


class BareLoop:
    """Sionna RT by hand: a scene, its receivers, and a list of arrays."""

    def __init__(self, source: SceneSource) -> None:
        rt = import_sionna_rt()
        import drjit as dr
        import mitsuba as mi
        from sionna.rt.path_solvers.sb_candidate_generator import SBCandidateGenerator

        SBCandidateGenerator.MIN_SPEC_COUNT_SIZE = CANDIDATE_TABLE  # else it loses paths, and is no peer
        self.dr, self.mi = dr, mi
        self.scene = rt.load_scene(vars(rt.scene).get(source.scene, source.scene))
        self.scene.frequency = source.carrier
        self.scene.tx_array = self.scene.rx_array = rt.PlanarArray(
            num_rows=1, num_cols=1, pattern="iso", polarization="VH"
        )
        self.scene.add(rt.Transmitter("tx", list(source.tx_position)))
        self.receivers = [rt.Receiver(f"rx-{i}", [0.0, 0.0, 0.0]) for i in range(source.receivers_per_solve)]
        for receiver in self.receivers:
            self.scene.add(receiver)
        self.solver = rt.PathSolver(deterministic=True)
        self.physics = vars(source.physics)

    def place(self, positions: np.ndarray, velocities: np.ndarray) -> None:
        """Positions and velocities as entries of one array."""
        place = self.mi.Point3f(np.ascontiguousarray(positions.T, np.float32))
        velocity = self.mi.Vector3f(np.ascontiguousarray(velocities.T, np.float32))
        for i, receiver in enumerate(self.receivers):
            receiver.position = self.dr.gather(self.mi.Point3f, place, self.mi.UInt32(i))
            receiver.velocity = self.dr.gather(self.mi.Vector3f, velocity, self.mi.UInt32(i))

    def place_numbers(self, positions: np.ndarray, velocities: np.ndarray) -> None:
        """Positions and velocities as Python numbers."""
        for receiver, position, velocity in zip(self.receivers, positions.tolist(), velocities.tolist(), strict=True):
            receiver.position = position
            receiver.velocity = velocity

    def run(self, batches: Iterator[tuple[np.ndarray, np.ndarray]], place: Callable[..., None]) -> float:
        """Trace all batches, keep what a store holds; returns 0 (no time to leave out)."""
        kept = []
        for positions, velocities in batches:
            place(positions, velocities)
            paths = self.solver(self.scene, synthetic_array=True, seed=1, **self.physics)
            gain, _ = paths.cir(normalize_delays=False, out_type="drjit")
            tensors = [*gain, *(getattr(paths, name) for name in TENSORS)]
            self.dr.eval(tensors)
            kept.append([x.numpy() for x in tensors])
        return 0.0


def generated(recipe: Recipe) -> float:
    """Generate a store; returns the seconds spent on clearing up after it, which are not part of the job."""
    folder = Path(tempfile.mkdtemp(prefix="chanlab-generate-"))
    generate(recipe, folder / "store", progress=False)
    start = time.perf_counter()
    shutil.rmtree(folder)
    return time.perf_counter() - start


def memory(recipe: Recipe, links: int, results: Path) -> int:
    """Generate so many links and watch the resident memory of this process."""
    source = build_source(recipe)
    assert isinstance(source, SceneSource)
    anchors = source.trajectories.num_anchors
    samples = -(-links // (anchors * source.group)) * source.group
    recipe = replace(recipe, samples=samples, shard_size=4 * source.group, splits={"fractions": {"train": 1.0}})
    folder = Path(tempfile.mkdtemp(prefix="chanlab-generate-"))
    start = time.perf_counter()
    try:
        resident: list[float] = []
        watch = Watch(resident)
        generate(recipe, folder / "store", executor=watch)
    finally:
        shutil.rmtree(folder)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    early, late = resident[len(resident) // 10], resident[-1]
    print(f"{samples * anchors} links in {seconds:.0f} s: peak {peak:.2f} GB")
    print(f"resident after a tenth of them {early:.2f} GB, at the end {late:.2f} GB")
    condition = {"links": samples * anchors, "rays": source.physics.samples_per_src}
    common: dict[str, Any] = {"system": "chanlab generate", "data": recipe.name, "condition": condition}
    save_records(
        results,
        [
            record(metric="peak_memory", value=peak, unit="GB", n=1, **common),
            record(metric="memory_growth_after_a_tenth", value=late - early, unit="GB", n=1, **common),
        ],
    )
    return int(peak > MEMORY_LIMIT)


class Watch:
    """An executor of this process that notes its resident memory after each shard [GB]."""

    def __init__(self, resident: list[float]) -> None:
        self.resident = resident

    def map_unordered(self, function: Callable[[Any], Any], tasks: Any) -> Iterator[Any]:
        """Run the tasks one by one."""
        for task in tqdm(list(tasks), desc="shards", unit="shard"):
            yield function(task)
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            self.resident.append(pages * os.sysconf("SC_PAGE_SIZE") / 1e9)


if __name__ == "__main__":
    raise SystemExit(main())
