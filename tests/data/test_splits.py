import numpy as np
import pytest
import torch

from chanlab.channels import Motion
from chanlab.data.splits import SPLITS, SplitSpec, assign_splits
from chanlab.errors import UsageError

GUARD, TRAIN, VAL, TEST = range(4)


def motion(xy, steps=4, step=(0.5, 0.0)):
    """Users that start at xy [m] and walk `step` per anchor."""
    start = torch.tensor(xy, dtype=torch.float32)
    walk = torch.arange(steps)[:, None] * torch.tensor(step)
    positions = torch.cat([start[:, None] + walk, torch.full((len(start), steps, 1), 1.5)], -1)
    times = torch.arange(steps, dtype=torch.float64).expand(len(start), -1)
    return Motion(times, positions, torch.zeros_like(positions), torch.zeros_like(positions))


def scattered(users=400, side=200.0, **kwargs):
    return motion(np.random.default_rng(0).uniform(0, side, (users, 2)), **kwargs)


def gap(codes, m, a, b):
    """Smallest distance between any anchors of two splits, by brute force."""
    p = m.positions.numpy()
    pa, pb = p[codes == a].reshape(-1, 3), p[codes == b].reshape(-1, 3)
    return np.linalg.norm(pa[:, None] - pb[None], axis=-1).min()


def test_by_trajectory_follows_the_fractions_and_the_seed():
    m = scattered()
    codes = assign_splits(m, {"by": "trajectory", "fractions": {"train": 0.7, "val": 0.1, "test": 0.2}}, seed=3)
    assert codes.dtype == np.int8
    assert np.bincount(codes, minlength=4).tolist() == [0, 280, 40, 80]
    assert (codes == assign_splits(m, {"fractions": {"train": 0.7, "val": 0.1, "test": 0.2}}, seed=3)).all()
    assert (codes != assign_splits(m, {"fractions": {"train": 0.7, "val": 0.1, "test": 0.2}}, seed=4)).any()


def test_the_permutation_is_frozen():
    """Stores on disk rely on it: a change here would move samples between splits."""
    codes = assign_splits(scattered(10), {"fractions": {"train": 0.6, "val": 0.2, "test": 0.2}}, seed=1)
    assert codes.tolist() == FROZEN


FROZEN = [1, 2, 3, 1, 1, 1, 1, 1, 3, 2]


def test_guard_distance_holds_over_all_anchors():
    m = scattered()
    codes = assign_splits(m, {"guard": 3.0}, seed=0)
    assert (codes == GUARD).sum() > 0
    for a, b in ((TRAIN, VAL), (TRAIN, TEST), (VAL, TEST)):
        assert gap(codes, m, a, b) >= 3.0
    free = assign_splits(m, {"guard": 0.0}, seed=0)
    assert (codes[free == TEST] == TEST).all()  # test is never thinned
    assert ((codes == free) | (codes == GUARD)).all()


def test_by_cells_keeps_places_together():
    m = scattered(2000)
    spec = {"by": "area", "cell": 20.0, "fractions": {"train": 0.6, "val": 0.2, "test": 0.2}}
    codes = assign_splits(m, spec, seed=0)
    cell = np.floor(m.positions[..., :2].numpy() / 20).astype(int)
    crossing = (cell != cell[:, :1]).any((1, 2))
    owners = {}
    for c, code, crosses in zip(map(tuple, cell[:, 0]), codes, crossing, strict=True):
        if not crosses:
            assert owners.setdefault(c, code) == code != GUARD
    assert (codes == GUARD).any()
    shares = np.bincount(codes, minlength=4)[1:] / 2000
    np.testing.assert_allclose(shares, [0.6, 0.2, 0.2], atol=0.06)


def test_stripes():
    m = scattered(500, step=(0.0, 5.0))
    codes = assign_splits(m, {"by": "area", "cell": [10, float("inf")]}, seed=0)
    assert (codes != GUARD).all()  # they walk along their stripe
    stripe = np.floor(m.positions[:, 0, 0].numpy() / 10)
    assert all(len(set(codes[stripe == s])) == 1 for s in set(stripe))


def test_regions():
    m = motion([[5, 5], [50, 50], [95, 50], [8.8, 5], [9.8, 50]])
    spec = {"by": "area", "regions": {"test": [[[0, 10], [0, 10]]], "val": [[[90, 100], [0, 100]]]}, "guard": 1.0}
    assert assign_splits(m, spec, seed=0).tolist() == [TEST, TRAIN, VAL, GUARD, TRAIN]


def test_small_stores_get_one_sample_each():
    assert sorted(assign_splits(scattered(3), {}, seed=0)) == [TRAIN, VAL, TEST]
    assert set(assign_splits(scattered(5), {"fractions": {"train": 1.0}}, seed=0)) == {TRAIN}


def test_an_empty_split_is_an_error_that_names_the_remedy():
    with pytest.raises(UsageError, match="too few"):
        assign_splits(scattered(2), {}, seed=0)
    with pytest.raises(UsageError, match=r"left for train and val after \d+ samples .* smaller guard"):
        assign_splits(scattered(side=20.0), {"guard": 10.0}, seed=0)
    with pytest.raises(UsageError, match="left for val and test before"):
        assign_splits(scattered(), {"by": "area", "cell": 1000.0}, seed=0)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"fraction": {}}, "known keys are by, fractions, guard, cell, regions"),
        ({"by": "snapshot"}, "'trajectory' or 'area'"),
        ({"fractions": {"train": 0.5, "val": 0.1}}, "add up to 1"),
        ({"fractions": {"training": 1.0}}, "splits are train, val, test"),
        ({"guard": -1}, "distance"),
        ({"by": "area"}, "either cell"),
        ({"cell": 3.0}, "by: area"),
        ({"by": "area", "cell": [1, 2, 3]}, "two of them"),
        ({"by": "area", "regions": {"test": [[[1, 0], [0, 1]]]}}, "x0 < x1"),
    ],
)
def test_wrong_specifications(section, message):
    with pytest.raises(UsageError, match=message):
        assign_splits(scattered(20), section, seed=0)


def test_spec_round_trip():
    assert SplitSpec.parse({"by": "area", "cell": 3}).cell_sides() == (3.0, 3.0)
    assert SPLITS == ("guard", "train", "val", "test")
