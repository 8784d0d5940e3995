"""What a run leaves behind: predictions beside their targets in HDF5, and weights as small files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import h5py
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

import chanlab
from chanlab.errors import ChanlabError, UsageError
from chanlab.weights import learner, save_weights

FORMAT = "chanlab predictions"
SCHEMA_VERSION = 1


class PredictionWriter(Callback):
    """Writes what `predict_step` returns, batch by batch, so that nothing piles up in memory.

    The file holds `prediction` and `target`, complex64 `[sample, rx_ant, tx_ant, horizon, subcarrier]`, and one value
    per sample of `sample_id`, `window`, `snr_db`, `noise_variance` and `speed`. It appears under its name when it is
    complete.

    Args:
        path: The file; `predictions.h5` in the trainer's `default_root_dir` when not given. With several devices each
            writes its own, with its rank before the suffix.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self._file: Any = None
        self._final = Path()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens the file under a temporary name."""
        self._final = Path(self.path or os.path.join(trainer.default_root_dir, "predictions.h5"))
        if trainer.world_size > 1:
            self._final = self._final.with_suffix(f".{trainer.global_rank}{self._final.suffix}")
        try:
            self._final.parent.mkdir(parents=True, exist_ok=True)
            self._file = h5py.File(self._partial, "w")
        except OSError as error:
            raise ChanlabError(f"Predictions can't be written to {self._final}: {error}") from error
        self._file.attrs.update(
            {
                "format": FORMAT,
                "schema_version": SCHEMA_VERSION,
                "chanlab_version": chanlab.__version__,
                "predictor": type(getattr(pl_module, "predictor", pl_module)).__name__,
                "checkpoint": str(trainer.ckpt_path or ""),
                "axes": "sample, rx_ant, tx_ant, horizon, subcarrier",
            }
        )

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: dict[str, Tensor],
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Appends one batch."""
        for name, tensor in outputs.items():
            values = tensor.detach().cpu().numpy()
            if name not in self._file:
                shape = values.shape[1:]
                self._file.create_dataset(name, (0, *shape), values.dtype, maxshape=(None, *shape), chunks=True)
            data = self._file[name]
            data.resize(len(data) + len(values), axis=0)
            data[len(data) - len(values) :] = values

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Closes the file and gives it its name."""
        self._file.close()
        self._file = None
        os.replace(self._partial, self._final)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leaves no partial file behind."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._partial.unlink(missing_ok=True)

    @property
    def _partial(self) -> Path:
        return self._final.with_name(f".{self._final.name}.partial")


class WeightsWriter(Callback):
    """Writes the weights of the predictor (or codec) as `save_weights` does, after each validation and at the end.

    `chanlab test --ckpt_path weights.safetensors` reads them, as `chanlab fit` does to start from them. The file is
    replaced whole: what stands under its name is always complete.

    Args:
        path: The file; `weights.safetensors` in the trainer's `default_root_dir` when not given.
        bits: See `save_weights`.

    Raises:
        UsageError: Unknown `bits`.
    """

    def __init__(self, path: str | None = None, bits: int = 8) -> None:
        if bits not in (6, 8, 16, 32):
            raise UsageError(f"bits must be 6, 8, 16 or 32, not {bits!r}")
        self.path = path
        self.bits: Literal[6, 8, 16, 32] = bits  # type: ignore[assignment]

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes them, unless it is the check before training or no training at all."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._write(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes them."""
        self._write(trainer, pl_module)

    def _write(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            path = self.path or os.path.join(trainer.default_root_dir, "weights.safetensors")
            save_weights(learner(pl_module), path, self.bits)
