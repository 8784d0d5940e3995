"""3GPP channels: what TR 38.901 says of them, and that a sample depends on (seed, id) alone."""

import math

import pytest
import torch

from chanlab.channels import (
    CDL,
    CIR,
    SPEED_OF_LIGHT,
    TDL,
    CellDrops,
    PlanarArray,
    array_response,
    direction,
    subcarrier_frequencies,
)
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
    """Sionna's `CDL(min_speed=v)` draws speeds between 0 and v."""
    assert torch.allclose(cdl(speed=20.0).motion(32, 1).velocities.norm(dim=-1), torch.tensor(20.0))
    speed = cdl(speed=(5.0, 6.0)).motion(256, 1).velocities.norm(dim=-1)
    assert 5 <= speed.min() < 5.1 < 5.9 < speed.max() <= 6


def test_cdl_is_sionnas_own():
    from sionna.phy import config
    from sionna.phy.channel import tr38901

    ut = tr38901.PanelArray(1, 1, "single", "V", "omni", CARRIER)
    bs = tr38901.PanelArray(4, 4, "dual", "cross", "38.901", CARRIER)
    theirs = tr38901.CDL("C", 1e-7, CARRIER, ut, bs, "uplink", min_speed=3.0, max_speed=12.0)
    generator = config.torch_rng("cpu")
    state = generator.get_state()
    generator.manual_seed(11)
    a, tau = theirs(6, 4, 500.0)
    generator.set_state(state)
    ours = cdl("C", speed=(3.0, 12.0), bs=BS).draw(6, 11, 4, 2e-3)
    torch.testing.assert_close(ours.coefficients, a[:, 0, :, 0].permute(0, 2, 1, 4, 3), rtol=1e-3, atol=1e-4)
    assert torch.equal(ours.delay, tau[:, 0, 0])


def tdl(model="A", delay_spread=100e-9, speed=10.0, **arguments):
    return TDL(model, delay_spread, speed, CARRIER, PAIR, UT, **arguments)


@pytest.mark.parametrize("model", ["A", "E"])
def test_tdl_has_unit_power_independent_ports_and_its_delay_spread(model):
    cir = tdl(model, speed=0.0).draw(1500, 2, 1, 1e-3)
    a = cir.coefficients[:, 0, :, 0]
    power = a.abs().square().mean((0, 1))
    assert power.sum().item() == pytest.approx(1.0, rel=0.06)
    delay = cir.delay[0]
    mean = (power * delay).sum() / power.sum()
    spread = ((power * (delay - mean).square()).sum() / power.sum()).sqrt()
    assert spread.item() == pytest.approx(100e-9, rel=0.12)
    scattered = a[..., 1:]
    assert (scattered[:, 0] * scattered[:, 1].conj()).mean(0).abs().max() < 0.1 * power[1:].max().clamp(min=0.1)


def test_tdl_fades_as_clarke_with_each_samples_own_speed():
    from scipy.special import j0

    model = tdl(speed=(5.0, 30.0))
    lag = 0.8e-3
    cir, speed = model.draw(4000, 3, 2, lag), model.motion(4000, 3).velocities.norm(dim=-1)[:, 0]
    first, second = cir.coefficients[:, 0].unbind(-2)
    for low, high in ((5.0, 7.5), (20.0, 22.5)):
        chosen = (speed >= low) & (speed < high)
        correlation = (second * first.conj())[chosen].sum() / first[chosen].abs().square().sum()
        doppler = speed[chosen] / SPEED_OF_LIGHT * CARRIER
        assert correlation.real.item() == pytest.approx(j0(2 * math.pi * doppler.numpy() * lag).mean(), abs=0.05)


def test_tdl_of_the_test_specification_has_its_delay_spread_in_its_name():
    cir = tdl("C300", None).draw(2, 1, 1, 1e-3)
    assert cir.delay.max() > 2e-6
    for model, spread in (("C300", 1e-7), ("C", None)):
        with pytest.raises(UsageError, match=f"TDL-{model} takes"):
            tdl(model, spread)


def drops(scenario="UMi", speed=3.0, block=6, **arguments):
    return CellDrops(scenario, speed, 3.5e9, PAIR, UT, block=block, **arguments)


@pytest.mark.parametrize("scenario", ["UMi", "UMa", "RMa"])
def test_a_dropped_user_has_a_place_and_depends_on_seed_and_id_alone(scenario):
    model = drops(scenario)
    together = model.draw_samples([4, 13, 5], 2, 3, 1e-3)
    alone = drops(scenario).draw_samples([13], 2, 3, 1e-3)
    assert torch.equal(alone.coefficients[0], together.coefficients[1])
    motion = model.motion(model.block, model.block_seed(2, 2))
    again = model.draw(model.block, model.block_seed(2, 2), 3, 1e-3)
    assert torch.equal(again.coefficients[1], together.coefficients[1])
    place, orientation = model.base_station()
    assert motion.positions.shape == (6, 1, 3)
    assert (motion.positions[..., :2] - place[:2]).norm(dim=-1).min() >= 10
    assert place[2] == {"UMi": 10, "UMa": 25, "RMa": 35}[scenario]
    assert orientation[0].item() == pytest.approx(math.pi / 3)
    assert torch.allclose(motion.velocities.norm(dim=-1), torch.tensor(3.0))


def test_path_loss_of_dropped_users_grows_with_distance():
    model = drops("UMi", indoor=0.0, block=200)
    cir, place = model.draw(200, 1, 1, 1e-3), model.motion(200, 1).positions[:, 0]
    loss = -10 * cir.coefficients.abs().square().sum(-1).mean((1, 2, 3)).log10()
    distance = place.norm(dim=-1)
    # The exponent lies between that of the line of sight (2.1) and that of shadowed streets (3.5).
    design = torch.stack([torch.ones(200), 10 * distance.log10()], 1)
    exponent = torch.linalg.lstsq(design, loss[:, None]).solution[1].item()
    assert 1.5 < exponent < 5.0
    assert loss.min() > 32.4 + 20 * math.log10(3.5) + 20 * math.log10(distance.min().item()) - 25


def test_spatially_consistent_neighbours_are_alike():
    """Path gains of near users correlate within a drop; drops of their own know nothing of one another."""
    difference = {}
    for consistent in (True, False):
        near = []
        for seed in range(3):
            model = drops("UMi", indoor=0.0, spatial_consistency=consistent, block=100)
            cir, place = model.draw(100, seed, 1, 1e-3), model.motion(100, seed).positions[:, 0]
            gain = 10 * cir.coefficients.abs().square().sum(-1).mean((1, 2, 3)).log10()
            distance = torch.cdist(place, place) + torch.eye(100) * 1e3
            pair = distance.argmin(1)
            close = distance.amin(1) < 4
            near.append((gain - gain[pair])[close].square())
        difference[consistent] = torch.cat(near).mean().sqrt().item()
    assert difference[True] < 0.7 * difference[False]
    assert drops(spatial_consistency=True, block=9).together == 9
    assert drops(block=9).together == 1


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
