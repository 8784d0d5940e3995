"""What is read, from where, and into which split: by source photograph, never by patch."""

import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from chanlab.errors import StoreError, UsageError
from chanlab.jscc import open_images, open_pictures
from chanlab.jscc.image_files import draw_splits, picture_size, read_picture

SAFELY = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from Python 3.11.4 on


def picture(path, size=(20, 30), seed=0, **kwargs):
    """A picture of noise; `size` is height and width."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    Image.fromarray(pixels).save(path, **kwargs)
    return pixels


def splits(collection):
    return {entry.name: entry.split for entry in collection.entries}


def test_folder_is_split_by_source(tmp_path):
    """Both pictures of a pair and all frames of a video lie in one split, whatever the seed."""
    for i in range(6):
        picture(tmp_path / f"pair{i}_left.png")
        picture(tmp_path / f"pair{i}_right.png")
        for frame in range(4):
            picture(tmp_path / f"video{i}" / f"{frame:03d}.png")
    for seed in range(20):
        images = open_images(tmp_path, seed=seed, fractions=(0.5, 0.25, 0.25), group=r"^(pair\d|video\d)")
        assert images.drawn
        assert len({e.source for e in images.entries}) == 12
        by_source = {}
        for entry in images.entries:
            by_source.setdefault(entry.source, set()).add(entry.split)
        assert all(len(found) == 1 for found in by_source.values())
        assert {e.split for e in images.entries} == {"train", "val", "test"}
    assert images.size(0) == (20, 30)


def test_draw_depends_on_names_and_seed_alone():
    names = [f"photo{i}" for i in range(100)]
    drawn = draw_splits(names, 1, (0.8, 0.1, 0.1))
    assert drawn == draw_splits(names[::-1] * 3, 1, (0.8, 0.1, 0.1))
    assert drawn != draw_splits(names, 2, (0.8, 0.1, 0.1))
    assert sorted(drawn.values()).count("test") == 10
    assert set(draw_splits(names, 1, (0.0, 0.0, 1.0)).values()) == {"test"}
    assert sorted(draw_splits(names[:3], 1, (0.98, 0.01, 0.01)).values()) == ["test", "train", "val"]


@pytest.mark.parametrize(("count", "fractions"), [(2, (0.8, 0.1, 0.1)), (9, (0.8, 0.1, 0.2)), (9, (1.2, -0.1, -0.1))])
def test_impossible_draws_are_refused(count, fractions):
    with pytest.raises(UsageError, match=r"split into shares|add up to 1"):
        draw_splits([str(i) for i in range(count)], 1, fractions)


def test_folders_of_splits_are_kept(tmp_path):
    for name in ("train/a.png", "train/cat/b.jpg", "val/a.png", "test/a.png"):
        picture(tmp_path / name)
    images = open_images(tmp_path)
    assert [e.split for e in images.entries] == ["test", "train", "train", "val"]
    assert not images.drawn
    assert len({e.source for e in images.entries}) == 4  # the same name in two folders is not the same photograph
    with pytest.raises(UsageError, match="belongs to one split"):
        open_images(tmp_path, group="^(a)")


def test_manifest_decides(tmp_path):
    pixels = picture(tmp_path / "train" / "x.png")
    picture(tmp_path / "test" / "old.png")  # not listed: left there by something else
    photos = [{"file": "train/x.png", "source": "x", "split": "train"}]
    (tmp_path / "manifest.json").write_text(json.dumps({"photos": photos}))
    images = open_images(tmp_path)
    assert splits(images) == {"x.png": "train"}
    assert np.array_equal(images.read(0), pixels)
    photos.append({"file": "test/old.png", "source": "x", "split": "test"})
    (tmp_path / "manifest.json").write_text(json.dumps({"photos": photos}))
    with pytest.raises(UsageError, match="belongs to one split"):
        open_images(tmp_path)
    photos[1] = {"file": "test/gone.png", "source": "y", "split": "test"}
    (tmp_path / "manifest.json").write_text(json.dumps({"photos": photos}))
    with pytest.raises(StoreError, match=r"gone\.png missing"):
        open_images(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(StoreError, match="damaged"):
        open_images(tmp_path)


def test_kodak_is_for_testing(tmp_path):
    for i in range(1, 25):
        picture(tmp_path / f"kodim{i:02d}.png", (768, 512) if i in (4, 9) else (512, 768))
    images = open_images(tmp_path)
    assert len(images.indices("test")) == 24
    assert {images.size(i) for i in range(24)} == {(512, 768), (768, 512)}


def test_classes_are_folders(tmp_path):
    for split in ("train", "test"):
        for kind in ("cat", "dog"):
            picture(tmp_path / split / kind / "1.png")
    images = open_images(tmp_path, labels="folder")
    assert images.classes == ("cat", "dog")
    assert {(e.name, e.label) for e in images.entries} == {("cat/1.png", 0), ("dog/1.png", 1)}
    picture(tmp_path / "test" / "stray.png")
    with pytest.raises(UsageError, match=r"stray\.png lies in no folder"):
        open_images(tmp_path, labels="folder")


def test_pictures_to_send(tmp_path):
    picture(tmp_path / "one.jpg")
    picture(tmp_path / "more" / "two.png")
    images = open_pictures([tmp_path / "one.jpg", tmp_path / "more"])
    assert [e.name.split("/")[-1] for e in images.entries] == ["one.jpg", "two.png"]
    assert open_pictures(tmp_path / "one.jpg").read(0).shape == (20, 30, 3)
    with pytest.raises(UsageError, match=r"no picture .*three\.png"):
        open_pictures(tmp_path / "three.png")


def test_pictures_are_decoded_as_seen(tmp_path):
    pixels = picture(tmp_path / "rgb.png")
    assert np.array_equal(read_picture(tmp_path / "rgb.png"), pixels)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    picture(tmp_path / "turned.png", exif=exif)
    assert np.array_equal(read_picture(tmp_path / "turned.png"), np.rot90(pixels, -1))
    Image.fromarray(pixels[..., 0]).save(tmp_path / "grey.png")
    assert np.array_equal(read_picture(tmp_path / "grey.png"), np.repeat(pixels[..., :1], 3, -1))
    alpha = np.dstack([pixels, np.zeros((20, 30), np.uint8)])
    Image.fromarray(alpha).save(tmp_path / "clear.png")
    assert (read_picture(tmp_path / "clear.png") == 255).all()
    Image.fromarray(np.full((4, 4), 40000, np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(UsageError, match="more than 8 bits"):
        read_picture(tmp_path / "deep.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "rgb.png").read_bytes()[:200])
    with pytest.raises(UsageError, match=r"cut\.png can't be read"):
        read_picture(tmp_path / "cut.png")
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(UsageError, match=r"text\.png can't be read"):
        picture_size(tmp_path / "text.png")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: None, "there is no"),
        (lambda p: p.mkdir(), "holds no pictures"),
        (lambda p: p.write_text("?"), "neither a folder of pictures nor"),
    ],
)
def test_nothing_to_read(tmp_path, make, message):
    make(tmp_path / "x")
    with pytest.raises(UsageError, match=message):
        open_images(tmp_path / "x")


def test_group_must_name_a_source(tmp_path):
    for i in range(3):
        picture(tmp_path / f"{i}.png")
    with pytest.raises(UsageError, match="no regular expression"):
        open_images(tmp_path, group="(")
    with pytest.raises(UsageError, match="group in parentheses"):
        open_images(tmp_path, group="png")


@pytest.fixture
def cifar(tmp_path):
    """An archive as CIFAR-10's binary version: per picture one byte of class, then red, green and blue planes."""
    rng = np.random.default_rng(0)
    files = {f"data_batch_{i}.bin": rng.integers(0, 256, (20, 3073), np.uint8) for i in range(1, 6)}
    files["test_batch.bin"] = rng.integers(0, 256, (20, 3073), np.uint8)
    for records in files.values():
        records[:, 0] %= 10
    contents = {name: records.tobytes() for name, records in files.items()}
    contents["batches.meta.txt"] = b"airplane\nautomobile\nbird\ncat\ndeer\ndog\nfrog\nhorse\nship\ntruck\n\n"
    path = tmp_path / "cifar-10-binary.tar.gz"
    write_archive(path, contents)
    return path, files


