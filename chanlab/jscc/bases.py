"""Base layers of a hybrid codec: images as a conventional codec compresses them, which analogue symbols then refine."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from chanlab.data import counter
from chanlab.errors import StoreError, UsageError
from chanlab.jscc.separation.channel_codes import Offer
from chanlab.jscc.separation.image_codecs import Avif, Bpg, ImageCodec, PillowCodec, find_codec
from chanlab.jscc.separation.rate_search import Compressed, RateSearch, psnr_db

Pictures = npt.NDArray[np.uint8]
"""Red, green and blue, 0 to 255, `[picture, height, width, 3]`."""
_MOST_SEARCHES = 64  # pictures whose encodings are kept, some 50 MB each where they have 512 x 768 pixels
_CHUNK = 32  # pictures that a process takes at once
Job = TypeVar("Job")
Done = TypeVar("Done")


@dataclass(frozen=True)
class Base:
    """Base layers as the receiver decodes them.

    Attributes:
        image: Float32 `[batch, 3, height, width]` in [0, 1]; the mean colour of an image without a base layer.
        num_bytes: Bytes to send, int64 `[batch]`; 0: no base layer.
        uses: Channel uses that sending them takes, int64 `[batch]`; None: not known yet.
        loss: Probability that they are lost, float32 `[batch]`; None: 0.
        power: Of their symbols, over the mean of all, float32 `[batch]`; None: 1, as in training.
    """

    image: Tensor
    num_bytes: Tensor
    uses: Tensor | None = None
    loss: Tensor | None = None
    power: Tensor | None = None

    def __post_init__(self) -> None:
        if self.image.ndim != 4 or self.image.shape[1] != 3 or self.num_bytes.shape != self.image.shape[:1]:
            raise UsageError(
                f"a base has an image [batch, 3, height, width] and num_bytes [batch], not {list(self.image.shape)} "
                f"and {list(self.num_bytes.shape)}."
            )
        each = self.uses, self.loss, self.power
        if any(value is not None and value.shape != self.num_bytes.shape for value in each):
            raise UsageError(f"channel uses, losses and powers of bases are [batch] = {list(self.num_bytes.shape)}.")

    @property
    def taken(self) -> Tensor:
        """`uses`.

        Raises:
            UsageError: If they aren't known.
        """
        if self.uses is None:
            raise UsageError("a base must say how many channel uses it takes: see BaseLayer and PayloadRate.")
        return self.uses

    @classmethod
    def none(cls, images: Tensor) -> Base:
        """No base layer: the mean colours of images `[batch, 3, height, width]` in [0, 1], on their device."""
        flat = mean_colour(images)[:, :, None, None].expand(images.shape).contiguous()
        return cls(flat, torch.zeros(len(images), dtype=torch.int64, device=images.device))

    def to(self, device: torch.device | str) -> Base:
        """The same on a device."""
        others = (None if value is None else value.to(device) for value in (self.uses, self.loss, self.power))
        return Base(self.image.to(device), self.num_bytes.to(device), *others)


def mean_colour(images: Tensor) -> Tensor:
    """Mean colours in 8 bits a channel.

    Args:
        images: `[batch, 3, height, width]` in [0, 1].

    Returns:
        Float32 `[batch, 3]`, multiples of 1/255.
    """
    return ((images.mean((2, 3), dtype=torch.float64).clamp(0, 1) * 255).round() / 255).float()


class CodedPictures(NamedTuple):
    """What a codec makes of pictures.

    Attributes:
        image: Decoded, uint8 `[picture, height, width, 3]`.
        num_bytes: Int64 `[picture]`.
    """

    image: Pictures
    num_bytes: npt.NDArray[np.int64]


class BaseCodec:
    """A conventional image codec that makes base layers, several pictures at a time.

    Many pictures are coded at once: by processes on Linux (`at_level`, codecs that have a name), else by threads, which
    a codec of one's own must bear.

    Args:
        codec: Name of a codec of the separation baseline (`jpeg`, `jpeg2000`, `webp`, `avif`, `bpg`; containers
            stripped), or an `ImageCodec`.
        speed: Of `avif`: 0 (best) to 10 (fastest); None: 4, as the separation baseline has it. The headers that are
            stripped depend on it, so that both ends must have the same.
        threads: Threads; None: as many as the machine has processors.

    Raises:
        UsageError: If the codec is unknown, or has no speed.
        MissingDependencyError: If what it needs is missing.
    """

    def __init__(self, codec: str | ImageCodec = "avif", speed: int | None = None, threads: int | None = None) -> None:
        if speed is not None and codec != "avif":
            raise UsageError(f"speed is an option of 'avif', not of {codec!r}: give a codec that is set up.")
        if threads is not None and threads < 1:
            raise UsageError(f"threads must be at least 1, not {threads}.")
        self.codec = find_codec(codec) if speed is None else Avif(speed=speed)
        self.threads = threads or os.cpu_count() or 1
        self._searches: dict[bytes, RateSearch] = {}

    def at_level(
        self,
        pictures: Pictures,
        levels: int | Sequence[int] | npt.NDArray[np.int64],
        variants: int | Sequence[int] | npt.NDArray[np.int64] = 0,
        progress: bool = False,
    ) -> CodedPictures:
        """Code pictures, each at a quality level.

        Args:
            pictures: uint8 `[picture, height, width, 3]`.
            levels: Level of each picture, or of all; 0 to `codec.levels - 1`.
            variants: Index in `codec.variants`, of each picture or of all.
            progress: Show a progress bar.

        Raises:
            UsageError: If shapes or levels don't fit.
        """
        pictures = _check_pictures(pictures)
        count = len(pictures)
        level = _each("levels", levels, count, self.codec.levels)
        variant = _each("variants", variants, count, len(self.codec.variants))
        image, size = np.empty_like(pictures), np.empty(count, np.int64)
        parts = [np.arange(i, min(i + _CHUNK, count)) for i in range(0, count, _CHUNK)]
        jobs = ((pictures[p], level[p], [self.codec.variants[v] for v in variant[p]]) for p in parts)
        with tqdm(total=count, unit="picture", disable=not progress) as bar:
            for part, coded in zip(parts, self._coded(jobs, len(parts)), strict=True):
                image[part], size[part] = coded
                bar.update(len(part))
        return CodedPictures(image, size)

    def within(self, picture: npt.NDArray[np.uint8], num_bytes: int) -> Compressed | None:
        """The picture of highest PSNR in at most so many bytes; None if none fits.

        What was encoded of the last pictures is kept for the next number of bytes, see `forget`.

        Args:
            picture: uint8 `[height, width, 3]`.
            num_bytes: Bytes.
        """
        return self._search(picture).best(int(num_bytes)) if num_bytes > 0 else None

    def _search(self, picture: npt.NDArray[np.uint8]) -> RateSearch:
        key = hashlib.sha256(repr(picture.shape).encode() + picture.tobytes()).digest()
        if key not in self._searches and len(self._searches) >= _MOST_SEARCHES:
            self.forget()
        return self._searches.setdefault(key, RateSearch(self.codec, picture))

    def fitting(self, images: Tensor, offers: Sequence[Sequence[Offer]], progress: bool = False) -> Base:
        """Base layers of highest expected PSNR, each in the bytes of one of its image's offers.

        Args:
            images: `[batch, 3, height, width]` in [0, 1], on any device; compressed with 8 bits per value.
            offers: What a link carries, for each image; see `useful_offers`. A lost image is shown in mid-grey.
            progress: Show a progress bar.

        Returns:
            The base layers and their probability of loss, on the device of the images; none where nothing that fits is
            better than mid-grey.
        """
        pixels = _to_8_bits(images.detach().cpu())
        base = replace(Base.none(pixels.float() / 255), loss=torch.zeros(len(images)))
        pictures = pixels.permute(0, 2, 3, 1).numpy()
        chosen: dict[int, tuple[Compressed, Offer, float] | None] = {}

        def search(i: int) -> None:
            picture = np.ascontiguousarray(pictures[i])
            lost_db = psnr_db(picture, np.full_like(picture, 128))
            chosen[i] = self._search(picture).expected_best(offers[i], lost_db)

        self._threaded(search, range(len(images)), progress)
        for i, found in chosen.items():  # here, not by threads: they don't share the caller's inference mode
            if found is not None and base.loss is not None:
                file, offer, _ = found
                base.loss[i] = offer.error
                base.image[i] = torch.from_numpy(file.image.copy()).permute(2, 0, 1).float() / 255
                base.num_bytes[i] = len(file.data)
        return base.to(images.device)

    def forget(self) -> None:
        """Let go of what `within` has encoded."""
        self._searches.clear()

    def _coded(self, jobs: Iterable[Job], count: int) -> Iterator[CodedPictures]:
        """Chunks of pictures, by processes: what Python does around the coders would take turns in threads."""
        work = functools.partial(_code, self.codec)
        workers = min(self.threads, count)
        if workers < 2:
            yield from map(work, jobs)
            return
        pool: Executor = ThreadPoolExecutor(workers)
        call: Callable[[Job], CodedPictures] = work
        if sys.platform == "linux" and isinstance(self.codec, PillowCodec | Bpg):
            # Forked, so that codecs needn't be pickled. What others run, PyTorch say, may not survive that.
            pool, call = ProcessPoolExecutor(workers, get_context("fork")), functools.partial(_inherit, id(work))
            _inherited[id(work)] = work
        try:
            with pool:
                try:
                    yield from pool.map(call, jobs)
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
        finally:
            _inherited.pop(id(work), None)

    def _threaded(self, work: Callable[[Job], Done], jobs: Iterable[Job], progress: bool) -> None:
        held = list(jobs)
        with (
            ThreadPoolExecutor(self.threads) as pool,
            tqdm(total=len(held), unit="picture", disable=not progress) as bar,
        ):
            try:
                for _ in pool.map(work, held):
                    bar.update()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


class BasePool:
    """Crops and a base layer of each, made before training.

    Attributes:
        image: Crops, uint8 `[n, 3, height, width]`.
        base: Their base layers, uint8 `[n, 3, height, width]`.
        num_bytes: Bytes of each base layer, int64 `[n]`.
        digest: Of crops, codec, levels and seed.
    """

    def __init__(self, image: Tensor, base: Tensor, num_bytes: Tensor, digest: str) -> None:
        if image.shape != base.shape or image.dtype != torch.uint8 or base.dtype != torch.uint8:
            raise UsageError("crops and base layers must be uint8 and of one shape.")
        if num_bytes.shape != image.shape[:1]:
            raise UsageError(f"num_bytes must be [{len(image)}], one per crop, not {list(num_bytes.shape)}.")
        self.image, self.base, self.num_bytes, self.digest = image, base, num_bytes, digest

    @classmethod
    def make(
        cls,
        images: Tensor,
        codec: BaseCodec | str | ImageCodec = "avif",
        levels: tuple[int, int] = (5, 95),
        seed: int = 1,
        threads: int | None = None,
        progress: bool = True,
        folder: str | Path | None = None,
    ) -> BasePool:
        """Code each crop at a level and in a variant that depend on (seed, its index) alone.

        Args:
            images: Crops, uint8 `[n, 3, height, width]`.
            codec: See `BaseCodec`.
            levels: Least and highest level, drawn uniformly with both ends.
            seed: Of the draw.
            threads: See `BaseCodec`, whose own count holds.
            progress: Show a progress bar.
            folder: Where pools are kept: one of the same digest is read, another one made and written.

        Raises:
            UsageError: If crops or levels don't fit.
            StoreError: If a file in the folder is damaged.
        """
        if images.ndim != 4 or images.shape[1] != 3 or images.dtype != torch.uint8:
            raise UsageError(f"crops must be uint8 [n, 3, height, width], not {images.dtype} {list(images.shape)}.")
        coder = codec if isinstance(codec, BaseCodec) else BaseCodec(codec, threads=threads)
        if not 0 <= levels[0] <= levels[1] < coder.codec.levels:
            raise UsageError(f"levels must lie in 0 to {coder.codec.levels - 1}, least first, not {levels}.")
        crops = images.detach().cpu().contiguous()
        digest = pool_digest(crops, coder.codec, levels, seed)
        path = None if folder is None else Path(folder) / f"bases-{digest[:16]}.pt"
        if path is not None and path.is_file():
            return cls.load(path, digest)
        draw = counter.uniform(counter.keys(torch.arange(len(crops)), seed, "bases"), (2,)).double()
        span = torch.tensor([levels[1] - levels[0] + 1, len(coder.codec.variants)])
        level, variant = (draw * span).long().T.numpy()
        coded = coder.at_level(crops.permute(0, 2, 3, 1).numpy(), level + levels[0], variant, progress)
        base = torch.from_numpy(coded.image).permute(0, 3, 1, 2).contiguous()
        pool = cls(crops, base, torch.from_numpy(coded.num_bytes), digest)
        if path is not None:
            pool.save(path)
        return pool

    def __len__(self) -> int:
        return len(self.image)

    def to(self, device: torch.device | str) -> BasePool:
        """The same on a device."""
        return BasePool(self.image.to(device), self.base.to(device), self.num_bytes.to(device), self.digest)

    def take(self, index: Tensor, flip: Tensor | None = None) -> tuple[Tensor, Base]:
        """Crops, float32 `[batch, 3, height, width]` in [0, 1], and their base layers.

        Args:
            index: Int64 `[batch]`.
            flip: Which to mirror left to right, bool `[batch]`.
        """
        image, base = self.image[index], self.base[index]
        if flip is not None:
            flip = flip[:, None, None, None]
            image, base = (torch.where(flip, x.flip(-1), x) for x in (image, base))
        return image.float() / 255, Base(base.float() / 255, self.num_bytes[index])

    def save(self, path: str | Path) -> None:
        """Write the pool; the file is replaced at once."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}.new")
        held = {name: getattr(self, name).cpu() for name in ("image", "base", "num_bytes")}
        torch.save(held | {"digest": self.digest}, new)
        new.replace(path)

    @classmethod
    def load(cls, path: str | Path, digest: str | None = None) -> BasePool:
        """Read a pool that `save` wrote.

        Args:
            path: The file.
            digest: The digest that it must have; None: any.

        Raises:
            StoreError: If it is missing, damaged or another pool.
        """
        try:
            held = torch.load(path, map_location="cpu", weights_only=True)
            pool = cls(held["image"], held["base"], held["num_bytes"], held["digest"])
        except Exception as error:  # torch.load raises whatever it meets
            raise StoreError(f"{path} is no pool of base layers ({error}): delete it, it is made again.") from error
        if digest is not None and pool.digest != digest:
            raise StoreError(f"{path} is a pool of other crops, levels or codec: delete it, it is made again.")
        return pool


