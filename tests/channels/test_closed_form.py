import math

import pytest
import torch
from scipy.optimize import brentq
from scipy.special import j0

from chanlab.channels import (
    SPEED_OF_LIGHT,
    Clarke,
    FreeSpace,
    PathList,
    PathSpec,
    PlanarArray,
    Ring,
    Source,
    TwoRay,
    cfr,
    cfr_along,
    subcarrier_frequencies,
    two_ray_paths,
)
from chanlab.channels.geometric import fresnel, ground_permittivity
from chanlab.channels.trajectories import Drops
from chanlab.errors import UsageError

CARRIER = 3.5e9
WAVELENGTH = SPEED_OF_LIGHT / CARRIER
ZERO = torch.zeros(1, dtype=torch.float64)
MAST, USER = 10.0, 1.5
SOURCES = [
    FreeSpace(users=Drops([[10.0, 50.0], [-20.0, 20.0]])),
    TwoRay(),
    Clarke(num_paths=8, rms_delay_spread=1e-7),
    PathList([PathSpec(1e-7), PathSpec(2e-7, gain_db=-3, doppler=10.0)], random_phase=True, duration=0.1),
]


def _two_rays(distance, polarization):
    place = torch.stack([distance, torch.zeros_like(distance), torch.full_like(distance, USER)], -1)
    paths = two_ray_paths(torch.tensor([0.0, 0.0, MAST]), place, ZERO, CARRIER, 5.24, 0.123)
    array = PlanarArray(polarization=polarization)
    return cfr(paths, array, array, ZERO)[:, 0, 0, 0, 0]


def _differential(distance):
    return math.hypot(distance, MAST + USER) - math.hypot(distance, MAST - USER)


@pytest.mark.parametrize("polarization", ["V", "H"])
def test_two_ray_fading_follows_the_textbook_formula(polarization):
    distance = torch.logspace(1, 4, 500, dtype=torch.float64)
    direct = torch.sqrt(distance**2 + (MAST - USER) ** 2)
    reflected = torch.sqrt(distance**2 + (MAST + USER) ** 2)
    sine = (MAST + USER) / reflected
    eta = 5.24 - 1j * 0.123 / (2 * math.pi * CARRIER * 8.8541878128e-12)
    root = torch.sqrt(eta - (1 - sine**2))
    gamma = (sine - root) / (sine + root) if polarization == "H" else (eta * sine - root) / (eta * sine + root)
    wave = 2j * math.pi / WAVELENGTH
    exact = torch.exp(-wave * direct) / direct + gamma * torch.exp(-wave * reflected) / reflected
    assert torch.allclose(_two_rays(distance, polarization).abs(), exact.abs() * WAVELENGTH / (4 * math.pi), rtol=1e-6)


def test_two_ray_nulls_lie_where_the_ways_differ_by_whole_wavelengths():
    for order in (1, 2, 3):
        null, peak = (brentq(lambda d, n=n: _differential(d) - n * WAVELENGTH, 20, 5000) for n in (order, order + 0.5))
        at_null, at_peak = _two_rays(torch.tensor([null, peak], dtype=torch.float64), "H").abs() * torch.tensor(
            [null, peak]
        )
        assert at_null < 0.15 * at_peak
        near = torch.linspace(0.98 * null, 1.02 * null, 401, dtype=torch.float64)
        deepest = near[_two_rays(near, "H").abs().argmin()]
        assert float(deepest) == pytest.approx(null, rel=2e-3)


def test_far_away_two_rays_fall_with_the_fourth_power_of_distance():
    distance = torch.tensor([50e3, 100e3], dtype=torch.float64)
    power = _two_rays(distance, "H").abs().square()
    assert torch.allclose(power, (MAST * USER / distance**2) ** 2, rtol=2e-2)


def test_brewster_angle_and_grazing():
    eta = ground_permittivity(4.0, 0.0, CARRIER)
    cosine = torch.tensor([math.cos(math.atan(2.0)), 1e-6, 1.0], dtype=torch.float64)
    te, tm = fresnel(cosine, eta)
    assert float(tm[0].abs()) < 1e-9
    assert te[1].real.item() == pytest.approx(-1, abs=1e-5)
    assert tm[1].real.item() == pytest.approx(-1, abs=1e-5)
    assert te[2].real.item() == pytest.approx(-1 / 3)
    assert tm[2].real.item() == pytest.approx(1 / 3)


