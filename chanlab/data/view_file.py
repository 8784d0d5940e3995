"""Materialised views: the noiseless windows of a split in one HDF5 file, read at the speed of memory."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from chanlab.data.views import CSIView
from chanlab.errors import StoreError

FORMAT = "chanlab-view"
VERSION = 1
_CHUNK_BYTES = 64 * 2**20

Rows = npt.NDArray[np.int64]
Compute = Callable[[Rows], tuple[Tensor, Tensor, Tensor]]
"""Rows -> noiseless history and target `[row, rx_ant, tx_ant, time, subcarrier]`, speed `[row]` [m/s]."""


class ViewFile:
    """Reader of a materialised view; may be handed to worker processes.

    Datasets are contiguous, one row per window, so that a window is one copy out of the page cache.

    Args:
        path: The file.

    Raises:
        StoreError: If it isn't a view or is truncated.
    """

    def __init__(self, path: Path) -> None:
        import h5py

        self.path = path
        self._maps: tuple[npt.NDArray[np.complex64], npt.NDArray[np.complex64]] | None = None
        try:
            with h5py.File(path, "r", locking=False) as file:
                if file.attrs.get("format") != FORMAT or file.attrs.get("version") != VERSION:
                    raise ValueError("not a view of this version")
                self.key = str(file.attrs["key"])
                self._layout = [(file[n].shape, file[n].id.get_offset()) for n in ("history", "target")]
                self.power = torch.from_numpy(file["power"][...])
                self.speed = torch.from_numpy(file["speed"][...])
            self._map()
        except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
            raise StoreError(f"{path} can't be read as a view ({error}): delete it, it will be made again.") from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": None}

    def __len__(self) -> int:
        return len(self.power)

    def noisy_histories(self, rows: Rows, draw: Callable[[int, Tensor], None]) -> Tensor:
        """Histories of windows with noise, complex64 `[row, rx_ant, tx_ant, time, subcarrier]`.

        Args:
            rows: Which windows.
            draw: Fills a tensor `[rx_ant, tx_ant, time, subcarrier]` with the noise of the i-th of them.
        """
        mapped = self._map()[0]
        out, noise = empty((len(rows), *mapped.shape[1:])), torch.empty(mapped.shape[1:], dtype=torch.complex64)
        into, drawn = out.numpy(), noise.numpy()
        for i in np.argsort(rows, kind="stable"):  # ascending: neighbours on disk are read together
            draw(int(i), noise)
            np.add(mapped[rows[i]], drawn, out=into[i])  # noise stays in the cache until it is added
        return out

    def target(self, rows: Rows) -> Tensor:
        """Copies of the targets of windows, complex64 `[row, rx_ant, tx_ant, horizon, subcarrier]`."""
        mapped = self._map()[1]
        out = empty((len(rows), *mapped.shape[1:]))
        into = out.numpy()
        for i in np.argsort(rows, kind="stable"):
            into[i] = mapped[rows[i]]
        return out

    def _map(self) -> tuple[npt.NDArray[np.complex64], npt.NDArray[np.complex64]]:
        if self._maps is None:
            history, target = (
                np.asarray(np.memmap(self.path, np.complex64, "r", offset, shape)) for shape, offset in self._layout
            )
            self._maps = (history, target)
        return self._maps


def empty(shape: tuple[int, ...]) -> Tensor:
    """Uninitialised complex64; in a `DataLoader`'s worker in shared memory, so that handing it over costs no copy."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.complex64)
    like = torch.empty(0, dtype=torch.complex64)
    # As torch's own collation does.
    storage = like._typed_storage()._new_shared(int(np.prod(shape)), device=like.device)  # type: ignore[no-untyped-call]
    return like.new(storage).resize_(shape)


def build_view_file(folder: Path, key: dict[str, Any], windows: int, view: CSIView, compute: Compute) -> ViewFile:
    """Open the view with this key, after computing and writing it if it isn't there or isn't whole.

    The file appears under its name when it is complete, so that a kill leaves no half view and processes that build the
    same one don't disturb each other.

    Args:
        folder: Where views are kept; made if missing.
        key: All that the content depends on, plain values.
        windows: Number of windows.
        view: Their shape.
        compute: Computes rows.

    Raises:
        StoreError: If the folder can't be written or the disk is full.
    """
    text = json.dumps({**key, "version": VERSION}, sort_keys=True)
    path = folder / f"{key['split']}-{hashlib.sha256(text.encode()).hexdigest()[:20]}.h5"
    if path.exists():
        try:
            found = ViewFile(path)
            if found.key == text and len(found) == windows:
                return found
        except StoreError:
            pass  # truncated or foreign: made again
    temporary = folder / f".{path.name}.{uuid.uuid4().hex}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(temporary, text, windows, view, compute)
        os.replace(temporary, path)
    except OSError as error:
        raise StoreError(
            f"can't write the materialised view {path} ({error}): free some space, name another folder with view_dir, "
            "or use mode='paths'."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return ViewFile(path)


def _write(path: Path, key: str, windows: int, view: CSIView, compute: Compute) -> None:
    import h5py
    from tqdm import tqdm

    shapes = {"history": view.shape(view.history), "target": view.shape(view.horizon)}
    step = max(1, min(256, _CHUNK_BYTES // (8 * sum(int(np.prod(s)) for s in shapes.values()))))
    with h5py.File(path, "w", alignment_threshold=1, alignment_interval=4096) as file:
        sets = {n: file.create_dataset(n, (windows, *s), "<c8", track_times=False) for n, s in shapes.items()}
        scalars = {n: np.empty(windows, np.float32) for n in ("power", "speed")}
        with tqdm(total=windows, desc=f"materialise {path.name.split('-')[0].lstrip('.')}", unit="window") as bar:
            for start in range(0, windows, step):
                rows = np.arange(start, min(start + step, windows))
                history, target, speed = compute(rows)
                sets["history"][start : start + len(rows)] = history.numpy()
                sets["target"][start : start + len(rows)] = target.numpy()
                scalars["power"][rows] = 2 * torch.view_as_real(history).square().mean((1, 2, 3, 4, 5)).numpy()
                scalars["speed"][rows] = speed.numpy()
                bar.update(len(rows))
        for name, values in scalars.items():
            file.create_dataset(name, data=values, track_times=False)
        sets["history"].attrs["axes"] = sets["target"].attrs["axes"] = "window rx_ant tx_ant time subcarrier"
        file.attrs.update(format=FORMAT, version=VERSION, key=key)
        file.flush()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
