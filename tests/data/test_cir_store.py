"""Stores of impulse responses: what was drawn is what is read, hashed, resumed and seen through windows."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from chanlab.channels import CDL, TDL, CDLGrid, CellDrops, DrawnChannels, PlanarArray, subcarrier_frequencies
from chanlab.cli.main import main
from chanlab.data.datamodule import CSIDataModule
from chanlab.data.generate import generate, plan
from chanlab.data.manifest import read_manifest
from chanlab.data.protocol import Cell, find_protocol
from chanlab.data.recipe import build_source, load_recipe, parse_recipe
from chanlab.data.store import Store
from chanlab.data.streamed import cell_channels
from chanlab.data.verify import info, verify
from chanlab.data.views import CSIView
from chanlab.data.windows import CSIWindows
from chanlab.errors import UsageError

RECIPE = Path(__file__).parent / "assets" / "cdl_tdl.yaml"
BS = PlanarArray(2, 2, pattern="tr38901", polarization="cross")
UT = PlanarArray()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cir") / "store"
    generate(load_recipe(RECIPE), folder, progress=False)
    return Store(folder)


def test_what_is_read_is_what_the_models_draw(store):
    wanted = [35, 0, 13, 0, 9]
    links = store.cir_links(wanted)
    assert store.payload == "cir"
    assert links.cir.carrier == store.carrier == 2.4e9
    assert links.sample_ids.tolist() == wanted
    # Blocks of four go to the three models in turn.
    assert links.model.tolist() == [2, 0, 0, 0, 2]
    models = [
        CDL("A", 1e-7, (1.0, 20.0), 2.4e9, BS, UT, block=4),
        CDL("D", 1e-7, 5.0, 2.4e9, BS, UT, block=4),
        TDL("C300", None, (1.0, 20.0), 2.4e9, BS, UT, block=4),
    ]
    for row, (sample, model) in enumerate(zip(wanted, links.model.tolist(), strict=True)):
        block, inside = divmod(sample, 4)
        direct = models[model].draw_block(block // 3, 3, 12, 2e-3)[inside : inside + 1]
        assert torch.equal(direct.pad(links.num_paths).coefficients, links.cir.coefficients[row : row + 1])
        assert torch.equal(direct.pad(links.num_paths).delay, links.cir.delay[row : row + 1])
    assert torch.equal(links.snapshots[0], torch.arange(12, dtype=torch.float64) * 2e-3)
    still = store.cir_links(np.arange(4, 8)).velocities.norm(dim=-1)
    assert torch.allclose(still, torch.tensor(5.0))
    assert links.positions.isnan().all()


def test_content_depends_on_neither_shards_nor_workers(store, tmp_path):
    recipe = dataclasses.replace(load_recipe(RECIPE), shard_size=20)
    other = generate(recipe, tmp_path / "other", progress=False)
    assert other.content_hash == store.content_hash
    for name, ids in store.splits.items():
        assert np.array_equal(other.splits[name], ids)
    assert sorted(np.concatenate(list(store.splits.values()))) == list(range(36))


def test_a_killed_generation_goes_on(store, tmp_path):
    recipe = load_recipe(RECIPE)
    whole = generate(recipe, tmp_path / "store", progress=False)
    kept = (whole.path / "shard-00001.h5").stat().st_mtime_ns
    (whole.path / "manifest.json").unlink()  # shards that nobody listed are adopted ...
    (whole.path / "shard-00003.h5").unlink()  # ... and what is missing is drawn again
    again = generate(recipe, tmp_path / "store", progress=False)
    assert again.content_hash == store.content_hash
    assert (whole.path / "shard-00001.h5").stat().st_mtime_ns == kept


def test_damage_is_found(tmp_path):
    broken = generate(load_recipe(RECIPE), tmp_path / "store", progress=False)
    assert verify(broken.path).ok
    file = broken.path / read_manifest(broken.path).shards[2].file
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert [p.file for p in verify(broken.path).problems] == [file.name]


def test_info_and_plan_tell_what_it_is(store, capsys):
    card = info(store.path)
    assert (card["payload"], card["snapshots"], card["anchors"], card["max_paths"]) == ("cir", 12, 1, 23)
    assert card["duration"] == pytest.approx(22e-3)
    assert main(["info", str(store.path)]) == 0
    text = capsys.readouterr().out
    assert "12 snapshots" in text
    assert "taps" in text
    assert json.dumps(card)
    planned = plan(RECIPE)
    assert planned["bytes"] == pytest.approx(card["size"], rel=0.5)  # models have unlike numbers of taps


def test_plot_draws_it(store, tmp_path):
    picture = tmp_path / "cir.png"
    assert main(["plot", str(store.path), "--out", str(picture), "--sample", "6"]) == 0
    assert picture.stat().st_size > 20_000
    assert main(["plot", str(store.path), "--out", str(picture), "--sample", "99"]) == 2


def test_plotted_statistics_are_those_of_the_models(store):
    from scipy.special import j0

    from chanlab.cli.quicklook_cir import delay_spread, temporal_correlation

    cir = TDL("B", 1e-7, 10.0, 2.4e9, BS, UT, block=64).draw(64, 1, 40, 1e-3)
    assert delay_spread(cir).mean().item() == pytest.approx(1e-7, rel=0.1)
    seen = temporal_correlation(cir)
    assert torch.allclose(seen[:, 0], torch.ones(64))
    expected = abs(j0(2 * math.pi * 10 / 299792458 * 2.4e9 * np.arange(5) * 1e-3))
    assert np.allclose(seen.mean(0)[:5], expected, atol=0.1)
    one = store.cir_links([6]).cir
    assert torch.allclose(delay_spread(one.pad(40)), delay_spread(one))


def test_the_other_payload_is_refused_by_name(store, tmp_path):
    with pytest.raises(UsageError, match="cir_links"):
        store.links([0])


def test_places_are_needed_for_areas_and_guards():
    for splits in ({"by": "area", "cell": 10.0}, {"guard": 1.0}):
        recipe = dataclasses.replace(load_recipe(RECIPE), splits=splits, text="")
        with pytest.raises(UsageError, match="no places"):
            plan(recipe)


def test_users_of_one_drop_go_to_one_split(tmp_path):
    text = """
