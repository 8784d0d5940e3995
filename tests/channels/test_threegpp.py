"""3GPP channels: what TR 38.901 says of them, and that a sample depends on (seed, id) alone."""

import math

import pytest
import torch

from chanlab.channels import CDL, CIR, SPEED_OF_LIGHT, PlanarArray, array_response, direction, subcarrier_frequencies
from chanlab.errors import UsageError

CARRIER = 2.4e9
BS = PlanarArray(4, 4, pattern="tr38901", polarization="cross")
UT = PlanarArray()
PAIR = PlanarArray(1, 2)


def cdl(model="A", delay_spread=100e-9, speed=10.0, bs=PAIR, ut=UT, block=8, **arguments):
    return CDL(model, delay_spread, speed, CARRIER, bs, ut, block=block, **arguments)


def random_cir(taps=5, scale=1.0):
    generator = torch.Generator().manual_seed(1)
    a = scale * torch.randn(3, 2, 4, 6, taps, dtype=torch.complex64, generator=generator)
    return CIR(a, torch.rand(3, taps, generator=generator) * 1e-6, CARRIER)


@pytest.mark.parametrize("normalize", [False, True])
def test_cfr_is_sionnas(normalize):
    from sionna.phy.channel import cir_to_ofdm_channel

    cir = random_cir(scale=3.0)
    frequencies = subcarrier_frequencies(75, 300e3, torch.float32)
    a = cir.coefficients.permute(0, 1, 2, 4, 3)[:, None, :, None]
    expected = cir_to_ofdm_channel(frequencies, a, cir.delay[:, None, None], normalize)[:, 0, :, 0]
    torch.testing.assert_close(cir.cfr(frequencies, normalize), expected, rtol=1e-4, atol=2e-5)


def test_energy_is_that_of_the_response():
    cir = random_cir()
    frequencies = subcarrier_frequencies(64, 30e3)
    torch.testing.assert_close(cir.energy(frequencies), cir.cfr(frequencies).abs().square().mean((1, 2, 3, 4)))


def test_no_power_stays_no_power_and_padding_changes_nothing():
    cir = random_cir()
    frequencies = subcarrier_frequencies(16, 30e3)
    silent = CIR(torch.zeros_like(cir.coefficients), cir.delay, CARRIER)
    assert not silent.cfr(frequencies, normalize=True).any()
    torch.testing.assert_close(cir.pad(9).cfr(frequencies, True), cir.cfr(frequencies, True))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match="coefficients"):
        CIR(torch.zeros(3, 2, 4, 6, 5, dtype=torch.complex64), torch.zeros(3, 4), CARRIER)
    with pytest.raises(UsageError, match="subcarrier"):
        random_cir().cfr(torch.zeros(2, 3))


@pytest.mark.parametrize(("array", "axis"), [("bs", 1), ("ut", 0)])
def test_line_of_sight_meets_planar_array_port_by_port(array, axis):
    """CDL-D's line of sight leaves at azimuth 0, zenith 98.5° and arrives at -180°, 81.5° (table 7.7.1-4)."""
    turned = (0.5, -0.2, 0.1)
    iso = PlanarArray()
    arrays = {"bs": iso, "ut": iso} | {array: BS}
    cir = cdl("D", speed=0.0, block=600, **arrays, **{f"{array}_orientation": turned}).draw(600, 1, 1, 1e-3)
    # Everything but the line of sight has a random phase.
    seen = cir.coefficients[..., 0, 0].mean(0).flatten()
    assert cir.coefficients.shape[1 + axis] == 32
    degrees = {"bs": (98.5, 0.0), "ut": (81.5, -180.0)}[array]
    zenith, azimuth = (torch.tensor([math.radians(x)]) for x in degrees)
    vector = direction(zenith, azimuth).mT
    expected = array_response(BS, vector, SPEED_OF_LIGHT / CARRIER, torch.tensor(turned))[:, 0, 0]
    k_factor = 10 ** (13.3 / 10)
    torch.testing.assert_close(seen, expected * math.sqrt(k_factor / (1 + k_factor)), atol=0.06, rtol=0.0)
    mirrored = expected.view(2, 4, 4).flip(1).flatten()
    assert (seen.conj() @ mirrored).abs() < 0.8 * (seen.conj() @ expected).abs()


