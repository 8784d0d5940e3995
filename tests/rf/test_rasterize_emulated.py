"""The CUDA sources, run on the CPU: kernels, launchers and binding are the production's own, CUDA is emulated."""

import contextlib
import ctypes
import math
import re
import subprocess
from pathlib import Path

import pytest
import torch
from spheres import HEMISPHERE, NAMES, SPHERE, away_from_cuts, gradients, one, scene, turn, weights_like
from test_rasterize import SCENES
from torch import Tensor

from chanlab.errors import ChanlabError, UsageError
from chanlab.rf import Panorama, build, sphere, sphere_cuda
from chanlab.rf.room import Room

LAUNCH = re.compile(r"(\w+(?:<CHANNELS, HALVES>)?)<<<(.*?), (\w+), 0, stream>>>\(", re.DOTALL)


BLOCK, CHUNK, FAN, WAYS = 64, 256, 4, 2
STALE = 0x7F7F7F7F
GUARD = 4096
"""Words beyond the end of what a forward pass allocates, which it must leave alone."""


def emulation(folder, many_tiles, band):
    """The library of `sphere.cu`, launches emulated; small scenes have several chunks and many blocks."""
    text = (build.KERNELS / "sphere.cu").read_text(encoding="utf-8")
    text, count = LAUNCH.subn(r"emulation::launch(\2, \3, [](auto... a) { \1(a...); }, ", text)
    assert count == text.count("emulation::launch") >= 5
    assert "<<<" not in text
    source, library = folder / "sphere.cpp", folder / "sphere.so"
    source.write_text(f'#include "{Path(__file__).with_name("cuda_on_cpu.h")}"\n{text}')
    command = [
        build.find_compiler("cpu"),
        "-std=c++17",
        "-O1",
        "-U_FORTIFY_SOURCE",
        "-fPIC",
        "-shared",
        f"-I{build.KERNELS}",
    ]
    sizes = {"BLOCK": BLOCK, "CHUNK": CHUNK, "FAN": FAN, "WAYS": WAYS, "BAND": band, "MANY_TILES": many_tiles}
    command += [*(f"-DSPHERE_{name}={size}" for name, size in sizes.items()), source, "-o"]
    return compiled([*command, library])


def compiled(command):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, f"Compiling sphere.cu for the emulation failed.\n{done.stderr}"
    return ctypes.CDLL(str(command[-1]))


@pytest.fixture(scope="module", params=["halves", "whole"])
def emulated(request, tmp_path_factory):
    """Warps that hold 4 x 4 pixels twice, or 8 x 4 pixels and few tiles in shared memory."""
    sizes = {"halves": (1 << 20, 1024), "whole": (1, 5)}[request.param]
    return emulation(tmp_path_factory.mktemp("emulation"), *sizes)


