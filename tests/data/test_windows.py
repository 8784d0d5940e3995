import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from window_store import make_store

from chanlab.channels import cfr_along
from chanlab.data.coverage import anchors_around, usable_samples
from chanlab.data.windows import CSIBatch, CSIWindows, collate
from chanlab.errors import UsageError


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("windows") / "store")


@pytest.fixture(params=["paths", "materialised"])
def windows(store, request, tmp_path):
    def make(split="train", **kwargs):
        return CSIWindows(store, split, mode=request.param, view_dir=tmp_path / "views", **kwargs)

    return make


def direct(windows, row, times, offset=0.0):
    """The channel of a window straight from the whole trajectory's paths."""
    links = windows.store.links([int(windows.sample_ids[row])])
    start = windows.starts(np.array([row]))[0]
    view = windows.view
    return cfr_along(
        links.paths,
        links.times,
        start + times,
        view.tx_array,
        view.rx_array,
        view.frequencies(),
        links.tx_orientation,
        links.orientations,
        band_offset=offset,
    )[0]


def test_history_and_target_are_the_channel_along_the_trajectory(windows):
    w = windows("val", snr_db=float("inf"))
    assert len(w) == 6 * w.view.windows_per_sample
    item = w[7]
    assert item.history.shape == (2, 4, 5, 6)
    assert item.target.shape == (2, 4, 3, 6)
    assert item.history.dtype == item.target.dtype == torch.complex64
    whole = direct(w, 7, torch.arange(8, dtype=torch.float64) * 2.5e-3)
    scale = whole.abs().max()
    torch.testing.assert_close(item.history / scale, whole[:, :, :5] / scale, rtol=0, atol=1e-5)
    torch.testing.assert_close(item.target / scale, whole[:, :, 5:] / scale, rtol=0, atol=1e-5)
    assert item.noise_variance == 0
    assert 2 <= item.speed <= 15
    assert (item.sample_id, item.window) == (w.sample_ids[7], w.window_ids[7])


def test_noise_has_the_power_that_the_snr_says(windows):
    clean, noisy = windows("train", snr_db=float("inf"), by_epoch=False), windows("train", snr_db=6.0, by_epoch=False)
    rows = range(len(clean))
    a, b = clean.batch(rows), noisy.batch(rows)
    torch.testing.assert_close(b.target, a.target)
    power = a.history.abs().square().mean((1, 2, 3, 4))
    torch.testing.assert_close(b.noise_variance, power / 10**0.6)
    noise = (b.history - a.history) / b.noise_variance.sqrt()[:, None, None, None, None]
    assert noise.abs().square().mean().item() == pytest.approx(1, rel=0.03)
    assert noise.real.square().mean().item() == pytest.approx(0.5, rel=0.05)
    flat = noise.flatten(1)
    correlation = (flat @ flat.mH).abs() / flat.shape[1]
    assert (correlation - torch.diag(correlation.diag())).max() < 0.4  # windows share no noise
    assert (b.snr_db == 6).all()


def test_items_depend_on_neither_batch_nor_worker_nor_order(windows):
    w = windows("train", snr_db=(0.0, 20.0))
    found = {}
    for batch_size, workers, order in (
        (1, 0, range(72)),
        (7, 2, range(72)),
        (16, 2, np.random.default_rng(0).permutation(72).tolist()),
    ):
        loader = DataLoader(w, batch_size, sampler=order, num_workers=workers, collate_fn=collate)
        for fetched in loader:
            batch = w.to_batch(fetched)
            for i, key in enumerate(zip(batch.sample_id.tolist(), batch.window.tolist(), strict=True)):
                item = CSIBatch(*(x[i] for x in batch))
                first = found.setdefault(key, item)
                scale = first.target.abs().max()
                torch.testing.assert_close(item.history / scale, first.history / scale, rtol=0, atol=2e-5)
                torch.testing.assert_close(item.target / scale, first.target / scale, rtol=0, atol=2e-5)
                assert item.snr_db == first.snr_db
                assert item.speed == first.speed
                if w.mode == "materialised":
                    assert torch.equal(item.history, first.history)
    assert len(found) == len(w) == 72


def test_noise_of_fetched_paths_is_identical_in_any_batch(store):
    w = CSIWindows(store, "train")
    alone, together = w.__getitems__([9]), w.__getitems__([30, 9, 2])
    assert torch.equal(alone.noise[0], together.noise[1])
    assert alone.delay.shape[1] <= together.delay.shape[1]


