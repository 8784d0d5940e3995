import math
from dataclasses import replace

import pytest
import torch
from path_samples import random_paths

from chanlab.channels import (
    PATH_TENSORS,
    SPEED_OF_LIGHT,
    Paths,
    PlanarArray,
    cfr,
    cir_taps,
    free_space_paths,
    path_sum,
    port_coefficients,
    rotation_matrix,
    subcarrier_frequencies,
    two_ray_paths,
)
from chanlab.errors import UsageError

TX = PlanarArray(2, 2, pattern="tr38901", polarization="cross")
RX = PlanarArray(1, 2, pattern="dipole", polarization="VH")
ISO = PlanarArray()
HELD = {
    "tx_orientation": torch.tensor([0.3, 0.2, 0.1], dtype=torch.float64),
    "rx_orientation": torch.tensor([2.0, -0.4, 0.3], dtype=torch.float64),
}
ZERO = torch.zeros(1, dtype=torch.float64)


def _relative(a, b):
    return float((a - b).abs().square().sum().sqrt() / b.abs().square().sum().sqrt())


def _swap(paths: Paths) -> Paths:
    """The same link seen from the other end."""
    return Paths(
        paths.transfer.transpose(-3, -2),
        paths.delay,
        paths.arrival,
        paths.departure,
        paths.doppler,
        paths.interactions.flip(-2),
        paths.vertices.flip(-3),
        paths.mask,
        paths.carrier,
    )


def test_friis_amplitude_and_phase():
    carrier, place = 3.5e9, torch.tensor([[30.0, 40.0, 10.0]], dtype=torch.float64)
    paths = free_space_paths(torch.tensor([0.0, 0.0, 10.0]), place, torch.zeros(3), carrier)
    f = subcarrier_frequencies(12, 1e6)
    h = cfr(paths, ISO, ISO, f)[0, 0, 0, 0]
    wavelength = SPEED_OF_LIGHT / carrier
    exact = wavelength / (4 * math.pi * 50) * torch.exp(-2j * math.pi * (carrier + f) * 50 / SPEED_OF_LIGHT)
    assert torch.allclose(h, exact, rtol=1e-9)


def test_friis_with_gains_of_both_antennas():
    place = torch.tensor([[100.0, 0.0, 0.0]], dtype=torch.float64)
    paths = free_space_paths(torch.zeros(3), place, torch.zeros(3), 28e9)
    facing = {"rx_orientation": torch.tensor([math.pi, 0.0, 0.0])}
    sector = PlanarArray(pattern="tr38901")
    gain = cfr(paths, sector, sector, ZERO, **facing).abs().square() / cfr(paths, ISO, ISO, ZERO).abs().square()
    assert float(10 * gain.log10()) == pytest.approx(16, abs=1e-6)


def test_parseval_between_taps_and_frequency_response():
    paths, bandwidth = random_paths(3), 20e6
    taps = cir_taps(paths, TX, RX, bandwidth, -4000, 4000, **HELD)
    n = 2048
    f = ((torch.arange(n, dtype=torch.float64) + 0.5) / n - 0.5) * bandwidth
    h = cfr(paths, TX, RX, f, **HELD)
    assert torch.allclose(taps.abs().square().sum(-1), h.abs().square().mean(-1), rtol=1e-3)


def test_taps_are_the_fourier_coefficients_of_the_frequency_response():
    paths, bandwidth, n = random_paths(2), 20e6, 4096
    f = ((torch.arange(n, dtype=torch.float64) + 0.5) / n - 0.5) * bandwidth
    h = cfr(paths, ISO, ISO, f)
    lags = torch.arange(-3, 16, dtype=torch.float64)
    wave = torch.exp(2j * math.pi * f[:, None] / bandwidth * lags)
    assert torch.allclose(h @ wave / n, cir_taps(paths, ISO, ISO, bandwidth, -3, 15), atol=1e-5)


