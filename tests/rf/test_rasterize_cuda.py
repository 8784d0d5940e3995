"""`rasterize_sphere` on a GPU: the reference's image and gradients, full lists, streams, graphs."""

import pytest
import torch
from spheres import HEMISPHERE, NAMES, SPHERE, away_from_cuts, gradients, scene, weights_like
from test_rasterize import SCENES

from chanlab.errors import ChanlabError, UsageError
from chanlab.rf import Panorama, rasterize_sphere, sphere, sphere_cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def nothing_pending():
    yield
    sphere.check()


def on_gpu(inputs):
    return [x.float().cuda() for x in inputs]


@pytest.mark.parametrize(("panorama", "inputs"), SCENES.values(), ids=SCENES)
def test_image_and_gradients_are_the_references(panorama, inputs):
    single = on_gpu(inputs)
    doubled = [x.double().cpu() for x in single]
    by_image, by_transmittance = weights_like(inputs, panorama)
    clear = away_from_cuts(doubled, panorama)
    assert clear.float().mean() > 0.3
    weights = (by_image * clear[:, None], by_transmittance * clear)
    want, by_want = gradients(doubled, panorama, "reference", *weights, statistics=True)
    made, found = gradients(single, panorama, "cuda", *weights, statistics=True)
    where = clear[:, None].expand_as(want.image)
    torch.testing.assert_close(made.image.cpu()[where].double(), want.image[where], rtol=1e-3, atol=2e-5)
    torch.testing.assert_close(
        made.transmittance.cpu()[clear].double(), want.transmittance[clear], rtol=1e-3, atol=2e-5
    )
    torch.testing.assert_close(made.visibility.weight.cpu().double(), want.visibility.weight, rtol=0.01, atol=0.02)
    torch.testing.assert_close(made.visibility.peak.cpu().double(), want.visibility.peak, rtol=0.01, atol=0.005)
    for name, a, b in zip(NAMES, found, by_want, strict=True):
        if b.numel():
            difference = (a.cpu().double() - b).norm()
            assert difference <= 1e-3 * b.norm(), name


@pytest.mark.parametrize("receivers", [2, 100])  # patches of 4 x 4 and of 8 x 4 pixels
@pytest.mark.parametrize("channels", [1, 2, 3, 6, 7, 22, 23, 38])
def test_channels(channels, receivers):
    inputs = on_gpu(scene(80, receivers=receivers, channels=channels, seed=30))
    weights = weights_like(inputs, HEMISPHERE)
    want, by_want = gradients([x.cpu() for x in inputs], HEMISPHERE, "cpu", *weights)
    made, found = gradients(inputs, HEMISPHERE, "cuda", *weights)
    torch.testing.assert_close(made.image.cpu(), want.image, rtol=1e-3, atol=0.02)
    for a, b in zip(found, by_want, strict=True):
        assert (a.cpu() - b).norm() <= 0.02 * b.norm()


def test_large_scene_as_on_the_cpu():
    """Longer lists than one batch, many receivers: what small scenes do not reach."""
    inputs = on_gpu(scene(20_000, receivers=3, seed=31, scales=(0.005, 0.05)))
    panorama = Panorama.hemisphere(90, 360)
    weights = weights_like(inputs, panorama)
    want, by_want = gradients([x.cpu() for x in inputs], panorama, "cpu", *weights, statistics=True)
    made, found = gradients(inputs, panorama, "cuda", *weights, statistics=True)
    error = (made.image.cpu() - want.image).abs()
    assert error.median() < 1e-6
    assert (error > 1e-3).float().mean() < 0.01  # footprints at the cut
    assert (made.visibility.weight.cpu() - want.visibility.weight).norm() < 0.01 * want.visibility.weight.norm()
    for a, b in zip(found, by_want, strict=True):
        assert (a.cpu() - b).norm() <= 0.05 * b.norm()