def test_training_draws_anew_each_epoch_and_evaluation_does_not(windows):
    train, val = windows("train", snr_db=(0.0, 20.0)), windows("val", snr_db=(0.0, 20.0))
    first, again, other = train.batch([(0, 3)]), train.batch([(0, 3)]), train.batch([(1, 3)])
    assert torch.equal(first.history, again.history)
    assert not torch.equal(first.history, other.history)
    assert first.snr_db != other.snr_db
    assert torch.equal(first.target, other.target) == (train.mode == "materialised")
    assert torch.equal(val.batch([(0, 3)]).history, val.batch([(4, 3)]).history)


def test_both_modes_give_the_same_windows(store, tmp_path):
    a = CSIWindows(store, "test", snr_db=[10.0])
    b = CSIWindows(store, "test", snr_db=[10.0], mode="materialised", view_dir=tmp_path)
    for x, y in zip(a.batch(range(8)), b.batch(range(8)), strict=True):
        scale = max(float(y.abs().max()), 1e-30)
        torch.testing.assert_close(x / scale, y / scale, rtol=0, atol=2e-5)


def test_starts_fill_the_trajectory(store):
    w = CSIWindows(store, "train", windows_per_sample=50)
    rows = np.arange(len(w))
    durations = {int(i): float(store.links([i]).times[0, -1]) for i in np.unique(w.sample_ids)}
    room = np.array([durations[int(i)] for i in w.sample_ids]) - w.view.span
    share = w.starts(rows) / room
    assert share.min() >= 0
    assert share.max() < 1
    assert np.histogram(share, 4, (0, 1))[0] == pytest.approx(len(w) / 4, rel=0.2)
    assert (w.starts(rows) == w.starts(rows)).all()
    other_seed = CSIWindows(store, "train", windows_per_sample=50, seed=6)
    assert (other_seed.starts(rows) != w.starts(rows)).all()


def test_fdd_shifts_the_target_alone(windows):
    w = windows("val", snr_db=float("inf"), band="fdd", fdd_offset=40)
    item, tdd = w[2], windows("val", snr_db=float("inf"))[2]
    torch.testing.assert_close(item.history, tdd.history)
    expected = direct(w, 2, torch.arange(5, 8, dtype=torch.float64) * 2.5e-3, offset=40 * 180e3)
    scale = expected.abs().max()
    torch.testing.assert_close(item.target / scale, expected / scale, rtol=0, atol=1e-5)
    assert (item.target - tdd.target).abs().max() > 0.1 * scale


def test_horizons_may_be_any_list(windows):
    w = windows("val", snr_db=float("inf"), horizons=[0, 0.5, 4])
    expected = direct(w, 0, torch.tensor([4, 4.5, 8], dtype=torch.float64) * 2.5e-3)
    scale = expected.abs().max()
    torch.testing.assert_close(w[0].target / scale, expected / scale, rtol=0, atol=1e-5)
    torch.testing.assert_close(w[0].target[..., 0, :], w[0].history[..., -1, :], rtol=1e-4, atol=float(1e-5 * scale))


def test_a_list_of_snrs_gives_each_window_at_each(windows):
    w, clean = windows("val", snr_db=[0.0, 20.0]), windows("val", snr_db=float("inf"))
    assert len(w) == 2 * len(clean)
    batch, channel = w.batch([6, 7]), clean[3]
    assert batch.snr_db.tolist() == [0, 20]
    noise = batch.history - channel.history
    torch.testing.assert_close(noise[0], noise[1] * 10, rtol=1e-3, atol=float(1e-5 * noise[0].abs().max()))


def test_an_snr_range_is_filled_uniformly(store):
    w = CSIWindows(store, "train", snr_db=(-5.0, 15.0), windows_per_sample=10)
    snr = torch.cat([w.__getitems__([(e, i) for i in range(0, 180, 3)]).snr_db for e in range(5)])
    assert snr.min() >= -5
    assert snr.max() <= 15
    assert torch.histc(snr, 4, -5, 15).tolist() == pytest.approx([75] * 4, rel=0.3)