def test_same_definitions_as_sionna_phy():
    channel = pytest.importorskip("sionna.phy.channel")
    paths, times = random_paths(2), torch.arange(3, dtype=torch.float64) * 1e-3
    ports = port_coefficients(paths, TX, RX)
    wave = torch.exp(2j * math.pi * paths.doppler[..., None] * times)
    a = (ports[..., None] * wave[:, None, None])[:, None, :, None]  # batch, rx, rx_ant, tx, tx_ant, path, time
    tau = paths.delay[:, None, None]
    f = subcarrier_frequencies(7, 15e3)
    theirs = channel.subcarrier_frequencies(7, 15e3, precision="double", device="cpu")
    assert torch.equal(f, theirs)
    theirs = channel.cir_to_ofdm_channel(f, a, tau)[:, 0, :, 0]
    assert torch.allclose(cfr(paths, TX, RX, f, times), theirs)
    theirs = channel.cir_to_time_channel(30e6, a, tau, -6, 20)[:, 0, :, 0]
    assert torch.allclose(cir_taps(paths, TX, RX, 30e6, -6, 20, times), theirs)


def test_reciprocity():
    paths, f = random_paths(3), subcarrier_frequencies(8, 1e6)
    forward = cfr(paths, TX, RX, f, **HELD)
    backward = cfr(
        _swap(paths), RX, TX, f, tx_orientation=HELD["rx_orientation"], rx_orientation=HELD["tx_orientation"]
    )
    assert torch.allclose(forward, backward.transpose(-4, -3))


def test_reciprocity_of_real_geometry():
    a, b = torch.tensor([[0.0, 0.0, 10.0]]).double(), torch.tensor([[50.0, -20.0, 1.5]]).double()
    there, back = two_ray_paths(a, b, ZERO, 3.5e9), two_ray_paths(b, a, ZERO, 3.5e9)
    assert torch.allclose(there.transfer, back.transfer.transpose(-3, -2))
    assert torch.allclose(there.departure, back.arrival)


@pytest.mark.parametrize("drift", [False, True])
def test_doppler_is_the_channel_at_the_displaced_place(drift):
    start = torch.tensor([[80.0, 30.0, 1.5]], dtype=torch.float64)
    velocity = torch.tensor([[8.0, -5.0, 0.0]], dtype=torch.float64)
    mast = torch.tensor([0.0, 0.0, 10.0])
    f = subcarrier_frequencies(16, 1e6)
    errors = []
    for t in (2e-3, 1e-3):
        time = torch.tensor([t], dtype=torch.float64)
        predicted = cfr(two_ray_paths(mast, start, velocity, 3.5e9), ISO, ISO, f, time, delay_drift=drift)
        traced = cfr(two_ray_paths(mast, start + velocity * t, velocity, 3.5e9), ISO, ISO, f)
        errors.append(_relative(predicted, traced))
    assert errors[0] < 2e-3
    assert errors[1] < 0.55 * errors[0]  # vanishes with the step


def test_delay_drift_is_what_a_wide_band_sees():
    start, velocity = torch.tensor([[80.0, 0.0, 0.0]]).double(), torch.tensor([[-30.0, 0.0, 0.0]]).double()
    f = subcarrier_frequencies(64, 10e6)
    time = torch.tensor([5e-3], dtype=torch.float64)  # 15 cm on: half a nanosecond, 0.3 cycles over the band
    paths = free_space_paths(torch.zeros(3), start, velocity, 3.5e9)
    traced = cfr(free_space_paths(torch.zeros(3), start + velocity * 5e-3, velocity, 3.5e9), ISO, ISO, f)
    assert _relative(cfr(paths, ISO, ISO, f, time, delay_drift=True), traced) < 3e-3
    assert _relative(cfr(paths, ISO, ISO, f, time), traced) > 0.1


