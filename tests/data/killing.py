"""Run generation in a forked process and kill it, at random or exactly between two steps of writing a file."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import h5py  # noqa: F401 - what chanlab imports when it needs it, here once for all forked processes
import jsonargparse  # noqa: F401
import torch
import tqdm

import chanlab.data.splits  # noqa: F401
from chanlab.data import writer
from chanlab.data.generate import generate
from chanlab.data.manifest import MANIFEST
from chanlab.data.recipe import parse_recipe
from chanlab.data.store import Store
from chanlab.errors import StoreError

STEPS = ("_write", "_sync", "_rename", "_sync_folder")


def on_step(action: Callable[[int, str, tuple[Any, ...]], None]) -> None:
    """Call `action(number, name, arguments)` before each step of writing in this process."""
    number = 0

    def before(name: str, step: Callable[..., None]) -> Callable[..., None]:
        def wrapped(*arguments: Any) -> None:
            nonlocal number
            action(number, name, arguments)
            number += 1
            step(*arguments)

        return wrapped

    for name in STEPS:
        setattr(writer, name, before(name, getattr(writer, name)))


def steps_of(text: str, out: Path) -> list[str]:
    """Names of the steps of an undisturbed run."""
    log = out.with_suffix(".steps")

    def note(number: int, name: str, arguments: tuple[Any, ...]) -> None:
        with log.open("a") as file:
            file.write(name + "\n")

    assert run(text, out, prepare=lambda: on_step(note)) == 0
    return log.read_text().split()


def run(
    text: str,
    out: Path,
    kill_before: int | None = None,
    kill_after: float | None = None,
    prepare: Callable[[], None] | None = None,
) -> int:
    """Generate in a forked process.

    Args:
        text: The recipe.
        out: The store.
        kill_before: SIGKILL itself before this step; if it is a write, when half of it is written.
        kill_after: SIGKILL it after this time [s].
        prepare: Called in the child first.

    Returns:
        Its exit code, -9 if it was killed.
    """
    process = mp.get_context("fork").Process(target=_generate, args=(text, out, kill_before, prepare))
    process.start()
    if kill_after is not None:
        time.sleep(kill_after)
        process.kill()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _generate(text: str, out: Path, kill_before: int | None, prepare: Callable[[], None] | None) -> None:
    torch.set_num_threads(1)  # OpenMP's threads don't survive a fork
    tqdm.tqdm.set_lock(
        threading.RLock()
    )  # the parent's is shared over the fork; killed while holding it, it would hang
    if prepare is not None:
        prepare()

    def kill(number: int, name: str, arguments: tuple[Any, ...]) -> None:
        if number == kill_before:
            if name == "_write":
                os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    if kill_before is not None:
        on_step(kill)
    generate(parse_recipe(text), out, progress=False)


def complete_shards(out: Path) -> dict[str, tuple[int, int]]:
    """Inode and modification time of every shard that has its name; each must be readable, listed or not."""
    if (out / MANIFEST).exists():
        try:
            store = Store(out, partial=True)
        except StoreError as error:
            assert "no complete shard yet" in str(error)  # noqa: PT017 - which message, not which type
        else:
            assert store.links(store.sample_ids).num_users == store.num_samples
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.glob("shard-*.h5")}


def computed(log: Path, shards: Iterable[str], shard_size: int) -> set[str]:
    """Names in the source's log that belong to samples of these shards."""
    indices = {int(Path(name).stem.removeprefix("shard-")) for name in shards}
    return {path.name for path in log.iterdir() if int(path.name.split("-")[0]) // shard_size in indices}
