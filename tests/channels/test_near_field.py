import itertools
import math

import pytest
import torch

from chanlab.channels import SPEED_OF_LIGHT, Paths, PlanarArray, cfr, free_space_paths, rotation_matrix, two_ray_paths
from chanlab.errors import UsageError

CARRIER = 28e9
ZERO = torch.zeros(1, dtype=torch.float64)
TX, RX = PlanarArray(8, 8), PlanarArray(2, 8, horizontal_spacing=4.0)
HELD = {
    "tx_orientation": torch.tensor([0.2, 0.1, 0.3], dtype=torch.float64),
    "rx_orientation": torch.tensor([2.5, -0.2, 0.1], dtype=torch.float64),
}
MAST, PLACE = torch.tensor([0.0, 0.0, 1.8]).double(), torch.tensor([2.5, 1.0, 1.2]).double()


def _elements():
    wavelength = SPEED_OF_LIGHT / CARRIER
    tx = MAST + TX.positions(wavelength) @ rotation_matrix(HELD["tx_orientation"]).T
    rx = PLACE + RX.positions(wavelength) @ rotation_matrix(HELD["rx_orientation"]).T
    return tx[None], rx[:, None]


def _phases(h):
    return h / h.abs()


@pytest.mark.parametrize("rays", [free_space_paths, two_ray_paths])
def test_phases_of_every_pair_of_elements_are_those_of_their_own_path(rays):
    tx, rx = _elements()
    exact = rays(*torch.broadcast_tensors(tx, rx), ZERO, CARRIER)
    lengths = exact.delay * SPEED_OF_LIGHT
    centre = rays(MAST, PLACE, ZERO, CARRIER)
    for path in range(centre.num_paths):
        only = centre._map(lambda _, x, p=path: x[..., p : p + 1])
        near = cfr(only, TX, RX, ZERO, near_field=True, **HELD)[..., 0, 0]
        expected = -2 * math.pi * (lengths[..., path] - only.delay * SPEED_OF_LIGHT) / exact.wavelength
        turned = _phases(near) / torch.polar(torch.ones_like(expected), expected)
        assert torch.allclose(turned, turned[:1, :1].expand_as(turned), atol=1e-9)


def test_far_away_it_is_the_plane_wave():
    far = torch.tensor([20_000.0, 5_000.0, 300.0], dtype=torch.float64)
    paths = two_ray_paths(MAST, far, ZERO, CARRIER)
    plane, near = (cfr(paths, TX, RX, ZERO, near_field=near, **HELD) for near in (False, True))
    assert float((plane - near).abs().max() / plane.abs().max()) < 2e-2
    close = two_ray_paths(MAST, PLACE, ZERO, CARRIER)
    plane, near = (cfr(close, TX, RX, ZERO, near_field=near, **HELD) for near in (False, True))
    assert float((plane - near).abs().max() / plane.abs().max()) > 0.3


def test_line_of_sight_has_more_than_one_mode_nearby():
    paths = free_space_paths(MAST, PLACE, ZERO, CARRIER)
    facing = {"rx_orientation": torch.tensor([math.pi, 0.0, 0.0], dtype=torch.float64)}
    wide = PlanarArray(1, 16, horizontal_spacing=4.0)
    plane, near = (cfr(paths, wide, wide, ZERO, near_field=near, **facing)[..., 0, 0] for near in (False, True))
    assert torch.linalg.svdvals(plane)[1] / torch.linalg.svdvals(plane)[0] < 1e-6
    assert torch.linalg.svdvals(near)[1] / torch.linalg.svdvals(near)[0] > 0.5


def _scattered(kinds, point, second=None):
    """A path over one or two points, whose first wavefront starts at the point."""
    second = point if second is None else second
    way = [MAST, point, second, PLACE]
    length = sum(float((b - a).norm()) for a, b in itertools.pairwise(way))
    return Paths(
        transfer=torch.eye(2, dtype=torch.complex128)[..., None],
        delay=torch.tensor([length / SPEED_OF_LIGHT], dtype=torch.float64),
        departure=torch.nn.functional.normalize(point - MAST, dim=0)[:, None],
        arrival=torch.nn.functional.normalize(second - PLACE, dim=0)[:, None],
        doppler=ZERO,
        interactions=torch.tensor(kinds, dtype=torch.int8)[:, None],
        vertices=torch.stack([point, second])[..., None],
        mask=torch.ones(1, dtype=torch.bool),
        carrier=CARRIER,
    )


@pytest.mark.parametrize("kinds", [[2], [8, 0]])
def test_a_scatterer_emits_a_wave_of_its_own(kinds):
    point = torch.tensor([1.5, -1.0, 1.0], dtype=torch.float64)
    paths = _scattered(kinds, point)
    ends = {"tx_position": MAST, "rx_position": PLACE}
    near = _phases(cfr(paths, TX, RX, ZERO, near_field=True, **ends, **HELD)[..., 0, 0])
    tx, rx = _elements()
    length = (tx - point).norm(dim=-1) + (rx - point).norm(dim=-1) - paths.delay * SPEED_OF_LIGHT
    expected = torch.polar(torch.ones_like(length), -2 * math.pi * length / paths.wavelength)
    turned = near / expected
    assert torch.allclose(turned, turned[:1, :1].expand_as(turned), atol=1e-9)
    with pytest.raises(UsageError, match="tx_position"):
        cfr(paths, TX, RX, ZERO, near_field=True)


def test_behind_a_mirror_the_scatterer_is_at_the_unfolded_distance():
    # Reflection from z = 0, then a scatterer: seen from the transmitter it lies at its mirror image.
    scatterer = torch.tensor([1.5, -1.0, 0.8], dtype=torch.float64)
    image = scatterer * torch.tensor([1.0, 1.0, -1.0])
    bounce = MAST + (image - MAST) * MAST[2] / (MAST[2] - image[2])
    paths = _scattered([1, 2], bounce, scatterer)
    near = _phases(cfr(paths, TX, RX, ZERO, near_field=True, tx_position=MAST, rx_position=PLACE, **HELD)[..., 0, 0])
    tx, rx = _elements()
    length = (tx - image).norm(dim=-1) + (rx - scatterer).norm(dim=-1)
    turned = near * torch.polar(torch.ones_like(length), 2 * math.pi * length / paths.wavelength)
    assert torch.allclose(turned, turned[:1, :1].expand_as(turned), atol=1e-9)
