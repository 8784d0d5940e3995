"""Trajectories: spacing, speed, areas, and randomness that depends on (seed, id) alone."""

import math

import pytest
import torch

from chanlab.channels.trajectories import Drops, RandomWaypoints, StraightTrajectories
from chanlab.errors import UsageError

STREET = [[-50.0, 50.0], [-7.0, 7.0]]
TWO_STREETS = [STREET, [[20.0, 24.0], [7.0, 57.0]]]


@pytest.mark.parametrize(
    "trajectories",
    [
        StraightTrajectories(STREET),
        StraightTrajectories(STREET, length=3.0, anchor_spacing=0.25, heading=(0.0, 0.1)),
        RandomWaypoints(STREET, length=40.0, anchor_spacing=0.25),
    ],
)
def test_anchors_are_equally_spaced_and_passed_at_the_drawn_speed(trajectories):
    motion = trajectories.motion(range(50), seed=3)
    assert motion.times.dtype == torch.float64
    assert motion.positions.shape == (50, trajectories.num_anchors, 3)
    speed = torch.linalg.vector_norm(motion.velocities, dim=-1)
    assert (speed >= 1.0).all()
    assert (speed <= 15.0).all()
    torch.testing.assert_close(speed, speed[:, :1].expand_as(speed))
    way = motion.times.diff(dim=-1) * speed[:, :1]
    torch.testing.assert_close(way, way[:1, :1].expand_as(way))
    torch.testing.assert_close(way.sum(-1), torch.full((50,), trajectories.length, dtype=torch.float64))
    steps = torch.linalg.vector_norm(motion.positions.diff(dim=1), dim=-1)
    assert steps.max() <= 0.25 + 1e-9  # a corner between two waypoints is cut
    heading = motion.orientations[..., 0]
    torch.testing.assert_close(motion.velocities[..., 0], speed * heading.cos())
    torch.testing.assert_close(motion.velocities[..., 1], speed * heading.sin())


def test_straight_trajectories_go_where_they_head_and_stay_in_their_box():
    motion = StraightTrajectories(TWO_STREETS, height=1.7, length=2.0).motion(range(400), seed=0)
    torch.testing.assert_close(
        motion.positions, motion.positions[:, :1] + motion.times[..., None] * motion.velocities[:, :1]
    )
    x, y, z = motion.positions.unbind(-1)
    assert (z == 1.7).all()
    first = (x.abs() <= 50) & (y.abs() <= 7)
    second = (x >= 20) & (x <= 24) & (y >= 7) & (y <= 57)
    assert (first.all(1) | second.all(1)).all()
    assert 0.75 < first.all(1).double().mean() < 0.95  # 1,400 of 1,600 square metres


def test_length_divides_into_whole_spacings():
    assert StraightTrajectories(STREET, length=0.3, anchor_spacing=0.1).num_anchors == 4
    assert StraightTrajectories(STREET, length=2.0, anchor_spacing=0.15).num_anchors == 15


def test_drops_have_one_anchor_and_a_doppler_velocity_if_asked():
    still = Drops(STREET).motion(range(5), seed=1)
    assert still.times.shape == (5, 1)
    assert (still.times == 0).all()
    assert (still.velocities == 0).all()
    moving = Drops(STREET, speed=(3.0, 3.0)).motion(range(5), seed=1)
    torch.testing.assert_close(torch.linalg.vector_norm(moving.velocities, dim=-1), torch.full((5, 1), 3.0).double())
    assert moving.orientations[..., 0].unique().numel() == 5


def test_a_user_depends_on_seed_and_id_alone():
    def left_of_zero(positions):
        return (positions[..., 0] < 0).all(-1)

    for trajectories in (StraightTrajectories(STREET), RandomWaypoints(STREET), Drops(STREET)):
        whole = trajectories.motion(range(20), 7, left_of_zero)
        some = trajectories.motion([13, 2, 5], 7, left_of_zero)
        for name, values in vars(some).items():
            assert torch.equal(values, getattr(whole, name)[[13, 2, 5]])
        assert not torch.equal(whole.positions, trajectories.motion(range(20), 8, left_of_zero).positions)
        assert (whole.positions[..., 0] < 0).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StraightTrajectories([[0, 1]]), "area must be"),
        (lambda: StraightTrajectories([[1, 0], [0, 1]]), "x0 < x1"),
        (lambda: StraightTrajectories([[0, 1], [0, 1]], length=2.0), "shorter than the way"),
        (lambda: StraightTrajectories(STREET, speed=(0.0, 1.0)), "use Drops"),
        (lambda: StraightTrajectories(STREET, speed=(2.0, 1.0)), r"\[lowest, highest\]"),
        (lambda: StraightTrajectories(STREET, anchor_spacing=0.0), "anchor_spacing"),
        (lambda: RandomWaypoints(STREET, length=0.0), "use Drops"),
        (lambda: Drops(STREET, speed=(-1.0, 1.0)), "negative"),
    ],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_an_area_without_a_permitted_place_is_an_error(monkeypatch):
    monkeypatch.setattr("chanlab.channels.trajectories.MAX_DRAWS", 20)
    with pytest.raises(UsageError, match="no permitted place for user 4"):
        Drops(STREET).motion([4], 0, lambda positions: torch.zeros(len(positions), dtype=torch.bool))


def test_uniform_headings_cover_the_circle():
    heading = StraightTrajectories([[0, 100], [0, 100]]).motion(range(500), 0).orientations[:, 0, 0]
    counts = torch.histc(heading, 8, 0.0, 2 * math.pi)
    assert counts.min() > 35
