"""`rasterize_sphere`: what is true of the image, and of all back ends on the CPU."""

import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from spheres import HEMISPHERE, NAMES, SPHERE, away_from_cuts, gradients, one, scene, turn, weights_like
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from chanlab.errors import UsageError
from chanlab.rf import Panorama, rasterize_sphere

BOTH = pytest.mark.parametrize("backend", ["reference", "cpu"])


def draw(inputs, panorama, backend, **options):
    return rasterize_sphere(*inputs, panorama=panorama, backend=backend, **options)


DIRECTIONS = {
    "ahead": (1.0, 0.02, 0.03),
    "seam": (1.0, 1e-9, 0.2),
    "behind": (-1.0, 0.01, -0.4),
    "zenith": (0.0, 0.0, 1.0),
    "near zenith": (0.03, -0.02, 1.0),
    "nadir": (0.0, 0.0, -1.0),
}


@BOTH
@pytest.mark.parametrize("direction", DIRECTIONS.values(), ids=DIRECTIONS)
def test_round_gaussian_falls_with_the_angle_everywhere(backend, direction):
    """alpha = opacity exp(-angle² / 2 (scale² / distance² + blur²)), at the seam and the poles as anywhere."""
    inputs = one(direction, distance=2.5, scale=0.4, opacity=0.7, signal=3.0)
    made = draw(inputs, SPHERE, backend, blur=0.05)
    towards = torch.nn.functional.normalize(inputs[0][0], dim=0)
    rays = SPHERE.rays()
    angle = torch.atan2(torch.linalg.cross(rays, towards.expand_as(rays)).norm(dim=-1), rays @ towards)
    alpha = 0.7 * torch.exp(-angle.square() / (2 * ((0.4 / 2.5) ** 2 + 0.05**2)))
    alpha = alpha.where(alpha >= 1 / 255, 0)
    assert (alpha > 0).sum() > 8
    torch.testing.assert_close(made.image[0, 0], 3 * alpha, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(made.transmittance[0], 1 - alpha, rtol=1e-9, atol=1e-12)


@BOTH
@pytest.mark.parametrize("turned", [0.0, math.pi / 2])
def test_widths_along_the_horizon_and_up_are_the_gaussians_own(backend, turned):
    """A Gaussian on the x axis: its y and z scales over its distance are the image's widths; the radial one is none."""
    panorama = Panorama(61, 720, -0.3, 0.3, start=-math.pi / 720)  # a row and a column look along x
    inputs = list(one((1.0, 0, 0), distance=4.0, opacity=0.9))
    inputs[2] = torch.tensor([[3.0, 0.2, 0.1]], dtype=torch.float64)
    inputs[1] = torch.tensor([[math.cos(turned / 2), math.sin(turned / 2), 0, 0]], dtype=torch.float64) * 7
    image = draw(inputs, panorama, backend, blur=0.01).image[0, 0]
    across, up = (0.05, 0.025) if turned == 0 else (0.025, 0.05)
    azimuth = torch.arange(9, dtype=torch.float64) * 2 * math.pi / 720
    elevation = torch.arange(9, dtype=torch.float64) * 0.6 / 61
    for found, angle, width in ((image[30, :9], azimuth, across), (image[30:39, 0], elevation, up)):
        want = 0.9 * torch.exp(-angle.square() / (2 * (width**2 + 0.01**2)))
        torch.testing.assert_close(found, want.where(want > 1 / 255, 0), rtol=1e-9, atol=1e-12)


@BOTH
def test_moving_round_by_columns_rolls_the_image(backend):
    inputs = scene(40, receivers=2, seed=3)
    made = draw(inputs, HEMISPHERE, backend)
    for columns in (1, 17, 49):
        rolled = list(inputs)
        rolled[6] = inputs[6] @ turn(2, -columns * HEMISPHERE.column_step)
        again = draw(rolled, HEMISPHERE, backend)
        torch.testing.assert_close(again.image, made.image.roll(columns, -1), rtol=1e-9, atol=1e-10)


@BOTH
def test_turning_the_world_with_the_receivers_changes_nothing(backend):
    means, quaternions, scales, opacities, signals, receivers, rotations = scene(40, receivers=2, seed=4)
    made = draw((means, quaternions, scales, opacities, signals, receivers, rotations), SPHERE, backend)
    turned = turn(0, 0.7)
    w, x, y, z = quaternions.unbind(-1)
    c, s = math.cos(0.35), math.sin(0.35)
    product = torch.stack([c * w - s * x, c * x + s * w, c * y - s * z, c * z + s * y], -1)
    shift = torch.tensor([3.0, -1, 2], dtype=torch.float64)
    moved = (means @ turned.mT + shift, product, scales, opacities, signals, receivers @ turned.mT + shift)
    again = draw((*moved, turned @ rotations), SPHERE, backend)
    torch.testing.assert_close(again.image, made.image, rtol=1e-8, atol=1e-9)


@BOTH
def test_order_of_the_inputs_is_none_of_the_images(backend):
    inputs = scene(80, seed=5, opacities=(0.6, 0.99))
    made = draw(inputs, SPHERE, backend, statistics=True)
    shuffled = torch.randperm(80, generator=torch.Generator().manual_seed(0))
    again = draw((*(x[shuffled] for x in inputs[:5]), *inputs[5:]), SPHERE, backend, statistics=True)
    torch.testing.assert_close(again.image, made.image, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(again.visibility.weight, made.visibility.weight[:, shuffled], rtol=1e-10, atol=1e-12)


@BOTH
def test_nearer_hides_farther_and_ties_go_by_index(backend):
    first, second = one((1.0, 1, 0.5), 2.0, opacity=0.6, signal=1.0), one((1.0, 1, 0.5), 3.0, 0.15, 0.6, signal=10.0)
    pair = [torch.cat([b, a]) for a, b in zip(first[:5], second[:5], strict=True)]
    made = draw((*pair, *first[5:]), SPHERE, backend)
    highest = (1 - made.transmittance).argmax()
    alpha = 1 - made.transmittance.flatten()[highest].sqrt()  # alike but for distance
    assert made.image.flatten()[highest].item() == pytest.approx((alpha + 10 * alpha * (1 - alpha)).item())
    tied = [torch.cat([a, a]) for a in first[:4]]
    signals = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    image = draw((*tied, signals, *first[5:]), SPHERE, backend).image[0]
    torch.testing.assert_close(image[1], image[0] * (1 - image[0]), rtol=1e-9, atol=1e-4)
    assert image[0].max() > 0.3


@BOTH
def test_weights_and_transmittance_add_to_one(backend):
    inputs = list(scene(200, receivers=2, channels=1, seed=6, scales=(0.1, 0.8), opacities=(0.5, 1.0)))
    inputs[4] = torch.ones_like(inputs[4])
    made = draw(inputs, SPHERE, backend, statistics=True)
    torch.testing.assert_close(made.image[:, 0], 1 - made.transmittance, rtol=1e-9, atol=1e-12)
    assert 1e-4 <= made.transmittance.min() < 0.01
    weight, radius, peak = made.visibility.weight, made.visibility.radius, made.visibility.peak
    torch.testing.assert_close(weight.sum(1), made.image.sum((1, 2, 3)), rtol=1e-9, atol=1e-9)
    assert (peak <= 0.999).all()
    assert (weight[radius == 0] == 0).all()
    assert ((peak > 0) == (weight > 0)).all()


@BOTH
@pytest.mark.parametrize("place", ["none", "below the horizon", "at the receiver", "too faint"])
def test_nothing_to_see_is_an_empty_image_without_nan(backend, place):
    inputs = {
        "none": tuple(x[:0] if i < 5 else x for i, x in enumerate(one((1.0, 0, 0)))),
        "below the horizon": one((0.3, 0.2, -1.0)),
        "at the receiver": one((1.0, 0, 0), distance=0.0),
        "too faint": one((1.0, 0, 0.5), opacity=1 / 256),
    }[place]
    made, found = gradients(inputs, HEMISPHERE, backend, *weights_like(inputs, HEMISPHERE), statistics=True)
    assert (made.image == 0).all()
    assert (made.transmittance == 1).all()
    assert all((g == 0).all() for g in found)
    assert made.image.shape == (inputs[5].shape[0], 1, 21, 50)
    assert place == "below the horizon" or (made.visibility.radius == 0).all()


@BOTH
def test_nearest_is_where_drawing_begins(backend):
    for distance, drawn in ((0.49, False), (0.5, False), (0.51, True)):
        made = draw(one((0.0, 1, 0), distance=distance), SPHERE, backend, nearest=0.5)
        assert (made.image.max() > 0.1) == drawn
        assert (made.visibility.radius.item() > 0) == drawn


def test_what_is_too_opaque_has_no_gradient_where_it_is():
    """Around a mean on a pixel's ray alpha is clamped; it has no gradient there, in tiles as by definition."""
    inputs = one(SPHERE.rays()[10, 7], opacity=1.0, scale=1.5)
    want, by_want = gradients(inputs, SPHERE, "reference", *weights_like(inputs, SPHERE))
    made, found = gradients(inputs, SPHERE, "cpu", *weights_like(inputs, SPHERE))
    assert made.image[0, 0, 10, 7].item() == pytest.approx(0.999, abs=1e-12)
    torch.testing.assert_close(made.image, want.image, rtol=1e-9, atol=1e-12)
    for a, b in zip(found, by_want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@BOTH
def test_among_and_inside_gaussians_nothing_is_nan(backend):
    inputs = list(scene(60, receivers=2, seed=8, scales=(0.5, 3.0)))
    inputs[0] = inputs[0] * 0.1
    inputs[0][0] = inputs[5][0]
    made, found = gradients(inputs, SPHERE, backend, *weights_like(inputs, SPHERE))
    assert made.image.isfinite().all()
    assert made.image.abs().max() > 0
    assert all(g.isfinite().all() for g in found)


@BOTH
@pytest.mark.parametrize("which", range(7), ids=NAMES)
def test_gradients_are_those_of_finite_differences(backend, which):
    inputs = list(scene(7, receivers=2, seed=9, scales=(0.1, 0.5)))
    inputs[0][:2, :2] = inputs[0][:2, :2] * 0.02 + inputs[5][0, :2]  # one at a pole of the first receiver
    panorama = Panorama.sphere(9, 20)
    by_image, by_transmittance = weights_like(inputs, panorama)
    clear = away_from_cuts(inputs, panorama, band=1e-4)
    assert clear.float().mean() > 0.9

    def loss(x):
        made = draw((*inputs[:which], x, *inputs[which + 1 :]), panorama, backend)
        return ((made.image * by_image).sum(1) + made.transmittance * by_transmittance)[clear]

    torch.autograd.gradcheck(loss, inputs[which].requires_grad_(), eps=1e-6, atol=1e-6, rtol=1e-5, fast_mode=True)


SCENES = {
    "sphere": (SPHERE, scene(60, receivers=2, seed=10)),
    "hemisphere": (HEMISPHERE, scene(150, receivers=2, seed=11)),
    "one column": (Panorama.sphere(7, 1), scene(30, seed=12)),
    "one row": (Panorama.hemisphere(1, 33), scene(30, seed=13, channels=1)),
    "a band from a start": (Panorama(19, 37, -0.4, 1.1, start=0.3), scene(60, seed=14, channels=5)),
    "opaque": (SPHERE, scene(300, seed=15, scales=(0.2, 1.0), opacities=(0.9, 1.0))),
    "wide": (SPHERE, scene(40, seed=16, scales=(1.0, 20.0), opacities=(0.01, 0.3))),
    "no channels": (SPHERE, scene(40, seed=17, channels=0)),
}


def degenerate():
    inputs = scene(60, receivers=2, seed=18)
    inputs[2][:20, 0] = 0  # discs
    inputs[2][20:40, 1:] = 0  # needles
    inputs[2][40:50] = 0  # points
    inputs[2][50:55, 0] = 50.0  # across the sky
    return inputs


def at_the_poles():
    inputs = scene(40, receivers=1, seed=19)
    inputs[0][:, :2] *= 0.03
    inputs[6][:] = torch.eye(3, dtype=torch.float64)
    inputs[5][:] = 0
    inputs[0][0, :2] = 0
    return inputs


def needles():
    inputs = scene(90, seed=20, opacities=(0.02, 0.9))
    inputs[2][:, 1:] = 0.01
    inputs[2][:, 0] *= 2
    return inputs


def near_and_wide():
    inputs = scene(200, seed=21, scales=(0.02, 0.2), opacities=(0.02, 0.3))
    inputs[2][::10] *= 15
    return inputs


SCENES["needles"] = (Panorama.sphere(60, 120), needles())
SCENES["near and wide"] = (SPHERE, near_and_wide())
SCENES["degenerate scales"] = (HEMISPHERE, degenerate())
SCENES["poles"] = (SPHERE, at_the_poles())


@pytest.mark.parametrize(("panorama", "inputs"), SCENES.values(), ids=SCENES)
def test_tiles_give_the_dense_image_and_gradients(panorama, inputs):
    by_image, by_transmittance = weights_like(inputs, panorama)
    clear = away_from_cuts(inputs, panorama, band=1e-9)
    assert clear.float().mean() > 0.99
    weights = (by_image * clear[:, None], by_transmittance * clear)
    want, by_want = gradients(inputs, panorama, "reference", *weights, statistics=True)
    made, found = gradients(inputs, panorama, "cpu", *weights, statistics=True)
    where = clear[:, None].expand_as(want.image)
    torch.testing.assert_close(made.image[where], want.image[where], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(made.transmittance[clear], want.transmittance[clear], rtol=1e-9, atol=1e-11)
    if clear.all():
        torch.testing.assert_close(made.visibility.weight, want.visibility.weight, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(made.visibility.peak, want.visibility.peak, rtol=1e-8, atol=1e-10)
    assert (made.visibility.radius >= want.visibility.radius).all()
    assert (made.visibility.radius <= 1.001 * want.visibility.radius + 2e-4).all()
    for name, a, b in zip(NAMES, found, by_want, strict=True):
        scale = b.abs().max() if b.numel() else 0
        assert (a - b).abs().max() <= 1e-8 * scale if b.numel() else a.shape == b.shape, name


@pytest.mark.parametrize(("panorama", "inputs"), SCENES.values(), ids=SCENES)
def test_single_precision_is_within_a_thousandth(panorama, inputs):
    single = [x.float() for x in inputs]
    doubled = [x.double() for x in single]
    by_image, by_transmittance = weights_like(inputs, panorama)
    clear = away_from_cuts(doubled, panorama)
    assert clear.float().mean() > 0.3
    weights = (by_image * clear[:, None], by_transmittance * clear)
    want, by_want = gradients(doubled, panorama, "reference", *weights)
    made, found = gradients(single, panorama, "cpu", *weights)
    where = clear[:, None].expand_as(want.image)
    torch.testing.assert_close(made.image[where].double(), want.image[where], rtol=1e-3, atol=2e-5)
    for name, a, b in zip(NAMES, found, by_want, strict=True):
        assert a.dtype == torch.float32
        if b.numel():
            assert (a - b).norm() <= 1e-3 * b.norm(), name
            assert (a - b).abs().max() <= 1e-3 * b.abs().max(), name


def test_gradients_are_the_same_bits_on_every_run():
    inputs = [x.float() for x in scene(200, receivers=2, seed=20)]
    runs = [gradients(inputs, SPHERE, "cpu", *weights_like(inputs, SPHERE))[1] for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("panorama", [SPHERE, HEMISPHERE])
def test_operator_keeps_the_rules_of_torch(panorama):
    inputs = scene(12, receivers=2, seed=21)
    for dtype in (torch.float32, torch.float64):
        given = [x.to(dtype).requires_grad_() for x in inputs]
        asked = (panorama.height, panorama.width, panorama.lowest, panorama.highest, panorama.start, 0.01, 0.003)
        torch.library.opcheck(torch.ops.chanlab.rasterize_sphere, (*given, *asked, True, 0, -1))


def test_compiled_code_draws_the_same():
    inputs = scene(12, seed=22)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def total(*given):
        return rasterize_sphere(*given, panorama=SPHERE, backend="cpu").image.square().sum()

    leaves = [x.clone().requires_grad_() for x in inputs]
    total(*leaves).backward()
    again = [x.clone().requires_grad_() for x in inputs]
    draw(again, SPHERE, "cpu").image.square().sum().backward()
    for a, b in zip(leaves, again, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_forward_mode_is_refused():
    inputs = scene(12, seed=22)
    along = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def total(means, backend):
        return draw((means, *inputs[1:]), SPHERE, backend).image.square().sum()

    mean = inputs[0].clone().requires_grad_()
    total(mean, "cpu").backward()
    _, moved = torch.func.jvp(lambda x: total(x, "reference"), (inputs[0],), (along,))
    torch.testing.assert_close(moved, (mean.grad * along).sum(), rtol=1e-6, atol=1e-9)
    with pytest.raises(UsageError, match="forward-mode"):
        torch.func.jvp(lambda x: total(x, "cpu"), (inputs[0],), (along,))
    with forward_ad.dual_level(), pytest.raises(UsageError, match="forward-mode"):
        total(forward_ad.make_dual(inputs[0], along), "cpu")


def test_second_derivatives_are_refused():
    inputs = scene(12, seed=22)
    asked = (SPHERE.height, SPHERE.width, SPHERE.lowest, SPHERE.highest, SPHERE.start, 0.01, 0.003)

    def plainly(*given):
        return draw(given, SPHERE, "cpu").image

    def dispatched(*given):
        return torch.ops.chanlab.rasterize_sphere(*given, *asked, False, 0, -1)[0]

    for image in (plainly, dispatched):
        leaf = inputs[0].clone().requires_grad_()
        (first,) = torch.autograd.grad(image(leaf, *inputs[1:]).square().sum(), leaf, create_graph=True)
        with pytest.raises((UsageError, RuntimeError), match=r"twice|second derivatives"):
            first.sum().backward()


def test_tracing_sees_the_operator():
    inputs = scene(12, seed=22)
    graph = make_fx(lambda means: draw((means, *inputs[1:]), SPHERE, "cpu").image)(inputs[0])
    assert torch.ops.chanlab.rasterize_sphere.default in {node.target for node in graph.graph.nodes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda means: draw((means, *inputs[1:]), SPHERE, "cpu").image, (inputs[0],))
    moved = inputs[0] * 1.3
    for made in (graph(moved), traced(moved)):
        assert torch.equal(made, draw((moved, *inputs[1:]), SPHERE, "cpu").image)


def test_strides_signs_and_gradients_switched_off_make_no_difference():
    inputs = scene(1, seed=2)
    want = draw(inputs, SPHERE, "cpu")
    turned = list(inputs)
    turned[0] = inputs[0].mT.contiguous().mT
    turned[6] = inputs[6].mT.contiguous().mT
    turned[4] = torch.complex(torch.zeros_like(inputs[4]), -inputs[4]).conj().imag
    assert turned[4].is_neg()
    for given in (turned, [x.clone().requires_grad_() for x in inputs]):
        with torch.no_grad():
            made = draw(given, SPHERE, "cpu")
        assert not made.image.requires_grad
        assert torch.equal(made.image, want.image)
    single = [x[:, :1] if x.ndim == 2 and i == 4 else x for i, x in enumerate(turned)]
    assert single[4].is_contiguous()
    assert torch.equal(draw(single, SPHERE, "cpu").image, want.image[:, :1])


def test_forked_processes_draw():
    code = """
import os, signal, sys
from spheres import SPHERE, scene
from chanlab.rf import rasterize_sphere
want = rasterize_sphere(*scene(12), panorama=SPHERE).image
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
signal.alarm(20)
os._exit(not rasterize_sphere(*scene(12), panorama=SPHERE).image.equal(want))
"""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_back_end_follows_the_device_and_never_gives_way():
    inputs = scene(5, seed=23)
    torch.testing.assert_close(
        rasterize_sphere(*inputs, panorama=SPHERE).image, draw(inputs, SPHERE, "cpu").image, rtol=0, atol=0
    )
    for backend in ("cuda", "gpu"):
        with pytest.raises(UsageError, match="back end"):
            draw(inputs, SPHERE, backend)
    with pytest.raises(UsageError, match="back end"):
        rasterize_sphere(*(x.to("meta") for x in inputs), panorama=SPHERE)


def test_wrong_inputs_are_named():
    inputs = scene(5, seed=24)
    for which, name in enumerate(NAMES):
        wrong = list(inputs)
        wrong[which] = inputs[which][..., :1, None]
        with pytest.raises(UsageError, match="rasterize_sphere"):
            draw(wrong, SPHERE, "cpu")
        wrong[which] = inputs[which].float()
        with pytest.raises(UsageError, match=name if which else "rasterize_sphere"):
            draw(wrong, SPHERE, "cpu")
        wrong[which] = inputs[which].to("meta")
        with pytest.raises(UsageError, match=name if which else "quaternions"):
            rasterize_sphere(*wrong, panorama=SPHERE)
        for axis in range(inputs[which].ndim):
            wrong[which] = inputs[which].repeat_interleave(2, axis)
            if (name, axis) != ("signals", 1):
                with pytest.raises(UsageError, match="must be"):
                    draw(wrong, SPHERE, "cpu")
    with pytest.raises(UsageError, match="float32"):
        draw([x.half() for x in inputs], SPHERE, "cpu")
    with pytest.raises(UsageError, match="no receivers"):
        draw([x[:0] if i > 4 else x for i, x in enumerate(inputs)], SPHERE, "cpu")
    with pytest.raises(UsageError, match="blur"):
        draw(inputs, SPHERE, "cpu", blur=0.0)
    with pytest.raises(UsageError, match="capacity"):
        draw(inputs, SPHERE, "cpu", capacity=-1)
    with pytest.raises(UsageError, match="whole turns"):
        Panorama(4, 4, start=1e9)
    with pytest.raises(UsageError, match="panorama"):
        Panorama(0, 4)
    with pytest.raises(UsageError, match="elevations"):
        Panorama(4, 4, 1.0, 0.0)


def test_training_moves_a_gaussian_to_where_the_image_says():
    """The whole chain: a receiver that looks at a target image pulls a Gaussian across the seam."""
    target = draw(one((1.0, -0.15, 0.6), scale=0.5), HEMISPHERE, "cpu").image
    inputs = list(one((1.0, 0.25, 0.4), scale=0.5))
    mean = inputs[0].clone().requires_grad_()
    optimiser = torch.optim.Adam([mean], lr=0.03)
    for _ in range(200):
        optimiser.zero_grad()
        loss = (draw((mean, *inputs[1:]), HEMISPHERE, "cpu").image - target).square().mean()
        loss.backward()
        optimiser.step()
    wanted = torch.nn.functional.normalize(torch.tensor([1.0, -0.15, 0.6], dtype=torch.float64), dim=0)
    found = torch.nn.functional.normalize(mean.detach()[0], dim=0)
    assert found @ wanted > math.cos(0.01)
