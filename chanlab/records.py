"""Records of measured results: one figure each, with how it came about.

A `results.json` is a list of records. Whatever measures (a benchmark, a recipe's evaluation, the demo) writes them; the
tables of the cards are made from them, so that no figure is copied by hand.
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from chanlab.errors import UsageError

Record = dict[str, Any]
Condition = Mapping[str, str | int | float | bool]

FIELDS = (
    "system",
    "data",
    "split",
    "condition",
    "metric",
    "value",
    "deviation",
    "n",
    "seeds",
    "unit",
    "command",
    "commit",
    "hardware",
    "date",
)
"""Fields of every record, in order; `peer` and `ratio` (and others) may follow."""

KEY = ("system", "data", "split", "condition", "metric", "unit")
"""What a record is about: a newer record with the same key replaces the older one."""


def record(
    *,
    system: str,
    metric: str,
    value: float,
    data: str = "",
    split: str = "",
    condition: Condition | None = None,
    deviation: float | None = None,
    n: int = 1,
    seeds: Sequence[int] = (),
    unit: str = "",
    command: str | None = None,
    **extra: Any,
) -> Record:
    """One measured figure with its origin; commit, hardware and date are filled in.

    Args:
        system: What was measured: `no prediction`, `ar`, `pad`, `llm`, `chanlab`, ...
        metric: Name of the metric, its reduction included: `nmse_pooled`, `windows_per_second`, ...
        value: The figure, in `unit`; NaN and infinity are written as null.
        data: Recipe (or other name) of the data.
        split: Split of the data: `train`, `val`, `test`, or empty.
        condition: What the figure depends on, units in the names: `{"snr_db": 15, "horizon": 2}`.
        deviation: Standard deviation over `seeds` (or what `condition` says), in `unit`.
        n: Number of samples behind the figure.
        seeds: Seeds it was measured with.
        unit: Unit of `value` and `deviation`: `dB`, `bit/s/Hz`, `s`, empty for a plain number.
        command: How to repeat it; the running command by default.
        **extra: More fields, such as `peer` (the figure of what it is compared with) and `ratio`.
    """
    clash = set(extra) & set(FIELDS) - {"commit", "hardware", "date"}
    if clash:
        raise UsageError(f"record(): {sorted(clash)} given twice")
    made: Record = {
        "system": system,
        "data": data,
        "split": split,
        "condition": dict(condition or {}),
        "metric": metric,
        "value": _finite(value),
        "deviation": None if deviation is None else _finite(deviation),
        "n": int(n),
        "seeds": [int(s) for s in seeds],
        "unit": unit,
        "command": this_command() if command is None else command,
        "commit": commit(),
        "hardware": hardware(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    return made | extra


def key(item: Mapping[str, Any]) -> str:
    """What a record is about, as a string to compare and merge by."""
    return json.dumps([item.get(name) for name in KEY], sort_keys=True)


def load_records(path: str | Path) -> list[Record]:
    """Read a `results.json`; a file that does not exist holds no records.

    Raises:
        UsageError: If the file is not a list of records.
    """
    path = Path(path)
    if not path.exists():
        return []
    try:
        items = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON ({error}). Repair or delete it, then measure again.") from error
    if not isinstance(items, list) or not all(
        isinstance(i, dict) and {"system", "metric", "value"} <= set(i) for i in items
    ):
        raise UsageError(f"{path} is not a list of records with at least system, metric and value.")
    return items


def save_records(path: str | Path, records: Iterable[Record], *, replace: bool = False) -> list[Record]:
    """Merge records into a `results.json` (by `KEY`; newer wins) and write it atomically.

    Args:
        path: The file; its folder is created.
        records: New records.
        replace: Forget what the file held before.

    Returns:
        All records now in the file.
    """
    path = Path(path)
    merged = {} if replace else {key(item): item for item in load_records(path)}
    merged.update({key(item): dict(item) for item in records})
    items = list(merged.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(" " + json.dumps(item, ensure_ascii=False, allow_nan=False) for item in items)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(f"[\n{lines}\n]\n" if items else "[]\n", encoding="utf-8")
    temporary.replace(path)
    return items


def select(records: Iterable[Record], **want: Any) -> list[Record]:
    """Records whose fields, or entries of `condition`, equal what is asked: `select(r, system="ar", horizon=1)`."""

    def matches(item: Record) -> bool:
        return all(lookup(item, name) == value for name, value in want.items())

    return [item for item in records if matches(item)]


def over_seeds(records: Iterable[Record]) -> list[Record]:
    """Join runs that differ in their seeds alone: mean and sample standard deviation, `n` and `seeds` added up.

    Args:
        records: Records, each of one run; those of one `KEY` become one. Fields that differ between runs, such as
            intervals, are dropped.
    """
    runs: dict[str, list[Record]] = {}
    for item in records:
        runs.setdefault(key(item), []).append(item)
    joined = []
    for items in runs.values():
        values = [float(item["value"]) for item in items if item["value"] is not None]
        one = {name: value for name, value in items[0].items() if all(item.get(name) == value for item in items)}
        one["value"] = statistics.fmean(values) if values else None
        one["deviation"] = statistics.stdev(values) if len(values) > 1 else items[0]["deviation"]
        one["n"] = sum(int(item["n"]) for item in items)
        one["seeds"] = sorted({int(seed) for item in items for seed in item["seeds"]})
        for name in ("command", "commit", "hardware", "date"):
            one[name] = items[-1].get(name)
        joined.append({name: one[name] for name in (*FIELDS, *(k for k in one if k not in FIELDS))})
    return joined


def lookup(item: Mapping[str, Any], name: str) -> Any:
    """A field of a record, or an entry of its `condition`; None if it has neither."""
    return item[name] if name in item else (item.get("condition") or {}).get(name)


@functools.cache
def commit() -> str | None:
    """Commit of the checkout that chanlab runs from, `-dirty` appended if tracked files changed; None outside one."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        run = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=20
        )
        return run.stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return head + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def hardware() -> str:
    """One line: processor, usable cores, memory, and GPUs if CUDA is in use by this process."""
    parts = [f"{_processor()}, {_cores()} cores"]
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        parts.append(f"{memory / 2**30:.0f} GiB")
    except (ValueError, OSError):
        pass
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        count = torch.cuda.device_count()
        parts.append(f"{count}x {torch.cuda.get_device_name(0)}")
    return ", ".join(parts)


def this_command() -> str:
    """The running command line, paths of the interpreter and the script shortened to their names."""
    if not sys.argv or not sys.argv[0] or sys.argv[0] == "-c":
        return "python"
    script = Path(sys.argv[0])
    if script.name == "__main__.py":
        script = Path(script.parent.name)
    elif script.suffix == ".py":
        root = Path(__file__).resolve().parents[1]
        where = script.resolve()
        shown = where.relative_to(root) if where.is_relative_to(root) else Path(script.name)
        return shlex.join(["python", str(shown), *sys.argv[1:]])
    return shlex.join([script.name, *sys.argv[1:]])


def _finite(value: float) -> float | None:
    value = float(value)
    return value if math.isfinite(value) else None


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return " ".join(line.split(":", 1)[1].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()
