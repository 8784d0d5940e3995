"""Received images as files, and what each cost and kept."""

from __future__ import annotations

import json
import math
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from chanlab.errors import ChanlabError


class ReceivedImageWriter(Callback):
    """Writes what `JSCCModule.predict_step` returns: a PNG for each image, SNR and ratio, and `received.json`.

    A file is called after its image, the SNR and, where it was asked for, the ratio: `street_5dB.png`,
    `street_5dB_1_12.png`. `received.json` lists image, SNR [dB], ratio, channel uses, PSNR [dB], whether
    a base layer was lost, and file.

    Args:
        folder: Where; `received` in the trainer's `default_root_dir` when not given.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self._rows: list[dict[str, Any]] = []

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the folder."""
        self._rows = []
        try:
            self._place(trainer).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ChanlabError(f"Images can't be written to {self._place(trainer)}: {error}") from error

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: dict[str, Tensor],
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Writes one batch."""
        from PIL import Image

        pixels = (outputs["image"].float() * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 1, 3, 4, 2).cpu()
        for i, sample in enumerate(outputs["id"].tolist()):
            name = self._name(trainer, sample)
            for j, (snr, ratio) in enumerate(zip(outputs["snr_db"].tolist(), outputs["ratio"].tolist(), strict=True)):
                known = None if math.isnan(ratio) else Fraction(ratio).limit_denominator(10_000)
                asked = "" if known is None else f"_{known.numerator}_{known.denominator}"
                file = f"{name}_{snr:g}dB{asked}.png"
                Image.fromarray(pixels[i, j].numpy()).save(self._place(trainer) / file)
                self._rows.append(
                    {
                        "image": name,
                        "snr_db": snr,
                        "ratio": None if known is None else str(known),
                        "channel_uses": int(outputs["uses"][i, j]),
                        "psnr_db": round(float(outputs["psnr"][i, j]), 3),
                        "lost": bool(outputs["lost"][i, j]),
                        "file": file,
                    }
                )

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the list."""
        target = self._place(trainer) / "received.json"
        target.write_text(json.dumps(self._rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def _place(self, trainer: Trainer) -> Path:
        return Path(self.folder or os.path.join(trainer.default_root_dir, "received"))

    def _name(self, trainer: Trainer, sample: int) -> str:
        """Name of an image without its folders and suffix, kept apart from others of the same name."""
        data = getattr(trainer, "datamodule", None)
        if data is None or not hasattr(data, "picture"):
            return f"{sample:04d}"
        path = Path(data.picture("predict", sample))
        alike = sum(Path(name).stem == path.stem for name in data.names("predict"))
        return path.stem if alike == 1 else f"{path.stem}_{sample:04d}"
