import pickle
from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch
from random_drops import RandomDrops, recipe_text
from torch.utils.data import DataLoader, Dataset

from chanlab.channels.paths import PATH_TENSORS
from chanlab.data.fields import FIELDS
from chanlab.data.generate import generate
from chanlab.data.recipe import parse_recipe
from chanlab.data.store import Store
from chanlab.data.verify import info
from chanlab.errors import UsageError


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return generate(parse_recipe(recipe_text()), tmp_path_factory.mktemp("store") / "s", progress=False)


def test_links_are_what_the_source_yielded(store):
    ids = [31, 0, 7, 8, 0, 39]
    want = RandomDrops().links(ids, seed=1)
    got = store.links(ids)
    for name in PATH_TENSORS:
        x, y = getattr(got.paths, name), getattr(want.paths, name)
        assert x.dtype == y.dtype
        assert torch.equal(x, y), name
    for name in ("times", "positions", "velocities", "orientations", "sample_ids", "tx_position", "tx_orientation"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert got.paths.carrier == 3.5e9 == store.carrier


@pytest.mark.parametrize("ids", [range(40), range(3, 6), [5], [9, 8], np.array([1, 1, 1])])
def test_any_selection_keeps_its_order(store, ids):
    assert store.links(ids).sample_ids.tolist() == list(ids)


@pytest.mark.parametrize("ids", [[], [40], [-1], [0, 1000]])
def test_unknown_samples_are_a_usage_error(store, ids):
    with pytest.raises(UsageError, match="40 samples"):
        store.links(ids)


def test_card(store):
    card = info(store.path)
    assert card["schema_version"] == 1
    assert card["samples"] == len(store) == 40
    assert card["splits"] == {"guard": 0, "train": 24, "val": 8, "test": 8}
    assert card["recipe"] == recipe_text()
    assert card["versions"]["tests"] == "1"
    assert card["content_hash"] == store.content_hash
    assert (card["anchors"], card["duration"], card["complete"]) == (3, pytest.approx(0.02), True)


def test_splits_are_stored_and_disjoint(store):
    ids = np.concatenate(list(store.splits.values()))
    assert sorted(ids.tolist()) == list(range(40))
    assert len(store.splits["train"]) == 24


def test_a_shard_documents_itself(store):
    with h5py.File(store.path / "shard-00000.h5") as file:
        assert file.attrs["format"] == "chanlab-store"
        assert file.attrs["schema_version"] == 1
        assert file.attrs["payload"] == "paths"
        assert file.attrs["recipe"] == recipe_text()
        assert file.attrs["seed"] == 1
        assert file["paths/transfer"].dtype == np.complex64
        assert {name: file[name].attrs["units"] for name in FIELDS} == {name: f.units for name, f in FIELDS.items()}
        assert all(len(file[name].attrs["axes"].split()) == file[name].ndim for name in FIELDS)


def test_content_hash_depends_on_channels_alone(store, tmp_path):
    same = generate(parse_recipe(recipe_text(shard_size=40)), tmp_path / "one_shard", progress=False)
    batches = generate(parse_recipe(recipe_text(group=8)), tmp_path / "groups", progress=False)
    other = generate(parse_recipe(recipe_text(seed=2)), tmp_path / "seed", progress=False)
    fewer = generate(parse_recipe(recipe_text(samples=39)), tmp_path / "fewer", progress=False)
    splits = replace(parse_recipe(recipe_text()), splits={"fractions": {"train": 0.5, "val": 0.25, "test": 0.25}})
    labels = generate(splits, tmp_path / "labels", progress=False)
    assert same.content_hash == batches.content_hash == store.content_hash
    assert len({store.content_hash, other.content_hash, fewer.content_hash, labels.content_hash}) == 4


def test_users_without_any_path_are_stored(tmp_path):
    text = recipe_text(samples=6, shard_size=4).replace("num_paths: 6", "num_paths: 0")
    empty = generate(parse_recipe(text), tmp_path / "s", progress=False)
    assert empty.links([5, 0]).paths.mask.shape == (2, 3, 0)
    assert empty.verify().ok


def test_open_files_are_not_pickled(store):
    store.links([0])
    assert store._files
    copy = pickle.loads(pickle.dumps(store))
    assert not copy._files
    assert torch.equal(copy.links([3]).paths.transfer, store.links([3]).paths.transfer)


class _Users(Dataset):
    def __init__(self, store: Store) -> None:
        self.store = store

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor]:
        return i, self.store.links([i]).positions


@pytest.mark.filterwarnings("ignore:This DataLoader will create 6 worker processes")
def test_many_loader_workers_read_one_store(store):
    want = store.links(range(40)).positions  # the parent's files are open when the workers are forked
    loader = DataLoader(_Users(store), batch_size=2, num_workers=6, shuffle=True)
    seen = 0
    for _ in range(2):
        for ids, positions in loader:
            assert torch.equal(positions[:, 0], want[ids])
            seen += len(ids)
    assert seen == 80
    store.close()
    assert torch.equal(store.links([2]).positions[0], want[2])
