"""Plants known mistakes in the rasterizer, one at a time, and lists those that the tests do not see.

    python tests/rf/mutations.py            # all of them; exit code 1 if one survives
    python tests/rf/mutations.py azimuth    # those whose name holds a word

Each mutant is a copy of the package with one line of the production code changed (the header that CPU and CUDA share,
the CPU back end, the reference, the operator); the quick tests run against it until one fails. The first seven are
mistakes published in kernels of this field.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Mutation(NamedTuple):
    """A mistake: in which file of `chanlab/rf`, what is replaced by what."""

    name: str
    file: str
    right: str
    wrong: str
    published: bool = False


HEADER, CPU, REFERENCE, OPERATOR = "kernels/sphere.h", "kernels/sphere_cpu.cpp", "reference.py", "sphere.py"

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
        HEADER,
        "(column < across ? column : column - across)",
        "(column < across ? column : across - 1)",
        True,
    ),
    Mutation("two degrees per elevation row", HEADER, "* problem.row_step);", "* 2 * problem.row_step);", True),
    Mutation(
        "footprint independent of the distance",
        HEADER,
        "const T p11 = dot(s1, s1), p12 = dot(s1, s2), p22 = dot(s2, s2);",
        "for (int k = 0; k < 3; ++k) s1[k] *= p.distance, s2[k] *= p.distance;\n"
        "    const T p11 = dot(s1, s1), p12 = dot(s1, s2), p22 = dot(s2, s2);",
        True,
    ),
    # Others: geometry.
    Mutation("pixel corners for centres", HEADER, "(double(column) + 0.5)", "(double(column) + 0.0)"),
    Mutation(
        "start of the azimuth forgotten in the bounds",
        HEADER,
        "- problem.start) / problem.column_step",
        ") / problem.column_step",
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
        HEADER,
        "if (ratio < 0.999) {  // else the cap holds a pole, or nearly\n        const double half = std::asin(ratio)",
        "if (true) {\n        const double half = std::asin(ratio < 1 ? ratio : 1.0)",
    ),
    Mutation(
        "bounds too narrow",
        HEADER,
        "p.radius = std::sqrt(cut * largest)",
        "p.radius = T(0.9) * std::sqrt(cut * largest)",
    ),
    Mutation("bounds from the smaller axis", HEADER, "(c11 + c22) / 2 + std::sqrt", "(c11 + c22) / 2 - std::sqrt"),
    Mutation(
        "last tile row forgotten",
        HEADER,
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
    Mutation("no gradients", OPERATOR, "g if want else None for g, want", "None for g, want"),
    Mutation(
        "fake of another shape", OPERATOR, "means.new_empty(b, height, width),", "means.new_empty(b, width, height),"
    ),
)
"""What is planted."""

TESTS = ("tests/rf/test_rasterize.py",)


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


def survives(mutation: Mutation, tests: Iterable[str] = TESTS) -> bool:
    """Whether all tests pass in spite of the mistake.

    Raises:
        ValueError: If the line to change is gone, or the mutant does not even compile: it then shows nothing.
    """
    with tempfile.TemporaryDirectory(prefix="chanlab-mutant-") as name:
        folder = Path(name)
        plant(mutation, folder)
        environment = os.environ | {
            "PYTHONPATH": str(folder),
            "CHANLAB_CACHE": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        environment.pop("CHANLAB_KERNELS", None)
        which = "reference or tiles" if mutation.file == REFERENCE else "not reference"
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", which, "-p", "no:cacheprovider", *tests]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1) or "Compiling sphere_cpu.cpp failed" in done.stdout:
            raise ValueError(f"{mutation.name}: the tests did not run.\n{done.stdout}{done.stderr}")
        return done.returncode == 0


def main() -> int:
    """Plant, test, list."""
    words = sys.argv[1:]
    chosen = [m for m in MUTATIONS if not words or any(word in m.name for word in words)]
    survivors = []
    for mutation in chosen:
        started = time.monotonic()
        alive = survives(mutation)
        survivors += [mutation.name] * alive
        print(f"{'SURVIVES' if alive else 'found':9} {time.monotonic() - started:5.1f} s  {mutation.name}", flush=True)
    print(f"{len(chosen)} planted, {len(survivors)} survive" + "".join(f"\n  {name}" for name in survivors))
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    raise SystemExit(main())
