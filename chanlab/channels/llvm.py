"""Finds what Sionna RT runs on, before it is imported: CUDA with OptiX, else an LLVM that Dr.Jit can use.

Dr.Jit compiles ray tracing through libLLVM. Version 14 is refused, version 15 aborts the whole process, so a library
older than 16 is never handed on. `import_sionna_rt` is the only place of chanlab that imports `sionna.rt`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from chanlab.errors import MissingDependencyError

MINIMUM_LLVM = 16
"""Oldest major version of LLVM that Dr.Jit compiles ray tracing with."""

CUDA_VARIANT = "cuda_ad_mono_polarized"
LLVM_VARIANT = "llvm_ad_mono_polarized"

_LIBRARY_FOLDERS = (
    "/usr/lib/llvm-*/lib",
    "/usr/lib/*-linux-gnu",
    "/usr/lib64",
    "/usr/lib64/llvm*/lib",
    "/usr/lib",
    "/usr/local/lib",
    "/opt/homebrew/opt/llvm*/lib",
    "/usr/local/opt/llvm*/lib",
)
_LIBRARY_NAME = re.compile(r"libLLVM([-.]\d[\w.]*)?\.(so|dylib)(\.[\d.]+)?$")
# LLVMGetVersion exists from LLVM 16 on: a library without it is too old, whatever its name says.
_READ_VERSION = """
import ctypes, sys
version = [ctypes.c_uint() for _ in range(3)]
ctypes.CDLL(sys.argv[1]).LLVMGetVersion(*map(ctypes.byref, version))
print(version[0].value)
"""


@functools.lru_cache(maxsize=64)
def llvm_version(path: str) -> int | None:
    """Major version that the library itself reports (16 or newer), read in a process of its own.

    Args:
        path: The shared library.

    Returns:
        None for a library older than 16, one that does not load here, and what is not LLVM.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-S", "-c", _READ_VERSION, path], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip().isdigit() else None


def _named_version(path: Path) -> int | None:
    """Major version in the name of the file behind `path`, None if it holds none."""
    match = re.search(r"libLLVM\D{1,6}(\d+)", path.resolve().name)
    return int(match.group(1)) if match else None


def _candidates() -> Iterator[Path]:
    """Every LLVM library that the loader's cache or the usual folders name."""
    for ldconfig in ("ldconfig", "/sbin/ldconfig", "/usr/sbin/ldconfig"):
        if shutil.which(ldconfig):
            listing = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=False).stdout
            yield from (Path(line.rsplit("=> ", 1)[1].strip()) for line in listing.splitlines() if "libLLVM" in line)
            break
    folders = [Path(sys.prefix, "lib"), *(Path(p) for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p)]
    for pattern in _LIBRARY_FOLDERS:
        folders += sorted(Path("/").glob(pattern[1:]))
    for folder in folders:
        yield from sorted(folder.glob("libLLVM*"))


def find_llvm() -> Path | None:
    """The LLVM library to use: `DRJIT_LIBLLVM_PATH` if it is version 16 or newer, else the newest one installed.

    Returns:
        None if there is none of version 16 or newer.
    """
    override = os.environ.get("DRJIT_LIBLLVM_PATH")
    if override and llvm_version(override) is not None:
        return Path(override)
    libraries = {path.resolve(): path for path in _candidates() if _LIBRARY_NAME.fullmatch(path.name)}
    found: list[tuple[int, Path]] = []
    for path in libraries.values():
        version = _named_version(path)
        if version is None:
            version = llvm_version(str(path))
        if version is not None and version >= MINIMUM_LLVM:
            found.append((version, path))
    for _, path in sorted(found, key=lambda item: item[0], reverse=True):
        if llvm_version(str(path)) is not None:
            return path
    return None


def llvm_install_command() -> str:
    """The command that installs a usable LLVM on this machine."""
    sudo = "" if os.geteuid() == 0 else "sudo "
    if shutil.which("apt-get"):
        return f"{sudo}apt-get install -y libllvm19"
    if shutil.which("dnf"):
        return f"{sudo}dnf install -y llvm-libs"
    if shutil.which("brew"):
        return "brew install llvm"
    return f"install LLVM's shared library, version {MINIMUM_LLVM} or newer, or set DRJIT_LIBLLVM_PATH to one"


def _cuda_libraries_load() -> bool:
    """Whether the driver and OptiX are there (which does not yet say that they work)."""
    try:
        for name in ("libcuda.so.1", "libnvoptix.so.1"):
            ctypes.CDLL(name)
    except OSError:
        return False
    return True