def test_straight_down_is_finite_and_reflects_as_a_mirror():
    paths = two_ray_paths(torch.tensor([3.0, 4.0, 10.0]), torch.tensor([3.0, 4.0, 2.0]).double(), ZERO, CARRIER, 4.0, 0)
    assert torch.isfinite(torch.view_as_real(paths.transfer)).all()
    expected = WAVELENGTH / (4 * math.pi * 12) / 3
    assert torch.linalg.svdvals(paths.transfer[..., 1]).tolist() == pytest.approx([expected, expected])


def test_clarke_autocorrelation_is_a_bessel_function():
    source = Clarke(num_paths=24, speed=[10.0, 10.0], duration=0.1)
    links = source.links(range(3000), seed=5)
    times = torch.linspace(0, 0.015, 16, dtype=torch.float64)
    antenna = PlanarArray()
    h = cfr_along(links.paths, links.times, times, antenna, antenna, ZERO)[:, 0, 0, :, 0]
    correlation = (h[:, :1].conj() * h).mean(0)
    expected = j0(2 * math.pi * 10 / WAVELENGTH * times.numpy())
    error = 4 / math.sqrt(3000)
    assert abs(correlation.real.numpy() - expected).max() < error
    assert correlation.imag.abs().max() < error
    assert h.abs().square().mean().item() == pytest.approx(1, abs=0.03)
    assert h.abs().pow(4).mean().item() == pytest.approx(2 - 1 / 24, abs=0.15)  # Rayleigh, but for 24 waves


def test_clarke_frequency_correlation_follows_the_delay_spread():
    spread = 100e-9
    links = Clarke(num_paths=24, rms_delay_spread=spread, duration=0.0).links(range(3000), seed=6)
    f = torch.linspace(0, 3e6, 7, dtype=torch.float64)
    h = cfr(links.paths, PlanarArray(), PlanarArray(), f)[:, 0, 0, 0, 0]
    correlation = (h[:, :1].conj() * h).mean(0)
    expected = 1 / (1 + 2j * math.pi * f * spread)
    assert (correlation - expected).abs().max() < 4 / math.sqrt(3000)


def test_plane_waves_are_exact_at_any_time_between_their_anchors():
    links = Clarke(num_paths=8, rms_delay_spread=1e-7, duration=0.2).links([3], seed=1)
    f, times = subcarrier_frequencies(8, 1e6), torch.tensor([0.03, 0.11], dtype=torch.float64)
    antenna = PlanarArray(1, 2)
    between = cfr_along(links.paths, links.times, times, antenna, antenna, f)[0]
    from_start = cfr(links.paths[0, 0], antenna, antenna, f, times, delay_drift=True)
    assert torch.allclose(between, from_start, atol=2e-4)


def test_path_list_by_hand():
    specs = [PathSpec(0.0, phase=0.0), PathSpec(1e-6, gain_db=-6.0, phase=math.pi / 2, doppler=100.0)]
    links = PathList(specs).links([0, 1], seed=1)
    f, times = torch.tensor([0.0, 250e3]), torch.tensor([0.0, 2.5e-3])
    antenna = PlanarArray()
    h = cfr(links.paths[:, 0], antenna, antenna, f, times)[1, 0, 0]
    a = 10 ** (-6 / 20)
    # A quarter turn of delay (250 kHz · 1 µs) and of Doppler (100 Hz · 2.5 ms).
    expected = torch.tensor([[1 + 1j * a, 1 + a], [1 - a, 1 + 1j * a]], dtype=torch.complex64)
    assert torch.allclose(h, expected, atol=1e-5)


