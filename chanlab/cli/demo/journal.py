"""Which stages of a run are done, and with what: so that a run goes on where it was interrupted."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chanlab.errors import UsageError


def fingerprint(*parts: Any) -> str:
    """A short name for everything that a stage depends on."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


class Journal:
    """A small JSON file beside the results.

    Args:
        path: The file; made when the first stage begins.

    Raises:
        UsageError: If the file can't be read as a journal.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stages: dict[str, dict[str, Any]] = {}
        if path.exists():
            try:
                self._stages = dict(json.loads(path.read_text(encoding="utf-8")))
            except ValueError as error:
                raise UsageError(f"{path} is damaged ({error}); delete it, or run with --fresh.") from error

    def begun(self, stage: str, key: str) -> bool:
        """Whether a stage was begun, or done, with just this key."""
        return self._stages.get(stage, {}).get("key") == key

    def done(self, stage: str, key: str) -> bool:
        """Whether a stage is done with just this key."""
        return self.begun(stage, key) and bool(self._stages[stage]["done"])

    def facts(self, stage: str) -> dict[str, Any]:
        """What was noted when the stage ended."""
        return dict(self._stages.get(stage, {}).get("facts", {}))

    def seconds(self, stage: str) -> float:
        """Time that the stage took, all its beginnings together [s]."""
        return float(self._stages.get(stage, {}).get("seconds", 0.0))

    @contextmanager
    def stage(self, name: str, key: str) -> Iterator[dict[str, Any]]:
        """Run a stage: yields a dictionary for facts to note; done only if nothing is raised."""
        before = self.seconds(name) if self.begun(name, key) else 0.0
        entry: dict[str, Any] = {"key": key, "done": False, "seconds": before, "facts": {}}
        self._stages[name] = entry
        self._write()
        start = time.monotonic()
        try:
            yield entry["facts"]
            entry["done"] = True
        finally:
            entry["seconds"] = before + time.monotonic() - start
            self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(self._stages, indent=1), encoding="utf-8")
        temporary.replace(self.path)
