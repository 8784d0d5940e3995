"""What `rasterize_sphere` learns from the counts that CUDA calls send back, without a GPU."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from chanlab.errors import ChanlabError, UsageError
from chanlab.rf import Panorama, sphere_cuda
from chanlab.rf.room import Room

LARGE, SMALL = Panorama.hemisphere(90, 360), Panorama.sphere(18, 40)


@pytest.fixture
def room(monkeypatch):
    """A room on a machine with CUDA, as far as it can tell."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    return Room()


def before(room, gaussians, panorama=SMALL, asked=None):
    return room.before(
        panorama, gaussians, max(1, gaussians * sphere_cuda.tiles(panorama.height, panorama.width)), asked
    )


def call(room, gaussians, need, panorama=LARGE, asked=None):
    """A call that needs so many pairs; what it had room for."""
    had, slot = before(room, gaussians, panorama, asked)
    assert slot >= 0
    place = slot % room.SLOTS
    assert room.address(slot) == room._pinned.data_ptr() + 8 * place
    room._pinned[place] = need
    room.after(slot)
    return had


def test_first_calls_guess_and_later_ones_know(room):
    assert call(room, 5000, 60_000) == 120_000
    assert call(room, 5000, 50_000) == 75_000
    assert call(room, 5000, 70_000) == 75_000
    assert call(room, 5000, 70_000) == 87_500
    assert call(room, 6000, 70_000) == 105_000  # more Gaussians, more pairs
    assert call(room, 5000, 1000, asked=10**9) == 5000 * 276  # all tiles
    assert call(room, 5000, 1000, SMALL) == 5000 * 9  # another panorama
    assert call(room, 5000, 1000, Panorama.hemisphere(90, 300)) == 120_000


def test_a_traced_graph_runs_again_without_the_slot_that_it_holds(room):
    _, slot = before(room, 5000)
    assert room.address(slot)
    room.after(slot)
    assert room.address(slot) == 0
    _, taken_back = before(room, 5000)
    room.after(taken_back)
    assert room.address(taken_back) == 0
    assert list(room._pending) == [slot % room.SLOTS]
    room._pinned[slot % room.SLOTS] = 40_000
    room.check()
    assert len(set(room._free)) == len(room._free) == room.SLOTS


def test_too_little_room_is_told_and_mended(room):
    call(room, 5000, 50_000, asked=40_000)
    with pytest.raises(ChanlabError, match=r"room for 50000 pairs.* had 40000.*capacity=50000"):
        room.check()
    room.check()
    assert call(room, 5000, 50_000) == 62_500
    call(room, 5000, 59_000, asked=58_999)
    with pytest.raises(ChanlabError, match="59000"):
        call(room, 5000, 1)


def test_large_and_small_scenes_take_turns(room):
    call(room, 5000, 50_000)
    for _ in range(200):
        call(room, 5000, 100)
        assert call(room, 5000, 50_000) == 62_500
    for _ in range(room.PATIENCE + 1):
        call(room, 5000, 4000)
    assert call(room, 5000, 100) == 5000


def test_slots_come_back(room):
    for _ in range(1000):
        call(room, 100, 150)
    for _ in range(1000):  # fails before the launch, or is traced only
        _, slot = before(room, 100)
        assert slot >= 0
        room.after(slot)
    slots = [before(room, 100)[1] for _ in range(room.SLOTS + 1)]
    assert {slot % room.SLOTS for slot in slots[:-1]} == set(range(room.SLOTS))
    assert slots[-1] == -1
    assert room.address(-1) == 0
    room.after(-1)


def test_a_slot_is_pending_until_it_is_filled(room):
    call(room, 100, 150)
    _, slot = before(room, 100)  # finds the count, and takes the same slot
    room.address(slot)
    room.after(slot)
    for _ in range(3):
        call(room, 100, 150)
    room.check()
    assert list(room._pending) == [slot % room.SLOTS]


def test_calls_without_a_slot(room, monkeypatch):
    call(room, 5000, 50_000)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert before(room, 5000, LARGE) == (120_000, -1)  # no look at counts in a capture
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert before(room, 0, LARGE) == (1, -1)


def test_threads_share_a_room(room):
    start = threading.Barrier(4)

    def work(_):
        start.wait()
        for _ in range(2000):
            _, slot = before(room, 50)
            if slot >= 0:
                room.address(slot)
                room._slots[slot % room.SLOTS] = 60
            room.after(slot)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    room.check()
    assert sorted(room._free) == list(range(room.SLOTS))
    assert not room._pending
    assert not room._given


def test_sizes_beyond_the_counters_are_refused():
    asked = (90, 360, 0.0, 1.0, 0.0, 0.01, 0.001)
    sphere_cuda._check_sizes(asked, 1 << 30, 64, 1 << 30)
    for items, receivers, capacity in ((1 << 31, 1, 1), (1, 1, 1 << 31), (1, 1 << 20, 1)):
        with pytest.raises(UsageError, match="fewer receivers"):
            sphere_cuda._check_sizes(asked, items, receivers, capacity)
    for size in ((8 * 65535 + 1, 1), (1, 16 * 65535 + 1)):
        with pytest.raises(UsageError, match="render bands"):
            sphere_cuda._check_sizes((*size, *asked[2:]), 1, 1, 1)
