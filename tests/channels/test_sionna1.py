"""Doppler shifts of the uplink, in Sionna before version 2 and as TR 38.901 has them."""

import math

import pytest
import torch

from chanlab.channels import CDL, SPEED_OF_LIGHT, PlanarArray, direction
from chanlab.channels.sionna1 import UplinkOfSionna1

CARRIER, SPEED = 2.4e9, 3.0
# First cluster of CDL-C (TR 38.901, table 7.7.1-3): at the base station and at the user, azimuth and zenith.
BASE_STATION, USER = (-46.6, 97.2), (-101.0, 87.6)


def channels(kind):
    arrays = PlanarArray(2, 2, pattern="tr38901", polarization="cross"), PlanarArray(pattern="iso", polarization="V")
    return kind("C", 300e-9, SPEED, CARRIER, *arrays)


@pytest.mark.parametrize(("kind", "end", "spread"), [(UplinkOfSionna1, BASE_STATION, 2.0), (CDL, USER, 15.0)])
def test_doppler_is_the_velocity_along_the_angles_at_one_end(kind, end, spread):
    model, interval = channels(kind), 1e-4
    cir = model.draw(200, 7, 2, interval)
    velocity = model.motion(200, 7).velocities[:, 0]
    tap = cir.coefficients[..., int(cir.delay[0].argmin())]
    phase = (tap[..., 1] * tap[..., 0].conj()).sum((1, 2)).angle()
    azimuth, zenith = torch.tensor(end) * math.pi / 180
    expected = velocity @ direction(zenith[None], azimuth[None])[0] * CARRIER / SPEED_OF_LIGHT
    error = phase / (2 * math.pi * interval) - expected
    assert error.std() < SPEED * CARRIER / SPEED_OF_LIGHT * math.radians(spread)
    assert abs(error.mean()) < 0.1 * expected.std()


def test_they_differ_in_nothing_else():
    old, new = (channels(kind).draw(4, 3, 2, 2e-3) for kind in (UplinkOfSionna1, CDL))
    torch.testing.assert_close(old.coefficients[..., 0, :], new.coefficients[..., 0, :])
    torch.testing.assert_close(old.delay, new.delay)
    assert not torch.isclose(old.coefficients[..., 1, :], new.coefficients[..., 1, :]).all()
