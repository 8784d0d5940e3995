"""Images for Lightning: crops of photographs for training, fixed crops or whole photographs for evaluation.

Pictures are decoded once, into one array of bytes. A loader hands out ids alone; crops are cut where the learner
computes (`ImageDataModule.on_after_batch_transfer`), so that a graphics processor needs no workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from chanlab.data.progress import processes, seen_batches
from chanlab.data.sampler import WindowLoader, WindowSampler
from chanlab.errors import UsageError
from chanlab.jscc.base_batches import BaseBatches
from chanlab.jscc.bases import BaseCodec
from chanlab.jscc.image_crops import ImageBatch, ImageCrops, Request, ShapeSampler
from chanlab.jscc.image_files import ImageCollection, open_images, open_pictures
from chanlab.jscc.near_duplicates import near_duplicates, thumbnail
from chanlab.jscc.pixels import Picture, Pixels

Decoded = TypeVar("Decoded")

Size = int | tuple[int, int]
"""Height and width in pixels, or both as one number."""

_ALIKE_LIMIT = 5000


class ImageDataModule(LightningDataModule):
    """Photographs as `ImageBatch`, split by source.

    Training: random crops, mirrored at random, whose places depend on (seed, sample id, epoch) alone; with `bases` from
    a pool of crops that were compressed before training (`BasePool`). Validation and test: fixed crops that depend on
    (seed, sample id), or photographs as a whole.

    Args:
        images: Folder of pictures, or CIFAR-10; see `open_images` for what decides on the split.
        test_images: Another collection to test on, all of whose pictures for testing (or all, if it names none) count:
            a Kodak folder, for example.
        predict_images: Pictures to send with `predict`, of any size: files or folders; None: those of the test.
        batch_size: Crops per batch and process.
        eval_batch_size: The same in evaluation; whole photographs of one size share a batch. None is `batch_size`.
        crop: Size of training crops.
        crops_per_epoch: Crops in an epoch; None: as many as fit into the photographs side by side.
        area_power: A photograph's share of the crops goes with its area to this power: 1 treats all pixels alike, 0 all
            photographs.
        scales: Sizes at which photographs are cut, 1 being their own; each adds a copy in memory.
        flip: Mirror training crops left to right with probability 1/2.
        eval_size: Photographs of validation and test are shrunk until they just cover this size, then cut to it around
            their middle (in portrait format with sides exchanged). Photographs that would have to be enlarged are left
            out, and told of. None: their own size.
        eval_crop: Size of fixed crops in validation and test; None: whole photographs. Smaller photographs are left
            out, and told of.
        eval_crops: Crops from each photograph.
        max_side: Training photographs with a longer side are shrunk to this one.
        eval_max_side: The same in validation and test, before `eval_size` and `eval_crop`.
        min_side: Training photographs with a shorter side below this (at any scale) are left out; those below `crop`
            are an error otherwise.
        fractions: Shares of train, val and test where the split is drawn.
        group: Regular expression whose first group names the source of a picture; see `open_images`.
        labels: `folder`: a picture's class is the first folder of its path.
        allow_similar: Let pictures that look like one scene lie in different splits of a drawn split.
        seed: Of splits, crops and order.
        threads: Threads that decode.
        host_memory: Limit on decoded pixels [GiB].
        device_memory: Limit on decoded pixels kept on a graphics processor [GiB]; more are cut on the host.
        bases: Crops in the pool that training batches are taken from, each with a base layer; 0: no pool. It is made
            for `fit`, by as many processes as there are processors.
        bases_codec: Image codec of base layers; see `BaseCodec`.
        bases_speed: Of `avif`; see `BaseCodec`.
        bases_folder: Where pools are kept and found again; None: made for each run.

    Raises:
        UsageError: If an argument doesn't fit the pictures.
    """

    def __init__(
        self,
        images: str | Path | None = None,
        test_images: str | Path | None = None,
        predict_images: str | Path | list[str] | None = None,
        batch_size: int = 64,
        eval_batch_size: int | None = None,
        crop: Size = 96,
        crops_per_epoch: int | None = None,
        area_power: float = 0.5,
        scales: Sequence[float] = (1.0,),
        flip: bool = True,
        eval_size: tuple[int, int] | None = None,
        eval_crop: Size | None = None,
        eval_crops: int = 1,
        max_side: int | None = None,
        eval_max_side: int | None = None,
        min_side: int = 0,
        fractions: tuple[float, float, float] = (0.8, 0.1, 0.1),
        group: str | None = None,
        labels: Literal["folder"] | None = None,
        allow_similar: bool = False,
        seed: int = 1,
        threads: int = 4,
        host_memory: float = 16.0,
        device_memory: float = 8.0,
        bases: int = 0,
        bases_codec: str = "avif",
        bases_speed: int | None = None,
        bases_folder: str | Path | None = None,
    ) -> None:
        super().__init__()
        positive = {"batch_size": batch_size, "eval_batch_size": eval_batch_size or 1, "eval_crops": eval_crops}
        positive |= {"crops_per_epoch": crops_per_epoch or 1, "threads": threads}
        for name, value in positive.items():
            if value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}.")
        if bases < 0:
            raise UsageError(f"bases must be 0 (no pool) or more, not {bases}.")
        if images is None and test_images is None and predict_images is None:
            raise UsageError("give images (a folder of pictures or CIFAR-10), test_images or predict_images.")
        if not scales or not all(0 < s <= 1 for s in scales):
            raise UsageError(
                f"scales must lie in (0, 1], not {list(scales)}: a codec learns nothing from enlargements."
            )
        self.images = images
        self.test_images = test_images
        self.predict_images = predict_images
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size or batch_size
        self.crop = _pair(crop)
        self.crops_per_epoch = crops_per_epoch
        self.area_power = area_power
        self.scales = tuple(scales)
        self.flip = flip
        self.eval_size = None if eval_size is None else _pair(eval_size)
        self.eval_crop = None if eval_crop is None else _pair(eval_crop)
        self.eval_crops = eval_crops
        self.max_side = max_side
        self.eval_max_side = eval_max_side
        self.min_side = min_side
        self.fractions = fractions
        self.group = group
        self.labels = labels
        self.allow_similar = allow_similar
        self.seed = seed
        self.threads = threads
        self.host_memory = host_memory
        self.device_memory = device_memory
        self.bases = bases
        self.bases_codec = bases_codec
        self.bases_speed = bases_speed
        self.bases_folder = bases_folder
        self._base_batches: BaseBatches | None = None
        self._collections: dict[str, ImageCollection] = {}
        self._crops: dict[str, ImageCrops] = {}
        self._names: dict[str, list[str]] = {}

    def collection(self, split: str) -> ImageCollection:
        """The collection that a split (`train`, `val`, `test` or `predict`) is taken from."""
        kind = "images"
        if split == "predict" and self.predict_images is not None:
            kind = "predict_images"
        elif split in ("test", "predict") and self.test_images is not None:
            kind = "test_images"
        if kind not in self._collections:
            self._collections[kind] = self._open(kind)
        return self._collections[kind]

    def crops(self, split: str) -> ImageCrops:
        """The samples of a split, decoded when first asked for."""
        if split not in self._crops:
            self._crops[split] = self._train() if split == "train" else self._fixed(split)
        return self._crops[split]

    def base_batches(self) -> BaseBatches:
        """The pool that training batches are taken from, made (or read) when first asked for.

        Raises:
            UsageError: If it doesn't fit into `host_memory`, or the codec is unknown.
        """
        if self._base_batches is None:
            need = 6 * self.bases * self.crop[0] * self.crop[1] / 2**30
            if need > self.host_memory:
                raise UsageError(
                    f"{self.bases} crops with base layers take {need:.1f} GiB, host_memory is {self.host_memory:g} "
                    "GiB: raise it, or lower bases."
                )
            codec, crops = BaseCodec(self.bases_codec, self.bases_speed), self.crops("train")
            first = processes(self.trainer)[0] == 0
            self._base_batches = BaseBatches.make(crops, self.bases, codec, self.bases_folder, progress=first)
        return self._base_batches

    def names(self, split: str) -> list[str]:
        """Names of a split's pictures; a sample's is that of `picture(split, id)`."""
        self.crops(split)
        return self._names[split]

    def picture(self, split: str, sample_id: int) -> str:
        """Name of the picture that a sample is cut from."""
        return self.names(split)[int(self.crops(split).picture[sample_id])]

    def prepare_data(self) -> None:
        """Make the pool of base layers where it is kept, by one process for all."""
        fits = self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        if fits and self.bases and self.bases_folder is not None:
            self.base_batches()

    def setup(self, stage: str | None = None) -> None:
        """Decode the splits that a stage (`fit`, `validate`, `test`, `predict`, None for all but that) needs.

        Training with `bases` makes their pool, too.
        """
        if self.bases and stage in ("fit", None):
            self.base_batches()
        by_stage = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}
        for split in by_stage.get(stage or "", ("train", "val", "test")):
            self.crops(split)

    def train_dataloader(self) -> WindowLoader:
        """Shuffled crops; after an interruption it goes on where the trainer stopped."""
        crops, trainer = self.crops("train"), self.trainer
        epoch, batches = seen_batches(trainer)
        sampler = WindowSampler(
            cast(Any, crops),
            True,
            self.seed,
            *processes(trainer),
            clock=None if trainer is None else lambda: trainer.current_epoch,
            seen=(epoch, batches * self.batch_size),
        )
        return WindowLoader(cast(Any, crops), batch_size=self.batch_size, sampler=sampler, collate_fn=_as_it_is)

    def val_dataloader(self) -> DataLoader[Request]:
        """Samples of `val`, by id within each shape."""
        return self._evaluate("val")

    def test_dataloader(self) -> DataLoader[Request]:
        """Samples of `test`, by id within each shape."""
        return self._evaluate("test")

    def predict_dataloader(self) -> DataLoader[Request]:
        """Pictures to send, as a whole, by id within each shape."""
        return self._evaluate("predict")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Cut the crops on the device that the batch has reached."""
        return self.to_batch(batch) if isinstance(batch, Request) else batch

    def to_batch(self, request: Request) -> ImageBatch:
        """Cut what a loader asked for, on the device of its ids."""
        memory = int(self.device_memory * 2**30)
        if self.bases and request.split == "train":
            return self.base_batches().to_batch(request, memory)
        return self.crops(request.split).to_batch(request, memory)

    def batches(self, split: str, device: torch.device | str = "cpu") -> Iterator[ImageBatch]:
        """Batches of a split without a trainer; training crops are those of epoch 0."""
        loader = self.train_dataloader() if split == "train" else self._evaluate(split)
        for request in loader:
            yield self.to_batch(request._replace(id=request.id.to(device)))

    def _evaluate(self, split: str) -> DataLoader[Request]:
        crops = self.crops(split)
        sampler = ShapeSampler(crops, self.eval_batch_size, *processes(self.trainer))
        return DataLoader(crops, batch_size=None, sampler=sampler)

    def _open(self, kind: str) -> ImageCollection:
        if kind == "predict_images":
            assert self.predict_images is not None
            return open_pictures(self.predict_images)
        path = self.images if kind == "images" else self.test_images
        if path is None:
            raise UsageError("no images= to take this split from: give a folder of pictures or CIFAR-10.")
        collection = open_images(path, seed=self.seed, fractions=self.fractions, group=self.group, labels=self.labels)
        if collection.drawn and kind == "images" and not self.allow_similar:
            _check_alike(collection, self.threads)
        return collection

    def _train(self) -> ImageCrops:
        collection, indices = self._indices("train")
        self._check_memory(collection, indices, self.max_side, sum(s * s for s in self.scales))

        def scaled(index: int) -> list[Picture]:
            picture = _shrunk(collection.read(index), self.max_side)
            return [_resized(picture, scale) for scale in self.scales]

        pictures, owners, small = [], [], []
        for index, copies in zip(indices, self._decoded(indices, scaled), strict=True):
            for copy in copies:
                if min(copy.shape[:2]) < self.min_side:
                    continue
                if copy.shape[0] < self.crop[0] or copy.shape[1] < self.crop[1]:
                    small.append(f"{collection.entries[index].name} ({copy.shape[0]}x{copy.shape[1]})")
                pictures.append(copy)
                owners.append(index)
        if small:
            raise UsageError(
                f"{len(small)} training pictures of {collection.origin} are smaller than crop {_text(self.crop)}: "
                f"{', '.join(small[:3])}; lower crop, or leave them out with min_side={max(self.crop)}."
            )
        if not pictures:
            raise UsageError(f"min_side={self.min_side} leaves no training picture of {collection.origin}.")
        pixels = Pixels.pack(pictures)
        self._names["train"] = [collection.entries[i].name for i in owners]
        tiles = (pixels.height // self.crop[0]) * (pixels.width // self.crop[1])
        total = self.crops_per_epoch or int(tiles.sum())
        count = _shares((pixels.height * pixels.width).double() ** self.area_power, total)
        label = _labels(collection, owners)
        return ImageCrops("train", pixels, label, count, self.crop, self.seed, moving=True, flip=self.flip)

    def _fixed(self, split: str) -> ImageCrops:
        collection, indices = self._indices(split)
        whole = split == "predict"
        self._check_memory(collection, indices, None if whole else self.eval_max_side)
        size = None if whole else self.eval_size

        def read(index: int) -> Picture:
            picture = collection.read(index)
            return picture if whole else _covering(_shrunk(picture, self.eval_max_side), size)

        crop = None if whole else self.eval_crop
        pictures, kept, left_out = [], [], []
        for index, picture in zip(indices, self._decoded(indices, read), strict=True):
            least = crop or (1, 1)
            if (size and set(picture.shape[:2]) != set(size)) or any(np.less(picture.shape[:2], least)):
                left_out.append(collection.entries[index].name)
            else:
                pictures.append(picture)
                kept.append(index)
        asked = f"eval_size {_text(size)}" if size else f"eval_crop {_text(crop or (1, 1))}"
        if not pictures:
            raise UsageError(f"no {split} picture of {collection.origin} is as large as {asked}: lower it.")
        if left_out:
            rank_zero_info(f"{split}: {len(left_out)} smaller than {asked} left out: {', '.join(left_out)}")
        pixels = Pixels.pack(pictures)
        self._names[split] = [collection.entries[i].name for i in kept]
        count = torch.full((len(pixels),), self.eval_crops if crop else 1)
        return ImageCrops(split, pixels, _labels(collection, kept), count, crop, self.seed, moving=False, flip=False)

    def _indices(self, split: str) -> tuple[ImageCollection, list[int]]:
        collection = self.collection(split)
        indices = collection.indices("test" if split == "predict" else split)
        if not indices:
            there = sorted({entry.split for entry in collection.entries})
            raise UsageError(
                f"{collection.origin} has no {split} pictures, only {', '.join(there)}: lay some source photographs "
                f"into a folder {'test' if split == 'predict' else split}."
            )
        return collection, indices

    def _decoded(self, indices: Sequence[int], read: Callable[[int], Decoded]) -> Iterator[Decoded]:
        """Pictures in order, decoded in threads: Pillow works without the interpreter's lock."""
        with ThreadPoolExecutor(self.threads) as pool:
            yield from pool.map(read, indices)

    def _check_memory(
        self, collection: ImageCollection, indices: Sequence[int], max_side: int | None, factor: float = 1.0
    ) -> None:
        need = 3 * factor * sum(_area(collection, i, max_side) for i in indices) / 2**30
        if need > self.host_memory:
            raise UsageError(
                f"{len(indices)} pictures of {collection.origin} take {need:.1f} GiB decoded, host_memory is "
                f"{self.host_memory:g} GiB: raise it, shrink pictures with max_side= (eval_max_side=), or take fewer."
            )


def _pair(size: Size) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    if height < 1 or width < 1:
        raise UsageError(f"a size must be at least 1x1 pixels, not {height}x{width}.")
    return height, width


def _text(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def _as_it_is(request: Any) -> Any:
    """A batch is complete as it is asked for."""
    return request


def _resized(picture: Picture, scale: float) -> Picture:
    if scale == 1.0:
        return picture
    height, width = (max(1, round(scale * side)) for side in picture.shape[:2])
    return np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.LANCZOS))


