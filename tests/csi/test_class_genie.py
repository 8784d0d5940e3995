"""The class genie: its statistics are those of the draws, its estimate has the linear minimum mean square error."""

import math

import pytest
import torch
from exponentials import nmse_db

from chanlab.channels import CDL, PlanarArray, subcarrier_frequencies
from chanlab.channels.sionna1 import UplinkOfSionna1
from chanlab.csi.class_genie import ClassGenie, PortwiseGenie, RayClass, ray_class
from chanlab.errors import UsageError

INTERVAL, HISTORY, STEPS = 2.352e-3, 8, 10
TIMES = torch.arange(STEPS, dtype=torch.float64) * INTERVAL
GRID = subcarrier_frequencies(64, 120e3).double()
BASE = PlanarArray(2, 2, pattern="tr38901", polarization="cross")


def channels(kind=CDL, model="A", speed=10.0, **arguments):
    return kind(model, 300e-9, speed, 2.4e9, BASE, PlanarArray(), **arguments)


def at_velocity(source, velocity, num):
    """Impulse responses of users who all move alike."""
    motion = source._users(num, "cpu")[0]
    motion.velocities[:] = velocity.float()
    source._users = lambda num, device: (motion, None)
    return source.draw(num, 1, STEPS, INTERVAL)


@pytest.mark.parametrize("kind", [CDL, UplinkOfSionna1])
@pytest.mark.parametrize("model", ["A", "D"])
def test_modes_are_the_covariance_of_the_draws(kind, model):
    velocity = torch.tensor([3.0, 8.0, -2.0], dtype=torch.float64)
    drawn = at_velocity(channels(kind, model), velocity, 2000)
    taps = drawn.coefficients[:, 0].to(torch.complex128).movedim(-1, 1).flatten(2)  # [batch, tap, port·time]
    taps = taps / taps.abs().square().sum((1, 2)).mean().sqrt() * math.sqrt(8 * STEPS)
    rays = ray_class(channels(kind, model))
    modes = rays.modes(velocity, TIMES)
    vector = (modes.vector * modes.power.sqrt()).flatten(0, 1)
    for delay in torch.unique(drawn.delay[0])[:6]:
        mine = vector[:, (rays.delay.float()[modes.tap] - delay).abs() < 1e-12]
        expected = mine @ mine.mH
        found = taps[:, (drawn.delay[0] - delay).abs() < 1e-12].sum(1)
        covariance = found.mT @ found.conj() / len(found)
        # The sampling error of a covariance: its power times the number of modes over the number of samples.
        assert (covariance - expected).abs().square().sum() < 0.02 * expected.abs().square().sum()


def drawn_of(rays, modes, num, seed=0):
    """Gaussian channels with exactly these statistics, `[num, 1, port, time, subcarrier]`."""
    generator = torch.Generator().manual_seed(seed)
    unit = torch.randn(num, len(modes.power), dtype=torch.complex128, generator=generator)
    steering = torch.polar(torch.ones(len(GRID), len(rays.delay)).double(), -2 * math.pi * GRID[:, None] * rays.delay)
    amplitude = unit * modes.power.sqrt()
    return torch.einsum("bm,ptm,fm->bptf", amplitude, modes.vector, steering[:, modes.tap])[:, None], generator


@pytest.fixture(scope="module", params=[CDL, UplinkOfSionna1])
def known(request):
    rays = ray_class(channels(request.param))
    modes = rays.modes(torch.tensor([20.0, 20.0, 0.0]), TIMES)
    clean, generator = drawn_of(rays, modes, 400)
    noise = torch.randn(clean.shape, dtype=clean.dtype, generator=generator)
    variance = 0.1
    noisy = (clean + math.sqrt(variance) * noise)[:, :, :, :HISTORY, :48]
    genie = ClassGenie(modes, rays.delay, GRID[:48], GRID, HISTORY, variance)
    return rays, modes, clean, noisy, genie, variance


def test_unit_power_on_average(known):
    rays, modes, *_ = known
    assert modes.power.sum() / (8 * STEPS) == pytest.approx(1.0, abs=1e-6)
    assert len(rays.delay) == 23


