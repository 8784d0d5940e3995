"""The script that gathers photographs, run on packages made here: no network."""

import gzip
import importlib.util
import io
import json
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from chanlab.data.recipe import load_recipe
from chanlab.errors import ChanlabError, UsageError
from chanlab.jscc import ImageDataModule, open_images

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("gather_photos", ROOT / "datasets" / "gather_photos.py")
script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


def scene(seed, size=(288, 300), mode="RGB", kind="PNG", noise=0):
    """A picture with structure of all scales; the same for the same seed, but for noise."""
    rng = np.random.default_rng(seed)
    grains = [np.kron(rng.normal(size=(40 // n, 40 // n, 3)), np.ones((8 * n, 8 * n, 1))) for n in (1, 4, 10)]
    pixels = 128 + 30 * sum(grains)[: size[0], : size[1]] + noise * rng.normal(size=(*size, 3))
    picture = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).convert(mode)
    buffer = io.BytesIO()
    picture.convert("RGB" if mode == "L" else mode).save(buffer, kind)
    return buffer.getvalue()


def write_wheel(folder, contents, name="photo_lib-1.2.0-py3-none-any.whl"):
    with zipfile.ZipFile(folder / name, "w") as archive:
        for path, data in contents.items():
            archive.writestr(path, data)


def write_deb(folder, contents, name="photo-doc_1%3a4.0-2_all.deb", suffix="xz"):
    """A .deb: an ar archive of debian-binary, control.tar and data.tar."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=f"w:{suffix}") as archive:
        for path, content in contents.items():
            member = tarfile.TarInfo(f"./{path}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    parts = {"debian-binary": b"2.0\n", "control.tar.gz": gzip.compress(b"x"), f"data.tar.{suffix}": data.getvalue()}
    raw = b"!<arch>\n"
    for part, content in parts.items():
        raw += f"{part:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        raw += content + b"\n" * (len(content) % 2)
    (folder / name).write_bytes(raw)


LISTING = {
    "name": "photos",
    "description": "A few.",
    "content_hash": "?",
    "packages": [
        {
            "package": "photo-lib",
            "registry": "pypi",
            "licence": "BSD-3-Clause",
            "root": "lib/data/",
            "photos": {
                "cat": {"split": "train", "files": "cat.png", "licence": "CC0-1.0"},
                "pair": {"split": "test", "files": ["l.png", "r.png"]},
            },
            "left_out": {"drawn": ["logo*"]},
        },
        {
            "package": "photo-doc",
            "registry": "debian",
            "licence": "GPL-2+",
            "root": "usr/share/photos/",
            "photos": {"sea": {"split": "val", "files": "sea.jpg"}},
        },
    ],
}


@pytest.fixture
def packages(tmp_path):
    folder = tmp_path / "packages"
    folder.mkdir()
    wheel = {
        "lib/data/cat.png": scene(1, mode="RGBA"),
        "lib/data/l.png": scene(2),
        "lib/data/r.png": scene(2, noise=8),
        "lib/data/logo1.png": scene(9),
        "lib/data/new.png": scene(8),
        "lib/data/icon.png": scene(7, size=(16, 16)),
        "photo_lib-1.2.0.dist-info/licenses/LICENSE": b"BSD",
        "lib/code.py": b"pass",
    }
    write_wheel(folder, wheel)
    write_deb(folder, {"usr/share/photos/sea.jpg": scene(3, kind="JPEG"), "usr/share/doc/photo-doc/copyright": b"GPL"})
    return folder


def gather(out, packages, listing=LISTING, **kwargs):
    return script.gather(out, listing, packages, quiet=True, **kwargs)


def test_gathers_what_is_listed(packages, tmp_path):
    out = tmp_path / "photos"
    manifest = gather(out, packages)
    photos = {p["file"]: p for p in manifest["photos"]}
    assert set(photos) == {"train/cat.png", "test/pair-1.png", "test/pair-2.png", "val/sea.jpg"}
    assert photos["test/pair-1.png"]["source"] == photos["test/pair-2.png"]["source"] == "pair"
    assert photos["train/cat.png"]["licence"] == "CC0-1.0"
    assert photos["val/sea.jpg"] | {"version": "1:4.0-2", "licence": "GPL-2+"} == photos["val/sea.jpg"]
    assert (out / "val/sea.jpg").read_bytes() == scene(3, kind="JPEG")  # as it is
    with Image.open(out / "train/cat.png") as cat:
        assert cat.mode == "RGB"  # the alpha channel is dropped
    assert (out / "licences/photo-lib/LICENSE").read_bytes() == b"BSD"
    assert (out / "licences/photo-doc/copyright").read_bytes() == b"GPL"
    assert manifest["not_looked_at"] == ["photo-lib: lib/data/new.png"]
    images = open_images(out)
    assert {e.name: e.split for e in images.entries} == {Path(f).name: p["split"] for f, p in photos.items()}
    records = {(r["split"], r["metric"]): r["value"] for r in script.count_records(manifest)}
    assert records["test", "sources"] == 1
    assert records["test", "pictures"] == 2
    assert records["train", "pixels"] == pytest.approx(288 * 300 / 1e6)
    assert len(ImageDataModule(out, crop=96).crops("train")) == 9


def test_goes_on_where_it_stopped(packages, tmp_path, monkeypatch):
    """Killed at a photograph: the next run ends with the same files, and writes none of those that were there."""
    whole, out = tmp_path / "whole", tmp_path / "photos"
    gather(whole, packages)
    original, count = script._photo, []

    def dies(*args):
        count.append(args)
        if len(count) == 3:
            raise KeyboardInterrupt
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(script, "_photo", dies)
        with pytest.raises(KeyboardInterrupt):
            gather(out, packages)
    assert not (out / "manifest.json").exists()
    before = (out / "train/cat.png").stat().st_mtime_ns
    gather(out, packages)
    assert (out / "train/cat.png").stat().st_mtime_ns == before
    files = [sorted(p.relative_to(f).as_posix() for p in f.rglob("*") if p.is_file()) for f in (whole, out)]
    assert files[0] == files[1]
    assert (out / "manifest.json").read_bytes() == (whole / "manifest.json").read_bytes()


def listing(**changes):
    changed = json.loads(json.dumps(LISTING))
    for source, split in changes.items():
        for package in changed["packages"]:
            if source in package["photos"]:
                package["photos"][source]["split"] = split
    return changed


def test_a_photograph_leaves_its_old_split(packages, tmp_path):
    gather(tmp_path / "photos", packages)
    (tmp_path / "photos/test/mine.png").write_bytes(scene(5))
    gather(tmp_path / "photos", packages, listing(cat="test"))
    assert sorted(p.name for p in (tmp_path / "photos/test").iterdir()) == [
        "cat.png", "mine.png", "pair-1.png", "pair-2.png",
    ]  # fmt: skip
    assert not list((tmp_path / "photos/train").iterdir())


def test_grey_and_repeated_photographs_are_refused(packages, tmp_path):
    contents = {"usr/share/photos/sea.jpg": scene(3, mode="L", kind="JPEG")}
    write_deb(packages, contents)
    with pytest.raises(ChanlabError, match=r"sea\.jpg is grey"):
        gather(tmp_path / "photos", packages)
    write_deb(packages, {"usr/share/photos/sea.jpg": scene(1, kind="JPEG", noise=5)})
    with pytest.raises(ChanlabError, match=r"(cat|sea)\.\w+ and .*(cat|sea)\.\w+ look like one scene"):
        gather(tmp_path / "photos", packages)


def test_packages_of_other_contents(packages, tmp_path):
    write_deb(packages, {"usr/share/photos/lake.jpg": scene(3, kind="JPEG")}, suffix="gz")
    with pytest.raises(
        ChanlabError, match=r"lacks usr/share/photos/sea\.jpg: photos\.yaml was made from another version"
    ):
        gather(tmp_path / "photos", packages)
    deb = next(packages.glob("*.deb"))
    deb.write_bytes(deb.read_bytes()[:3000])
    with pytest.raises(ChanlabError, match="is damaged"):
        gather(tmp_path / "photos", packages)
    deb.unlink()
    with pytest.raises(UsageError, match=r"holds no \.deb of photo-doc: apt-get download photo-doc"):
        gather(tmp_path / "photos", packages)


def test_no_network_and_no_apt_are_told_of(packages, tmp_path, monkeypatch, capsys):
    deb = next(packages.glob("*.deb"))
    cache = tmp_path / "photos" / ".packages"
    shutil.copytree(packages, cache)
    (cache / deb.name).unlink()
    asked = []

    def fails(command, **kwargs):
        asked.append(command)
        return type(
            "Done", (), {"returncode": 100, "stderr": "W: x\nE: Unable to locate package photo-doc", "stdout": ""}
        )

    monkeypatch.setattr(script.shutil, "which", lambda name: "/usr/bin/apt-get")
    monkeypatch.setattr(script.subprocess, "run", fails)
    with pytest.raises(ChanlabError, match=r"(?s)can't fetch photo-doc.*Unable to locate.*apt-get update.*--packages"):
        script.gather(tmp_path / "photos", LISTING, quiet=True)
    assert asked == [["apt-get", "download", "photo-doc"]]
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match=r"apt-get isn't here.*--packages"):
        script.gather(tmp_path / "photos", LISTING, quiet=True)
    assert script.main(["--out", str(tmp_path / "y"), "--packages", str(tmp_path / "none")]) == 2
    assert "holds no wheel of scikit-image" in capsys.readouterr().err


def test_frames_need_a_decoder(packages, tmp_path, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(script.importlib, "import_module", missing)
    with pytest.raises(ChanlabError, match="pip install av"):
        gather(tmp_path / "photos", packages, frames=10)
    with pytest.raises(UsageError, match="at least 1"):
        gather(tmp_path / "photos", packages, frames=0)


def test_generate_tells_what_the_list_is_for():
    with pytest.raises(UsageError, match=r"lists photographs, not channels: `python datasets/gather_photos\.py`"):
        load_recipe(ROOT / "datasets" / "photos.yaml")


def test_the_list_itself():
    """Each source once, in a split; the numbers in its description are right; what is taken isn't left out by name."""
    listing = yaml.safe_load((ROOT / "datasets" / "photos.yaml").read_text())
    sources = [name for package in listing["packages"] for name in package["photos"]]
    files = [f for package in listing["packages"] for p in package["photos"].values() for f in script._files(p)]
    assert len(sources) == len(set(sources))
    assert f"{len(sources)} natural colour photographs ({len(files)} pictures)" in listing["description"]
    splits = [p["split"] for package in listing["packages"] for p in package["photos"].values()]
    assert {s: splits.count(s) for s in splits} == {"train": 43, "val": 6, "test": 17}
    assert listing["video"]["split"] == "train"
    assert len(listing["content_hash"]) == 64