@pytest.fixture(autouse=True)
def memory_holds_anything():
    """Fills what is allocated with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def cuda(emulated, monkeypatch):
    return through(emulated, monkeypatch)


def through(library, monkeypatch):
    """Calls the CUDA implementations of the operator with tensors of the CPU."""
    library.sphere_cuda_error.restype = ctypes.c_char_p
    monkeypatch.setattr(sphere_cuda, "_library", lambda: library)
    monkeypatch.setattr(sphere_cuda, "ITEM_THREADS", BLOCK)
    monkeypatch.setattr(sphere_cuda, "_plan", sphere_cuda._plan.__wrapped__)
    guards = []

    def guarded(count):
        return lambda *sizes: count(*sizes) + GUARD

    def new_empty(like, *size, **options):
        made = Tensor.new_zeros(like, *size, **options).fill_(STALE if options else math.nan)
        if options and made.ndim == 1:
            guards.append(made)
        return made

    monkeypatch.setattr(sphere_cuda, "state_words", guarded(sphere_cuda.state_words))
    monkeypatch.setattr(sphere_cuda, "_scratch_words", guarded(sphere_cuda._scratch_words))
    monkeypatch.setattr(Tensor, "new_empty", new_empty)
    monkeypatch.setattr(sphere_cuda, "_stream", lambda device: 0)

    def call(inputs, panorama, by_image, by_transmittance, capacity=20_000, poses=True, slot=-1):
        given = [x.float() for x in inputs]
        size = (panorama.height, panorama.width)
        blur = 0.3 * panorama.row_step**2
        asked = (*size, panorama.lowest, panorama.highest, panorama.start, 0.01, blur)
        guards.clear()
        image, left, *seen, state = sphere._cuda(*given, *asked, True, capacity, slot)
        assert len(guards) == 2 - (not len(given[0]))
        assert all((guard[-GUARD:] == STALE).all() for guard in guards if len(given[0])), "written beyond the end"
        by = (by_image.float(), by_transmittance if by_transmittance is None else by_transmittance.float())
        found = sphere._cuda_backward(*by, *given, left, state, *asked, capacity, poses)
        return image, left, seen, found, state[:4].view(torch.int64)

    call.guards = guards
    return call


@pytest.fixture(scope="module")
def sort_library(tmp_path_factory):
    """`sphere_sort.cu` with what stands for CUB."""
    folder, include = tmp_path_factory.mktemp("sort"), Path(__file__).with_name("cuda_on_host")
    command = [build.find_compiler("cpu"), "-std=c++17", "-O1", "-fPIC", "-shared", "-include", "cuda_runtime.h"]
    return compiled([*command, f"-I{include}", "-x", "c++", build.KERNELS / "sphere_sort.cu", "-o", folder / "sort.so"])


@pytest.fixture
def radix(cuda, sort_library, monkeypatch):
    """The same, sorting by radix; how often it did."""
    monkeypatch.setattr(sphere_cuda, "_sort_library", lambda: sort_library)
    monkeypatch.setattr(sphere_cuda, "RADIX_ITEMS", 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return cuda


CHOSEN = (
    "hemisphere",
    "one column",
    "a band from a start",
    "opaque",
    "degenerate scales",
    "poles",
    "needles",
    "near and wide",
)


@pytest.mark.parametrize("name", CHOSEN)
def test_kernels_give_the_references_image_and_gradients(cuda, name):
    panorama, inputs = SCENES[name]
    inputs = [x.float().double() for x in inputs]
    by_image, by_transmittance = weights_like(inputs, panorama)
    clear = away_from_cuts(inputs, panorama)
    assert clear.float().mean() > 0.3
    weights = (by_image * clear[:, None], by_transmittance * clear)
    want, by_want = gradients(inputs, panorama, "reference", *weights, statistics=True)
    image, through, seen, found, status = cuda(inputs, panorama, *weights)
    where = clear[:, None].expand_as(want.image)
    torch.testing.assert_close(image[where].double(), want.image[where], rtol=1e-3, atol=2e-5)
    torch.testing.assert_close(through[clear].double(), want.transmittance[clear], rtol=1e-3, atol=2e-5)
    assert (seen[0] >= want.visibility.radius).all()
    assert (seen[0] <= 1.001 * want.visibility.radius + 2e-4).all()
    for a, b in zip(seen[1:], want.visibility[1:], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0.01, atol=0.02)
    for which, a, b in zip(NAMES, found, by_want, strict=True):
        assert (a - b).norm() <= 1e-3 * b.norm(), which
    assert 0 < status[0] <= 20_000
    assert status[1] == 0


@pytest.mark.parametrize("channels", [1, 3, 7, 25])
def test_channels(cuda, channels):
    inputs = [x.float() for x in scene(30, receivers=2, channels=channels, seed=30)]
    weights = weights_like(inputs, HEMISPHERE)
    want, by_want = gradients(inputs, HEMISPHERE, "cpu", *weights)
    image, _, _, found, _ = cuda(inputs, HEMISPHERE, *weights)
    torch.testing.assert_close(image, want.image, rtol=1e-3, atol=1e-4)
    for a, b in zip(found, by_want, strict=True):
        assert (a - b).norm() <= 1e-3 * b.norm()


def test_lists_of_many_chunks_are_merged_by_distance(cuda):
    inputs = [x.float() for x in scene(700, receivers=2, seed=31, scales=(0.2, 0.9))]
    inputs[3] *= 0.05  # so that the furthest count
    panorama = Panorama.sphere(8, 16)
    weights = weights_like(inputs, panorama)
    want, by_want = gradients(inputs, panorama, "cpu", *weights)
    image, through, _, found, status = cuda(inputs, panorama, *weights)
    assert status[0] > 2 * 2 * CHUNK  # one tile for each receiver
    torch.testing.assert_close(image, want.image, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(through, want.transmittance, rtol=1e-3, atol=1e-4)
    for a, b in zip(found, by_want, strict=True):
        assert (a - b).norm() <= 1e-3 * b.norm()


def test_equal_distances_keep_the_order_of_the_inputs(cuda):
    inputs = [x.float() for x in scene(60, receivers=2, seed=35, scales=(0.3, 1.5), opacities=(0.5, 0.9))]
    inputs[:5] = [x[torch.arange(300) % 60] for x in inputs[:5]]  # five at each place
    inputs[4] = torch.randn(300, 2, generator=torch.Generator().manual_seed(0))
    panorama = Panorama.sphere(8, 16)
    weights = weights_like(inputs, panorama)
    want, by_want = gradients(inputs, panorama, "cpu", *weights)
    image, _, _, found, status = cuda(inputs, panorama, *weights)
    assert status[0] > 2 * CHUNK
    torch.testing.assert_close(image, want.image, rtol=1e-3, atol=1e-4)
    for a, b in zip(found, by_want, strict=True):
        assert (a - b).norm() <= 1e-3 * b.norm()


@pytest.mark.parametrize("count", [1, 2, 3, 31, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 1281, 2049, 2300])
def test_lists_of_every_length_are_sorted(cuda, count):
    """Round Gaussians one behind another, in random order: their weights fall with the distance."""
    generator = torch.Generator().manual_seed(count)
    rank = torch.randperm(count, generator=generator)
    panorama = Panorama.sphere(1, 1)
    inputs = [torch.cat([x] * count) if i < 5 else x for i, x in enumerate(one((1.0, 0, 0.0), opacity=0.00395))]
    inputs[0] = inputs[0] / 3 * (1 + rank[:, None] / 100)
    inputs[6] = turn(2, math.pi)[None]  # the pixel looks along -x
    _, through, (_, weight, _), _, status = cuda(inputs, panorama, *weights_like(inputs, panorama), capacity=count)
    assert status.tolist() == [count, 0]
    left = 1 - 0.00395
    torch.testing.assert_close(weight[0].double(), 0.00395 * left ** rank.double(), rtol=3e-4, atol=0)
    assert through.item() == pytest.approx(left**count, rel=3e-4)


@pytest.mark.parametrize(("count", "receivers"), [(1, 1), (1, 3), (64, 2), (65, 5), (700, 4)])
@pytest.mark.parametrize("keep", [True, False])
def test_sorts_agree(radix, monkeypatch, count, receivers, keep):
    """By radix and by merges: pairs at one distance, a third just nearer, one nowhere; with memory kept or not."""
    inputs = [x.float() for x in scene(count, receivers=receivers, seed=40, scales=(0.2, 0.9))]
    inputs[:4] = [x[torch.arange(count) // 3] for x in inputs[:4]]
    inputs[0] = inputs[0] * (1 - 4e-7 * (torch.arange(count) % 3 == 2))[:, None]
    inputs[0][count // 2 + 1 :][:1] = -math.nan  # with its sign
    asked = (8, 16, -1.5, 1.5, 0.0, 0.01, 0.01)
    images = []
    for least in (1, 1 << 40):
        monkeypatch.setattr(sphere_cuda, "RADIX_ITEMS", least)
        radix.guards.clear()
        image, *_ = sphere_cuda.forward(inputs, asked, False, 20_000, -1, keep)
        assert len(radix.guards) == 1 + keep
        assert all((guard[-GUARD:] == STALE).all() for guard in radix.guards), "written beyond the end"
        images.append(image)
    assert images[0].isfinite().all()
    assert images[0].abs().max() > 0
    assert torch.equal(*images)


@pytest.mark.parametrize(("items", "gaussians", "radix"), [(64, 65, 1), (65, 64, 1), (65, 65, 0)])
def test_which_sort(cuda, monkeypatch, items, gaussians, radix):
    monkeypatch.setattr(sphere_cuda, "RADIX_ITEMS", items)
    monkeypatch.setattr(sphere_cuda, "RADIX_GAUSSIANS", gaussians)
    monkeypatch.setattr(sphere_cuda, "_radix_sort", lambda *_: (1, 8))
    plans = [sphere_cuda._plan((8, 16, -1.5, 1.5, 0.0, 0.01, 0.01), 64, b, 2, 0) for b in (1, 2)]
    assert [plan.sort for plan in plans] == [radix, 1]
    assert plans[1].scratch - sphere_cuda._scratch_words(64, 2, 8, 16) == 2


@pytest.mark.parametrize("count", [1, 2, 255, 300])
def test_radix_sorts_by_distance(radix, count):
    test_lists_of_every_length_are_sorted(radix, count)


def test_sort_that_fails_is_an_error(radix, monkeypatch):
    found = sphere_cuda._radix_sort
    monkeypatch.setattr(sphere_cuda, "_radix_sort", lambda *given: (found(*given)[0], 1))
    inputs = scene(20, seed=33)
    with pytest.raises(ChanlabError, match="emulated"):
        radix(inputs, SPHERE, *weights_like(inputs, SPHERE))


def test_count_of_pairs_is_told(cuda, monkeypatch):
    room = Room()
    room._pinned = torch.full((room.SLOTS,), room.EMPTY, dtype=torch.int64)
    monkeypatch.setattr(sphere_cuda, "ROOM", room)
    inputs = scene(40, seed=32)
    for slot, capacity in ((1, 20_000), (2, 10)):
        room._given[slot] = (None, 40, capacity, None)
        *_, status = cuda(inputs, SPHERE, *weights_like(inputs, SPHERE), capacity=capacity, slot=slot)
        assert room._pinned[slot] == status[0] > 40
    assert room._pinned.tolist().count(room.EMPTY) == room.SLOTS - 2
    assert room._pending == {1: (None, 40, 20_000, None), 2: (None, 40, 10, None)}


def test_more_tiles_than_threads_that_scan(cuda):
    inputs = [x.float() for x in scene(600, receivers=2, seed=37, scales=(0.01, 0.02), opacities=(0.01, 0.02))]
    inputs[5][0], inputs[6][0] = 0, torch.eye(3)
    edge = torch.tensor([math.cos(math.pi / 6), math.sin(math.pi / 6), 0.1])  # of two tiles that one thread scans
    inputs[0][40:] = edge * (1 + 0.001 * torch.arange(560)[:, None])
    inputs[3][:40] *= 40
    panorama = Panorama.sphere(96, 192)
    weights = weights_like(inputs, panorama)
    want, by_want = gradients(inputs, panorama, "cpu", *weights)
    image, _, _, found, status = cuda(inputs, panorama, *weights)
    assert status[0] > 560 * 3
    torch.testing.assert_close(image, want.image, rtol=1e-3, atol=1e-4)
    for a, b in zip(found, by_want, strict=True):
        assert (a - b).norm() <= 1e-3 * b.norm()


@pytest.mark.parametrize("which", [*range(7), None], ids=[*NAMES, "none"])
def test_only_what_is_needed_has_a_gradient(cuda, monkeypatch, which):
    inputs = [x.float() for x in scene(20, receivers=2, seed=33)]
    by_image, by_transmittance = weights_like(inputs, SPHERE)
    *_, want, _ = cuda(inputs, SPHERE, by_image, torch.zeros_like(by_transmittance))
    monkeypatch.setattr(sphere, "_cpu", sphere._cuda)
    monkeypatch.setattr(sphere, "_cpu_backward", sphere._cuda_backward)
    leaves = [x.clone().requires_grad_(i == which) for i, x in enumerate(inputs)]
    asked = (SPHERE.height, SPHERE.width, SPHERE.lowest, SPHERE.highest, SPHERE.start, 0.01, 0.3 * SPHERE.row_step**2)
    image, *_ = sphere._draw(leaves, asked, False, 20_000, -1)
    assert image.requires_grad == (which is not None)
    if which is not None:
        (image * by_image.float()).sum().backward()
        torch.testing.assert_close(leaves[which].grad, want[which])
    assert all(x.grad is None for i, x in enumerate(leaves) if i != which)


def test_too_large_a_request_is_an_error(cuda):
    inputs = scene(3, seed=36)
    for panorama in (Panorama.sphere(1, 16 * 65535 + 1), Panorama.sphere(8 * 65535 + 1, 1)):
        with pytest.raises(UsageError, match="render bands"):
            cuda(inputs, panorama, *weights_like(inputs, SPHERE))
    with pytest.raises(UsageError, match="fewer receivers"):
        cuda(inputs, Panorama.sphere(8 * 10_000, 16 * 10_000), *weights_like(inputs, SPHERE))
    with pytest.raises(UsageError, match="fewer receivers"):
        cuda(inputs, SPHERE, *weights_like(inputs, SPHERE), capacity=1 << 31)


def test_constants_stand_in_the_sources_too():
    text = "".join((build.KERNELS / name).read_text() for name in ("sphere.h", "sphere_lists.cuh", "sphere.cu"))
    assert f"TILE_WIDTH = {sphere_cuda.TILE_WIDTH}, TILE_HEIGHT = {sphere_cuda.TILE_HEIGHT}," in text
    assert f"#define SPHERE_BLOCK {sphere_cuda.ITEM_THREADS}\n" in text
    assert f"integral_constant<int, {sphere_cuda.MAX_CHANNELS}>());\n}}" in text


def test_room_is_used_to_the_last_pair_and_its_lack_is_nan(cuda):
    inputs = [x.float() for x in scene(40, seed=32)]
    panorama = Panorama.sphere(31, 61)
    weights = weights_like(inputs, panorama)
    image, _, _, found, status = cuda(inputs, panorama, *weights)
    need = int(status[0])
    exact, _, _, again, status = cuda(inputs, panorama, *weights, capacity=need)
    assert torch.equal(exact, image)
    assert status[1] == 0
    for a, b in zip(again, found, strict=True):
        torch.testing.assert_close(a, b)
    for capacity in (need - 1, 10):
        image, through, _, found, status = cuda(inputs, panorama, *weights, capacity=capacity)
        assert status.tolist() == [need, 1]
        assert image.isnan().all()
        assert through.isnan().all()
        assert all(g.isnan().all() for g in found)


def test_no_gradient_by_the_transmittance_is_zero(cuda):
    inputs = scene(20, seed=33)
    by_image, by_transmittance = weights_like(inputs, SPHERE)
    *_, want, _ = cuda(inputs, SPHERE, by_image, torch.zeros_like(by_transmittance))
    *_, found, _ = cuda(inputs, SPHERE, by_image, None)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b)


def test_what_is_not_drawn_has_no_radius_and_no_gradient(cuda):
    inputs = scene(20, receivers=2, seed=33)
    inputs[0][0] = inputs[5][1]
    inputs[3][1] = 1 / 256
    _, _, (radius, weight, peak), found, _ = cuda(inputs, SPHERE, *weights_like(inputs, SPHERE))
    for value in (radius, weight, peak):
        assert value[1, 0] == 0
        assert (value[:, 1] == 0).all()
    assert radius[0, 0] > 0
    assert all(g.isfinite().all() for g in found)
    assert all((g[1] == 0).all() for g in found[:5])


def test_poses_without_gradient_are_zero_and_nothing_is_nothing(cuda):
    inputs = scene(20, seed=33)
    weights = weights_like(inputs, SPHERE)
    *_, found, _ = cuda(inputs, SPHERE, *weights, poses=False)
    assert all((g == 0).all() for g in found[5:])
    assert found[0].abs().max() > 0
    empty = [x[:0] if i < 5 else x for i, x in enumerate(inputs)]
    image, through, _, found, _ = cuda(empty, SPHERE, *weights)
    assert (image == 0).all()
    assert (through == 1).all()
    assert (found[5] == 0).all()
