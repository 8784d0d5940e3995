"""Files that survive a kill at any instant: temporary name, write, sync, rename, sync the folder; one writer only."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

from chanlab.errors import StoreError

LOCK = ".lock"
_TEMPORARY = re.compile(r"^\..+\.[0-9a-f]{32}\.tmp$")
_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file grew too big",
}


class WriteError(OSError):
    """The operating system refused a write; `explain` turns it into a message for people."""


@contextlib.contextmanager
def _as_write_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WriteError(error.errno, error.strerror or str(error), error.filename) from error


# Each step is a function of its own so that the tests can kill a process, or fail it, exactly between two of them.
def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)


def _rename(source: Path, target: Path) -> None:
    os.replace(source, target)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make the folder and its parents unless it exists.

    Raises:
        WriteError: If it can't be made.
    """
    with _as_write_error():
        folder.mkdir(parents=True, exist_ok=True)


def write_temporary(target: Path, data: bytes) -> Path:
    """Write `data` beside `target` under a temporary name and sync it; `commit` then gives it its name.

    Raises:
        WriteError: If it can't be written; nothing is left behind then.
    """
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
    with _as_write_error():
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                _write(descriptor, data)
                _sync(descriptor)
            finally:
                os.close(descriptor)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    return temporary


def commit(temporary: Path, target: Path) -> None:
    """Give a synced temporary file its name, durably.

    Raises:
        WriteError: If that fails.
    """
    with _as_write_error():
        _rename(temporary, target)
        _sync_folder(target.parent)


def write_file(target: Path, data: bytes) -> None:
    """Write a file durably and atomically: after a kill it is either the old one or the new one."""
    temporary = write_temporary(target, data)
    try:
        commit(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def is_leftover(name: str) -> bool:
    """Whether a killed writer left the file behind (a temporary or the lock)."""
    return name == LOCK or _TEMPORARY.match(name) is not None


def remove_temporaries(folder: Path) -> None:
    """Remove what killed writers left behind; only while holding the folder's lock."""
    for path in folder.iterdir():
        if _TEMPORARY.match(path.name):
            path.unlink(missing_ok=True)


def tidy(folder: Path) -> None:
    """Remove what killed writers left in a complete store, if this user may and no one writes."""
    if any(is_leftover(path.name) for path in folder.iterdir()):
        with contextlib.suppress(WriteError, StoreError), writer_lock(folder):
            remove_temporaries(folder)


@contextlib.contextmanager
def writer_lock(folder: Path) -> Iterator[None]:
    """Hold the folder as its only writer.

    The kernel drops the lock when its holder dies, however it dies.

    Raises:
        StoreError: If another process holds it; the message names its pid.
        WriteError: If the folder can't be written.
    """
    path = folder / LOCK
    with _as_write_error():
        descriptor = _lock(path)
    try:
        with _as_write_error():
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()} on {os.uname().nodename}\n".encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A holder that ends removes the file: what was locked may be no longer the one in the folder.
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise StoreError(
                f"{path.parent} is being written by another process (pid {holder}): wait for it, stop it, or choose "
                "another --out folder."
            ) from None
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def explain(error: OSError, folder: Path, complete: str) -> StoreError:
    """Turn an operating system's error into one that says what is complete and how to go on.

    Args:
        error: What happened.
        folder: The store.
        complete: What is complete, for example "3 of 10 shards are".
    """
    resume = f"{complete} complete and stay usable; run the same `chanlab generate` again to go on"
    if error.errno in _FULL:
        return StoreError(f"can't write {folder}: {_FULL[error.errno]}. {resume} once there is space.")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return StoreError(
            f"can't write {folder}: it is read-only for this user; choose another --out folder or its mode."
        )
    return StoreError(f"can't write {folder}: {error}. {resume}.")
