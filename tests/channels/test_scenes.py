"""Traced sources: the same bits whoever asks, users in the open, errors that help."""

import pickle
import subprocess
import sys
from dataclasses import fields

import pytest
import torch

from chanlab.channels import PATH_TENSORS, Drops, SceneSource, Source, StraightTrajectories
from chanlab.channels import scenes as scenes_module
from chanlab.errors import UsageError

# Three users with three anchors: nine receivers, as in test_scenes_cfr.py, so that Dr.Jit compiles once for both.
STREET = [[-50.0, 50.0], [-7.0, 7.0]]
ARGUMENTS = {
    "scene": "simple_street_canyon",
    "carrier": 3.5e9,
    "tx_position": (-30.0, 0.0, 10.0),
    "samples_per_src": 10_000,
    "diffraction": True,
    "group": 3,
}


def make(trajectories=None, **changes):
    trajectories = trajectories or StraightTrajectories(STREET, length=0.2, anchor_spacing=0.1)
    return SceneSource(**ARGUMENTS | {"trajectories": trajectories} | changes)


def same(a, b):
    """Whether two `Links` are equal bit for bit, apart from padding."""
    paths = max(a.paths.num_paths, b.paths.num_paths)
    a_paths, b_paths = a.paths.pad(paths), b.paths.pad(paths)
    return all(torch.equal(getattr(a_paths, n), getattr(b_paths, n)) for n in PATH_TENSORS) and all(
        torch.equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a) if f.name != "paths"
    )


@pytest.mark.rt
def test_links_depend_on_seed_and_id_alone():
    source = make()
    whole = source.links(range(6), seed=4)
    assert isinstance(source, Source)
    assert whole.paths.batch_shape == (6, 3)
    assert whole.paths.mask.any(-1).all()
    for ids in ([0], [5, 1], [4, 2, 0, 3]):
        some = source.links(ids, seed=4)
        assert some.sample_ids.tolist() == ids
        index = torch.tensor(ids)
        picked = type(whole)(
            **{f.name: getattr(whole, f.name) for f in fields(whole)}
            | {"paths": whole.paths[index]}
            | {n: getattr(whole, n)[index] for n in ("times", "positions", "velocities", "orientations", "sample_ids")}
        )
        assert same(some, picked)
    other = source.links(range(6), seed=5)
    assert not torch.equal(other.positions, whole.positions)


