"""Predictions that `chanlab predict` wrote, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import h5py
import torch
from torch import Tensor

from chanlab.errors import UsageError
from chanlab.link.ensemble import PERFECT, CSIEnsemble

_NEEDED = ("prediction", "target", "sample_id", "window", "snr_db")


def read_predictions(
    files: Mapping[str, str | Path], base_station: Literal["tx", "rx"] = "tx", snr_db: float | None = None
) -> CSIEnsemble:
    """Read the predictions of several systems for the same windows; perfect CSI is added.

    Args:
        files: HDF5 file of each system (`chanlab predict` writes them), by name.
        base_station: Which end of the link has the M ports; see `chanlab.link.collect`.
        snr_db: SNR of the histories [dB] to take where the files hold several.

    Raises:
        UsageError: If a file can't be read or is no file of predictions, or the systems predicted different windows.
    """
    if not files:
        raise UsageError("give at least one file of predictions.")
    found: CSIEnsemble | None = None
    for name, path in files.items():
        data = _read(Path(path), {"tx": 1, "rx": 2}[base_station], snr_db)
        mine = CSIEnsemble(data["target"], {name: data["prediction"]}, data["sample_id"], data["window"]).sort()
        if found is None:
            found = CSIEnsemble(mine.channel, {PERFECT: mine.channel} | dict(mine.csi), mine.sample_id, mine.window)
            continue
        same = mine.channel.shape == found.channel.shape
        same = same and torch.equal(mine.sample_id, found.sample_id) and torch.equal(mine.window, found.window)
        if not (same and torch.allclose(mine.channel, found.channel, rtol=1e-3, atol=0)):
            raise UsageError(
                f"{path} holds other windows than {next(iter(files.values()))}: predict with the same data."
            )
        found = CSIEnsemble(found.channel, dict(found.csi) | dict(mine.csi), found.sample_id, found.window)
    assert found is not None
    return found


def _read(path: Path, axis: int, snr_db: float | None) -> dict[str, Tensor]:
    try:
        with h5py.File(path, "r") as file:
            missing = [name for name in _NEEDED if name not in file]
            if missing:
                raise UsageError(f"{path} has no {', '.join(missing)}: it isn't a file that `chanlab predict` wrote.")
            data = {name: torch.from_numpy(file[name][()]) for name in _NEEDED}
    except OSError as error:
        raise UsageError(
            f"{path} can't be read: {error}. `chanlab predict --config NAME` writes such files."
        ) from error
    if data["target"].ndim != 5 or data["target"].shape[axis] != 1:
        raise UsageError(
            f"{path} holds channels {list(data['target'].shape)} [sample, rx_ant, tx_ant, horizon, subcarrier]; the "
            "link serves users of one antenna."
        )
    levels = sorted(set(data["snr_db"].tolist()))
    if snr_db is None and max(levels) - min(levels) > 1e-3:
        raise UsageError(f"{path} holds histories from {min(levels):g} to {max(levels):g} dB: choose one with snr_db.")
    kept = torch.ones(len(data["snr_db"]), dtype=torch.bool)
    if snr_db is not None:
        kept = (data["snr_db"] - snr_db).abs() < 1e-3
        if not bool(kept.any()):
            raise UsageError(f"{path} holds no history at {snr_db:g} dB; there are {levels[:8]}.")
    return {name: values[kept].squeeze(axis) if values.ndim == 5 else values[kept] for name, values in data.items()}