def test_vertical_and_horizontal_do_not_mix_in_free_space():
    place = torch.tensor([[100.0, 0.0, 0.0]], dtype=torch.float64)
    paths = free_space_paths(torch.zeros(3), place, torch.zeros(3), 3.5e9)
    both = PlanarArray(polarization="VH")
    h = cfr(paths, both, both, ZERO)[0, :, :, 0, 0].abs()
    h = h / h.max()
    assert torch.allclose(h, torch.eye(2, dtype=torch.float64), atol=1e-9)
    # A receiver rolled by a quarter turn swaps them; rolling both ends changes nothing.
    roll = torch.tensor([0.0, 0.0, math.pi / 2], dtype=torch.float64)
    h = cfr(paths, both, both, ZERO, rx_orientation=roll)[0, :, :, 0, 0].abs()
    assert torch.allclose(h / h.max(), torch.eye(2, dtype=torch.float64).flip(0), atol=1e-9)
    rolled = cfr(paths, both, both, ZERO, tx_orientation=0.3 * roll, rx_orientation=0.3 * roll)[0, :, :, 0, 0].abs()
    assert torch.allclose(rolled / rolled.max(), torch.eye(2, dtype=torch.float64), atol=1e-9)
    # Slanted antennas that face each other: +45 of one meets -45 of the other.
    cross = PlanarArray(polarization="cross")
    facing = torch.tensor([math.pi, 0.0, 0.0], dtype=torch.float64)
    h = cfr(paths, cross, cross, ZERO, rx_orientation=facing)[0, :, :, 0, 0].abs()
    assert torch.allclose(h / h.max(), torch.eye(2, dtype=torch.float64).flip(0), atol=1e-9)


def test_turning_the_whole_world_changes_nothing():
    mast, place = torch.tensor([0.0, 0.0, 0.0]).double(), torch.tensor([[40.0, 25.0, -8.0]]).double()
    turn = torch.tensor([1.1, 0.0, 0.0], dtype=torch.float64)
    moved = place @ rotation_matrix(turn).T
    before = cfr(free_space_paths(mast, place, ZERO, 3.5e9), TX, RX, ZERO)
    after = cfr(free_space_paths(mast, moved, ZERO, 3.5e9), TX, RX, ZERO, tx_orientation=turn, rx_orientation=turn)
    assert torch.allclose(before, after)


def test_band_offset_is_the_channel_of_the_other_carrier():
    # Free space at f_c + 200 MHz: phases, Doppler and array steering of that carrier (amplitude stays that of f_c).
    offset, place = 200e6, torch.tensor([[60.0, 20.0, 3.0]], dtype=torch.float64)
    velocity = torch.tensor([[10.0, 3.0, 0.0]], dtype=torch.float64)
    f, t = subcarrier_frequencies(4, 1e6), torch.tensor([0.0, 1e-3], dtype=torch.float64)
    array = PlanarArray(4, 4)
    here = free_space_paths(torch.zeros(3), place, velocity, 3.5e9)
    there = free_space_paths(torch.zeros(3), place, velocity, 3.5e9 + offset)
    elements = array.positions(here.wavelength)
    for drift in (False, True):
        h = cfr(here, array, ISO, f, t, band_offset=offset, delay_drift=drift)
        exact = cfr(there, array, ISO, f, t, tx_elements=elements, delay_drift=drift)
        assert torch.allclose(h / h.abs(), exact / exact.abs(), atol=1e-6)


def test_masked_paths_count_for_nothing():
    paths, f = random_paths(4), subcarrier_frequencies(8, 1e6)
    assert not bool(paths.mask.all())
    padded = paths.pad(9, 4)
    assert torch.allclose(cfr(padded, TX, RX, f), cfr(paths, TX, RX, f))
    none = Paths(*(torch.zeros_like(getattr(paths, name)) for name in PATH_TENSORS), carrier=3.5e9)
    assert float(cfr(none, TX, RX, f).abs().max()) == 0


def test_no_paths_at_all_is_a_channel_of_zeros():
    paths = random_paths(2)._map(lambda _, x: x[..., :0])
    assert cfr(paths, ISO, ISO, subcarrier_frequencies(4, 1e6)).abs().sum() == 0


