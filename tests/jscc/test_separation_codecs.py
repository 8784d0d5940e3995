import io
import os
import stat
import sys

import numpy as np
import pytest
import torch
from jscc_photographs import photograph
from PIL import Image, features

from chanlab.errors import MissingDependencyError, UsageError
from chanlab.jscc.separation import CODECS, Avif, CodecError, CompressAI, Jpeg, Jpeg2000, WebP, find_codec
from chanlab.jscc.separation.containers import StripError, strip_webp
from chanlab.jscc.separation.rate_search import RateSearch

SHAPES = ((96, 96), (61, 83))  # odd sides too: none of them a multiple of a block
MADE = {"jpeg": Jpeg, "jpeg2000": Jpeg2000, "webp": WebP, "avif": lambda strip=True: Avif(strip, speed=8)}
SAVED = {"jpeg": 177, "jpeg2000": 157, "webp": 27, "avif": 289}
"""Bytes that each container has at least besides what is sent."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MADE)
def test_a_stripped_stream_is_rebuilt_bit_for_bit(name, shape):
    codec, image = MADE[name](), photograph(*shape, seed=1)
    for variant in codec.variants:
        for level in (0, codec.levels // 2, codec.levels - 1):
            stream = codec.file(image, level, variant)
            data = codec.encode(image, level, variant)
            assert codec.wrap(data, shape) == stream
            assert len(stream) - len(data) >= SAVED[name]
            with Image.open(io.BytesIO(stream)) as opened:
                assert np.array_equal(codec.decode(data, shape), np.asarray(opened.convert("RGB")))


@pytest.mark.parametrize("name", MADE)
def test_bytes_alone_are_enough_for_a_receiver(name):
    sender, receiver = MADE[name](), MADE[name]()  # nothing is left in an encoder that a decoder would use
    image = photograph(96, 96, seed=2)
    for variant in sender.variants:
        data = sender.encode(image, sender.levels // 2, variant)
        assert np.array_equal(receiver.decode(data, (96, 96)), sender.decode(data, (96, 96)))


@pytest.mark.parametrize("name", MADE)
def test_whole_files_when_nothing_is_stripped(name):
    codec, image = MADE[name](strip=False), photograph(96, 96, seed=1)
    data = codec.encode(image, codec.levels // 2, codec.variants[0])
    with Image.open(io.BytesIO(data)) as opened:
        assert opened.format == codec.format
    assert codec.decode(data, (96, 96)).shape == (96, 96, 3)


@pytest.mark.parametrize("name", MADE)
def test_headers_are_not_shared_by_a_batch(name):
    # A defect of earlier baselines: the bytes of two images together, headers once. Each image here is its own stream.
    codec = MADE[name]()
    one, two = photograph(96, 96, seed=3), photograph(96, 96, seed=4)
    variant, level = codec.variants[0], codec.levels // 2
    alone = codec.encode(two, level, variant)
    codec.encode(one, level, variant)
    assert codec.encode(two, level, variant) == alone
    receiver = MADE[name]()
    assert np.array_equal(receiver.decode(alone, (96, 96)), codec.decode(alone, (96, 96)))


@pytest.mark.parametrize("name", MADE)
def test_quality_grows_with_the_budget(name):
    codec = MADE[name]()
    search = RateSearch(codec, photograph(96, 96, seed=5))
    budgets = (400, 600, 900, 1400, 2200, 3500, 5000)
    found = [search.best(b) for b in budgets]
    held = [(b, f) for b, f in zip(budgets, found, strict=True) if f is not None]
    assert len(held) >= 4
    assert all(len(f.data) <= b for b, f in held)
    quality = [f.psnr_db for _, f in held]
    assert quality == sorted(quality)
    # the budget is used: one level more would not fit
    for budget, f in held:
        if f.level + 1 < codec.levels:
            assert len(codec.encode(search.image, f.level + 1, f.variant)) > budget


@pytest.mark.parametrize("name", MADE)
def test_no_picture_fits_a_few_bytes(name):
    assert RateSearch(MADE[name](), photograph(96, 96, seed=5)).best(8) is None


@pytest.mark.parametrize("name", ["jpeg", "webp", "avif"])  # JPEG 2000 shows what it can of anything
def test_damaged_bytes_are_an_error(name):
    codec = MADE[name]()
    for data in (b"\xff", b"\xff" * 40):
        with pytest.raises(CodecError):
            codec.decode(data, (96, 96))


def test_a_picture_of_another_size_is_an_error():
    codec = Jpeg(strip=False)
    with pytest.raises(CodecError, match="not"):
        codec.decode(codec.encode(photograph(96, 96, seed=1), 50, codec.variants[0]), (64, 64))


def test_lossless_webp_is_not_taken_for_a_lossy_one():
    buffer = io.BytesIO()
    Image.fromarray(photograph(32, 32, seed=1)).save(buffer, "WEBP", lossless=True)
    with pytest.raises(StripError, match="strip=False"):
        strip_webp(buffer.getvalue(), 32, 32)


@pytest.mark.parametrize("name", ["jpeg", "jpeg2000", "webp", "avif"])
def test_a_missing_format_names_the_remedy(name, monkeypatch):
    monkeypatch.setattr(features, "check", lambda feature: False)
    with pytest.raises(MissingDependencyError, match="pip install"):
        find_codec(name)


def test_unknown_codec_and_wrong_images():
    with pytest.raises(UsageError, match="jpeg2000"):
        find_codec("png")
    with pytest.raises(UsageError, match="uint8"):
        Jpeg().encode(np.zeros((8, 8, 3), np.float32), 1, Jpeg.variants[0])
    with pytest.raises(UsageError, match="levels"):
        Jpeg().encode(photograph(8, 8, seed=1), 100, Jpeg.variants[0])


def test_bpg_without_its_programs_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="bpgenc and bpgdec"):
        find_codec("bpg")


@pytest.mark.skipif(os.name != "posix", reason="programs are shell scripts")
def test_bpg_by_programs_with_its_command_line(monkeypatch, tmp_path):
    """Stand-ins with the options of bpgenc and bpgdec: `-q`, `-f`, `-o`."""
    programs = {
        "bpgenc": "o = dict(zip(a[:-1:2], a[1:-1:2])); assert o['-f'] in ('420', '444') and 0 <= int(o['-q']) <= 51\n"
        "Image.open(a[-1]).save(o['-o'], 'JPEG', quality=100 - int(o['-q']))",
        "bpgdec": "assert a[0] == '-o'\nImage.open(a[2]).save(a[1])",
    }
    for name, body in programs.items():
        path = tmp_path / name
        path.write_text(f"#!{sys.executable}\nimport sys\nfrom PIL import Image\na = sys.argv[1:]\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    codec, image = find_codec("bpg"), photograph(48, 64, seed=1)
    data = codec.encode(image, 40, "420")
    assert np.abs(codec.decode(data, (48, 64)).astype(int) - image).mean() < 10
    assert len(data) < len(codec.encode(image, 50, "420"))
    with pytest.raises(CodecError, match="BPG"):
        codec.decode(b"nothing", (48, 64))


class Network:
    """A network with CompressAI's interface: latents are block means with a quantiser's step."""

    def __init__(self, step):
        self.step = step

    def compress(self, x):
        assert x.shape[2] % 16 == 0
        assert x.shape[3] % 16 == 0
        y = torch.nn.functional.avg_pool2d(x, 16)
        return {
            "strings": [[(y / self.step).round().to(torch.uint8).numpy().tobytes()], [b"z" * 5]],
            "shape": y.shape[2:],
        }

    def decompress(self, strings, shape):
        (y,), (z,) = strings
        if z != b"z" * 5:
            raise ValueError("damaged")
        latent = torch.frombuffer(bytearray(y), dtype=torch.uint8).reshape(1, 3, *shape) * self.step
        return {"x_hat": torch.nn.functional.interpolate(latent, scale_factor=16)}


def test_a_learned_codec_with_compressais_interface():
    codec = CompressAI([Network(0.1), Network(0.01)], multiple=16)
    image = photograph(50, 70, seed=1)
    data = codec.encode(image, 1, "")
    out = codec.decode(data, (50, 70))
    assert out.shape == image.shape
    blocks = image[:48, :64].reshape(3, 16, 4, 16, 3).mean((1, 3))
    assert np.abs(out[8:48:16, 8:64:16].astype(float) - blocks).max() < 0.005 * 255 + 1
    assert len(data) == 2 + 2 + 3 * 4 * 5 + 5
    with pytest.raises(CodecError, match="learned"):
        codec.decode(data[:-1][:20], (50, 70))


def test_every_named_codec_is_an_image_codec():
    assert set(CODECS) == {"jpeg", "jpeg2000", "webp", "avif", "bpg"}
