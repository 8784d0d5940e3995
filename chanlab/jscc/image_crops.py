"""Samples of images: which picture each is cut from, where, and what a learner gets of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from chanlab.data.counter import keys, uniform
from chanlab.jscc.pixels import Pixels


class ImageBatch(TypedDict, total=False):
    """What a codec gets.

    Attributes:
        image: Float32 `[batch, 3, height, width]` in [0, 1].
        id: Sample ids, int64 `[batch]`: with the seed, all that a sample's randomness may depend on.
        label: Classes, int64 `[batch]`, if the collection has them.
        base: Base layers as the receiver decodes them, as `image`, in training with `bases` alone.
        base_bytes: Bytes of each base layer, int64 `[batch]`, beside `base`.
    """

    image: Tensor
    id: Tensor
    label: Tensor
    base: Tensor
    base_bytes: Tensor


class Request(NamedTuple):
    """What a loader hands over in place of pixels.

    Attributes:
        split: `train`, `val`, `test` or `predict`.
        epoch: Epoch of training.
        id: Sample ids, int64 `[batch]`.
    """

    split: str
    epoch: int
    id: Tensor


class ImageCrops(Dataset[Request]):
    """Samples of one split: which picture each is cut from, and where.

    Items are asked for as (epoch, id), many at once.

    Args:
        split: Name of the split.
        pixels: The pictures.
        label: Class of each picture, int64 `[picture]`, or None.
        count: Crops of each picture, int64 `[picture]`; ids run through pictures.
        size: Height and width of the crops; None: whole pictures.
        seed: Of positions and mirroring.
        moving: New positions in each epoch (training).
        flip: Mirror half of the crops left to right.
    """

    def __init__(
        self,
        split: str,
        pixels: Pixels,
        label: Tensor | None,
        count: Tensor,
        size: tuple[int, int] | None,
        seed: int,
        moving: bool,
        flip: bool,
    ) -> None:
        self.split = split
        self.pixels = pixels
        self.label = label
        self.size = size
        self.seed = seed
        self.moving = moving
        self.flip = flip
        self.picture = torch.repeat_interleave(torch.arange(len(pixels)), count)
        self._tables = {"cpu": (self.pixels, self.picture)}

    def __len__(self) -> int:
        return len(self.picture)

    def __getitems__(self, indices: Sequence[tuple[int, int]]) -> Request:
        """A batch of one epoch."""
        return Request(self.split, indices[0][0], torch.tensor([i for _, i in indices]))

    def __getitem__(self, index: Any) -> Request:
        """One sample (epoch, id), or a list of them."""
        return self.__getitems__(index if isinstance(index, list) else [index])

    def shape(self, sample: int) -> tuple[int, int]:
        """Height and width of a sample."""
        if self.size is not None:
            return self.size
        index = int(self.picture[sample])
        return int(self.pixels.height[index]), int(self.pixels.width[index])

    def to_batch(self, request: Request, memory: int = 0) -> ImageBatch:
        """Cut what a loader asked for, on the device of its ids.

        Args:
            request: Its ids; all samples have one shape.
            memory: Bytes that pixels may take on that device; where they need more, they are cut on the host.
        """
        device = request.id.device
        place = device if device.type == "cpu" or len(self.pixels.data) <= memory else torch.device("cpu")
        if str(place) not in self._tables:
            self._tables[str(place)] = (self.pixels.to(place), self.picture.to(place))
        pixels, picture = self._tables[str(place)]
        ids = request.id.to(place)
        index = picture[ids]
        size = self.size or self.shape(int(ids[0]))
        key = keys(ids, self.seed, "crop", self.split, request.epoch if self.moving else 0)
        draws = uniform(key, (3,))
        room = torch.stack([pixels.height[index] - size[0], pixels.width[index] - size[1]], 1)
        corner = torch.minimum((draws[:, :2] * (room + 1)).long(), room)
        flip = draws[:, 2] < 0.5 if self.flip else None
        cut = pixels.crops(index, corner[:, 0], corner[:, 1], size, flip)
        batch: ImageBatch = {"image": cut.to(device, non_blocking=True).float().div_(255), "id": request.id}
        if self.label is not None:
            batch["label"] = self.label.to(place)[index].to(device)
        return batch


class ShapeSampler(DistributedSampler[Request]):
    """Whole batches of (epoch, id) of one shape, in the order in which shapes first come.

    Lightning leaves a `DistributedSampler` as it is. Each sample comes once, whatever the number of processes.

    Args:
        crops: The samples.
        batch_size: At most so many a batch.
        rank: This process.
        world_size: Number of processes.
    """

    def __init__(self, crops: ImageCrops, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(crops, num_replicas=world_size, rank=rank, shuffle=False)
        shapes: dict[tuple[int, int], list[int]] = {}
        for sample in range(rank, len(crops), world_size):
            shapes.setdefault(crops.shape(sample), []).append(sample)
        self.batches = [
            [(0, i) for i in members[start : start + batch_size]]
            for members in shapes.values()
            for start in range(0, len(members), batch_size)
        ]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)
