"""Batches of images: a sample depends on (seed, sample id, epoch) alone, and no photograph lies in two splits."""

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image

from chanlab.errors import UsageError
from chanlab.jscc import ImageDataModule
from chanlab.jscc.base_batches import pool_crops
from chanlab.jscc.bases import BaseCodec
from chanlab.jscc.image_crops import Request, ShapeSampler


def write(path, size, code):
    """A photograph whose red is its code, whose green and blue tell row and column."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows, columns = np.indices(size)
    pixels = np.stack([np.full(size, code), rows % 256, columns % 256], -1)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path):
    """Six photographs for training, two for validation, three for testing, of different sizes."""
    sizes = [(40, 60), (60, 40), (50, 50), (34, 200), (40, 60), (100, 90)]
    for i, size in enumerate(sizes):
        write(tmp_path / "photos" / "train" / f"{i}.png", size, i)
    for i in range(2):
        write(tmp_path / "photos" / "val" / f"{i}.png", (48, 64), 100 + i)
    for i, size in enumerate([(48, 64), (64, 48), (96, 128)]):
        write(tmp_path / "photos" / "test" / f"{i}.png", size, 200 + i)
    return tmp_path / "photos"


def samples(data, split, epoch=0):
    """Every sample of a split by its id, cut one at a time."""
    crops = data.crops(split)
    return {i: data.to_batch(Request(split, epoch, torch.tensor([i])))["image"][0] for i in range(len(crops))}


def test_training_batches(folder):
    data = ImageDataModule(folder, batch_size=5, crop=32)
    batches = list(data.batches("train"))
    image = torch.cat([b["image"] for b in batches])
    ids = torch.cat([b["id"] for b in batches])
    assert image.dtype == torch.float32
    assert ids.dtype == torch.int64
    assert image.shape[1:] == (3, 32, 32)
    assert image.min() >= 0
    assert image.max() <= 1
    assert sorted(ids.tolist()) == list(range(len(ids)))
    assert ids.tolist() != sorted(ids.tolist())
    # as many crops as fit side by side: 1, 1, 1, 6, 1 and 3 x 2
    assert len(ids) == 1 + 1 + 1 + 6 + 1 + 6
    codes = (image[:, 0] * 255).round()
    assert (codes == codes[:, :1, :1]).all()  # no crop runs over into another photograph
    assert set(codes[:, 0, 0].tolist()) == set(range(6))
    rows = (image[:, 1] * 255).round()
    assert (rows.diff(dim=1) == 1).all()
    columns = (image[:, 2] * 255).round().diff(dim=2)
    assert ((columns == 1).all((1, 2)) | (columns == -1).all((1, 2))).all()
    assert 0 < (columns[:, 0, 0] == -1).sum() < len(ids)


def test_a_crop_depends_on_seed_id_and_epoch_alone(folder):
    one = ImageDataModule(folder, batch_size=5, crop=32, seed=3)
    other = ImageDataModule(folder, batch_size=16, crop=32, seed=3)
    single = samples(one, "train")
    for data in (one, other):
        for batch in data.batches("train"):
            for i, image in zip(batch["id"].tolist(), batch["image"], strict=True):
                assert torch.equal(image, single[i])
    later = samples(one, "train", epoch=1)
    assert any(not torch.equal(single[i], later[i]) for i in single)
    assert all(single[i][0, 0, 0] == later[i][0, 0, 0] for i in single)  # the photograph of an id stays
    reseeded = samples(ImageDataModule(folder, crop=32, seed=4), "train")
    assert any(not torch.equal(single[i], reseeded[i]) for i in single)


def test_crops_reach_every_place(folder):
    """Corners of a photograph are cut as often as its middle."""
    data = ImageDataModule(folder, crop=32, crops_per_epoch=6000, area_power=0.0, batch_size=6000)
    (batch,) = data.batches("train")
    mine = batch["image"][(batch["image"][:, 0, 0, 0] * 255).round() == 0]  # 40 x 60
    assert len(mine) == 1000
    top = (mine[:, 1, 0, 0] * 255).round().long()
    left = (mine[:, 2, 0].min(1).values * 255).round().long()
    for place, count in ((top, 9), (left, 29)):
        found = torch.bincount(place, minlength=count)
        assert len(found) == count
        expected = 1000 / count
        assert ((found - expected).square() / expected).sum() < count + 6 * (2 * count) ** 0.5  # chi-squared, 6 sigma


def test_shares_follow_area(folder):
    def counts(power):
        data = ImageDataModule(folder, crop=32, crops_per_epoch=1000, area_power=power)
        return torch.bincount(data.crops("train").picture).tolist()

    areas = [2400, 2400, 2500, 6800, 2400, 9000]
    assert sum(counts(0.5)) == 1000
    assert max(counts(0)) - min(counts(0)) <= 1
    assert counts(1) == pytest.approx([1000 * a / sum(areas) for a in areas], abs=1)


def test_scales_add_smaller_copies(folder):
    data = ImageDataModule(folder, crop=16, scales=(1.0, 0.5))
    crops = data.crops("train")
    assert len(crops.pixels) == 12
    assert crops.pixels.height[:2].tolist() == [40, 20]
    assert data.names("train")[:2] == ["0.png", "0.png"]
    small = ImageDataModule(folder, crop=16, max_side=95).crops("train").pixels
    assert small.height.tolist() == [40, 60, 50, 16, 40, 95]
    with pytest.raises(UsageError, match="enlargements"):
        ImageDataModule(folder, scales=(2.0,))


def test_too_small_photographs_are_named_or_left_out(folder):
    with pytest.raises(UsageError, match=r"smaller than crop 48x48: 0\.png \(40x60\).*min_side=48"):
        ImageDataModule(folder, crop=48).crops("train")
    data = ImageDataModule(folder, crop=48, min_side=48)
    assert data.names("train") == ["2.png", "5.png"]
    with pytest.raises(UsageError, match="leaves no training picture"):
        ImageDataModule(folder, crop=48, min_side=500).crops("train")


def test_whole_photographs_of_one_shape_share_batches(folder):
    write(folder / "test" / "3.png", (64, 48), 203)
    data = ImageDataModule(folder, eval_batch_size=2)
    batches = list(data.batches("test"))
    assert [tuple(b["image"].shape) for b in batches] == [(1, 3, 48, 64), (2, 3, 64, 48), (1, 3, 96, 128)]
    assert [b["id"].tolist() for b in batches] == [[0], [1, 3], [2]]
    assert [data.picture("test", i) for i in range(4)] == ["0.png", "1.png", "2.png", "3.png"]


def test_processes_share_samples_without_repeating(folder):
    crops = ImageDataModule(folder, eval_crop=16, eval_crops=3).crops("test")
    shares = [[i for batch in ShapeSampler(crops, 2, rank, 2) for _, i in batch] for rank in range(2)]
    assert sorted(shares[0] + shares[1]) == list(range(9))


def test_fixed_crops_are_fixed(folder):
    data = ImageDataModule(folder, eval_crop=(16, 24), eval_crops=4)
    first = samples(data, "val")
    assert len(first) == 8
    again = samples(ImageDataModule(folder, eval_crop=(16, 24), eval_crops=4, batch_size=1), "val", epoch=5)
    assert all(torch.equal(first[i], again[i]) for i in first)
    assert len({tuple(image[1:, 0, 0].tolist()) for image in first.values()}) > 4  # different places
    columns = torch.stack(list(first.values()))[:, 2].diff(dim=-1)
    assert (columns > 0).all()  # not mirrored


def test_eval_size_shrinks_and_leaves_out(folder, capfd):
    data = ImageDataModule(folder, eval_size=(40, 60))
    shapes = [tuple(b["image"].shape) for b in data.batches("test")]
    assert shapes == [(2, 3, 40, 60), (1, 3, 60, 40)]  # portrait format with sides exchanged
    image = samples(data, "test")[2]  # 96 x 128 becomes 45 x 60, of which rows 2 to 42 are kept
    assert image[1, 0, 30] * 255 == pytest.approx(2.5 * 96 / 45, abs=1.5)
    larger = ImageDataModule(folder, eval_size=(90, 120))
    assert larger.names("test") == ["2.png"]
    with pytest.raises(UsageError, match="no test picture"):
        ImageDataModule(folder, eval_size=(512, 768)).crops("test")
    both = ImageDataModule(folder, eval_max_side=48, eval_crop=32)
    assert both.names("test") == ["0.png", "1.png", "2.png"]


def test_tests_may_come_from_elsewhere(folder, tmp_path):
    for i in range(1, 4):
        write(tmp_path / "kodak" / f"kodim{i:02d}.png", (64, 96), 250)
    data = ImageDataModule(folder, test_images=tmp_path / "kodak", crop=32)
    assert data.names("test") == ["kodim01.png", "kodim02.png", "kodim03.png"]
    assert data.names("val") == ["0.png", "1.png"]
    only = ImageDataModule(test_images=tmp_path / "kodak")
    assert len(only.crops("test")) == 3
    with pytest.raises(UsageError, match="no images="):
        only.crops("train")
    with pytest.raises(UsageError, match="has no train pictures, only test"):
        ImageDataModule(tmp_path / "kodak").crops("train")


def test_any_picture_can_be_sent(folder, tmp_path):
    write(tmp_path / "odd.jpg", (33, 71), 9)
    data = ImageDataModule(predict_images=[str(tmp_path / "odd.jpg"), str(folder / "val")], eval_size=(8, 8))
    batches = list(data.batches("predict"))
    assert [tuple(b["image"].shape) for b in batches] == [(1, 3, 33, 71), (2, 3, 48, 64)]
    assert data.picture("predict", 0).endswith("odd.jpg")


def scene(rng, size=(120, 160)):
    """A picture with structure of all scales, as photographs have."""
    field = sum(np.kron(rng.normal(size=(120 // n, 160 // n, 3)), np.ones((n, n, 1))) * n**0.5 for n in (4, 8, 20, 40))
    return np.clip(128 + 12 * field, 0, 255).astype(np.uint8)[: size[0], : size[1]]


def test_one_scene_in_two_splits_is_found(tmp_path):
    """A stereo pair (shifted, noisy) that nobody declared: the drawn split refuses, and names it."""
    rng = np.random.default_rng(0)
    for i in range(8):
        picture = scene(rng)
        Image.fromarray(picture).save(tmp_path / f"scene{i}a.png")
        shifted = np.roll(picture, 12, axis=1).astype(float) + rng.normal(scale=4, size=picture.shape)
        Image.fromarray(np.clip(shifted, 0, 255).astype(np.uint8)).save(tmp_path / f"scene{i}b.png")
    with pytest.raises(
        UsageError, match=r"scene(\d)[ab]\.png \((train|val|test)\) and scene\1[ab].*look like one scene"
    ):
        ImageDataModule(tmp_path, crop=32).setup()
    ImageDataModule(tmp_path, crop=32, group="(scene.)").setup()
    ImageDataModule(tmp_path, crop=32, allow_similar=True).setup()


def test_memory_is_bounded(folder):
    with pytest.raises(UsageError, match=r"GiB decoded, host_memory is 1e-05 GiB.*max_side="):
        ImageDataModule(folder, crop=32, host_memory=1e-5).crops("train")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give images"),
        ({"images": "x", "batch_size": 0}, "batch_size must be at least 1"),
        ({"images": "x", "crop": 0}, "at least 1x1"),
        ({"images": "nowhere"}, "there is no nowhere"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(UsageError, match=message):
        ImageDataModule(**arguments).crops("train")


# batches with base layers


def with_bases(folder, **options):
    options = {"bases": 40, "bases_codec": "jpeg", "crop": 32, "batch_size": 5} | options
    return ImageDataModule(folder, **options)


def test_pools_hold_the_crops_of_one_epoch_after_another(folder):
    crops = ImageDataModule(folder, crop=32).crops("train")  # 16 samples
    pool = pool_crops(crops, 40)
    assert pool.shape == (40, 3, 32, 32)
    for place in (0, 15, 16, 31, 32, 39):
        image = crops.to_batch(Request("train", place // 16, torch.tensor([place % 16])))["image"][0]
        assert torch.equal(pool[place].float() / 255, image)
    many = ImageDataModule(folder, crop=16, crops_per_epoch=300).crops("train")
    assert torch.equal(pool_crops(many, 301)[:299], pool_crops(many, 299))


def test_training_batches_with_base_layers(folder):
    data = with_bases(folder)
    batches = list(data.batches("train"))
    pool = data.base_batches().pool
    assert torch.equal(pool.image, pool_crops(data.crops("train"), 40))
    ids, sizes = [], []
    mirrored = 0
    for batch in batches:
        assert batch["base"].shape == batch["image"].shape
        assert batch["base"].dtype == torch.float32
        assert batch["base_bytes"].dtype == torch.int64
        for image, base, size in zip(batch["image"], batch["base"], batch["base_bytes"], strict=True):
            image, base = ((255 * x).round().byte() for x in (image, base))
            straight = (pool.image == image).all((1, 2, 3)) & (pool.base == base).all((1, 2, 3))
            turned = (pool.image == image.flip(-1)).all((1, 2, 3)) & (pool.base == base.flip(-1)).all((1, 2, 3))
            (index,) = (straight | turned).nonzero()[:1, 0].tolist()  # a crop of the pool, its base turned along
            mirrored += int(turned.any())
            assert pool.num_bytes[straight | turned].eq(size).any()
            sizes.append(index)
        ids += batch["id"].tolist()
    assert sorted(ids) == list(range(16))
    assert 0 < mirrored < 16
    assert len(set(sizes)) > 8
    assert "base" not in next(data.batches("val"))
    assert not any("base" in batch for batch in ImageDataModule(folder, crop=32).batches("train"))


def test_a_base_layer_depends_on_seed_id_and_epoch_alone(folder, tmp_path):
    single = samples(with_bases(folder, seed=3), "train")
    for batch in with_bases(folder, seed=3, batch_size=16).batches("train"):
        for i, image in zip(batch["id"].tolist(), batch["image"], strict=True):
            assert torch.equal(image, single[i])
    later = samples(with_bases(folder, seed=3), "train", epoch=1)
    assert sum(not torch.equal(single[i], later[i]) for i in single) > 8
    # Every crop of the pool comes, as often as any other.
    data = with_bases(folder, crops_per_epoch=4000, flip=False)
    drawn = data.to_batch(Request("train", 0, torch.arange(4000)))["base_bytes"]
    size, count = data.base_batches().pool.num_bytes.unique(return_counts=True)
    found = torch.stack([(drawn == s).sum() for s in size])
    expected = 100 * count
    assert ((found - expected).square() / expected).sum() < len(size) + 6 * (2 * len(size)) ** 0.5


def test_pools_are_kept_in_their_folder(folder, tmp_path, monkeypatch):
    first = with_bases(folder, bases_folder=tmp_path / "bases")
    first.setup("test")
    assert not (tmp_path / "bases").exists()
    first.setup("fit")
    assert len(list((tmp_path / "bases").iterdir())) == 1
    monkeypatch.setattr(BaseCodec, "at_level", lambda *a, **k: pytest.fail("encoded again"))
    again = with_bases(folder, bases_folder=tmp_path / "bases")
    again.setup("fit")
    assert torch.equal(again.base_batches().pool.base, first.base_batches().pool.base)
    with pytest.raises(pytest.fail.Exception):
        with_bases(folder, bases_folder=tmp_path / "bases", seed=2).setup("fit")


def test_classes_go_with_the_crops_of_a_pool(folder):
    for kind, code in (("dune", 10), ("tree", 20)):
        write(folder.parent / "classes" / "train" / kind / "0.png", (40, 60), code)
        write(folder.parent / "classes" / "val" / kind / "0.png", (40, 60), code)
    data = with_bases(folder.parent / "classes", labels="folder", crops_per_epoch=30)
    (batch,) = (data.to_batch(Request("train", 0, torch.arange(30))),)
    codes = (255 * batch["image"][:, 0, 0, 0]).round()
    assert torch.equal(batch["label"], (codes == 20).long())
    assert set(batch["label"].tolist()) == {0, 1}


def test_errors_of_bases(folder):
    with pytest.raises(UsageError, match="bases must be 0"):
        with_bases(folder, bases=-1)
    with pytest.raises(UsageError, match="speed is an option"):
        with_bases(folder, bases_speed=4).setup("fit")
    with pytest.raises(UsageError, match=r"100000 crops with base layers take 0\.6 GiB, host_memory is 0\.5 GiB"):
        with_bases(folder, bases=100_000, host_memory=0.5).setup("fit")


class Reader(LightningModule):
    """Learns nothing and remembers what it was given."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch, batch_idx):
        assert batch["image"].device == self.device
        self.seen.append((self.current_epoch, batch["id"].clone(), batch["image"].clone()))
        return self.weight * batch["image"].mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/mean", batch["image"].mean())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return batch["image"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def trainer(folder, **kwargs):
    return Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, **kwargs,
    )  # fmt: skip


