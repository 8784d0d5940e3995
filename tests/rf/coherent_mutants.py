"""Plants errors in the code of the coherent sum, one at a time in a copy, and lists those that its tests don't find.

    python tests/rf/coherent_mutants.py            # a few minutes; exits 1 if one survives

Among them are the errors of published kernels: the imaginary part overwritten by the real, a gradient halved or of the
wrong sign, phases in single precision; and every barrier of the CUDA kernels left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "chanlab/rf"
BARRIER = "__syncthreads();"


class Mutant(NamedTuple):
    """`wrong` in place of the only `right` in a file; `count` picks one of several barriers."""

    file: str
    right: str
    wrong: str
    count: int | None = None

    def plant(self, root: Path) -> None:
        """Change the file below `root`."""
        path = root / FOLDER / self.file
        parts = path.read_text(encoding="utf-8").split(self.right)
        at = 1 if self.count is None else self.count + 1
        path.write_text(self.right.join(parts[:at]) + self.wrong + self.right.join(parts[at:]), encoding="utf-8")

    @property
    def tests(self) -> str:
        """The file of tests that must find it."""
        name = "coherent_cuda" if "kernels" in self.file else Path(self.file).stem
        known = {"coherent_gemm": "coherent", "coherent_reference": "coherent"}
        return f"tests/rf/test_{known.get(name, name)}.py"


OPERATOR, GEMM, REFERENCE = "coherent.py", "coherent_gemm.py", "coherent_reference.py"
PRIMITIVES = "coherent_primitives.py"
HEADER, KERNEL = "kernels/coherent.h", "kernels/coherent.cu"

MUTANTS = [
    Mutant(OPERATOR, "if torch.is_grad_enabled():  #", "if False:  #"),
    Mutant(GEMM, "imag = quarters[:, 1, :, 0] - quarters[:, 0, :, 1]", "imag = real.clone()"),
    Mutant(GEMM, "quarters[:, 0, :, 0] + quarters[:, 1, :, 1]", "quarters[:, 0, :, 0] - quarters[:, 1, :, 1]"),
    Mutant(GEMM, "cycles.frac_().to(dtype)", "cycles.to(dtype).frac_()"),
    Mutant(GEMM, "total[rows] += ", "total[rows] = "),
    Mutant(GEMM, "both[:, 0].conj()", "both[:, 0]"),
    Mutant(GEMM, "= 2 * math.pi * (both[:, 1] * held).imag", "= -2 * math.pi * (both[:, 1] * held).imag"),
    Mutant(GEMM, "turn = -(back[:, 0]", "turn = (back[:, 0]"),
    Mutant(GEMM, "num_rx * num_tx, 2 * math.pi / wavelength", "num_rx * num_tx, math.pi / wavelength"),
    Mutant(GEMM, "rx_turn, tx_turn = turn.sum(2), turn.sum(1)", "tx_turn, rx_turn = turn.sum(2), turn.sum(1)"),
    Mutant(GEMM, "rx_grads[rows] += ", "rx_grads[rows] = "),
    Mutant(REFERENCE, "phase = phase - 2", "phase = phase + 2"),
    Mutant(REFERENCE, "(rx_positions @ arrival)", "(rx_positions @ -arrival)"),
    Mutant(PRIMITIVES, "_spread(first, wavelength) / second", "_spread(first + second, wavelength) / second"),
    Mutant(PRIMITIVES, "tx - 2 * tx_height[..., None] * normal", "tx - tx_height[..., None] * normal"),
    Mutant(PRIMITIVES, "        -way[..., None],", "        way[..., None],"),
    Mutant(PRIMITIVES, "tx_height * rx_height > 0", "tx_height > 0"),
    Mutant(PRIMITIVES, "torch.where(length > 0, length, 1.0)", "length"),
    Mutant(HEADER, "cycles - rint(cycles)", "cycles"),
    Mutant(HEADER, "fmaf(a.re, b.im, fmaf(-a.im, b.re, acc.im))", "fmaf(a.re, b.im, fmaf(a.im, b.re, acc.im))"),
    Mutant(KERNEL, "sum[1] -= back.im", "sum[1] += back.im"),
    Mutant(KERNEL, "turn = -(back * held).im", "turn = (back * held).im"),
    Mutant(KERNEL, "wavenumber = TWO_PI / p.wavelength", "wavenumber = TWO_PI / 2 / p.wavelength"),
    Mutant(KERNEL, "last = (split + 1) * count / p.splits", "last = (split + 1) * (count / p.splits)"),
    Mutant(KERNEL, "split = row; split", "split = 0; split"),
    Mutant(KERNEL, "x.tx[3 * (pair % p.tx)", "x.tx[3 * (pair / p.rx)"),
    *(Mutant(KERNEL, BARRIER, ";", count) for count in range(8)),
]


def main() -> int:
    """Plant, test, list; returns the exit code."""
    parser = argparse.ArgumentParser(description="Which errors in the coherent sum do its tests not find?")
    parser.parse_args()
    for tests in sorted({mutant.tests for mutant in MUTANTS}):
        if not passes(tests):
            raise SystemExit(f"{tests} fails without any mutant; mend that first.")
    survivors = [mutant for mutant in tqdm(MUTANTS, unit="mutant") if passes(mutant.tests, mutant)]
    for mutant in survivors:
        print(f"survives: {mutant.file}: {mutant.right!r} -> {mutant.wrong!r} ({mutant.count})")
    print(f"{len(MUTANTS)} planted, {len(survivors)} survive")
    return int(bool(survivors))


def passes(tests: str, mutant: Mutant | None = None) -> bool:
    """Whether a file of tests passes in a copy of the code with the mutant."""
    with tempfile.TemporaryDirectory(prefix="chanlab-mutant-") as folder:
        root = Path(folder)
        for part in ("chanlab", "tests/rf"):
            shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", root)
        if mutant:
            mutant.plant(root)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", "not mutants", tests]
        environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest itself fails:\n{done.stdout}{done.stderr}")
    return done.returncode == 0


if __name__ == "__main__":
    raise SystemExit(main())
