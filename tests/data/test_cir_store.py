"""Stores of impulse responses: what was drawn is what is read, hashed, resumed and seen through windows."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from chanlab.channels import CDL, TDL, CDLGrid, CellDrops, DrawnChannels, PlanarArray
from chanlab.cli.main import main
from chanlab.data.generate import generate, plan
from chanlab.data.manifest import read_manifest
from chanlab.data.recipe import build_source, load_recipe, parse_recipe
from chanlab.data.store import Store
from chanlab.data.verify import info, verify
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
    assert planned["bytes"] == pytest.approx(card["size"], rel=0.2)


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


def test_grid_is_every_combination():
    grid = CDLGrid(["A", "D"], [3e-8, 1e-7], [1.0, (5.0, 9.0)], 2.4e9, BS, UT, 3, 1e-3, block=2)
    assert [(m.model, m.delay_spread, m.speed) for m in grid.models[:3]] == [
        ("A", 3e-8, (1.0, 1.0)),
        ("A", 3e-8, (5.0, 9.0)),
        ("A", 1e-7, (1.0, 1.0)),
    ]
    assert grid.links(range(16), 1).model.tolist() == [i // 2 for i in range(16)]


def test_models_of_one_store_fit_together():
    first = CDL("A", 1e-7, 1.0, 2.4e9, BS, UT, block=4)
    with pytest.raises(UsageError, match="same block"):
        DrawnChannels([first, CDL("A", 1e-7, 1.0, 2.4e9, BS, UT, block=5)], 2, 1e-3)
    with pytest.raises(UsageError, match="same bs_array"):
        DrawnChannels([first, CellDrops("UMi", 1.0, 2.4e9, UT, UT, block=4)], 2, 1e-3)
    recipe = dataclasses.replace(load_recipe(RECIPE), shard_size=6, text="")
    with pytest.raises(UsageError, match="shard_size 6 must be a multiple of the 4"):
        build_source(recipe)