def _shrunk(picture: Picture, max_side: int | None) -> Picture:
    side = max(picture.shape[:2])
    return picture if max_side is None or side <= max_side else _resized(picture, max_side / side)


def _covering(picture: Picture, size: tuple[int, int] | None) -> Picture:
    """Shrunk to cover a size and cut to it around the middle; as it is if it is too small."""
    if size is None:
        return picture
    height, width = picture.shape[:2]
    if (height > width) != (size[0] > size[1]) and height != width:
        size = (size[1], size[0])
    scale = max(size[0] / height, size[1] / width)
    if scale > 1:
        return picture
    new = (max(size[0], round(scale * height)), max(size[1], round(scale * width)))
    resized = Image.fromarray(picture).resize((new[1], new[0]), Image.Resampling.LANCZOS) if scale < 1 else picture
    top, left = (new[0] - size[0]) // 2, (new[1] - size[1]) // 2
    return np.asarray(resized)[top : top + size[0], left : left + size[1]]


def _shares(weight: Tensor, total: int) -> Tensor:
    """Whole numbers in proportion to weights that add up to a total, int64."""
    edges = (weight.cumsum(0) / weight.sum() * total).round().long()
    edges[-1] = total
    return edges.diff(prepend=torch.zeros(1, dtype=torch.long))