def import_sionna_rt() -> ModuleType:
    """Import `sionna.rt` on CUDA if it works here, else on an LLVM of version 16 or newer.

    Idempotent. A Mitsuba variant that the caller has already set is left as it is. `DRJIT_LIBLLVM_PATH` is set for this
    process and its children.

    Returns:
        The module `sionna.rt`.

    Raises:
        MissingDependencyError: If Sionna RT is not installed, or neither CUDA nor a usable LLVM is found; the message
            holds the command that helps.
    """
    loaded = sys.modules.get("sionna.rt")
    if loaded is not None:
        return loaded
    if importlib.util.find_spec("sionna") is None or importlib.util.find_spec("mitsuba") is None:
        raise MissingDependencyError("Sionna RT is not installed: pip install 'sionna>=2.2,<3'")
    llvm = find_llvm()
    if llvm is not None:
        os.environ["DRJIT_LIBLLVM_PATH"] = str(llvm)  # before Dr.Jit is imported: it reads the variable then
    else:
        os.environ.pop("DRJIT_LIBLLVM_PATH", None)
    mitsuba = importlib.import_module("mitsuba")
    if mitsuba.variant() is None and not (_cuda_libraries_load() and _set_variant(mitsuba, CUDA_VARIANT)):
        if llvm is None:
            raise MissingDependencyError(
                f"Ray tracing needs CUDA with OptiX, or LLVM {MINIMUM_LLVM} or newer, and neither works here: "
                f"{llvm_install_command()}"
            )
        if not _set_variant(mitsuba, LLVM_VARIANT):
            raise MissingDependencyError(
                f"Dr.Jit can't use {llvm}. Install another LLVM ({llvm_install_command()}) and unset "
                "DRJIT_LIBLLVM_PATH; `chanlab doctor` shows what works."
            )
    return importlib.import_module("sionna.rt")


def _set_variant(mitsuba: ModuleType, variant: str) -> bool:
    try:
        mitsuba.set_variant(variant)
    except ImportError:  # what Mitsuba raises for a back end that does not start
        return False
    return True


def _probe() -> None:
    """Trace one reflection and print the variant as JSON; run by `rt_status` in a process of its own."""
    rt = import_sionna_rt()
    scene = rt.load_scene(rt.scene.simple_reflector)
    scene.tx_array = scene.rx_array = rt.PlanarArray(num_rows=1, num_cols=1, pattern="iso", polarization="V")
    scene.add(rt.Transmitter("tx", [-1.0, 0.0, 1.0]))
    scene.add(rt.Receiver("rx", [1.0, 0.0, 1.0]))
    paths = rt.PathSolver(deterministic=True)(scene, max_depth=1, samples_per_src=1000)
    variant = importlib.import_module("mitsuba").variant()
    print(json.dumps({"variant": variant, "paths": int(paths.valid.numpy().sum())}))


def rt_status(timeout: float = 180.0) -> dict[str, Any]:
    """What ray tracing runs on here, found out by tracing a reflection in a process of its own.

    An LLVM that aborts the process, or a driver that hangs, ends the probe and not the caller.

    Args:
        timeout: Give up after this time [s].

    Returns:
        `works` (bool), `variant` (Mitsuba's name, None if nothing works), `version` of sionna-rt (None if missing),
        `llvm_path` and `llvm_version` (None without a usable LLVM) and `remedy` (None if it works).
    """
    try:
        version = importlib.metadata.version("sionna-rt")
    except importlib.metadata.PackageNotFoundError:
        version = None
    llvm = find_llvm()
    status: dict[str, Any] = {
        "works": False,
        "variant": None,
        "version": version,
        "llvm_path": str(llvm) if llvm else None,
        "llvm_version": llvm_version(str(llvm)) if llvm else None,
        "remedy": None,
    }
    command = [sys.executable, "-c", "from chanlab.channels.llvm import _probe; _probe()"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        status["remedy"] = f"the ray-tracing probe did not end in {timeout:.0f} s: check the GPU driver, and try again"
        return status
    if done.returncode == 0:
        found = json.loads(done.stdout.strip().splitlines()[-1])
        status.update(variant=found["variant"], works=found["paths"] > 0)
    if not status["works"]:
        status["remedy"] = _remedy(version, llvm, done)
    return status


def _remedy(version: str | None, llvm: Path | None, done: subprocess.CompletedProcess[str]) -> str:
    if version is None:
        return "pip install 'sionna>=2.2,<3'"
    if llvm is None:
        return llvm_install_command()
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return f"ray tracing with {llvm} fails ({last}); another LLVM: {llvm_install_command()}"