name: drops
seed: 1
samples: 30
shard_size: 15
source:
  class_path: chanlab.channels.DrawnChannels
  init_args:
    num_steps: 2
    interval: 1.0e-3
    models:
      - class_path: chanlab.channels.CellDrops
        init_args:
          scenario: UMi
          speed: 1.0
          carrier: 3.5e9
          bs_array: {}
          ut_array: {}
          spatial_consistency: true
          block: 5
splits: {fractions: {train: 0.5, val: 0.34, test: 0.16}}
"""
    store = generate(parse_recipe(text), tmp_path / "store", progress=False)
    code = np.zeros(30, int)
    for number, ids in enumerate(store.splits.values()):
        code[ids] = number
    blocks = code.reshape(6, 5)
    assert (blocks == blocks[:, :1]).all()
    assert len(set(blocks[:, 0])) == 3
    links = store.cir_links(range(30))
    assert links.positions.isfinite().all()
    assert links.tx_position[2] == 10


def noiseless(store, split="train", **arguments):
    return CSIWindows(store, split, snr_db=math.inf, **arguments)


@pytest.mark.parametrize("band", [{"band": "tdd"}, {"band": "fdd", "fdd_offset": 30}])
def test_windows_are_the_stored_snapshots(store, band):
    windows = noiseless(store, windows_per_sample=3, **band)
    assert windows.view.interval == pytest.approx(2e-3)
    batch = windows.batch(range(len(windows)))
    first = np.rint(windows.starts(np.arange(len(windows)), [0] * len(windows)) / 2e-3).astype(int)
    assert set(first) == set(range(5))  # 12 snapshots leave a window of 8 five places
    links = store.cir_links(windows.sample_ids)
    frequencies = subcarrier_frequencies(20, 180e3)
    past = links.cir.cfr(frequencies)
    future = links.cir.cfr(frequencies + (180e3 * 30 if band["band"] == "fdd" else 0.0))
    for row, start in enumerate(first):
        torch.testing.assert_close(batch.history[row], past[row, :, :, start : start + 5])
        torch.testing.assert_close(batch.target[row], future[row, :, :, start + 5 : start + 8])
    assert batch.history.shape[1:] == (1, 8, 5, 20)
    torch.testing.assert_close(batch.speed, links.velocities[:, 0].norm(dim=-1))


def test_windows_may_skip_snapshots_and_start_anew_each_epoch(store):
    windows = noiseless(store, history=3, horizons=[1, 2], interval=4e-3)
    batch = windows.batch(range(len(windows)))
    start = int(windows.starts(np.array([0]), [0])[0] / 2e-3 + 0.5)
    stored = store.cir_links(windows.sample_ids[:1]).cir.cfr(windows.view.frequencies())[0]
    torch.testing.assert_close(batch.history[0], stored[:, :, start : start + 6 : 2])
    torch.testing.assert_close(batch.target[0], stored[:, :, start + 6 : start + 10 : 2])
    rows = np.arange(len(windows))
    assert (windows.starts(rows, [1] * len(rows)) != windows.starts(rows, [2] * len(rows))).any()


def test_materialised_windows_are_the_same_and_noise_has_its_variance(store, tmp_path):
    arguments = {"split": "test", "snr_db": 10.0}
    live = CSIWindows(store, **arguments)
    file = CSIWindows(store, mode="materialised", view_dir=tmp_path, **arguments)
    for a, b in zip(live.batch(range(len(live))), file.batch(range(len(file))), strict=True):
        torch.testing.assert_close(a, b)
    clean = noiseless(store, "test").batch(range(len(live)))
    noisy = live.batch(range(len(live)))
    ratio = (noisy.history - clean.history).abs().square().mean() / clean.history.abs().square().mean()
    assert ratio.item() == pytest.approx(0.1, rel=0.1)


def test_windows_name_what_is_not_stored(store):
    for arguments, words in (
        ({"interval": 3e-3}, "multiples"),
        ({"horizons": [0.5, 1.0]}, "multiples"),
        ({"history": 12}, "12 snapshots, a window takes 15"),
        ({"tx_array": PlanarArray(2, 2)}, "8 transmit ports"),
    ):
        with pytest.raises(UsageError, match=words):
            CSIWindows(store, **arguments)


def test_a_predictor_learns_from_it(store):
    from lightning.pytorch import Trainer

    from chanlab.csi import GRU, CSIPredictionModule

    data = CSIDataModule(store.path, batch_size=4, num_workers=0)
    module = CSIPredictionModule(GRU(num_subcarriers=20, horizons=3, hidden=8))
    trainer = Trainer(
        max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
    )
    trainer.fit(module, data)
    assert trainer.global_step == 3


def test_grid_is_every_combination():
    grid = CDLGrid(["A", "D"], [3e-8, 1e-7], [1.0, (5.0, 9.0)], 2.4e9, BS, UT, 3, 1e-3, block=2)
    assert [(m.model, m.delay_spread, m.speed) for m in grid.models[:3]] == [
        ("A", 3e-8, (1.0, 1.0)),
        ("A", 3e-8, (5.0, 9.0)),
        ("A", 1e-7, (1.0, 1.0)),
    ]
    assert grid.links(range(16), 1).model.tolist() == [i // 2 for i in range(16)]


def test_stored_csi4cast_has_the_cells_of_its_protocol():
    source, protocol = build_source(load_recipe("csi4cast")), find_protocol("csi4cast")
    cells = [Cell(m.model, m.delay_spread, m.speed[0]) for m in source.models]
    assert cells == list(protocol.cells["regular"])
    assert all(m.speed[0] == m.speed[1] for m in source.models)
    for model, cell in zip(source.models, cells, strict=True):
        assert model.name == cell_channels(protocol, cell).name
        assert (model.bs_array, model.ut_array) == (
            cell_channels(protocol, cell).bs_array,
            cell_channels(protocol, cell).ut_array,
        )
    assert source.num_steps == protocol.history + protocol.horizons
    assert source.interval == pytest.approx(protocol.interval, rel=1e-9)
    view = CSIView.parse(load_recipe("csi4cast").view)
    assert (view.num_subcarriers, view.history, view.horizon) == (300, 16, 4)
    assert view.tx_array == source.models[0].bs_array
    fdd = CSIView.parse(load_recipe("csi4cast").view, band="fdd", fdd_offset=450)
    assert fdd.fdd_offset == protocol.band_distance


def test_models_of_one_store_fit_together():
    first = CDL("A", 1e-7, 1.0, 2.4e9, BS, UT, block=4)
    with pytest.raises(UsageError, match="same block"):
        DrawnChannels([first, CDL("A", 1e-7, 1.0, 2.4e9, BS, UT, block=5)], 2, 1e-3)
    with pytest.raises(UsageError, match="same bs_array"):
        DrawnChannels([first, CellDrops("UMi", 1.0, 2.4e9, UT, UT, block=4)], 2, 1e-3)
    recipe = dataclasses.replace(load_recipe(RECIPE), shard_size=6, text="")
    with pytest.raises(UsageError, match="shard_size 6 must be a multiple of the 4"):
        build_source(recipe)
