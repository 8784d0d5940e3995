"""Plants known mistakes in the rasterizer, one at a time, and lists those that the tests do not see.

    python tests/rf/mutations.py            # all of them; exit code 1 if one survives
    python tests/rf/mutations.py azimuth    # those whose name, or file, holds a word

Each mutant is a copy of the package with one line of the production code changed (the header that CPU and CUDA share,
the CPU back end, the CUDA sources, the reference, the operator); the tests that `TESTS` names for the file run against
it until one fails. The first seven are mistakes published in kernels of this field. Those at the end show on hardware
alone and are skipped where there is no GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from launch_mutations import IN_LAUNCHES
from list_mutations import IN_LISTS
from mutation import (
    BINDING,
    BOUNDS,
    CPU,
    HEADER,
    LAUNCH,
    LISTS,
    OPERATOR,
    PLAIN,
    PROBLEM,
    REFERENCE,
    ROOM,
    SORT,
    TILES,
    WALK,
    Mutation,
)
from tile_mutations import IN_TILES

os.environ["OMP_NUM_THREADS"] = "1"
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "torch.testing", "pytest"])

ROOT = Path(__file__).resolve().parents[2]


QUICK, EMULATED, COUNTS, CUDA = (f"tests/rf/test_rasterize{name}.py" for name in ("", "_emulated", "_room", "_cuda"))
TESTS = {
    HEADER: (QUICK,),
    BOUNDS: (QUICK, EMULATED),
    CPU: (QUICK,),
    REFERENCE: (QUICK,),
    LISTS: (EMULATED,),
    WALK: (EMULATED,),
    TILES: (EMULATED,),
    LAUNCH: (EMULATED,),
    PLAIN: (QUICK,),
    SORT: (EMULATED,),
    PROBLEM: (QUICK,),
    BINDING: (COUNTS, EMULATED),
    ROOM: (COUNTS, EMULATED),
    OPERATOR: (EMULATED, QUICK),
}
"""Which tests must see mistakes in a file: CUDA sources run on the CPU, emulated."""

MUTATIONS = (
    # Published mistakes.
    Mutation(
        "azimuth gradient halved",
        HEADER,
        "for (int i = 0; i < 3; ++i) by_v[i] = (by_u[i] - u[i] * radial) * inverse + by_distance * u[i];",
        "for (int i = 0; i < 3; ++i) by_v[i] = (by_u[i] - u[i] * radial) * inverse * (i < 2 ? T(0.5) : T(1)) "
        "+ by_distance * u[i];",
        True,
    ),
    Mutation(
        "gradient by the distance with the wrong sign",
        HEADER,
        "by_distance = -2 * inverse2 * inverse * spread",
        "by_distance = 2 * inverse2 * inverse * spread",
        True,
    ),
    Mutation(
        "second channel overwritten by the first",
        CPU,
        "const T signal = signals[i * channels + c];\n                T* to_colour",
        "const T signal = signals[i * channels];\n                T* to_colour",
        True,
    ),
    Mutation(
        "second channel's gradient taken from the first",
        CPU,
        "by_signal[(first + k) * channels + c] = sum;",
        "by_signal[(first + k) * channels + c] = c ? by_signal[(first + k) * channels] : sum;",
        True,
    ),
    Mutation(
        "no wrap at azimuth 0 / 2 pi",
        BOUNDS,
        "(column < across ? column : column - across)",
        "(column < across ? column : across - 1)",
        True,
    ),
    Mutation(
        "two degrees per elevation row",
        BOUNDS,
        "+ (row + 0.5) * problem.row_step)",
        "+ (row + 0.5) * 2 * problem.row_step)",
        True,
    ),
    Mutation(
        "footprint independent of the distance",
        HEADER,
        "const T p11 = dot(s1, s1), p12 = dot(s1, s2), p22 = dot(s2, s2);",
        "for (int k = 0; k < 3; ++k) s1[k] *= p.distance, s2[k] *= p.distance;\n"
        "    const T p11 = dot(s1, s1), p12 = dot(s1, s2), p22 = dot(s2, s2);",
        True,
    ),
    # Others: geometry.
    Mutation("pixel corners for centres", BOUNDS, "(column + 0.5)", "(column + 0.0)"),
    Mutation(
        "start of the azimuth forgotten in the bounds",
        BOUNDS,
        "std::atan2(p.u[1], p.u[0]) - T(problem.start);",
        "std::atan2(p.u[1], p.u[0]);",
    ),
    Mutation(
        "chord for angle",
        HEADER,
        "    arc_polynomial(folded > 1 ? T(1) : folded, g, slope);",
        "    g = 1;\n    slope = 0;",
    ),
    Mutation("no derivative of the log map", HEADER, "by.u = by_q * o.slope", "by.u = 0 * o.slope"),
    Mutation(
        "pole not noticed",
        BOUNDS,
        "if (!(ratio < T(0.999))) return {radius, radius, all, all};  // the cap holds a pole, or nearly\n",
        "",
    ),
    Mutation(
        "bounds too narrow",
        HEADER,
        "p.radius = std::sqrt(p.most * largest)",
        "p.radius = T(0.9) * std::sqrt(p.most * largest)",
    ),
    Mutation("bounds from the smaller axis", HEADER, "(c11 + c22) / 2 + std::sqrt", "(c11 + c22) / 2 - std::sqrt"),
    Mutation(
        "last tile row forgotten",
        BOUNDS,
        "t.rows = (b.row + b.rows - 1) / TILE_HEIGHT - t.row + 1;",
        "t.rows = (b.row + b.rows - 1) / TILE_HEIGHT - t.row + (b.rows < 2);",
    ),
    Mutation(
        "rotation transposed",
        HEADER,
        "axes[i] * p.offset[0] + axes[3 + i] * p.offset[1] + axes[6 + i] *",
        "axes[3 * i] * p.offset[0] + axes[3 * i + 1] * p.offset[1] + axes[3 * i + 2] *",
    ),
    Mutation(
        "quaternion not normalised",
        HEADER,
        "const T inverse = 1 / std::sqrt(q[0]",
        "const T inverse = 1 + 0 / std::sqrt(q[0]",
    ),
    Mutation("no blur", HEADER, "const T c11 = p11 + blur, c22", "const T c11 = p11, c22"),
    Mutation("blur missing in the determinant", HEADER, "+ blur * (p11 + p22) + blur * blur;", "+ blur * blur;"),
    Mutation("near Gaussians drawn", HEADER, "p.visible = p.distance > nearest &&", "p.visible = p.distance >= 0 &&"),
    Mutation(
        "antipode drawn",
        HEADER,
        "o.alpha = c < T(REACH == NEAR ? NEAR_COSINE : REACH == HALF ? 0.0 : COSINE_CUT) ? T(0) : alpha;",
        "o.alpha = alpha;",
    ),
    Mutation(
        "blur missing in the ellipse's bounds",
        BOUNDS,
        "T ee = T(problem.blur), en = 0, nn = ee;",
        "T ee = 0, en = 0, nn = 0;",
    ),
    Mutation(
        "bounds to the north for those to the east",
        BOUNDS,
        "        ee += east * east;",
        "        ee += north * north;",
    ),
    Mutation(
        "bounds to the east for those to the north",
        BOUNDS,
        "        nn += north * north;",
        "        nn += east * east;",
    ),
    Mutation("great circles follow the parallels", BOUNDS, "std::asin(steep * cosine - c", "std::asin(steep - c"),
    Mutation(
        "towards the pole for away from it",
        BOUNDS,
        "{s < 0 ? towards : away, s < 0 ? away : towards,",
        "{s < 0 ? away : towards, s < 0 ? towards : away,",
    ),
    Mutation(
        "sphere taken for its tangent plane",
        BOUNDS,
        "stretched = most * (sine / (cosine * radius)) * (sine / (cosine * radius));",
        "stretched = most;",
    ),
    Mutation("parallels as long as the equator", BOUNDS, "open = c * c - stretched * s * s * nn;", "open = c * c;"),
    Mutation("ellipses upright", BOUNDS, "turn = stretched * s * en,", "turn = 0 * en,"),
    Mutation("left for right", BOUNDS, "(root - turn) / open", "(root + turn) / open"),
    Mutation(
        "cap about the box's centre",
        BOUNDS,
        "dot(f.u, box.centre) + spread(f.u) < f.cosine",
        "dot(f.u, box.centre) < f.cosine",
    ),
    Mutation("box without width", BOUNDS, "std::abs(dot(form, box.first)) * box.size[0] + ", ""),
    Mutation("box without height", BOUNDS, "std::abs(dot(form, box.second)) * box.size[1] +", ""),
    Mutation("box without depth", BOUNDS, "std::abs(dot(form, box.centre)) * box.size[2];", "0;"),
    Mutation("footprint's core for the whole", BOUNDS, "square * f.most * T(1.0002)", "square * f.most * T(0.8)"),
    Mutation("around the mean nothing is reached", BOUNDS, "return !(least > 0 && least", "return !(least"),
    # Gradients.
    Mutation("basis not carried along", HEADER, "sum.u[i] - p.a[i] * au - p.b[i] * bu", "sum.u[i]"),
    Mutation("covariance not carried along", HEADER, "by_u[i] -= 2 * inverse2 * turned * um;", ""),
    Mutation(
        "radial part of the direction's gradient kept",
        HEADER,
        "(by_u[i] - u[i] * radial) * inverse",
        "by_u[i] * inverse",
    ),
    Mutation(
        "quaternion's gradient along itself kept", HEADER, "(by_unit[1] - along * x) * inverse", "by_unit[1] * inverse"
    ),
    Mutation(
        "off-diagonal of the covariance's gradient doubled",
        HEADER,
        "(dot(sum.a, p.b) + dot(sum.b, p.a)) / 4",
        "(dot(sum.a, p.b) + dot(sum.b, p.a)) / 2",
    ),
    Mutation(
        "alpha's gradient above the clamp", HEADER, "f.opacity * o.shape > T(ALPHA_MAX) ? T(0) : by_alpha", "by_alpha"
    ),
    Mutation(
        "transmittance's gradient forgotten", CPU, "behind[p] = by_transmittance[pixel] * through[p];", "behind[p] = 0;"
    ),
    Mutation("receiver's gradient with the means' sign", CPU, "position[d] -= double", "position[d] += double"),
    Mutation(
        "only the last receiver's gradient", CPU, "by_means[3 * i + d] += g.mean[d]", "by_means[3 * i + d] = g.mean[d]"
    ),
    Mutation(
        "rotation's gradient without the covariance",
        HEADER,
        "p.offset[j] * by_v[i] + dot(p.world + 3 * j, by_local + 3 * i)",
        "p.offset[j] * by_v[i]",
    ),
    # Compositing.
    Mutation("farthest first", CPU, "return distances[x] < distances[y];", "return distances[x] > distances[y];"),
    Mutation(
        "ties by the later index",
        CPU,
        "return distances[x] < distances[y];",
        "return distances[x] < distances[y] || (distances[x] == distances[y] && x > y);",
    ),
    Mutation(
        "weights without transmittance", HEADER, "open > 0 ? alpha * transmittance : T(0)", "open > 0 ? alpha : T(0)"
    ),
    Mutation(
        "cut crossed before stopping",
        HEADER,
        "open = next < T(TRANSMITTANCE_CUT) ? T(0) : open;\n    const T weight",
        "const T weight",
    ),
    Mutation("no alpha cut", HEADER, "ALPHA_CUT = 1.0 / 255.0;", "ALPHA_CUT = 1.0 / 2550.0;"),
    Mutation(
        "gradient beyond the end of a pixel",
        CPU,
        "const T shown = k < ends[p] ? T(1) : T(0);",
        "const T shown = 1;",
    ),
    Mutation("peak is a sum", CPU, "most = std::max(most, statistics.peak", "most = (most + statistics.peak"),
    Mutation("near polynomial for all", HEADER, "cosine > T(NEAR_COSINE) ? NEAR", "cosine > T(0.3) ? NEAR"),
    Mutation("half the sphere for all", HEADER, "cosine > 0 ? HALF : WHOLE", "cosine > -2 ? HALF : WHOLE"),
    Mutation("near polynomial's slope by 1 - c", HEADER, "    slope = -slope;\n", ""),
    # The definition itself.
    Mutation("reference: footprint independent of the distance", REFERENCE, "/ distance[:, None, None] ** 2", ""),
    Mutation(
        "reference: chord for angle",
        REFERENCE,
        "torch.exp(-_squared_angle_over_sine(cosine) * form / 2)",
        "torch.exp(-form / 2)",
    ),
    Mutation(
        "reference: farthest first",
        REFERENCE,
        "torch.sort(distance.detach(), stable=True)",
        "torch.sort(-distance.detach(), stable=True)",
    ),
    Mutation(
        "reference: transmittance with the Gaussian's own",
        REFERENCE,
        "weights = alpha * before",
        "weights = alpha * after",
    ),
    Mutation("reference: near Gaussians drawn", REFERENCE, "(distance.detach() > nearest)", "(distance.detach() >= 0)"),
    # The operator.
    Mutation(
        "a word less of state",
        BINDING,
        "(2 * tiles(height, width) + height * width)",
        "(2 * tiles(height, width) + height * width) - 1",
    ),
    Mutation(
        "a block less of scratch",
        BINDING,
        "-(-gaussians // ITEM_THREADS) * tiles",
        "gaussians // ITEM_THREADS * tiles",
    ),
    Mutation(
        "blocks of another size",
        BINDING,
        "ITEM_THREADS = 256",
        "ITEM_THREADS = 128",
    ),
    Mutation(
        "ranges of tiles beyond 16 bits", BINDING, "if max(across, up) >= 1 << 16:", "if max(across, up) >= 1 << 20:"
    ),
    Mutation("numbers beyond 31 bits", BINDING, "if max(items, capacity, max", "if max(0, 0, max"),
    Mutation("pairs beyond 31 bits", BINDING, "if capacity >= 1 << 31:", "if capacity >= 1 << 63:"),
    Mutation("state and scratch in one place", BINDING, "begin + 4 * apart if", "begin if"),
    Mutation("no memory for the sort", BINDING, "_scratch_words(*sizes) + -(-more // 4)", "_scratch_words(*sizes)"),
    Mutation("sort given too little memory", BINDING, "value or 0, size.value", "value or 0, size.value - 1"),
    Mutation("few keys sorted by radix", BINDING, "items >= RADIX_ITEMS or", "items > 0 or"),
    Mutation("many receivers' keys merged", BINDING, "items >= RADIX_ITEMS or", ""),
    Mutation("many keys of a receiver merged", BINDING, " or gaussians >= RADIX_GAUSSIANS", ""),
    Mutation("sort that failed", LAUNCH, "            return code;\n", "            return 0;\n"),
    Mutation("sorted keys looked for where they came from", SORT, "*sorted = both.Current();", "*sorted = keys;"),
    Mutation("signs of negative views lost", PROBLEM, "x.is_contiguous() and not x.is_neg()", "x.is_contiguous()"),
    Mutation("strides ignored", PROBLEM, "x if x.is_contiguous() and", "x if"),
    Mutation("panorama's other edge", PROBLEM, "lowest, _, start,", "_, lowest, start,"),
    Mutation("receivers alone get no gradient", OPERATOR, "poses = wanted[5] or wanted[6]", "poses = wanted[6]"),
    Mutation("rotations alone get no gradient", OPERATOR, "poses = wanted[5] or wanted[6]", "poses = wanted[5]"),
    Mutation(
        "second derivatives are zero",
        OPERATOR,
        'torch.library.register_autograd("chanlab::rasterize_sphere_backward", _no_second_derivative)\n',
        "",
    ),
    Mutation(
        "room for yesterday's Gaussians",
        ROOM,
        "max(1 << 12, math.ceil(demand.rate * items))",
        "max(1 << 12, math.ceil(demand.rate * 5000))",
    ),
    Mutation("room shrinks at once", ROOM, "if demand.idle >= self.PATIENCE:", "if True:"),
    Mutation("room never shrinks", ROOM, "if demand.idle >= self.PATIENCE:", "if False:"),
    Mutation("overflow is not told", ROOM, "            if need > room:\n                short = (need, room)\n", ""),
    Mutation(
        "slots of calls that failed are lost",
        ROOM,
        "                if self._given.pop(slot, None):\n                    self._free.append(slot % self.SLOTS)\n",
        "                self._given.pop(slot, None)\n",
    ),
    Mutation(
        "slots read once",
        ROOM,
        "            self._slots[slot] = self.EMPTY\n            self._free.append(slot)\n",
        "            self._slots[slot] = self.EMPTY\n",
    ),
    Mutation("last call's count in a slot", ROOM, "            self._slots[slot] = self.EMPTY\n", ""),
    Mutation("calls learn from others", ROOM, "self._demands.get(kind)", "next(iter(self._demands.values()), None)"),
    Mutation("slots numbered alike", ROOM, "self._free.pop() + self.SLOTS * self._calls", "self._free.pop()"),
    Mutation(
        "tracing sees no operator",
        PLAIN,
        "if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:",
        "if torch._C._get_tracing_state() is not None:",
    ),
    Mutation(
        "old tracing sees no operator",
        PLAIN,
        "if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:",
        "if torch._C._len_torch_dispatch_stack():",
    ),
    Mutation("forward mode is zero", PLAIN, "if forward_ad._current_level < 0:", "if forward_ad._current_level < 9:"),
    Mutation("no gradients", OPERATOR, "g if want else None for g, want", "None for g, want"),
    Mutation(
        "fake of another shape", OPERATOR, "means.new_empty(b, height, width),", "means.new_empty(b, width, height),"
    ),
    *IN_LISTS,
    *IN_TILES,
    *IN_LAUNCHES,
)
"""What is planted."""

LONGEST = 300
"""Seconds that tests may take; they take less than a minute."""


def plant(mutation: Mutation, folder: Path) -> None:
    """Copy package and tests to a folder, with the mistake."""
    shutil.copytree(ROOT / "chanlab", folder / "chanlab", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests" / "rf", folder / "tests" / "rf", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    path = folder / "chanlab" / "rf" / mutation.file
    text = path.read_text(encoding="utf-8")
    if mutation.right not in text:
        raise ValueError(
            f"{mutation.name}: {mutation.file} no longer holds `{mutation.right}`; write the mutation anew."
        )
    path.write_text(text.replace(mutation.right, mutation.wrong), encoding="utf-8")


def survives(mutation: Mutation, tests: Iterable[str] | None = None, cache: Path | None = None) -> bool:
    """Whether all tests pass in spite of the mistake; a crash and a test that doesn't end are no passing.

    Args:
        mutation: What to plant.
        tests: Files of tests; None is those of the mutated file.
        cache: Folder for compiled kernels, which mutants may share; None is one of its own.

    Raises:
        ValueError: If the line to change is gone, or the mutant does not even compile: it then shows nothing.
    """
    with tempfile.TemporaryDirectory(prefix="chanlab-mutant-") as name:
        folder = Path(name)
        plant(mutation, folder)
        environment = {"CHANLAB_CACHE": str(cache or folder / "cache"), "PYTHONPATH": str(folder)}
        which = "reference or tiles" if mutation.file == REFERENCE else "not reference or emulated or cuda"
        tests = tests or ((CUDA,) if mutation.hardware else TESTS[mutation.file])
        process = PROCESSES.Process(target=run_tests, args=(folder, environment, which, *tests))
        process.start()
        process.join(LONGEST)
        if process.is_alive():
            process.kill()
            return False
        said, code = (folder / "said").read_text(encoding="utf-8"), folder / "code"
        ended = int(code.read_text(encoding="utf-8")) if code.exists() else -1  # a crash
        if ended > 1 or re.search(r"Compiling sphere\S* .*failed", said):
            raise ValueError(f"{mutation.name}: the tests did not run.\n{said}")
        return ended == 0


def run_tests(folder: Path, environment: dict[str, str], which: str, *tests: str) -> None:
    """Run tests on the copy in a folder, in a process that has torch and pytest loaded, and write down their exit code.

    That of the process is lost where several threads wait for processes of a fork server: whoever asks first gets it.
    """
    os.chdir(folder)
    os.environ.update(environment)
    os.environ.pop("CHANLAB_KERNELS", None)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    with (folder / "said").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = pytest.main(["-q", "-x", "--tb=line", "-k", which, "-p", "no:cacheprovider", *tests])
    (folder / "code").write_text(str(int(code)), encoding="utf-8")


def main() -> int:
    """Plant, test, list."""
    parser = argparse.ArgumentParser(description="Which mistakes in the rasterizer do its tests not see?")
    parser.add_argument("words", nargs="*", help="those whose name or file holds one of them; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tried at once")
    asked = parser.parse_args()
    words = asked.words
    chosen = [m for m in MUTATIONS if not words or any(word in m.name or word in m.file for word in words)]
    tried = [m for m in chosen if not m.hardware or torch.cuda.is_available()]
    survivors = []
    with tempfile.TemporaryDirectory(prefix="chanlab-mutants-") as cache, ThreadPoolExecutor(asked.jobs) as pool:

        def attempt(mutation: Mutation) -> tuple[bool, float]:
            started = time.monotonic()
            return survives(mutation, cache=Path(cache)), time.monotonic() - started

        for mutation, (alive, seconds) in zip(tried, pool.map(attempt, tried), strict=True):
            survivors += [mutation.name] * alive
            print(
                f"{'SURVIVES' if alive else 'found':9} {seconds:5.1f} s  {mutation.file}: {mutation.name}", flush=True
            )
    print(f"{len(tried)} planted, {len(survivors)} survive" + "".join(f"\n  {name}" for name in survivors))
    if skipped := [m.name for m in chosen if m not in tried]:
        print(f"{len(skipped)} want a GPU" + "".join(f"\n  {name}" for name in skipped))
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    raise SystemExit(main())