@pytest.mark.parametrize("chunk", [1, 300, 5000])
def test_chunks_do_not_change_results(chunk, monkeypatch):
    paths, f = random_paths(3, 4), subcarrier_frequencies(8, 1e6)
    times = torch.rand(3, 4, 5, dtype=torch.float64) * 1e-3
    held = {"rx_orientation": torch.rand(3, 4, 3, dtype=torch.float64), "tx_orientation": torch.rand(3, 1, 3)}
    whole = cfr(paths, TX, RX, f, times, **held)
    monkeypatch.setattr(path_sum, "CHUNK_ELEMENTS", chunk)
    assert torch.allclose(cfr(paths, TX, RX, f, times, **held), whole, rtol=1e-12, atol=1e-12)


def test_batch_axes_and_single_links_agree():
    paths, f = random_paths(2, 3), subcarrier_frequencies(8, 1e6)
    times = torch.rand(2, 3, 4, dtype=torch.float64) * 1e-3
    whole = cfr(paths, TX, RX, f, times, rx_orientation=HELD["rx_orientation"])
    assert whole.shape == (2, 3, RX.num_ports, TX.num_ports, 4, 8)
    one = cfr(paths[1, 2], TX, RX, f, times[1, 2], rx_orientation=HELD["rx_orientation"])
    assert torch.allclose(whole[1, 2], one)


def test_precision_follows_the_paths():
    exact, f = random_paths(2), subcarrier_frequencies(8, 1e6)
    double, single = cfr(exact, TX, RX, f, **HELD), cfr(exact.to(dtype=torch.float32), TX, RX, f, **HELD)
    assert double.dtype == torch.complex128
    assert single.dtype == torch.complex64
    assert _relative(single.to(double.dtype), double) < 1e-5


def test_gradients():
    paths, f = random_paths(2, num_paths=3), subcarrier_frequencies(3, 1e6)
    times = torch.tensor([0.0, 1e-3], dtype=torch.float64)
    tx, rx = PlanarArray(1, 2, polarization="cross"), PlanarArray(2, 1)
    wavelength = paths.wavelength

    def response(transfer, scaled_delay, tx_scaled, rx_scaled, near):
        moved = replace(paths, transfer=transfer, delay=scaled_delay * 1e-6)
        elements = {"tx_elements": tx_scaled * wavelength, "rx_elements": rx_scaled * wavelength}
        return cfr(moved, tx, rx, f, times, delay_drift=True, near_field=near, **elements, **HELD)

    inputs = [
        paths.transfer.clone(),
        paths.delay * 1e6,
        tx.positions(wavelength) / wavelength,
        rx.positions(wavelength) / wavelength,
    ]
    for x in inputs:
        x.requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: response(*x, False), inputs)
    assert torch.autograd.gradcheck(lambda *x: response(*x, True), inputs)

    def taps(transfer, scaled_delay):
        moved = replace(paths, transfer=transfer, delay=scaled_delay * 1e-6)
        return cir_taps(moved, tx, rx, 20e6, 0, 4)

    assert torch.autograd.gradcheck(taps, inputs[:2])


def test_wrong_shapes_name_the_right_ones():
    paths, f = random_paths(3), subcarrier_frequencies(4, 1e6)
    with pytest.raises(UsageError, match="subcarrier"):
        cfr(paths, ISO, ISO, f[None])
    with pytest.raises(UsageError, match="times"):
        cfr(paths, ISO, ISO, f, torch.zeros(2, 5))
    with pytest.raises(UsageError, match="rx_orientation"):
        cfr(paths, ISO, ISO, f, rx_orientation=torch.zeros(2, 3))
    with pytest.raises(UsageError, match=r"\[1, 3\]"):
        cfr(paths, ISO, ISO, f, tx_elements=torch.zeros(2, 3))
    with pytest.raises(UsageError, match="l_min"):
        cir_taps(paths, ISO, ISO, 1e6, 3, 2)
    with pytest.raises(UsageError, match="spacing"):
        subcarrier_frequencies(4, 0.0)


def test_a_misspelt_argument_is_not_ignored():
    paths, f = random_paths(2), subcarrier_frequencies(4, 1e6)
    with pytest.raises(UsageError, match="rx_orientaton"):
        cfr(paths, ISO, ISO, f, rx_orientaton=torch.zeros(3))