def _labels(collection: ImageCollection, indices: Sequence[int]) -> Tensor | None:
    labels = torch.tensor([collection.entries[i].label for i in indices])
    return labels if (labels >= 0).all() else None


def _area(collection: ImageCollection, index: int, max_side: int | None) -> float:
    height, width = collection.size(index)
    shrink = 1.0 if max_side is None else min(1.0, max_side / max(height, width))
    return height * width * shrink * shrink


def _check_alike(collection: ImageCollection, threads: int) -> None:
    """Refuse a drawn split that parts pictures of one scene."""
    if len(collection.entries) > _ALIKE_LIMIT:
        rank_zero_info(f"{collection.origin}: too many pictures to look for the same scene in two splits.")
        return
    with ThreadPoolExecutor(threads) as pool:
        thumbnails = list(pool.map(lambda i: thumbnail(collection.read(i)), range(len(collection.entries))))
    train, others = collection.indices("train"), [*collection.indices("val"), *collection.indices("test")]
    for first, second in ((train, others), (collection.indices("val"), collection.indices("test"))):
        found = near_duplicates([thumbnails[i] for i in first], [thumbnails[i] for i in second])
        if found:
            i, j, alike = found[0]
            one, other = collection.entries[first[i]], collection.entries[second[j]]
            raise UsageError(
                f"{collection.origin}: {one.name} ({one.split}) and {other.name} ({other.split}) look like one scene "
                f"(correlation {alike:.2f}; {len(found)} such pairs). Name their common source with group=, lay the "
                "pictures in folders train, val and test yourself, or set allow_similar=True."
            )
