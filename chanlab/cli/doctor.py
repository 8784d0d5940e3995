"""`chanlab doctor`: what is installed, what works, and the remedy for what does not."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from chanlab import __version__
from chanlab.cli.common import print_json, subparser


@dataclass(frozen=True)
class Check:
    """One line of the diagnosis.

    Attributes:
        group: What it belongs to: `packages`, `extras`, `ray tracing`, `GPU`, `backbones`.
        name: What was looked at.
        ok: Whether it works.
        required: Whether chanlab's main job needs it.
        detail: A version, a path, or what went wrong.
        remedy: What to do about it, empty if nothing is wrong.
    """

    group: str
    name: str
    ok: bool
    required: bool
    detail: str
    remedy: str = ""


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    parser = subparser(
        commands,
        "doctor",
        "tell what works here, and the remedy for what does not",
        ["chanlab doctor", "chanlab doctor --json | jq '.checks[] | select(.ok == false)'"],
        "Exits with 1 if something that chanlab needs does not work; what is optional does not count.",
    )
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis; 1 if something required does not work."""
    checks = list(diagnose())
    healthy = all(check.ok for check in checks if check.required)
    if args.json:
        print_json({"chanlab": __version__, "healthy": healthy, "checks": [asdict(check) for check in checks]})
    else:
        print(report(checks))
    return 0 if healthy else 1


def diagnose() -> Iterator[Check]:
    """All checks, one after the other; nothing that crashes in them can end this process."""
    yield _python()
    yield from _packages()
    yield _ray_tracing()
    yield from _gpu()
    yield from _backbones()


def report(checks: list[Check]) -> str:
    """The diagnosis for people."""
    lines = [f"chanlab {__version__} on {platform.platform(terse=True)}"]
    width = max(len(check.name) for check in checks)
    group = ""
    for check in checks:
        if check.group != group:
            group = check.group
            lines += ["", group]
        sign = "ok  " if check.ok else ("FAIL" if check.required else "--  ")
        lines.append(f"  {sign}  {check.name:<{width}}  {check.detail}".rstrip())
        if check.remedy:
            lines.append(f"{'':<{width + 10}}→ {check.remedy}")
    broken = [check.name for check in checks if check.required and not check.ok]
    lines += ["", f"needs a remedy: {', '.join(broken)}" if broken else "Everything that chanlab needs works here."]
    return "\n".join(lines)


def _python() -> Check:
    ok = sys.version_info >= (3, 11)
    remedy = "" if ok else "use Python 3.11 or newer: python3.11 -m venv .venv"
    return Check("packages", "python", ok, True, platform.python_version(), remedy)


def _packages() -> Iterator[Check]:
    """Requirements of chanlab, as its metadata state them, against what is installed."""
    try:
        requirements = importlib.metadata.requires("chanlab") or []
    except importlib.metadata.PackageNotFoundError:
        yield Check("packages", "chanlab", False, True, "not installed", "pip install -e . (in the checkout)")
        return
    seen: set[str] = set()
    for text in requirements:
        extra = re.search(r"extra == ['\"](\w+)['\"]", text)
        if extra and extra[1] == "dev":
            continue
        name = re.match(r"[\w.-]+", text)
        if name is None or name[0] in seen or not _applies(text):
            continue
        seen.add(name[0])
        yield _package(name[0], text.split(";")[0].strip(), extra[1] if extra else "")


def _package(name: str, requirement: str, extra: str) -> Check:
    group = "extras" if extra else "packages"
    label = f"{name} [{extra}]" if extra else name
    remedy = f"pip install 'chanlab[{extra}]'" if extra else f"pip install '{requirement}'"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(group, label, False, not extra, "not installed", remedy)
    if not _satisfies(version, requirement):
        return Check(group, label, False, not extra, f"{version}, but chanlab needs {requirement}", remedy)
    return Check(group, label, True, not extra, version)


def _applies(requirement: str) -> bool:
    """Whether the requirement's marker holds here, its extra taken as asked for."""
    from packaging.requirements import Requirement

    marker = Requirement(requirement).marker
    extra = re.search(r"extra == ['\"](\w+)['\"]", requirement)
    return marker is None or marker.evaluate({"extra": extra[1] if extra else ""})


def _satisfies(version: str, requirement: str) -> bool:
    from packaging.requirements import Requirement

    return Requirement(requirement).specifier.contains(version, prereleases=True)


def _ray_tracing() -> Check:
    from chanlab.channels.llvm import rt_status

    status = rt_status()
    if not status["works"]:
        return Check("ray tracing", "Sionna RT", False, True, "does not work", str(status["remedy"]))
    uses_llvm = str(status["variant"]).startswith("llvm")
    detail = f"{status['variant']}" + (f", {status['llvm_path']} ({status['llvm_version']})" if uses_llvm else "")
    return Check("ray tracing", "Sionna RT", True, True, detail)


def _gpu() -> Iterator[Check]:
    try:
        import torch
    except Exception as error:  # a broken installation: the packages above tell more
        yield Check("GPU", "PyTorch CUDA", False, False, f"torch can't be imported: {error}", "pip install torch")
        return
    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        yield Check("GPU", "PyTorch CUDA", True, False, f"{torch.cuda.device_count()} × {', '.join(sorted(names))}")
    elif shutil.which("nvidia-smi"):
        remedy = "install a CUDA build of PyTorch: see pytorch.org, or make install TORCH_INDEX_URL=..."
        yield Check("GPU", "PyTorch CUDA", False, False, f"torch {torch.__version__} sees no GPU", remedy)
    else:
        yield Check("GPU", "PyTorch CUDA", False, False, "no NVIDIA GPU here; everything runs on the CPU")
    nvcc = shutil.which("nvcc")
    if nvcc:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
        release = re.search(r"release ([\d.]+)", text)
        yield Check("GPU", "nvcc", True, False, f"{release[1] if release else ''} {nvcc}".strip())
    else:
        yield Check("GPU", "nvcc", False, False, "not found; only chanlab's own CUDA kernels need it")


def _backbones() -> Iterator[Check]:
    try:
        from chanlab.csi import backbone
    except ImportError as error:
        yield Check("backbones", "cache", False, False, str(error))
        return
    for name in backbone.BACKBONES:
        folder = backbone.cache_folder() / name
        if backbone.is_fetched(folder):
            yield Check("backbones", name, True, False, str(folder))
        else:
            yield Check("backbones", name, False, False, "not fetched", f"chanlab backbone fetch {name}")