@pytest.mark.rt
def test_another_process_yields_the_same_bits(tmp_path):
    source = make()
    here = source.links([3, 4], seed=4)
    (tmp_path / "source").write_bytes(pickle.dumps(source))
    code = f"""
import pickle, torch
source = pickle.loads(open({str(tmp_path / "source")!r}, "rb").read())
paths = source.links([4, 3], 4).paths
torch.save({{name: getattr(paths, name) for name in {PATH_TENSORS!r}}}, {str(tmp_path / "paths")!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    there = torch.load(tmp_path / "paths", weights_only=True)
    for name in PATH_TENSORS:
        assert torch.equal(there[name][[1, 0]], getattr(here.paths, name)), name


@pytest.mark.rt
def test_solves_that_are_filled_up_give_what_one_solve_gives(monkeypatch):
    whole = make().links(range(3), seed=4)
    monkeypatch.setattr(scenes_module, "MAX_RECEIVERS", 5)  # nine receivers in two solves of five
    source = make()
    assert source.receivers_per_solve == 5
    assert same(source.links(range(3), seed=4), whole)


@pytest.mark.rt
def test_users_are_outdoors_and_no_wall_is_on_their_way():
    area = [[-64.0, -30.0], [-36.0, 36.0]]  # mostly houses: the street runs from y = -8.6 to 9.6
    motion = make(StraightTrajectories(area, length=4.0, anchor_spacing=2.0)).motion(range(60), seed=0)
    x, y, _ = motion.positions.unbind(-1)
    in_street = (y > -8.7) & (y < 9.7)
    beside_houses = (x < -61.5) | (x > -32.5)
    assert (in_street | beside_houses).all()
    indoors = make(Drops([[-60.0, -40.0], [15.0, 35.0]]), outdoors=False).motion(range(3), seed=0)
    assert (indoors.positions[..., 1] > 15).all()


@pytest.mark.rt
def test_nobody_is_put_into_a_house(monkeypatch):
    monkeypatch.setattr("chanlab.channels.trajectories.MAX_DRAWS", 5)
    with pytest.raises(UsageError, match="no permitted place"):
        make(Drops([[-60.0, -40.0], [15.0, 35.0]])).motion([0], seed=0)


@pytest.mark.rt
def test_users_without_any_path_are_kept_with_an_empty_mask():
    links = make(StraightTrajectories([[-60.0, -40.0], [15.0, 35.0]], length=0.2), outdoors=False, max_depth=0).links(
        range(2), seed=0
    )
    assert not links.paths.mask.any()
    assert links.paths.num_paths == 0


@pytest.mark.rt
def test_diffuse_reflection_scatters_and_repeats_to_1e_6():
    source = make(
        Drops(STREET), diffuse_reflection=True, scattering_coefficient=0.5, samples_per_src=2_000, max_depth=1
    )
    first, again = source.links(range(3), seed=4).paths, source.links(range(3), seed=4).paths
    assert (first.interactions == 2).any()
    assert torch.equal(first.mask, again.mask)
    torch.testing.assert_close(first.transfer, again.transfer, rtol=1e-5, atol=1e-9)


@pytest.mark.rt
def test_a_scene_file_and_its_name_are_the_same_scene():
    from chanlab.channels.tracer import scene_file, scene_names

    assert "munich" in scene_names()
    path = scene_file("simple_street_canyon")
    assert path.endswith(".xml")
    assert scene_file(path) == path
    assert torch.equal(make(scene=path).motion([0], seed=4).positions, make().motion([0], seed=4).positions)


@pytest.mark.rt
def test_an_unknown_scene_is_an_error_that_lists_the_known_ones():
    with pytest.raises(UsageError, match=r"'canyon'.*munich.*simple_street_canyon"):
        make(scene="canyon").motion([0], seed=0)
    with pytest.raises(UsageError, match="does not exist"):
        make(scene="nowhere.xml").motion([0], seed=0)


@pytest.mark.rt
def test_versions_name_what_the_result_depends_on():
    versions = make().versions()
    assert set(versions) == {"sionna", "sionna-rt", "mitsuba", "drjit", "mitsuba-variant"}
    assert versions["mitsuba-variant"].endswith("_ad_mono_polarized")


def test_groups_fill_a_solve_but_not_the_memory():
    moving = StraightTrajectories(STREET, length=2.0, anchor_spacing=0.1)
    assert make(moving, group=None, samples_per_src=50_000).receivers_per_solve == 12 * 21
    small = make(moving, group=None, samples_per_src=1_000_000)
    assert small.receivers_per_solve * 1_000_000 * 3 <= scenes_module.MAX_LANES
    long = make(StraightTrajectories(STREET, length=60.0, anchor_spacing=0.1), group=None)
    assert long.group == 1
    assert long.receivers_per_solve <= scenes_module.MAX_RECEIVERS
    assert make(Drops(STREET), group=None).group > 100


def test_a_source_is_light_to_make_and_to_pickle():
    code = """
import pickle, sys
from chanlab.channels import Drops, SceneSource
pickle.dumps(SceneSource("munich", 3.5e9, (0.0, 0.0, 30.0), Drops([[0.0, 1.0], [0.0, 1.0]])))
assert not {"sionna", "mitsuba", "drjit"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"carrier": 0.0}, "carrier"),
        ({"group": 0}, "group"),
        ({"tx_position": (0.0, 1.0)}, "three numbers"),
        ({"scattering_coefficient": 2.0}, "between 0 and 1"),
        ({"diffuse_reflection": True, "samples_per_src": 1_000_000}, "max_num_paths_per_src"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    with pytest.raises(UsageError, match=message):
        make(**changes)


def test_no_ids_is_an_error():
    with pytest.raises(UsageError, match="at least one"):
        make().links([], seed=0)
