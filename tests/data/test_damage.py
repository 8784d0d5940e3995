import json
import shutil
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from random_drops import RandomDrops, recipe_text

from chanlab.data import manifest as manifest_module
from chanlab.data import schema
from chanlab.data.generate import generate, plan
from chanlab.data.manifest import MANIFEST, read_manifest
from chanlab.data.recipe import parse_recipe
from chanlab.data.store import Store
from chanlab.data.verify import verify
from chanlab.errors import ChanlabError, StoreError

RECIPE = parse_recipe(recipe_text(samples=12, shard_size=4))
SHARD = "shard-00001.h5"


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return generate(RECIPE, tmp_path_factory.mktemp("sound") / "store", progress=False)


@pytest.fixture
def out(sound, tmp_path):
    """A copy of a sound store, to be damaged."""
    return Path(shutil.copytree(sound.path, tmp_path / "store"))


def _regenerated(out: Path, sound: Store) -> None:
    assert generate(RECIPE, out, progress=False).content_hash == sound.content_hash
    assert verify(out).ok


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def test_verify_finds_a_flipped_byte_anywhere_in_a_shard(out, sound):
    data = (out / SHARD).read_bytes()
    for position in [*range(0, len(data), 701), len(data) - 1]:
        _flip(out / SHARD, position)
        report = verify(out)
        assert [problem.file for problem in report.problems] == [SHARD], position
        assert f"delete {SHARD} and run the same `chanlab generate`" in report.problems[0].remedy
        assert (report.ok, report.shards, report.content_hash) == (False, 2, None)
        (out / SHARD).write_bytes(data)
    assert verify(out).ok
    _flip(out / SHARD, len(data) // 2)
    (out / SHARD).unlink()
    _regenerated(out, sound)


def test_verify_finds_a_flipped_byte_anywhere_in_the_manifest(out, sound):
    data = (out / MANIFEST).read_bytes()
    for position in range(0, len(data), 5):
        _flip(out / MANIFEST, position)
        with pytest.raises(StoreError):
            read_manifest(out)
        (out / MANIFEST).write_bytes(data)
    _flip(out / MANIFEST, data.index(b"sha256") + 12)
    report = verify(out)
    assert [problem.file for problem in report.problems] == [MANIFEST]
    with pytest.raises(StoreError, match=rf"delete {MANIFEST} and run the same `chanlab generate` again"):
        generate(RECIPE, out, progress=False)
    shards = {path.name: path.stat().st_ino for path in out.glob("shard-*.h5")}
    (out / MANIFEST).unlink()
    _regenerated(out, sound)
    assert shards == {path.name: path.stat().st_ino for path in out.glob("shard-*.h5")}


@pytest.mark.parametrize("size", [0, 5, 3000, -1])
def test_truncated_shard(out, sound, size):
    data = (out / SHARD).read_bytes()
    (out / SHARD).write_bytes(data[:size])
    with pytest.raises(StoreError, match=f"{SHARD} is truncated or damaged.*delete it and run"):
        Store(out).links([5])
    assert Store(out).links([0, 11]).num_users == 2
    assert [problem.file for problem in verify(out).problems] == [SHARD]
    if size == 5:  # not even recognisable as HDF5: never overwritten
        with pytest.raises(StoreError, match="move it away or delete it"):
            generate(RECIPE, out, progress=False)
    else:
        with pytest.warns(UserWarning, match="computed again"):
            _regenerated(out, sound)


def test_missing_and_stray_shards(out, sound):
    (out / SHARD).rename(out / "shard-00007.h5")
    assert {problem.file for problem in verify(out).problems} == {SHARD, "shard-00007.h5"}
    with pytest.raises(StoreError, match=SHARD):
        Store(out).links([5])
    (out / "shard-00007.h5").unlink()
    _regenerated(out, sound)


def test_a_renamed_shard_is_not_adopted(out):
    shutil.copy(out / "shard-00000.h5", out / SHARD)
    (out / MANIFEST).unlink()
    with pytest.raises(StoreError, match="holds samples 0 to 3, not 4 to 7"):
        generate(RECIPE, out, progress=False)


def test_foreign_files(out, tmp_path):
    (out / SHARD).unlink()
    with h5py.File(out / SHARD, "w") as file:
        file["data"] = 1
    with pytest.raises(StoreError, match="not a shard of a chanlab store"):
        generate(RECIPE, out, progress=False)
    (out / MANIFEST).write_text('{"name": "something else"}')
    with pytest.raises(StoreError, match="not the manifest of a chanlab store"):
        Store(out)
    other = tmp_path / "photos"
    other.mkdir()
    (other / "me.jpg").write_bytes(b"x")
    with pytest.raises(StoreError, match=r"not empty and holds no chanlab store \(but me.jpg\)"):
        generate(RECIPE, other, progress=False)
    assert [path.name for path in other.iterdir()] == ["me.jpg"]
    with pytest.raises(StoreError, match="chanlab generate RECIPE --out"):
        Store(tmp_path / "nowhere")


def test_a_newer_schema_says_upgrade(out, tmp_path, monkeypatch):
    with monkeypatch.context() as newer:
        for module in (schema, manifest_module):
            newer.setattr(module, "SCHEMA_VERSION", 2)
        generate(RECIPE, tmp_path / "newer", progress=False)
    for read in (Store, verify, lambda path: generate(RECIPE, path, progress=False)):
        with pytest.raises(StoreError, match=r"schema version 2, this chanlab reads up to 1: upgrade"):
            read(tmp_path / "newer")
    shutil.copy(tmp_path / "newer" / SHARD, out / SHARD)
    body = json.loads((out / MANIFEST).read_text())
    body["shards"][1]["size"] = (out / SHARD).stat().st_size
    del body["sha256"]
    (out / MANIFEST).write_bytes(manifest_module._dump(body))
    with pytest.raises(StoreError, match="schema version 2"):
        Store(out).links([5])


def test_another_recipe_or_other_versions_need_another_folder(out, monkeypatch):
    with pytest.raises(StoreError, match=r"another recipe \(it differs in seed\): choose another --out folder"):
        generate(replace(RECIPE, seed=9), out, progress=False)
    (out / SHARD).unlink()
    monkeypatch.setattr(RandomDrops, "versions", lambda self: {"tests": "2"})
    with pytest.raises(StoreError, match="tests 1 then, 2 now"):
        generate(RECIPE, out, progress=False)


def test_a_source_that_yields_nonsense_is_an_error(tmp_path, monkeypatch):
    links = RandomDrops.links

    def with_nan(self, ids, seed):
        found = links(self, ids, seed)
        found.paths.delay[0, 0, 0] = torch.nan
        return found

    monkeypatch.setattr(RandomDrops, "links", with_nan)
    with pytest.raises(ChanlabError, match="paths/delay that is not finite"):
        generate(RECIPE, tmp_path / "nan", progress=False)
    monkeypatch.setattr(RandomDrops, "links", lambda self, ids, seed: links(self, [i + 1 for i in ids], seed))
    with pytest.raises(ChanlabError, match="asked for samples"):
        generate(RECIPE, tmp_path / "ids", progress=False)
    monkeypatch.setattr(
        RandomDrops,
        "links",
        lambda self, ids, seed: replace(links(self, ids, seed), tx_position=torch.tensor([float(ids[0]), 0.0, 0.0])),
    )
    with pytest.raises(ChanlabError, match="one transmitter set"):
        generate(replace(RECIPE, samples=128, shard_size=128), tmp_path / "tx", progress=False)


def test_plan_predicts_size_and_splits(sound):
    expected = plan(RECIPE)
    size = sum(path.stat().st_size for path in sound.path.glob("*.h5"))
    assert expected["samples"] == 12
    assert expected["shards"] == 3
    assert expected["splits"] == {name: len(ids) for name, ids in sound.splits.items()}
    assert expected["bytes"] == pytest.approx(size, rel=0.2)
    assert expected["seconds"] > 0
    assert expected["anchors"] == sound.num_anchors


STORE_V1 = Path(__file__).parent / "assets" / "store_v1"


def test_a_store_of_version_1_stays_readable():
    store = Store(STORE_V1)
    known = json.loads((STORE_V1.parent / "store_v1.json").read_text())
    assert store.content_hash == known["content_hash"] == verify(STORE_V1).content_hash
    assert verify(STORE_V1).ok
    assert {name: ids.tolist() for name, ids in store.splits.items()} == known["splits"]
    links = store.links([known["sample"]])
    assert links.paths.mask.sum().item() == known["paths"]
    np.testing.assert_allclose(links.paths.delay[links.paths.mask].numpy(), known["delay"], rtol=1e-7)
    np.testing.assert_allclose(links.paths.transfer.abs().square().sum().item(), known["power"], rtol=1e-6)
    np.testing.assert_allclose(links.positions[0, -1].numpy(), known["position"], rtol=1e-7)