def write_archive(path, contents):
    with tarfile.open(path, "w:gz") as archive:
        for name, data in contents.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def test_cifar_10(cifar, tmp_path):
    path, files = cifar
    images = open_images(path, fractions=(0.8, 0.2, 0.0))
    assert len(images.entries) == 120
    assert len(images.indices("test")) == 20
    assert 5 < len(images.indices("val")) < 40
    assert images.classes[3] == "cat"
    (index,) = [i for i, e in enumerate(images.entries) if e.name == "data_batch_2/00007"]
    raw = files["data_batch_2.bin"][7]
    assert images.entries[index].label == raw[0]
    assert images.read(index)[5, 9].tolist() == [raw[1 + plane * 1024 + 5 * 32 + 9] for plane in range(3)]
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path / "out", **SAFELY)
    for folder in ("out", "out/cifar-10-batches-bin"):
        assert open_images(tmp_path / folder, fractions=(0.8, 0.2, 0.0)).entries == images.entries


def test_cifar_pickles_are_refused(tmp_path):
    """The error names the archive to take instead, whatever the file is called."""
    for name in ("cifar-10-python.tar.gz", "renamed.tar.gz"):
        write_archive(tmp_path / name, {"data_batch_1": b"\x80\x02"})
        with pytest.raises(UsageError, match=r"holds pickles.*cifar-10-binary\.tar\.gz"):
            open_images(tmp_path / name)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(b"\x80\x02")
    with pytest.raises(UsageError, match="holds pickles"):
        open_images(folder)


def test_damaged_cifar(cifar, tmp_path):
    path, files = cifar
    (tmp_path / "cut.tar.gz").write_bytes(path.read_bytes()[:5000])
    with pytest.raises(StoreError, match="can't be read as an archive"):
        open_images(tmp_path / "cut.tar.gz")
    contents = {name: records.tobytes() for name, records in files.items()}
    write_archive(tmp_path / "short.tar.gz", {**contents, "test_batch.bin": b"\0" * 3072})
    with pytest.raises(StoreError, match="no multiple of 3073"):
        open_images(tmp_path / "short.tar.gz")
    del contents["data_batch_4.bin"]
    write_archive(tmp_path / "few.tar.gz", contents)
    with pytest.raises(StoreError, match=r"lacks data_batch_4\.bin"):
        open_images(tmp_path / "few.tar.gz")
