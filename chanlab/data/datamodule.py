"""CSI windows for Lightning: `chanlab fit` and any `Trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from chanlab.channels import PlanarArray
from chanlab.data.impairments import Impairments
from chanlab.data.progress import processes, seen_batches
from chanlab.data.sampler import WindowLoader, WindowSampler
from chanlab.data.store import Store
from chanlab.data.tap_windows import TapWindows
from chanlab.data.views import CSIView, PathWindows
from chanlab.data.windows import CSIWindows, Fetched, collate
from chanlab.errors import UsageError


class CSIDataModule(LightningDataModule):
    """Windows of channel state information over a store, as `CSIBatch`.

    What is None comes from the `view` section of the store's recipe, then from the defaults of `CSIView`.

    Args:
        store: Folder that `chanlab generate` wrote.
        batch_size: Windows per batch and process.
        eval_batch_size: The same for validation, test and prediction; None is `batch_size`.
        num_workers: Processes that read ahead, each for a share of the batches; they live through all epochs.
        mode: `paths`: channels are computed from paths on the learner's device, batch by batch, with new windows in
            each epoch of training. `materialised`: noiseless windows are computed once and kept in a file per split,
            then read at the speed of memory; from epoch to epoch only SNR and noise change.
        view_dir: Folder of materialised views; None is `STORE.views` beside the store.
        snr_db: SNR of the history in training [dB]: a number, or [low, high] to draw from uniformly.
        eval_snr_db: SNR in validation, test and prediction [dB]: a number, or a list, each value of which is applied to
            every window (`CSIBatch.snr_db` tells them apart).
        seed: Seed of window starts, SNR, noise and order; None is the recipe's.
        predict_split: Split that `predict` reads.
        history: Snapshots of the history.
        horizons: Steps asked for after the history: a number H for 1 ... H, or a list (fractions allowed).
        interval: Time between snapshots [s].
        windows_per_sample: Windows drawn from each trajectory (in training: each epoch).
        tx_array: Transmit array.
        rx_array: Receive array.
        num_subcarriers: Number of subcarriers.
        subcarrier_spacing: Their spacing [Hz].
        band: `tdd`: the target on the history's band; `fdd`: on another one.
        fdd_offset: For `fdd`: distance of the bands in subcarriers.
        train_fraction: Share of the training trajectories that are kept, whole, for few-shot training.
        impairments: What stands between the channel and the history beside Gaussian noise; None is nothing.

    Raises:
        UsageError: If an argument doesn't fit the store.
        StoreError: If there is no store (the message says how to make it) or it can't be read.
    """

    def __init__(
        self,
        store: str | Path,
        batch_size: int = 64,
        eval_batch_size: int | None = None,
        num_workers: int = 2,
        mode: Literal["paths", "materialised"] = "paths",
        view_dir: str | Path | None = None,
        snr_db: float | tuple[float, float] = (0.0, 25.0),
        eval_snr_db: float | list[float] = 15.0,
        seed: int | None = None,
        predict_split: Literal["train", "val", "test"] = "test",
        history: int | None = None,
        horizons: int | list[float] | None = None,
        interval: float | None = None,
        windows_per_sample: int | None = None,
        tx_array: PlanarArray | None = None,
        rx_array: PlanarArray | None = None,
        num_subcarriers: int | None = None,
        subcarrier_spacing: float | None = None,
        band: Literal["tdd", "fdd"] | None = None,
        fdd_offset: int | None = None,
        train_fraction: float = 1.0,
        impairments: Impairments | None = None,
    ) -> None:
        super().__init__()
        if batch_size < 1 or (eval_batch_size or 1) < 1 or num_workers < 0:
            raise UsageError("batch_size and eval_batch_size must be >= 1, num_workers >= 0.")
        self.path = Path(store)
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size or batch_size
        self.num_workers = num_workers
        self.snr_db = tuple(snr_db) if isinstance(snr_db, tuple | list) else snr_db
        self.eval_snr_db = eval_snr_db if isinstance(eval_snr_db, int | float) else list(eval_snr_db)
        self.predict_split = predict_split
        self._arguments: dict[str, Any] = {
            "mode": mode,
            "view_dir": view_dir,
            "seed": seed,
            "history": history,
            "horizons": horizons,
            "interval": interval,
            "windows_per_sample": windows_per_sample,
            "tx_array": tx_array,
            "rx_array": rx_array,
            "num_subcarriers": num_subcarriers,
            "subcarrier_spacing": subcarrier_spacing,
            "band": band,
            "fdd_offset": fdd_offset,
            "train_fraction": train_fraction,
            "impairments": impairments,
        }
        self._windows: dict[str, CSIWindows] = {}
        self._store: Store | None = None

    @property
    def view(self) -> CSIView:
        """What is seen of the store: shapes, arrays, subcarriers, times."""
        return self.windows(next(iter(self._windows), "train")).view

    def windows(self, split: str) -> CSIWindows:
        """The windows of a split, opened when first asked for."""
        if split not in self._windows:
            self._store = self._store or Store(self.path)
            snr = self.snr_db if split == "train" else self.eval_snr_db
            self._windows[split] = CSIWindows(self._store, split, snr_db=snr, **self._arguments)
        return self._windows[split]

    def prepare_data(self) -> None:
        """Build materialised views, in one process of each machine."""
        if self._arguments["mode"] == "materialised":
            function = None if self.trainer is None else self.trainer.state.fn
            for split in self._splits(None if function is None else str(function.value)):
                self.windows(split)

    def setup(self, stage: str | None = None) -> None:
        """Open the splits that a stage (`fit`, `validate`, `test`, `predict`, None for all) needs."""
        for split in self._splits(stage):
            self.windows(split)

    def train_dataloader(self) -> WindowLoader:
        """Shuffled windows of `train`; after an interruption it goes on where the trainer stopped."""
        windows = self.windows("train")
        trainer = self.trainer
        epoch, batches = seen_batches(trainer)
        sampler = WindowSampler(
            windows,
            True,
            windows.seed,
            *processes(self.trainer),
            clock=None if trainer is None else lambda: trainer.current_epoch,
            seen=(epoch, batches * self.batch_size),
        )
        return WindowLoader(windows, batch_size=self.batch_size, sampler=sampler, **self._loading())

    def val_dataloader(self) -> DataLoader[Fetched]:
        """Windows of `val` in the order of sample ids."""
        return self._evaluate("val")

    def test_dataloader(self) -> DataLoader[Fetched]:
        """Windows of `test` in the order of sample ids."""
        return self._evaluate("test")

    def predict_dataloader(self) -> DataLoader[Fetched]:
        """Windows of `predict_split` in the order of sample ids."""
        return self._evaluate(self.predict_split)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Compute channels from paths or taps, on the device the batch has reached."""
        if isinstance(batch, PathWindows | TapWindows):
            return next(iter(self._windows.values())).to_batch(batch)
        return batch

    def _evaluate(self, split: str) -> DataLoader[Fetched]:
        windows = self.windows(split)
        sampler = WindowSampler(windows, False, windows.seed, *processes(self.trainer), even=False)
        return DataLoader(windows, batch_size=self.eval_batch_size, sampler=sampler, **self._loading())

    def _loading(self) -> dict[str, Any]:
        return {
            "num_workers": self.num_workers,
            "persistent_workers": self.num_workers > 0,
            "collate_fn": collate,
            "pin_memory": torch.cuda.is_available(),
        }

    def _splits(self, stage: str | None) -> tuple[str, ...]:
        by_stage = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": (self.predict_split,)}
        return by_stage.get(stage or "", ("train", "val", "test"))