def test_more_tiles_than_a_block_counts_as_on_the_cpu():
    inputs = on_gpu(scene(3000, receivers=2, seed=38, scales=(0.005, 0.05)))
    panorama = Panorama.sphere(600, 1200)
    weights = weights_like(inputs, panorama)
    want, by_want = gradients([x.cpu() for x in inputs], panorama, "cpu", *weights)
    made, found = gradients(inputs, panorama, "cuda", *weights)
    error = (made.image.cpu() - want.image).abs()
    assert error.median() < 1e-6
    assert (error > 1e-3).float().mean() < 0.01
    for a, b in zip(found, by_want, strict=True):
        assert (a.cpu() - b).norm() <= 0.05 * b.norm()


@pytest.mark.parametrize("count", [9000, 70_000])  # one level of merges, and two
def test_lists_of_many_chunks_as_on_the_cpu(count):
    inputs = on_gpu(scene(count, seed=39, scales=(0.05, 0.3), opacities=(0.004, 0.01)))
    panorama = Panorama.sphere(16, 32)
    want, by_want = gradients([x.cpu() for x in inputs], panorama, "cpu", *weights_like(inputs, panorama))
    made, found = gradients(inputs, panorama, "cuda", *weights_like(inputs, panorama))
    torch.testing.assert_close(made.image.cpu(), want.image, rtol=1e-3, atol=0.02)
    for a, b in zip(found, by_want, strict=True):
        assert (a.cpu() - b).norm() <= 0.05 * b.norm()


def test_no_room_is_nan_and_raises_at_the_next_check():
    inputs = on_gpu(scene(300, seed=32))
    panorama = Panorama.sphere(31, 61)
    leaves = [x.clone().requires_grad_() for x in inputs]
    made = rasterize_sphere(*leaves, panorama=panorama, capacity=100)
    assert made.image.isnan().all()
    assert made.transmittance.isnan().all()
    made.image.sum().backward()
    assert all(x.grad.isnan().all() for x in leaves)
    with pytest.raises(ChanlabError, match="capacity="):
        sphere.check()
    again = rasterize_sphere(*inputs, panorama=panorama)
    assert again.image.isfinite().all()
    sphere.check()


def test_no_host_synchronisation():
    inputs = [x.requires_grad_() for x in on_gpu(scene(300, receivers=2, seed=33))]
    rasterize_sphere(*inputs, panorama=SPHERE)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rasterize_sphere(*inputs, panorama=SPHERE).image.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_another_stream_and_a_graph_draw_the_same():
    inputs = on_gpu(scene(300, receivers=2, seed=34))
    want = rasterize_sphere(*inputs, panorama=SPHERE).image
    torch.cuda.synchronize()
    sphere.check()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000)
        shifted = inputs[0] * 1  # made late, on this stream
        made = rasterize_sphere(shifted, *inputs[1:], panorama=SPHERE).image
    stream.synchronize()
    torch.testing.assert_close(made, want)

    graph = torch.cuda.CUDAGraph()
    means = inputs[0].clone()
    with torch.cuda.graph(graph):
        replayed = rasterize_sphere(means, *inputs[1:], panorama=SPHERE, capacity=20_000).image
    graph.replay()
    torch.testing.assert_close(replayed, want)
    means.mul_(1.3)
    graph.replay()
    torch.testing.assert_close(replayed, rasterize_sphere(means, *inputs[1:], panorama=SPHERE).image)


def test_a_backward_pass_on_another_stream_clears_its_own_memory():
    inputs = [x.requires_grad_() for x in on_gpu(scene(300, receivers=2, seed=35))]

    def gradients_of(image):
        return torch.autograd.grad(image.square().sum(), inputs)

    want = gradients_of(rasterize_sphere(*inputs, panorama=SPHERE).image)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        image = rasterize_sphere(*inputs, panorama=SPHERE).image
        torch.cuda._sleep(20_000_000)
        # Written late, on this stream, and let go: the sums of the backward pass come to lie here.
        size = 2 * 300 * (10 + inputs[4].shape[1])
        late = [torch.full((size,), torch.nan, device="cuda") for _ in range(16)]
        del late
        made = gradients_of(image)
    stream.synchronize()
    for ours, other in zip(made, want, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-3, atol=1e-4)