def pool_digest(images: Tensor, codec: ImageCodec, levels: tuple[int, int], seed: int) -> str:
    """Digest of what decides on a pool: crops `[n, 3, height, width]` on the CPU, codec with its options, levels, seed.

    Versions of the codec's library are left out: a pool that was made with another one serves as well. A learned codec
    is known by its name alone.
    """
    plain = {k: v for k, v in sorted(vars(codec).items()) if isinstance(v, bool | int | float | str)}
    what = (list(images.shape), type(codec).__name__, codec.name, codec.levels, codec.variants, plain, levels, seed)
    digest = hashlib.sha256(repr(what).encode())
    digest.update(images.contiguous().numpy().data)
    return digest.hexdigest()


_inherited: dict[int, Callable[[Any], CodedPictures]] = {}


def _inherit(key: int, job: Any) -> CodedPictures:
    return _inherited[key](job)


def _code(codec: ImageCodec, job: tuple[Pictures, npt.NDArray[np.int64], list[str]]) -> CodedPictures:
    pictures, levels, variants = job
    shape = (pictures.shape[1], pictures.shape[2])
    image, size = np.empty_like(pictures), np.empty(len(pictures), np.int64)
    for i, (level, variant) in enumerate(zip(levels, variants, strict=True)):
        data = codec.encode(np.ascontiguousarray(pictures[i]), int(level), variant)
        image[i], size[i] = codec.decode(data, shape), len(data)
    return CodedPictures(image, size)


def _to_8_bits(images: Tensor) -> Tensor:
    return (images.double().clamp(0, 1) * 255).round().to(torch.uint8)


def _check_pictures(pictures: Pictures) -> Pictures:
    pictures = np.asarray(pictures)
    if pictures.ndim != 4 or pictures.shape[3] != 3 or pictures.dtype != np.uint8:
        raise UsageError(
            f"pictures must be uint8 [picture, height, width, 3], not {pictures.dtype} {list(pictures.shape)}."
        )
    return pictures


def _each(
    name: str, given: int | Sequence[int] | npt.NDArray[np.int64], count: int, limit: int
) -> npt.NDArray[np.int64]:
    """One value for each picture, within 0 to limit - 1."""
    values = np.asarray(given, np.int64)
    if values.ndim == 0:
        values = np.full(count, values)
    if values.shape != (count,) or (count and not 0 <= values.min() <= values.max() < limit):
        raise UsageError(f"{name} must be one or {count} (one per picture) of 0 to {limit - 1}.")
    return values