def test_the_error_is_orthogonal_to_what_was_observed(known):
    """The defining property of the LMMSE estimate; a scaled one doesn't have it."""
    _, _, clean, noisy, genie, _ = known
    prediction = genie(noisy)
    error = (prediction - clean[:, :, :, HISTORY:])[..., :48]
    correlation = (error.conj() * prediction[..., :48]).sum((1, 2, 3, 4)).real
    scale = prediction[..., :48].abs().square().sum((1, 2, 3, 4))
    assert correlation.mean().abs() < 4 * correlation.std() / math.sqrt(len(correlation))
    assert (correlation + 0.1 * scale).mean() > 4 * (correlation + 0.1 * scale).std() / math.sqrt(len(correlation))


def test_nobody_linear_does_better(known):
    """Less knowledge, another SNR or another velocity cost accuracy, on both bands."""
    rays, modes, clean, noisy, genie, variance = known
    future = clean[:, :, :, HISTORY:]
    velocity = torch.tensor([20.0, 20.0, 0.0])

    def portwise(matrix):
        each = [rays.through(row[None]).modes(velocity, TIMES) for row in matrix]
        return PortwiseGenie(matrix, each, rays.delay, GRID[:48], GRID, HISTORY, variance)

    dft = torch.exp(2j * math.pi * torch.outer(torch.arange(2), torch.arange(2)) / 2) / math.sqrt(2)
    beams = torch.kron(dft, torch.kron(dft, dft)).to(torch.complex128)
    others = [
        portwise(torch.eye(8, dtype=torch.complex128)),
        portwise(beams),
        ClassGenie(modes, rays.delay, GRID[:48], GRID, HISTORY, 10 * variance),
        ClassGenie(rays.modes(torch.tensor([20.0, 17.0, 0.0]), TIMES), rays.delay, GRID[:48], GRID, HISTORY, variance),
    ]
    for band in (slice(0, 48), slice(48, 64)):
        best = nmse_db(genie(noisy)[..., band], future[..., band])
        assert all(nmse_db(other(noisy)[..., band], future[..., band]) > best + 0.02 for other in others)


def test_ports_without_correlation_need_no_joint_processing():
    """With a single port, one by one is together."""
    rays = ray_class(channels())
    one = rays.through(torch.eye(8, dtype=torch.complex128)[:1])
    velocity = torch.tensor([5.0, 0.0, 0.0])
    modes = one.modes(velocity, TIMES)
    history = torch.randn(2, 1, 1, HISTORY, 64, dtype=torch.complex64)
    joint = ClassGenie(modes, one.delay, GRID, GRID, HISTORY, 0.1)(history)
    single = PortwiseGenie(torch.eye(1), [modes], one.delay, GRID, GRID, HISTORY, 0.1)
    assert torch.allclose(single(history), joint, atol=1e-5)


def test_it_scales_with_the_sample_and_knows_no_companions(known):
    *_, noisy, genie, _ = known
    whole = genie(noisy[:4])
    assert torch.allclose(genie(3j * noisy[2:3]), 3j * whole[2:3])


def test_a_user_at_rest_is_known_from_the_past():
    rays = ray_class(channels(model="C"))
    modes = rays.modes(torch.zeros(3), TIMES)
    clean, _ = drawn_of(rays, modes, 20)
    assert clean[:, :, :, 0].allclose(clean[:, :, :, -1])
    prediction = ClassGenie(modes, rays.delay, GRID, GRID, HISTORY, 1e-8)(clean[:, :, :, :HISTORY])
    assert nmse_db(prediction, clean[:, :, :, HISTORY:]) < -60


def test_what_it_is_not_made_for():
    with pytest.raises(UsageError, match="upright"):
        ray_class(CDL("A", 1e-7, 1.0, 2.4e9, BASE, PlanarArray(1, 2)))
    rays: RayClass = ray_class(channels())
    modes = rays.modes(torch.zeros(3), TIMES)
    with pytest.raises(UsageError, match="outlast"):
        ClassGenie(modes, rays.delay, GRID, GRID, STEPS, 0.1)
    with pytest.raises(UsageError, match="other channels"):
        ClassGenie(modes, rays.delay, GRID, GRID, HISTORY, 0.1)(torch.zeros(1, 1, 8, HISTORY, 32, dtype=torch.cfloat))