def test_training_step_in_a_graph():
    inputs = on_gpu(scene(300, seed=35))
    leaves = [x.clone().requires_grad_() for x in inputs]

    def step():
        made = rasterize_sphere(*leaves, panorama=SPHERE, capacity=20_000)
        return torch.autograd.grad(made.image.square().sum(), leaves)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        want = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_nothing_and_odd_requests():
    inputs = on_gpu(scene(10, seed=36))
    empty = [x[:0] if i < 5 else x for i, x in enumerate(inputs)]
    made = rasterize_sphere(*empty, panorama=SPHERE)
    assert (made.image == 0).all()
    assert (made.transmittance == 1).all()
    with pytest.raises(UsageError, match="float32"):
        rasterize_sphere(*(x.double() for x in inputs), panorama=SPHERE)
    with pytest.raises(UsageError, match="channels"):
        rasterize_sphere(*inputs[:4], inputs[4].repeat(1, 20), *inputs[5:], panorama=SPHERE)


def test_operator_keeps_the_rules_of_torch():
    inputs = [x.requires_grad_() for x in on_gpu(scene(12, receivers=2, seed=37))]
    asked = (SPHERE.height, SPHERE.width, SPHERE.lowest, SPHERE.highest, SPHERE.start, 0.01, 0.003)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")  # atomics: not the same bits twice
    torch.library.opcheck(torch.ops.chanlab.rasterize_sphere, (*inputs, *asked, True, 5000, -1), test_utils=tests)


@pytest.fixture
def sorts(monkeypatch):
    """Chooses the sort: by radix from so many items on."""

    def choose(least):
        monkeypatch.setattr(sphere_cuda, "RADIX_ITEMS", least)
        monkeypatch.setattr(sphere_cuda, "RADIX_GAUSSIANS", least)
        sphere_cuda._plan.cache_clear()

    yield choose
    sphere_cuda._plan.cache_clear()


@pytest.mark.parametrize(("count", "receivers"), [(1, 3), (700, 5), (20_000, 3), (20_000, 40), (140_000, 1)])
def test_sorts_agree(sorts, count, receivers):
    inputs = on_gpu(scene(count, receivers=receivers, seed=40, scales=(0.02, 0.1)))
    inputs[:4] = [x[torch.arange(count) // 3] for x in inputs[:4]]  # three at each distance
    panorama, images = Panorama.sphere(16, 32), []
    for least in (1, 1 << 40):
        sorts(least)
        made = rasterize_sphere(*inputs, panorama=panorama, capacity=32 * count * receivers)
        kept = rasterize_sphere(inputs[0].clone().requires_grad_(), *inputs[1:], panorama=panorama, capacity=2**25 + 1)
        images += [made.image, kept.image.detach()]
    assert images[0].abs().max() > 0
    assert all(torch.equal(image, images[0]) for image in images)


@pytest.mark.parametrize("capacity", [20_000, 20_001])  # memory that two parts share: the second begins at even words
def test_sort_by_radix_in_a_graph(sorts, capacity):
    sorts(1)
    inputs = on_gpu(scene(300, receivers=3, seed=41))
    want = rasterize_sphere(*inputs, panorama=SPHERE, capacity=capacity).image
    means, graph = inputs[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = rasterize_sphere(means, *inputs[1:], panorama=SPHERE, capacity=capacity).image
    graph.replay()
    assert torch.equal(replayed, want)
    means.mul_(-1)
    graph.replay()
    assert torch.equal(replayed, rasterize_sphere(means, *inputs[1:], panorama=SPHERE, capacity=capacity).image)