def fit(folder, root, epochs, checkpoint=None, callbacks=(), **options):
    reader = Reader()
    run = trainer(root, max_epochs=epochs, callbacks=list(callbacks))
    data = ImageDataModule(folder, batch_size=4, crop=32, **options)
    run.fit(reader, data, ckpt_path=checkpoint, weights_only=True)
    return reader


@pytest.mark.parametrize("bases", [0, 40])
def test_a_resumed_run_sees_the_same_crops(folder, tmp_path, bases):
    """Resumed within an epoch and at its end, a run sees the very crops that an uninterrupted one sees."""
    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    options = {"bases": bases, "bases_codec": "jpeg", "bases_folder": tmp_path / "bases"}
    whole = fit(folder, tmp_path, 3, callbacks=[keep], **options)
    assert len(whole.seen) == 12
    for done in (2, 4, 7):
        other = [ModelCheckpoint(tmp_path / "other")]
        resumed = fit(folder, tmp_path, 3, tmp_path / f"step={done}.ckpt", other, **options)
        pairs = list(zip(resumed.seen, whole.seen[done:], strict=True))
        assert all(a[0] == b[0] and torch.equal(a[1], b[1]) and torch.equal(a[2], b[2]) for a, b in pairs)


def test_trainer_tests_and_predicts(folder, tmp_path):
    data = ImageDataModule(folder, predict_images=str(folder / "train"))
    run = trainer(tmp_path)
    mean = run.test(Reader(), data, verbose=False)[0]["val/mean"]
    images = [b["image"] for b in data.batches("test")]
    # Lightning weights batches by their size
    assert mean == pytest.approx(sum(len(x) * float(x.mean()) for x in images) / sum(map(len, images)), rel=1e-5)
    assert len(run.predict(Reader(), data)) == 5  # shapes
