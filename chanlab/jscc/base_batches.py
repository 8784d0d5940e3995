"""Training batches with base layers: crops from a pool in place of fresh ones, and what their base layers cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chanlab.data.counter import keys, uniform
from chanlab.jscc.bases import Base, BaseCodec, BasePool

if TYPE_CHECKING:
    from chanlab.jscc.image_crops import ImageBatch, ImageCrops, Request
    from chanlab.jscc.separation.payload import PayloadRate

_CHUNK = 256  # crops cut at once


def pool_crops(crops: ImageCrops, count: int) -> Tensor:
    """Crops for a pool: those of the first ids in epoch 0, then in epoch 1, and so on.

    Args:
        crops: Samples of training.
        count: How many.

    Returns:
        Uint8 `[count, 3, height, width]`, on the CPU.
    """
    cut = []
    for start in range(0, count, _CHUNK):
        for epoch, ids in _by_epoch(start, min(start + _CHUNK, count), len(crops)):
            images = crops.to_batch(crops[[(epoch, i) for i in ids]])["image"]
            cut.append((255 * images).round().to(torch.uint8))
    return torch.cat(cut)


def _by_epoch(start: int, end: int, length: int) -> list[tuple[int, range]]:
    """Samples start to end - 1 of all epochs in a row, each epoch's ids."""
    epochs = range(start // length, (end - 1) // length + 1)
    return [(e, range(max(start - e * length, 0), min(end - e * length, length))) for e in epochs]


class BaseBatches:
    """Batches of a pool's crops and base layers, drawn at random.

    Which crop a sample takes and whether it is mirrored depends on (seed, sample id, epoch) alone.

    Args:
        pool: Crops and their base layers.
        label: Class of each crop, int64 `[crop]`, or None.
        seed: Of the draw.
        flip: Mirror half of the samples left to right.
    """

    def __init__(self, pool: BasePool, label: Tensor | None, seed: int, flip: bool) -> None:
        self.pool, self.label, self.seed, self.flip = pool, label, seed, flip
        self._pools = {"cpu": pool}

    @classmethod
    def make(
        cls, crops: ImageCrops, count: int, codec: BaseCodec, folder: str | Path | None = None, progress: bool = True
    ) -> BaseBatches:
        """Batches of a pool of new crops, compressed now unless the folder holds them.

        Args:
            crops: Samples of training, whose seed, mirroring and classes are taken over.
            count: Crops in the pool.
            codec: Makes base layers.
            folder: See `BasePool.make`.
            progress: Show a progress bar.
        """
        images = pool_crops(crops, count)
        pool = BasePool.make(images, codec, seed=crops.seed, progress=progress, folder=folder)
        label = None if crops.label is None else crops.label[crops.picture[torch.arange(count) % len(crops)]]
        return cls(pool, label, crops.seed, crops.flip)

    def to_batch(self, request: Request, memory: int = 0) -> ImageBatch:
        """Take what a loader asked for, on the device of its ids.

        Args:
            request: Its epoch and ids.
            memory: Bytes that the pool may take on that device; where it needs more, it stays on the host.
        """
        device = request.id.device
        need = self.pool.image.numel() + self.pool.base.numel()
        place = device if device.type == "cpu" or need <= memory else torch.device("cpu")
        if str(place) not in self._pools:
            self._pools[str(place)] = self.pool.to(place)
        pool = self._pools[str(place)]
        draws = uniform(keys(request.id.to(place), self.seed, "bases", request.split, request.epoch), (2,))
        index = (draws[:, 0] * len(pool)).long().clamp(max=len(pool) - 1)
        image, base = pool.take(index, draws[:, 1] < 0.5 if self.flip else None)
        base = base.to(device)
        batch: ImageBatch = {"image": image.to(device), "id": request.id}
        batch |= {"base": base.image, "base_bytes": base.num_bytes}
        if self.label is not None:
            batch["label"] = self.label.to(place)[index].to(device)
        return batch


def training_bases(base: Base, snr_db: Tensor, rate: PayloadRate, refining: float) -> Base:
    """Base layers of a training batch with the channel uses that they take, a share of them not sent.

    Args:
        base: Base layers.
        snr_db: SNR per complex symbol [dB], `[batch]`.
        rate: Channel uses of payloads, on the device of the base layers.
        refining: Probability that an image is sent with its base layer (PyTorch's generator).

    Returns:
        The same images, with `uses`: 0 where the base layer isn't sent, more than any image has where it can't be.
    """
    taken = rate.uses(8 * base.num_bytes, snr_db).ceil().clamp(max=2**30).long()
    sent = torch.rand(len(snr_db), device=snr_db.device) < refining
    return Base(base.image, base.num_bytes, torch.where(sent, taken, 0))
