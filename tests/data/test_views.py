import errno
import json

import h5py
import pytest
import torch
from window_store import make_store

from chanlab.channels import PlanarArray
from chanlab.data import view_file
from chanlab.data.views import CSIView, window_channels
from chanlab.data.windows import CSIWindows
from chanlab.errors import StoreError, UsageError

SECTION = {"num_subcarriers": 4, "subcarrier_spacing": 30e3, "tx_array": {"num_rows": 2}}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("views") / "store")


def test_view_of_a_recipe_and_overrides():
    view = CSIView.parse(SECTION, horizons=2, history=None, rx_array=PlanarArray(1, 3))
    assert view.tx_array == PlanarArray(num_rows=2)
    assert view.rx_array == PlanarArray(1, 3)
    assert (view.history, view.horizons, view.horizon) == (16, (1.0, 2.0), 2)
    assert view.span == pytest.approx(17 * 2.5e-3)
    torch.testing.assert_close(view.times()[-2:], torch.tensor([16, 17], dtype=torch.float64) * 2.5e-3)
    assert view.frequencies().tolist() == [-60e3, -30e3, 0, 30e3]
    assert view.shape(3) == (3, 2, 3, 4)
    assert json.dumps(view.to_dict())
    fdd = CSIView.parse({**SECTION, "band": "fdd", "fdd_offset": -10})
    assert fdd.band_offset == -300e3
    assert CSIView.parse({**SECTION, "band": "fdd", "fdd_offset": -10}, band="tdd").band_offset == 0


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"subcarriers": 3}, "known keys are num_subcarriers, subcarrier_spacing, tx_array"),
        ({"num_subcarriers": None}, "num_subcarriers missing"),
        ({"tx_array": {"rows": 2}}, "num_rows"),
        ({"horizons": [2, 1]}, "ascending"),
        ({"horizons": []}, "ascending"),
        ({"horizons": "all"}, "list"),
        ({"band": "both"}, "'tdd' or 'fdd'"),
        ({"interval": 0}, "interval"),
        ({"fdd_offset": 3}, "takes none"),
    ],
)
def test_wrong_views(section, message):
    with pytest.raises(UsageError, match=message):
        CSIView.parse({**SECTION, **section})


def files(folder):
    return sorted(p.name for p in folder.iterdir())


def test_a_view_is_built_once_beside_the_store(store, monkeypatch):
    first = CSIWindows(store, "val", mode="materialised")
    folder = store.path.with_name("store.views")
    (name,) = files(folder)
    with h5py.File(folder / name) as file:
        assert file["history"].shape == (24, 2, 4, 5, 6)
        assert file["history"].chunks is None
        assert json.loads(file.attrs["key"])["store"] == store.content_hash
    monkeypatch.setattr(view_file, "_write", None)  # not needed again
    again = CSIWindows(store, "val", mode="materialised")
    assert torch.equal(first[3].history, again[3].history)


def test_another_view_or_seed_gets_its_own_file(store, tmp_path):
    for kwargs in ({}, {"history": 4}, {"seed": 9}, {"windows_per_sample": 2}, {"snr_db": 3.0}):
        CSIWindows(store, "val", mode="materialised", view_dir=tmp_path, **kwargs)
    assert len(files(tmp_path)) == 4  # the SNR is added when it is read


def test_a_truncated_or_stale_view_is_built_again(store, tmp_path):
    def build():
        return CSIWindows(store, "val", mode="materialised", view_dir=tmp_path)[0]

    good = build()
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"not HDF5"):
        path.write_bytes(damaged)
        assert torch.equal(build().history, good.history)
        assert path.read_bytes()[:8] == whole[:8]
    with h5py.File(path, "r+") as file:
        file.attrs["key"] = "another store"
    build()
    with h5py.File(path) as file:
        assert "another" not in file.attrs["key"]


def test_nothing_is_left_behind_when_building_fails(store, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(view_file.os, "fsync", full)
    with pytest.raises(StoreError, match="view_dir"):
        CSIWindows(store, "val", mode="materialised", view_dir=tmp_path)
    assert files(tmp_path) == []
    monkeypatch.setattr(view_file, "_write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        CSIWindows(store, "val", mode="materialised", view_dir=tmp_path)
    assert files(tmp_path) == []


def test_paths_in_half_precision_are_refused(store):
    w = CSIWindows(store, "val")
    fetched = w.__getitems__([0])
    with pytest.raises(UsageError, match="bf16-mixed"):
        window_channels(fetched._replace(delay=fetched.delay.bfloat16()), w.view, w.carrier, w.tx_orientation)
