import math

import pytest
import torch

from chanlab.channels import PlanarArray, array_response, direction, rotation_matrix
from chanlab.channels.arrays import field, spherical_basis
from chanlab.errors import UsageError

PATTERNS = ("iso", "dipole", "hw_dipole", "tr38901")


def _grid(n=200):
    zenith = (torch.arange(n, dtype=torch.float64) + 0.5) * math.pi / n
    azimuth = (torch.arange(2 * n, dtype=torch.float64) + 0.5) * math.pi / n - math.pi
    z, a = torch.meshgrid(zenith, azimuth, indexing="ij")
    return z.flatten(), a.flatten()


def test_elements_run_down_each_column_and_ports_by_polarization():
    array = PlanarArray(2, 3, vertical_spacing=0.5, horizontal_spacing=1.0, polarization="VH")
    y, z = array.positions(2.0)[:, 1:].unbind(-1)
    assert y.tolist() == [-2, -2, 0, 0, 2, 2]
    assert z.tolist() == [0.5, -0.5] * 3
    assert array.num_elements == 6
    assert array.num_ports == 12
    response = array_response(array, torch.tensor([[1.0], [0], [0]]), 2.0)
    assert torch.allclose(response[:6, :, 0].abs(), torch.tensor([1.0, 0.0]).expand(6, 2), atol=1e-6)
    assert torch.allclose(response[6:, :, 0].abs(), torch.tensor([0.0, 1.0]).expand(6, 2), atol=1e-6)


def test_plane_wave_phase_by_hand():
    # Half-wave spacing along y, wave from 30 degrees azimuth: neighbours differ by pi sin(30 deg) = pi/2.
    array = PlanarArray(1, 4)
    look = direction(torch.tensor(math.pi / 2).double(), torch.tensor(math.pi / 6).double())
    theta = array_response(array, look[:, None], 0.1)[:, 0, 0]
    steps = (theta[1:] / theta[:-1]).angle()
    assert torch.allclose(steps, torch.full((3,), math.pi / 2, dtype=torch.float64))
    assert torch.allclose(theta.prod(), torch.ones((), dtype=theta.dtype))  # the array's centre is its origin


def test_a_turned_array_sees_the_turned_world():
    array = PlanarArray(2, 2, pattern="iso", polarization="V")
    orientation = torch.tensor([0.7, -0.3, 0.4], dtype=torch.float64)
    rotation = rotation_matrix(orientation)
    look = torch.nn.functional.normalize(torch.randn(3, 6, dtype=torch.float64), dim=0)
    still = array_response(array, look, 0.1)[:, 0]
    turned = array_response(array, rotation @ look, 0.1, orientation)
    phase = turned.norm(dim=1) * turned[:, 0] / turned[:, 0].abs()
    ratio = still / phase  # one sign per direction (the projection on θ̂), the same at every element
    assert torch.allclose(ratio, ratio[:1].expand_as(ratio))
    assert torch.allclose(rotation @ rotation.mT, torch.eye(3, dtype=torch.float64))


def test_rotation_about_each_axis():
    quarter = math.pi / 2
    x, y, z = torch.eye(3, dtype=torch.float64)
    alpha, beta, gamma = (rotation_matrix(quarter * e) for e in torch.eye(3, dtype=torch.float64))
    assert torch.allclose(alpha @ x, y)
    assert torch.allclose(beta @ z, x)
    assert torch.allclose(gamma @ y, z)


@pytest.mark.parametrize(("pattern", "gain_db"), [("iso", 0), ("dipole", 1.761), ("hw_dipole", 2.156), ("tr38901", 8)])
def test_peak_gain(pattern, gain_db):
    power = field(PlanarArray(pattern=pattern), torch.tensor([[1.0], [0], [0]])).square().sum()
    assert 10 * math.log10(power) == pytest.approx(gain_db, abs=2e-3)


@pytest.mark.parametrize("pattern", ["iso", "dipole", "hw_dipole"])
def test_lossless_patterns_radiate_what_they_are_fed(pattern):
    zenith, azimuth = _grid()
    power = field(PlanarArray(pattern=pattern), direction(zenith, azimuth).T).square().sum((0, 1))
    mean = (power * zenith.sin()).sum() / zenith.sin().sum()
    assert float(mean) == pytest.approx(1, abs=2e-3)  # 1.643 is rounded


def test_sector_pattern_is_3_db_down_at_half_its_width_and_floored_at_30_db():
    half, back = math.radians(32.5), math.pi
    level = torch.full((3,), math.pi / 2, dtype=torch.float64)
    look = direction(level, torch.tensor([0.0, half, back], dtype=torch.float64)).T
    power = field(PlanarArray(pattern="tr38901"), look)[0, 0].square()
    assert (10 * (power / power[0]).log10()).tolist() == pytest.approx([0, -3, -30])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_rotation_keeps_power_and_orthogonality(pattern):
    zenith, azimuth = _grid(20)
    look = direction(zenith, azimuth).T
    for polarization in ("VH", "cross"):
        array = PlanarArray(pattern=pattern, polarization=polarization)
        rotation = rotation_matrix(torch.tensor([0.4, -1.1, 2.0], dtype=torch.float64))
        turned = field(array, rotation @ look, rotation)
        still = field(array, look)
        assert torch.allclose(turned.square().sum(1), still.square().sum(1))
        assert torch.allclose((turned[0] * turned[1]).sum(0), torch.zeros(1, dtype=torch.float64), atol=1e-9)


def test_roll_by_a_quarter_turns_vertical_into_horizontal():
    look = torch.tensor([[1.0], [0], [0]], dtype=torch.float64)
    roll = rotation_matrix(torch.tensor([0, 0, math.pi / 2], dtype=torch.float64))
    vertical = field(PlanarArray(polarization="V"), look, roll)[0, :, 0]
    horizontal = field(PlanarArray(polarization="H"), look)[0, :, 0]
    assert float((vertical @ horizontal).abs()) == pytest.approx(1)


def test_poles_are_finite_and_differentiable():
    look = torch.tensor([[0.0, 0, 0], [0, 0, 0], [1, -1, 0]], dtype=torch.float64, requires_grad=True)
    for pattern in PATTERNS:
        response = array_response(PlanarArray(2, 2, pattern=pattern, polarization="cross"), look, 0.1)
        (gradient,) = torch.autograd.grad(response.abs().square().sum(), look)
        assert torch.isfinite(torch.view_as_real(response)).all()
        assert torch.isfinite(gradient).all()
    theta, phi = spherical_basis(look.detach())
    assert torch.allclose(torch.linalg.cross(theta[:, :2].T, phi[:, :2].T), look.detach()[:, :2].T)


@pytest.mark.parametrize(
    "arguments", [{"num_rows": 0}, {"pattern": "patch"}, {"polarization": "RHCP"}, {"num_cols": -1}]
)
def test_what_cant_be_built(arguments):
    with pytest.raises(UsageError):
        PlanarArray(**arguments)


def test_wrong_shapes_name_the_right_ones():
    look = torch.tensor([[1.0], [0], [0]])
    with pytest.raises(UsageError, match=r"\[4, 3\]"):
        array_response(PlanarArray(2, 2), look, 0.1, positions=torch.zeros(5, 3))
    with pytest.raises(UsageError, match="orientation"):
        rotation_matrix(torch.zeros(2))
