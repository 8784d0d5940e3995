import math

import pytest
import torch

from chanlab.channels.arrays import PlanarArray
from chanlab.channels.geometric import free_space_paths
from chanlab.channels.paths import SPEED_OF_LIGHT
from chanlab.channels.response import cfr, subcarrier_frequencies
from chanlab.errors import UsageError
from chanlab.rf import Rays, coherent_sum, image, line_of_sight, scatterer

CARRIER = 3.5e9
WAVELENGTH = SPEED_OF_LIGHT / CARRIER
POINT = torch.zeros(1, 3, dtype=torch.float64)
UP = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
GROUND = (UP, torch.zeros(1, dtype=torch.float64))


def points(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def response(rays, gain=1.0, frequencies=None, tx=POINT, rx=POINT):
    """Channel over absolute frequencies, `[..., rx_ant, tx_ant, subcarrier]`."""
    frequencies = torch.tensor([CARRIER], dtype=torch.float64) if frequencies is None else frequencies
    gain = (rays.amplitude * gain).to(torch.complex128)
    return coherent_sum(gain, rays.delay, rays.departure, rays.arrival, tx, rx, frequencies, WAVELENGTH)


def test_line_of_sight_is_friis_in_amplitude_and_phase():
    tx, rx = points(0, 0, 10), points([30, 40, 10], [3, 4, 1], [0, 0, 500])
    distance = torch.tensor([50.0, math.sqrt(106), 490.0], dtype=torch.float64)
    h = response(line_of_sight(tx, rx, WAVELENGTH)).flatten()
    want = WAVELENGTH / (4 * math.pi * distance) * torch.exp(-2j * math.pi * distance / WAVELENGTH)
    torch.testing.assert_close(h, want, rtol=1e-9, atol=0)


def test_line_of_sight_is_free_space_of_channels():
    """Arrays and a band: the same CFR as paths of chanlab.channels, signs of all phases included."""
    tx, rx = points(1, 2, 10), points([30, 40, 1.5], [-20, 7, 3])
    frequencies = subcarrier_frequencies(32, 1e6)
    arrays = [PlanarArray(2, 4), PlanarArray(2, 2)]
    places = [array.positions(WAVELENGTH) for array in arrays]
    want = cfr(free_space_paths(tx, rx, torch.zeros_like(rx), CARRIER), *arrays, frequencies)[..., 0, :]
    h = response(line_of_sight(tx, rx, WAVELENGTH), 1.0, CARRIER + frequencies, *places)
    ratio = h / want  # vertical patterns agree but for their sign along the ray
    torch.testing.assert_close(ratio.abs(), torch.ones_like(ratio.abs()), rtol=1e-7, atol=0)
    torch.testing.assert_close(ratio, ratio[:, :1, :1, :1].expand_as(ratio), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(ratio[:, 0, 0, 0].imag.abs(), torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-7)


def test_line_of_sight_and_image_are_two_ray_fading():
    height_tx, height_rx, reflection = 10.0, 1.5, -0.7
    ground = torch.linspace(5, 300, 400, dtype=torch.float64)
    rx = torch.stack([ground, torch.zeros_like(ground), torch.full_like(ground, height_rx)], -1)
    tx = points(0, 0, height_tx)
    rays = Rays.cat([line_of_sight(tx, rx, WAVELENGTH), image(tx, rx, *GROUND, WAVELENGTH)])
    h = response(rays, torch.tensor([1.0, reflection])).flatten()
    direct, mirrored = ((ground**2 + (height_tx + sign * height_rx) ** 2).sqrt() for sign in (-1, 1))
    k = 2 * math.pi / WAVELENGTH
    beat = 2 * reflection * torch.cos(k * (mirrored - direct)) / (direct * mirrored)
    power = (WAVELENGTH / (4 * math.pi)) ** 2 * (direct**-2 + (reflection / mirrored) ** 2 + beat)
    torch.testing.assert_close(h.abs().square(), power, rtol=1e-6, atol=1e-6 * float(power.max()))


def test_image_moves_with_the_users():
    """Half a metre along a wall at 10 m turns the phase: a fixed point of reflection is off by about 105°."""
    tx = points(0, 0, 0)
    there, here = points(6, 0, 0), points(6.5, 0, 0)
    wall = (points([0, 1, 0]), torch.tensor([10.0], dtype=torch.float64))
    moved = image(tx, here, *wall, WAVELENGTH).delay.item() * SPEED_OF_LIGHT
    assert moved == pytest.approx(math.hypot(6.5, 20))
    fixed = scatterer(tx, here, points([3, 10, 0]), WAVELENGTH).delay.item() * SPEED_OF_LIGHT
    assert image(tx, there, *wall, WAVELENGTH).delay.item() * SPEED_OF_LIGHT == pytest.approx(math.hypot(6, 20))
    assert abs(fixed - moved) > 1e-3


def test_scatterer_falls_with_both_distances():
    tx, mean = points(0, 0, 0), points([30, 0, 0], [0, 40, 0])
    rx = points(0, 0, 30)
    rays = scatterer(tx, rx, mean, WAVELENGTH)
    want = WAVELENGTH / (4 * math.pi) / torch.tensor([30 * math.sqrt(1800), 40 * 50], dtype=torch.float64)
    torch.testing.assert_close(rays.amplitude, want)
    want = torch.tensor([30 + math.sqrt(1800), 40 + 50], dtype=torch.float64) / SPEED_OF_LIGHT
    torch.testing.assert_close(rays.delay, want)
    # Bistatic radar equation: P_r/P_t = λ² σ / ((4π)³ d₁² d₂²) of isotropic antennas, σ = 4π |S|².
    scattering = 0.3
    h = response(scatterer(tx, rx, mean[1:], WAVELENGTH), scattering)
    sigma = 4 * math.pi * scattering**2
    power = WAVELENGTH**2 * sigma / ((4 * math.pi) ** 3 * 40**2 * 50**2)
    assert h.abs().square().item() == pytest.approx(power, rel=1e-9)


def test_directions_are_unit_vectors_towards_the_primitive():
    tx, rx = points(1, 2, 3), points(9, -4, 1.5)
    rays = scatterer(tx, rx, points([1, 12, 3], [9, -4, 21.5]), WAVELENGTH)
    torch.testing.assert_close(rays.departure[:, 0], points(0, 1, 0))
    torch.testing.assert_close(rays.arrival[:, 1], points(0, 0, 1))
    mirrored = image(tx, rx, *GROUND, WAVELENGTH)
    # Law of reflection: the tangential parts oppose, the normal parts agree.
    torch.testing.assert_close(mirrored.departure[:2], -mirrored.arrival[:2])
    torch.testing.assert_close(mirrored.departure[2], mirrored.arrival[2])
    torch.testing.assert_close(mirrored.departure.norm(dim=-2), torch.ones(1, dtype=torch.float64))


def every_kind(tx, rx):
    planes = (points([0, 0, 1], [1, 0, 0]), torch.tensor([0.0, -8.0], dtype=torch.float64))
    means = points([3, 4, 5], [-2, 6, 1], [7, 7, 2])
    return Rays.cat(
        [line_of_sight(tx, rx, WAVELENGTH), image(tx, rx, *planes, WAVELENGTH), scatterer(tx, rx, means, WAVELENGTH)]
    )


def test_reciprocity():
    a, b = points(0, 0, 10), points([20, 5, 1.5], [3, -9, 4])
    gen = torch.Generator().manual_seed(0)
    arrays = [WAVELENGTH * torch.randn(n, 3, dtype=torch.float64, generator=gen) for n in (2, 3)]
    gain = torch.randn(6, dtype=torch.complex128, generator=gen)
    frequencies = CARRIER + subcarrier_frequencies(8, 1e6)
    there = response(every_kind(a, b), gain, frequencies, arrays[0], arrays[1])
    back = response(every_kind(b, a), gain, frequencies, arrays[1], arrays[0])
    assert (back - there.transpose(-3, -2)).norm() <= 1e-9 * there.norm()


def test_gradients_reach_both_ends_and_the_primitives():
    tx, rx = points(0, 0, 2).requires_grad_(), points(4, 1, 1.5).requires_grad_()
    mean = points([2, 3, 1]).requires_grad_()
    normal, offset = points([0, 0.6, 0.8]).requires_grad_(), torch.tensor([-3.0], dtype=torch.float64).requires_grad_()

    def total(tx, rx, mean, normal, offset):
        kinds = [line_of_sight(tx, rx, 1.0), scatterer(tx, rx, mean, 1.0), image(tx, rx, normal, offset, 1.0)]
        rays = Rays.cat(kinds)
        return rays.delay * SPEED_OF_LIGHT, rays.amplitude, rays.departure, rays.arrival

    assert torch.autograd.gradcheck(total, (tx, rx, mean, normal, offset))


def test_plane_between_the_ends_reflects_nothing():
    rays = image(points(0, 0, 5), points([9, 0, -1], [9, 0, 1]), *GROUND, WAVELENGTH)
    assert rays.amplitude[0] == 0
    assert rays.amplitude[1] > 0


def test_points_at_one_place_stay_finite():
    here = points(1, 2, 3).requires_grad_()
    rays = Rays.cat([line_of_sight(here, here, WAVELENGTH), scatterer(here, here, here.detach(), WAVELENGTH)])
    assert rays.amplitude[0] == 1  # no more is received than was sent
    sum(x.sum() for x in rays).backward()
    assert all(x.isfinite().all() for x in (*rays, here.grad))


def test_nothing_to_join_is_an_error():
    with pytest.raises(UsageError, match="at least one"):
        Rays.cat([])
