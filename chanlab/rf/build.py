"""Compiles the kernels of `chanlab.rf`: on first use, or ahead of time with `python -m chanlab.rf.build`.

Each source in `kernels/` becomes a shared library of plain C functions, loaded with ctypes: no torch header is needed,
so that a machine without a GPU compiles the CUDA sources too. Libraries are kept in `$CHANLAB_CACHE/kernels` (default
`~/.cache/chanlab/kernels`) under a hash of sources, options and compiler. `$CHANLAB_KERNELS` names a folder of
libraries built ahead of time (`--out`), where no compiler is needed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from chanlab.errors import ChanlabError, MissingDependencyError, UsageError

KERNELS = Path(__file__).with_name("kernels")
"""The sources: `*.cpp` for the CPU, `*.cu` for CUDA, headers of both."""

CXX_OPTIONS = ("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
NVCC_OPTIONS = ("-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC", "-lineinfo", "--expt-relaxed-constexpr")


def cache_folder() -> Path:
    """Where libraries built on first use are kept."""
    return Path(os.environ.get("CHANLAB_CACHE") or Path.home() / ".cache" / "chanlab") / "kernels"


def sources(kind: str) -> list[Path]:
    """Sources of a kind, `cpu` or `cuda`."""
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"Kernels are built for `cpu` or `cuda`, not {kind!r}.")
    return sorted(KERNELS.glob("*.cpp" if kind == "cpu" else "*.cu"))


def find_compiler(kind: str) -> str:
    """Path of the compiler: `$CXX`, g++ or clang++ for the CPU; `$CUDACXX`, nvcc or that of `$CUDA_HOME` for CUDA.

    Raises:
        MissingDependencyError: If there is none.
    """
    if kind == "cpu":
        asked, names = os.environ.get("CXX"), ["g++", "clang++"]
        remedy = "On Debian and Ubuntu: apt-get install g++. Or set CXX to a compiler with OpenMP."
    else:
        asked, names = os.environ.get("CUDACXX"), ["nvcc"]
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
        names.append(str(Path(home, "bin", "nvcc")))
        remedy = "Install the CUDA toolkit and have nvcc on PATH, or set CUDA_HOME or CUDACXX."
    for name in [asked] if asked else names:
        if found := shutil.which(name):
            return found
    raise MissingDependencyError(
        f"The {kind} kernels of chanlab.rf need a compiler once ({asked or ' or '.join(names)} not found). {remedy} "
        "Where none can be, build elsewhere with `python -m chanlab.rf.build --out FOLDER` and set CHANLAB_KERNELS to "
        'it. backend="reference" needs no compiler and is slow.'
    )


def command_line(source: Path, target: Path) -> list[str]:
    """How a source is compiled.

    `$CHANLAB_MARCH` is the processor for the CPU (default `native`); `$CHANLAB_CUDA_ARCHS` the compute capabilities for
    CUDA, such as `8.0;9.0` (default: that of the GPUs here, 9.0 without one); PTX of the newest goes along.
    """
    if source.suffix == ".cpp":
        tuned = f"-march={os.environ.get('CHANLAB_MARCH') or 'native'}"
        return [find_compiler("cpu"), *CXX_OPTIONS, tuned, str(source), "-o", str(target)]
    archs = _cuda_archs()
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
    targets.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    return [find_compiler("cuda"), *NVCC_OPTIONS, *targets, str(source), "-o", str(target)]


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """The library of a source, such as `sphere_cpu.cpp`; compiled if it was not yet.

    Raises:
        MissingDependencyError: If it must be compiled and there is no compiler.
        ChanlabError: If the compiler fails (its output is shown whole) or the library can't be loaded.
    """
    source = KERNELS / name
    folder = os.environ.get("CHANLAB_KERNELS")
    path = Path(folder, _ahead_name(source)) if folder else None
    if path is None or not path.exists():
        path = build(source)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise ChanlabError(f"Can't load {path}: {error}. Delete it, so that it is built again.") from error


def build(source: Path, out: Path | None = None) -> Path:
    """Compile one source, unless that has been done, and return the library.

    Two processes never compile the same source at once, and a library appears whole or not at all.

    Args:
        source: A source in `kernels/`.
        out: Folder for a build ahead of time; the cache by default.
    """
    probe = command_line(source, Path("library"))
    if out is None:
        target = cache_folder() / f"{source.stem}-{_digest(source, *probe, _version(probe[0]), _machine(source))}.so"
        if target.exists():
            return target
    else:
        target = out / _ahead_name(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_suffix(".lock")):
        if out is None and target.exists():
            return target
        _say(f"compiling {source.name} with {Path(probe[0]).name} (once) ...")
        started = time.monotonic()
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{source.stem}-") as folder:
            made = Path(folder, "library.so")
            command = command_line(source, made)
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise ChanlabError(
                    f"Compiling {source.name} failed with exit code {done.returncode}.\n{' '.join(command)}\n"
                    f"{done.stdout}{done.stderr}\nCheck that the compiler is complete and recent (C++17), or choose "
                    "another with CXX or CUDACXX."
                )
            made.replace(target)
        _say(f"{source.name} compiled in {time.monotonic() - started:.1f} s: {target}")
    return target


def build_all(kinds: Sequence[str], out: Path | None = None, jobs: int | None = None) -> list[Path]:
    """Compile every source of the kinds, at most `jobs` at once (default: half the cores, at most 4)."""
    todo = [source for kind in kinds for source in sources(kind)]
    workers = jobs or max(1, min(4, (os.cpu_count() or 1) // 2))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return list(pool.map(functools.partial(build, out=out), todo))


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m chanlab.rf.build`."""
    parser = argparse.ArgumentParser(
        prog="python -m chanlab.rf.build",
        description="Compile the kernels of chanlab.rf ahead of time.",
        epilog="Example: python -m chanlab.rf.build cuda --out /opt/kernels; then CHANLAB_KERNELS=/opt/kernels.",
    )
    parser.add_argument(
        "kinds", nargs="*", metavar="cpu|cuda", help="what to build; default: cpu, and cuda where nvcc is"
    )
    parser.add_argument("--out", type=Path, help="folder for the libraries; default: the cache of first use")
    parser.add_argument("--jobs", type=int, help="compilers at once; default: half the cores, at most 4")
    asked = parser.parse_args(arguments)
    try:
        kinds = asked.kinds or ["cpu"]
        if not asked.kinds:
            with contextlib.suppress(MissingDependencyError):
                find_compiler("cuda")
                kinds.append("cuda")
        for path in build_all(kinds, asked.out, asked.jobs):
            print(path)
    except ChanlabError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _say(text: str) -> None:
    print(f"chanlab.rf: {text}", file=sys.stderr, flush=True)


