import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from jscc_photographs import photograph

from chanlab.errors import StoreError, UsageError
from chanlab.jscc.bases import Base, BaseCodec, BasePool, mean_colour
from chanlab.jscc.separation import Avif, Jpeg
from chanlab.jscc.separation.channel_codes import Offer
from chanlab.jscc.separation.rate_search import RateSearch, psnr_db


def pictures(count, size=64):
    return np.stack([photograph(size, size + 16, seed) for seed in range(count)])


def crops(count, size=64):
    return torch.from_numpy(pictures(count, size)).permute(0, 3, 1, 2).contiguous()


def test_mean_colour_is_told_in_eight_bits():
    images = torch.zeros(2, 3, 4, 4)
    images[0, :, 0] = torch.tensor([1.0, 0.5, 0.25])[:, None]  # a quarter of the rows
    colour = mean_colour(images)
    assert torch.equal((colour * 255).round(), torch.tensor([[64.0, 32, 16], [0, 0, 0]]))
    seen = torch.from_numpy(photograph(32, 48, 1)).permute(2, 0, 1)[None]
    exact = seen.double().mean((2, 3))
    assert ((mean_colour(seen.float() / 255) * 255).double() - exact).abs().max() <= 0.5001


def test_no_base_is_the_mean_colour_and_no_byte():
    images = crops(2).float() / 255
    base = Base.none(images)
    assert base.image.shape == images.shape
    assert base.num_bytes.tolist() == [0, 0]
    assert torch.equal(base.image[:, :, 5, 7], mean_colour(images))
    assert (base.image - base.image[:, :, :1, :1]).abs().max() == 0
    # of all constant pictures it is (nearly) the closest
    error = (images - base.image).square().mean()
    assert error < (images - base.image - 0.02).square().mean()
    assert error < (images - base.image + 0.02).square().mean()


def test_a_base_is_one_per_image():
    with pytest.raises(UsageError, match="num_bytes"):
        Base(torch.zeros(2, 3, 8, 8), torch.zeros(3, dtype=torch.int64))


def test_levels_and_variants_of_each_picture():
    codec, seen = BaseCodec("avif", speed=8, threads=2), pictures(4)
    coded = codec.at_level(seen, [10, 40, 70, 90], [0, 1, 0, 1])
    for i, (level, variant) in enumerate([(10, "4:2:0"), (40, "4:4:4"), (70, "4:2:0"), (90, "4:4:4")]):
        data = codec.codec.encode(seen[i], level, variant)
        assert coded.num_bytes[i] == len(data)
        assert np.array_equal(coded.image[i], codec.codec.decode(data, seen.shape[1:3]))
    same = codec.at_level(seen[:1].repeat(3, 0), [10, 50, 90])
    quality = [psnr_db(seen[0], image) for image in same.image]
    assert list(same.num_bytes) == sorted(set(same.num_bytes))
    assert quality == sorted(set(quality))


def test_what_threads_make_does_not_depend_on_their_number():
    seen, levels = pictures(6), np.arange(20, 80, 10)
    one = BaseCodec(Jpeg(), threads=1).at_level(seen, levels)
    many = BaseCodec(Jpeg(), threads=4).at_level(seen, levels)
    assert np.array_equal(one.image, many.image)
    assert np.array_equal(one.num_bytes, many.num_bytes)


def test_a_codec_of_ones_own_is_not_forked():
    """A learned codec would hang, or lose its device."""

    class Own:
        name, variants, levels = "own", ("",), 2

        def __init__(self):
            self.places = []

        def encode(self, image, level, variant):
            self.places.append(threading.get_ident())
            return bytes([level])

        def decode(self, data, shape):
            return np.full((*shape, 3), data[0], np.uint8)

    codec = BaseCodec(Own(), threads=2)
    coded = codec.at_level(np.zeros((100, 8, 8, 3), np.uint8), np.arange(100) % 2)
    assert coded.image[:, 0, 0, 0].tolist() == [0, 1] * 50
    assert len(codec.codec.places) == 100
    assert threading.get_ident() not in codec.codec.places