def test_path_list_phases_and_leakage():
    links = PathList([PathSpec(1e-7, xpr_db=10.0)]).links([0], seed=1)
    transfer = links.paths.transfer[0, 0, ..., 0]
    assert transfer[0, 0].angle().item() == pytest.approx(math.remainder(-2 * math.pi * 350, 2 * math.pi), abs=1e-4)
    assert (transfer[0, 0].abs() / transfer[1, 0].abs()).item() == pytest.approx(10**0.5)
    fading = PathList([PathSpec(1e-7)], random_phase=True).links([0, 1], seed=1).paths.transfer[:, 0, 0, 0, 0]
    assert abs(fading[0] - fading[1]) > 1e-3


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: type(s).__name__)
def test_what_every_source_promises(source):
    assert isinstance(source, Source)
    links, motion = source.links([4, 7, 9], seed=3), source.motion([4, 7, 9], seed=3)
    users, anchors = links.times.shape
    assert links.num_users == users == 3
    assert links.paths.batch_shape == (users, anchors)
    assert links.paths.transfer.dtype == torch.complex64
    assert links.times.dtype == torch.float64
    assert (links.times[:, 0] == 0).all()
    assert (links.times.diff(dim=1) > 0).all()
    for name in ("times", "positions", "velocities", "orientations"):
        assert torch.equal(getattr(links, name), getattr(motion, name))
    assert (links.paths.delay.diff(dim=-1) >= 0).all()  # canonical order
    assert (links.paths.delay >= 0).all()
    alone = source.links([7], seed=3)
    assert torch.equal(alone.paths.transfer[0], links.paths.transfer[1])
    assert torch.equal(alone.positions[0], links.positions[1])
    other = source.links([7], seed=4)
    assert not torch.equal(alone.positions, other.positions)
    assert source.versions()


def test_doppler_of_a_source_is_the_rate_of_its_delay():
    links = TwoRay(users=Ring(speed=[10.0, 15.0], anchor_spacing=0.02)).links(range(5), seed=2)
    double = two_ray_paths(torch.tensor([0.0, 0.0, 10.0]), links.positions, links.velocities, CARRIER)
    rate = -CARRIER * double.delay.diff(dim=1) / links.times.diff(dim=1)[..., None]
    between = (double.doppler[:, 1:] + double.doppler[:, :-1]) / 2
    assert torch.allclose(rate, between, atol=1e-3)
    assert torch.allclose(links.paths.doppler.double(), double.doppler, rtol=1e-5, atol=1e-3)


def test_ring_keeps_its_distances():
    motion = Ring(distance=[20.0, 50.0], center=[5.0, -5.0], length=0.0).motion(range(200), seed=1)
    radius = (motion.positions[:, 0, :2] - torch.tensor([5.0, -5.0])).norm(dim=-1)
    assert radius.min() >= 20
    assert radius.max() <= 50
    assert radius.max() - radius.min() > 28
    assert motion.times.shape == (200, 1)
    moving = Ring().motion([0, 1], seed=1)
    assert moving.times.shape == (2, 21)
    speed = moving.velocities.norm(dim=-1)
    assert torch.allclose(moving.positions.diff(dim=1).norm(dim=-1), torch.full((2, 20), 0.1, dtype=torch.float64))
    assert torch.allclose(moving.times[:, -1] * speed[:, 0], torch.full((2,), 2.0, dtype=torch.float64))


def test_sources_are_built_from_yaml():
    from chanlab.data.recipe import build_source, load_recipe, parse_recipe

    source = build_source(load_recipe("two_ray"))
    assert isinstance(source, TwoRay)
    assert source.motion([0], seed=1).times.shape == (1, 21)
    text = """
    name: two_paths
    seed: 1
    samples: 2
    source:
      class_path: chanlab.channels.PathList
      init_args:
        paths:
        - {delay: 1.0e-7, gain_db: -3, doppler: 20}
        - {delay: 2.0e-7, departure: [1.2, 0.1], xpr_db: 9}
    """
    source = build_source(parse_recipe(text))
    assert isinstance(source, PathList)
    assert [p.delay for p in source.paths] == [1e-7, 2e-7]


@pytest.mark.parametrize(
    "build",
    [
        lambda: FreeSpace(carrier=0.0),
        lambda: FreeSpace(tx_position=[0.0, 0.0]),
        lambda: FreeSpace(group=0),
        lambda: TwoRay(relative_permittivity=0.5),
        lambda: TwoRay(tx_position=[0.0, 0.0, -1.0]).links([0], 1),
        lambda: Clarke(num_paths=0),
        lambda: Clarke(speed=[3.0, 1.0]),
        lambda: PathList([]),
        lambda: PathList([PathSpec(-1.0)]),
        lambda: Ring(distance=[5.0, 1.0]),
        lambda: Ring(speed=[0.0, 1.0]),
        lambda: two_ray_paths(torch.ones(3), torch.ones(3).double(), ZERO, CARRIER),
    ],
)
def test_what_cant_be(build):
    with pytest.raises(UsageError):
        build()