def _digest(source: Path, *more: str) -> str:
    """Hash of a source, of the headers beside it that it may include, and of what else decides the result."""
    digest = hashlib.sha256("\0".join(more).encode())
    headers = ["*.h", "*.cuh"] if source.suffix == ".cu" else ["*.h"]
    for path in [source, *(path for pattern in headers for path in sorted(KERNELS.glob(pattern)))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _ahead_name(source: Path) -> str:
    return f"{source.stem}-{_digest(source)}.so"


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


def _machine(source: Path) -> str:
    """What `-march=native` depends on; homes are shared between machines."""
    if source.suffix == ".cu":
        return platform.machine()
    try:
        flags = re.search(r"^(flags|Features)\s*:.*$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M)
    except OSError:
        flags = None
    return platform.machine() + (flags.group() if flags else platform.processor())


def _cuda_archs() -> list[str]:
    asked = os.environ.get("CHANLAB_CUDA_ARCHS")
    if asked:
        found = {int(part.replace(".", "")) for part in re.split(r"[;,\s]+", asked.strip())}
    else:
        import torch

        devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
        found = {10 * major + minor for major, minor in (torch.cuda.get_device_capability(d) for d in devices)} or {90}
    return [str(arch) for arch in sorted(found)]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    raise SystemExit(main())
