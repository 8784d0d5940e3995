import math

import pytest
import torch
from path_samples import random_paths

from chanlab.channels import (
    SPEED_OF_LIGHT,
    Paths,
    PlanarArray,
    azimuth_directions,
    cfr,
    delay_angle_spectrum,
    free_space_paths,
    k_factor,
    mean_delay,
    path_gain,
    rms_delay_spread,
    rotation_matrix,
    rssi,
    rssi_from_cfr,
    subcarrier_frequencies,
)
from chanlab.errors import UsageError

CARRIER = 3.5e9


def _two_paths(power=(1.0, 0.25), delay=(1e-7, 3e-7)):
    n = len(power)
    level = torch.tensor(power, dtype=torch.float64).sqrt().to(torch.complex128)
    x = torch.tensor([1.0, 0, 0], dtype=torch.float64)[:, None].expand(3, n)
    return Paths(
        transfer=torch.eye(2, dtype=torch.complex128)[..., None] * level,
        delay=torch.tensor(delay, dtype=torch.float64),
        departure=x,
        arrival=-x,
        doppler=torch.zeros(n, dtype=torch.float64),
        interactions=torch.tensor([[0] + [1] * (n - 1)], dtype=torch.int8),
        vertices=torch.zeros(2, 3, n, dtype=torch.float64),
        mask=torch.ones(n, dtype=torch.bool),
        carrier=CARRIER,
    )


def test_statistics_by_hand():
    paths = _two_paths()
    assert float(path_gain(paths)) == pytest.approx(1.25)
    assert float(mean_delay(paths)) == pytest.approx(1.4e-7)
    assert float(rms_delay_spread(paths)) == pytest.approx(0.8e-7)  # 2e-7 · sqrt(0.8 · 0.2)
    assert float(k_factor(paths)) == pytest.approx(4)
    weak_sight = _two_paths((0.25, 1.0))
    assert float(k_factor(weak_sight)) == pytest.approx(4)
    assert float(k_factor(weak_sight, of="los")) == pytest.approx(0.25)
    assert float(k_factor(_two_paths((1.0, 1.0)))) == pytest.approx(1)
    assert float(k_factor(_two_paths((1.0,), (1e-7,)))) == math.inf


def test_no_path_is_no_power():
    none = random_paths(2)._map(lambda _, x: torch.zeros_like(x))
    assert path_gain(none).tolist() == [0, 0]
    assert rms_delay_spread(none).tolist() == [0, 0]
    assert k_factor(none).tolist() == [0, 0]
    assert rssi(none, PlanarArray(), PlanarArray()).tolist() == [[-math.inf]] * 2


def test_padding_changes_no_statistic():
    paths = random_paths(3)
    padded = paths.pad(9)
    for statistic in (path_gain, mean_delay, rms_delay_spread, k_factor):
        assert torch.allclose(statistic(padded), statistic(paths))


def test_received_power_is_the_friis_equation():
    place = torch.tensor([[300.0, 0.0, 0.0]], dtype=torch.float64)
    paths = free_space_paths(torch.zeros(3), place, torch.zeros(3), CARRIER)
    expected = 30 + 20 * math.log10(SPEED_OF_LIGHT / CARRIER / (4 * math.pi * 300))
    tx, rx = PlanarArray(4, 4), PlanarArray(1, 2, pattern="dipole")
    ports = rssi(paths, tx, rx, transmit_power_dbm=30)
    assert ports[0].tolist() == pytest.approx([expected + 1.7609] * 2, abs=1e-3)
    assert rssi(paths, tx, rx, 30, "sum").item() == pytest.approx(expected + 1.7609 + 3.0103, abs=1e-3)
    assert rssi(paths, tx, rx, 30, "mean").item() == pytest.approx(expected + 1.7609, abs=1e-3)
    assert 10 * math.log10(path_gain(paths).item()) == pytest.approx(expected - 30)
    h = cfr(paths, tx, rx, subcarrier_frequencies(4, 1e6))
    assert torch.allclose(rssi_from_cfr(h, 30), ports)


def test_over_a_wide_band_cfr_and_paths_agree_on_received_power():
    paths = random_paths(4)
    tx, rx = PlanarArray(2, 2, polarization="cross"), PlanarArray(1, 2)
    f = subcarrier_frequencies(4096, 1e6)
    for combine in ("port", "sum", "mean"):
        wide = rssi_from_cfr(cfr(paths, tx, rx, f), combine=combine)
        assert torch.allclose(wide, rssi(paths, tx, rx, combine=combine), atol=0.1)


@pytest.mark.parametrize("side", ["rx", "tx"])
def test_spectrum_peaks_at_the_wave(side):
    azimuth, delay = math.radians(20), 0.5e-6
    orientation = torch.tensor([0.4, 0.0, 0.0], dtype=torch.float64)
    local = torch.tensor([math.cos(azimuth), math.sin(azimuth), 0.0], dtype=torch.float64)
    ray = (rotation_matrix(orientation) @ local)[:, None]
    paths = _two_paths((1.0,), (delay,))._map(lambda name, x: ray if name in ("departure", "arrival") else x)
    array, antenna, f = PlanarArray(2, 8), PlanarArray(), subcarrier_frequencies(40, 500e3)
    ends = (antenna, array) if side == "rx" else (array, antenna)
    h = cfr(paths, *ends, f, torch.arange(2.0), **{f"{side}_orientation": orientation})
    spectrum = delay_angle_spectrum(h, array, f, CARRIER, side, orientation=orientation)
    assert spectrum.shape == (181, 40)
    at = divmod(int(spectrum.argmax()), 40)
    assert at == (110, 10)  # 20 degrees; 0.5 µs on a grid of 50 ns
    assert spectrum.max().item() == pytest.approx(1)


def test_spectrum_on_dft_grids_is_a_dft_and_keeps_power():
    paths, array, f = random_paths(2), PlanarArray(1, 8), subcarrier_frequencies(16, 1e6)
    h = cfr(paths, PlanarArray(), array, f)
    # Directions whose sines are the grid of an 8-point DFT over half-wave spacing.
    sine = torch.arange(-4, 4, dtype=torch.float64) / 4
    directions = torch.stack([(1 - sine**2).sqrt(), sine, torch.zeros(8)], -1)
    spectrum = delay_angle_spectrum(h, array, f, CARRIER, directions=directions)
    assert torch.allclose(spectrum.sum((-2, -1)), h.abs().square().mean((-4, -3, -2, -1)))
    grid = torch.fft.fftshift(torch.fft.fft(h[:, :, 0, 0], dim=1) / 8, dim=1)
    dft = torch.fft.ifft(grid, dim=-1).abs().square()
    assert torch.allclose(spectrum, dft)


def test_spectrum_errors_name_the_remedy():
    h = torch.zeros(2, 1, 1, 4, dtype=torch.complex64)
    f = subcarrier_frequencies(4, 1e6)
    with pytest.raises(UsageError, match="ports"):
        delay_angle_spectrum(h, PlanarArray(1, 3), f, CARRIER)
    with pytest.raises(UsageError, match="side"):
        delay_angle_spectrum(h, PlanarArray(1, 2), f, CARRIER, side="up")
    with pytest.raises(UsageError, match="equally spaced"):
        delay_angle_spectrum(h, PlanarArray(1, 2), f**2, CARRIER)
    with pytest.raises(UsageError, match="combine"):
        rssi_from_cfr(h, combine="max")
    with pytest.raises(UsageError, match="CFR"):
        rssi_from_cfr(h[0])
    assert azimuth_directions(3).shape == (3, 3)