def test_the_best_base_within_a_number_of_bytes():
    codec, picture = BaseCodec("avif", speed=8, threads=2), photograph(64, 64, 3)
    for budget in (150, 300, 301):
        found, reference = codec.within(picture, budget), RateSearch(Avif(speed=8), picture).best(budget)
        assert found.data == reference.data
        assert len(found.data) <= budget
    assert codec.within(picture, 3) is None


def test_what_was_encoded_is_kept(monkeypatch):
    codec, picture = BaseCodec(Jpeg()), photograph(64, 64, 3)
    first = codec.within(picture, 700)
    monkeypatch.setattr(Jpeg, "encode", lambda *a: pytest.fail("encoded again"))
    assert codec.within(picture.copy(), 700) is first
    codec.forget()
    with pytest.raises(pytest.fail.Exception):
        codec.within(picture, 700)


def test_bases_that_fit_a_batch():
    codec, images = BaseCodec("webp", threads=2), crops(3).float() / 255
    base = codec.fitting(images, [[Offer(8 * size + 1, 0.0)] for size in (400, 10, 200)])
    assert base.loss.tolist() == [0, 0, 0]
    assert base.num_bytes[1] == 0
    assert torch.equal(base.image[1], Base.none(images).image[1])
    for i, budget in ((0, 400), (2, 200)):
        found = codec.within(pictures(3)[i], budget)
        assert 0 < base.num_bytes[i] == len(found.data) <= budget
        assert torch.equal(base.image[i], torch.from_numpy(found.image.copy()).permute(2, 0, 1).float() / 255)


def test_of_several_offers_the_best_is_taken_losses_counted():
    codec, images = BaseCodec("webp"), crops(1).float() / 255
    picture = pictures(1)[0]
    few, many = (codec.within(picture, size).psnr_db for size in (300, 400))
    lost = psnr_db(picture, np.full_like(picture, 128))
    level = (many - few) / (many - lost)  # where both are worth the same
    for loss, num_bytes in ((0.9 * level, 400), (1.1 * level, 300), (1.0, 300)):
        offers = [Offer(8 * 400 + 1, loss), Offer(8 * 300 + 1, 0.0)]
        base = codec.fitting(images, [offers])
        assert base.num_bytes[0] == len(codec.within(picture, num_bytes).data)
        assert base.loss[0] == pytest.approx(loss if num_bytes == 400 else 0)
    assert codec.fitting(images, [[]]).num_bytes[0] == 0
    moved = replace(base, uses=base.num_bytes).to("cpu")
    assert moved.loss is not None
    assert moved.uses is not None


def test_an_exact_file_is_sent_safely_and_grey_needs_none():
    """PSNR of equal images is endless: any loss of them would seem as good."""
    offers = [Offer(8 * size + 1, error) for size, error in ((900, 0.09), (800, 0.01), (700, 0.0))]
    base = BaseCodec("webp").fitting(torch.full((1, 3, 64, 64), 200 / 255), [offers])
    assert base.image.unique().tolist() == pytest.approx([200 / 255])
    assert 0 < base.num_bytes[0] <= 700
    assert base.loss[0] == 0
    grey = BaseCodec("webp").fitting(torch.full((1, 3, 64, 64), 128 / 255), [offers])
    assert grey.num_bytes[0] == 0
    assert torch.equal(grey.loss, torch.zeros(1))


def test_errors_of_codecs():
    with pytest.raises(UsageError, match="speed is an option"):
        BaseCodec("jpeg", speed=4)
    with pytest.raises(UsageError, match="threads"):
        BaseCodec("jpeg", threads=0)
    codec = BaseCodec("jpeg")
    with pytest.raises(UsageError, match="uint8"):
        codec.at_level(pictures(1).astype(np.float32), 3)
    with pytest.raises(UsageError, match="levels must be one or 2"):
        codec.at_level(pictures(2), [3, 100])
    with pytest.raises(UsageError, match="variants must be one or 2"):
        codec.at_level(pictures(2), 3, [0])