def test_static_users_fade_by_doppler(tmp_path):
    w = CSIWindows(make_store(tmp_path / "still", length=0.0), "val", snr_db=float("inf"))
    assert w.starts(np.arange(3)).tolist() == pytest.approx([0, 8 * 2.5e-3, 16 * 2.5e-3])
    assert (w[0].history[..., 0, :] - w[0].history[..., -1, :]).abs().max() > 0


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5])
def test_few_shot_keeps_whole_trajectories(windows, fraction):
    """A share of the users of `train` with all their windows, the same in every epoch, part of any larger share."""
    few, whole, more = (windows(train_fraction=f, snr_db=10.0) for f in (fraction, 1.0, min(1.0, 2 * fraction)))
    users = [set(w.sample_ids.tolist()) for w in (few, whole, more)]
    assert len(users[0]) == max(1, round(fraction * len(users[1])))
    assert users[0] < users[2] <= users[1]
    assert len(few) == len(users[0]) * few.view.windows_per_sample
    row = len(few) - 1
    same = int(np.flatnonzero((whole.sample_ids == few.sample_ids[row]) & (whole.window_ids == few.window_ids[row]))[0])
    scale = few[row].history.abs().max()
    torch.testing.assert_close(few[row].history / scale, whole[same].history / scale, rtol=0, atol=2e-5)
    assert windows(train_fraction=fraction, seed=8).sample_ids.tolist() != few.sample_ids.tolist()


def test_few_shot_leaves_validation_alone(windows):
    assert windows("val", train_fraction=0.1).sample_ids.tolist() == windows("val").sample_ids.tolist()


def test_short_trajectories_are_skipped_and_counted(store, caplog):
    w = CSIWindows(store, "train", interval=0.02)  # a window of 0.14 s: users faster than 7.1 m/s leave 1 m before
    assert 0 < w.skipped["too short"] < 18
    assert len(w) == (18 - w.skipped["too short"]) * w.view.windows_per_sample
    assert "too short" in caplog.text
    with pytest.raises(UsageError, match=r"none of the 18 samples .* longer or slower"):
        CSIWindows(store, "train", interval=0.2)


def test_samples_with_an_anchor_without_paths_are_skipped(store):
    def links(ids):
        true = store.links(ids)
        mask = true.paths.mask.clone()
        mask[torch.as_tensor(ids) == blank, 3] = False
        return SimpleNamespace(times=true.times, paths=SimpleNamespace(mask=mask), num_users=true.num_users)

    blank = int(store.splits["train"][2])
    fake = SimpleNamespace(
        splits=store.splits, links=links, num_anchors=store.num_anchors, path=store.path, payload="paths"
    )
    ids, slack, skipped = usable_samples(fake, "train", CSIWindows(store, "train").view)
    assert blank not in ids
    assert len(ids) == len(slack) == 17
    assert skipped == {"too short": 0, "without paths": 1}


def test_anchors_enclose_the_window():
    times = torch.arange(6, dtype=torch.float64).expand(4, -1)
    start = torch.tensor([0.0, 1.5, 3.0, 4.9], dtype=torch.float64)
    assert anchors_around(times, start, 1.0).tolist() == [[0, 1, 2], [1, 2, 3], [3, 4, 5], [3, 4, 5]]


def test_windows_travel_to_workers_without_data(store, tmp_path):
    w = CSIWindows(store, "train", mode="materialised", view_dir=tmp_path, windows_per_sample=20)
    expected = w.batch([5]).history
    assert len(pickle.dumps(w)) < expected.nbytes * 360 / 4
    assert torch.equal(pickle.loads(pickle.dumps(w)).batch([5]).history, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "guard"}, "splits are train, val, test"),
        ({"mode": "cached"}, "'paths' or 'materialised'"),
        ({"snr_db": (20.0, 0.0)}, "ascending"),
        ({"snr_db": (0.0, 5.0, 10.0)}, "range"),
        ({"snr_db": float("nan")}, "numbers in dB"),
        ({"history": 0}, "history"),
        ({"train_fraction": 0.0}, "train_fraction must be above 0"),
        ({"train_fraction": 10}, "at most 1"),
        ({"band": "fdd"}, "fdd_offset"),
    ],
)
def test_wrong_arguments(store, arguments, message):
    with pytest.raises(UsageError, match=message):
        CSIWindows(store, **{"split": "train", **arguments})
    with pytest.raises(IndexError):
        CSIWindows(store, "val")[10_000]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_learners_device_changes_nothing(store):
    w = CSIWindows(store, "train")
    fetched = w.__getitems__(range(16))
    cpu, cuda = w.to_batch(fetched), w.to_batch(type(fetched)(*(x.cuda() for x in fetched)))
    for x, y in zip(cuda, cpu, strict=True):
        assert x.is_cuda
        scale = max(float(y.abs().max()), 1e-30)
        torch.testing.assert_close(x.cpu() / scale, y / scale, rtol=0, atol=2e-5)