def test_closer_means_positive_doppler():
    """A user that moves along the line of sight of CDL-D towards the base station sees its phase advance."""
    model = cdl("D", speed=30.0, bs=UT, block=64)
    cir = model.draw(64, 3, 16, 1e-4)
    phase = cir.coefficients[:, 0, 0, :, 0]
    shift = (phase[:, 1:] * phase[:, :-1].conj()).sum(1).angle() / (2 * math.pi * 1e-4)
    assert shift.abs().max() <= 1.15 * 30.0 / SPEED_OF_LIGHT * CARRIER
    assert shift.min() < -100
    assert shift.max() > 100


@pytest.mark.parametrize("model", ["A", "B", "C", "D", "E"])
def test_delay_spread_and_power_are_those_asked_for(model):
    cir = cdl(model, delay_spread=200e-9, bs=UT).draw(256, 5, 1, 1e-3)
    power = cir.coefficients[:, 0, 0, 0].abs().square().mean(0)
    delay = cir.delay[0]
    assert power.sum().item() == pytest.approx(1.0, rel=0.15)
    mean = (power * delay).sum() / power.sum()
    spread = ((power * (delay - mean).square()).sum() / power.sum()).sqrt()
    assert spread.item() == pytest.approx(200e-9, rel=0.15)


def test_speed_is_the_one_asked_for():
    """Sionna's default `max_speed` of 0 would slow users down."""
    model = cdl("A", speed=20.0)._build("cpu")
    assert torch.allclose(model._get_velocity(32).norm(dim=1), torch.tensor(20.0))
    model = cdl("A", speed=(5.0, 6.0))._build("cpu")
    speed = model._get_velocity(256).norm(dim=1)
    assert 5 <= speed.min() < 5.1 < 5.9 < speed.max() <= 6


def test_a_sample_depends_on_seed_and_id_alone():
    model = cdl()
    wanted = [9, 3, 17, 3, 8]
    together = model.draw_samples(wanted, 7, 4, 1e-3)
    for i, sample in enumerate(wanted):
        alone = cdl().draw_samples([sample], 7, 4, 1e-3)
        assert torch.equal(alone.coefficients[0], together.coefficients[i])
        assert torch.equal(alone.delay[0], together.delay[i])
    assert torch.equal(model.draw_block(1, 7, 4, 1e-3).coefficients[1], together.coefficients[0])
    others = [
        cdl().draw_samples(wanted, 8, 4, 1e-3),
        cdl(speed=11.0).draw_samples(wanted, 7, 4, 1e-3),
        model.draw_samples([x + 8 for x in wanted], 7, 4, 1e-3),
    ]
    for other in others:
        assert not torch.isclose(other.coefficients, together.coefficients).any()


def test_random_state_of_others_is_left_alone():
    from sionna.phy import config

    torch.manual_seed(3)
    config.torch_rng("cpu").manual_seed(4)
    before = torch.get_rng_state(), config.torch_rng("cpu").get_state(), config.seed
    cdl().draw(2, 1, 2, 1e-3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(config.torch_rng("cpu").get_state(), before[1])
    assert config.seed == before[2]


def test_first_import_of_sionna_leaves_random_state_alone():
    import subprocess
    import sys

    code = """
import sys, torch
from chanlab.channels import CDL, PlanarArray
assert "sionna.phy" not in sys.modules
torch.manual_seed(3)
before = torch.get_rng_state()
CDL("A", 1e-7, 1.0, 2.4e9, PlanarArray(), PlanarArray(), block=2).draw(2, 1, 2, 1e-3)
assert torch.equal(torch.get_rng_state(), before)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": "F"}, "A, B, C, D, E"),
        ({"speed": (3.0, 1.0)}, "ascending"),
        ({"delay_spread": 0.0}, "delay_spread"),
        ({"block": 0}, "block"),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises(UsageError, match=words):
        cdl(**arguments)


def test_unknown_pattern_and_device_are_named():
    with pytest.raises(UsageError, match="hw_dipole"):
        cdl(ut=PlanarArray(pattern="hw_dipole")).draw(1, 1, 1, 1e-3)
    with pytest.raises(UsageError, match="cpu"):
        cdl().draw(1, 1, 1, 1e-3, "mps")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_draws_the_same_distribution_repeatably():
    model = cdl("D", bs=BS, block=512)
    torch.cuda.manual_seed(1)
    state = torch.cuda.get_rng_state()
    once, again = (model.draw_samples([5, 600], 1, 4, 1e-3, "cuda") for _ in range(2))
    assert torch.equal(once.coefficients, again.coefficients)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    cuda = model.draw(512, 1, 1, 1e-3, "cuda").coefficients.abs().square().mean().item()
    assert cuda == pytest.approx(model.draw(512, 1, 1, 1e-3).coefficients.abs().square().mean().item(), rel=0.1)