# pools


class Noted(Jpeg):
    """Notes what it encodes."""

    def __init__(self):
        super().__init__()
        self.noted = {}

    def encode(self, image, level, variant):
        self.noted[image.tobytes()] = (level, variant)
        return super().encode(image, level, variant)


def test_levels_of_a_pool_are_drawn_by_seed_and_index_alone():
    images, codec, other = crops(300, 16), Noted(), Noted()
    pool = BasePool.make(images, BaseCodec(codec, threads=1), levels=(10, 60), seed=3, progress=False)
    drawn = [codec.noted[image.permute(1, 2, 0).numpy().tobytes()] for image in images]
    levels = np.array([level for level, _ in drawn])
    assert 10 <= levels.min() <= 12
    assert 58 <= levels.max() <= 60
    assert levels.mean() == pytest.approx(35, abs=3 * 14.7 / 300**0.5)  # three standard errors of a uniform draw
    assert {variant for _, variant in drawn} == set(codec.variants)
    fewer = BasePool.make(images[:20], other, levels=(10, 60), seed=3, threads=1, progress=False)
    assert torch.equal(fewer.base, pool.base[:20])
    assert torch.equal(fewer.num_bytes, pool.num_bytes[:20])
    BasePool.make(images[:20], other, levels=(10, 60), seed=4, progress=False)
    assert [other.noted[image.permute(1, 2, 0).numpy().tobytes()] for image in images[:20]] != drawn[:20]


def test_a_pool_holds_crops_and_what_they_decode_to():
    images = crops(6)
    pool = BasePool.make(images, BaseCodec("avif", speed=8), levels=(40, 40), threads=2, progress=False)
    assert len(pool) == 6
    assert torch.equal(pool.image, images)
    for i, picture in enumerate(images.permute(0, 2, 3, 1).numpy()):
        made = [Avif(speed=8).encode(np.ascontiguousarray(picture), 40, v) for v in ("4:2:0", "4:4:4")]
        data = next(d for d in made if len(d) == pool.num_bytes[i])
        assert np.array_equal(Avif(speed=8).decode(data, picture.shape[:2]), pool.base[i].permute(1, 2, 0).numpy())
    batch, base = pool.take(torch.tensor([5, 0]))
    assert torch.equal(batch, images[[5, 0]].float() / 255)
    assert torch.equal((base.image * 255).round().byte(), pool.base[[5, 0]])
    assert torch.equal(base.num_bytes, pool.num_bytes[[5, 0]])


def test_a_second_run_reads_the_pool(tmp_path, monkeypatch):
    images = crops(5, 16)
    first = BasePool.make(images, "jpeg", seed=2, progress=False, folder=tmp_path)
    (path,) = tmp_path.iterdir()
    monkeypatch.setattr(BaseCodec, "at_level", lambda *a, **k: pytest.fail("encoded again"))
    again = BasePool.make(images, Jpeg(), seed=2, progress=False, folder=tmp_path)
    monkeypatch.undo()
    assert torch.equal(again.base, first.base)
    assert list(tmp_path.iterdir()) == [path]
    for changed in ({"seed": 3}, {"levels": (5, 94)}, {"codec": Jpeg(strip=False)}, {"images": images.flip(0)}):
        BasePool.make(**({"images": images, "codec": "jpeg", "seed": 2, "progress": False} | changed), folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 5


def test_pools_that_cannot_be_read(tmp_path):
    path = tmp_path / "pool.pt"
    BasePool.make(crops(2, 16), "jpeg", progress=False).save(path)
    assert BasePool.load(path).num_bytes.shape == (2,)
    with pytest.raises(StoreError, match="other crops, levels or codec"):
        BasePool.load(path, "0" * 64)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(StoreError, match="no pool of base layers"):
        BasePool.load(path)


def test_errors_of_pools():
    with pytest.raises(UsageError, match="uint8"):
        BasePool.make(crops(2).float())
    with pytest.raises(UsageError, match="levels must lie in 0 to 100"):
        BasePool.make(crops(2), levels=(5, 101))
