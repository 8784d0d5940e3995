"""What impairments of a history physically are."""

import math

import pytest
import torch
from window_store import make_store

from chanlab.data import counter
from chanlab.data.impairments import (
    Impairments,
    burst_noise,
    carrier_offset,
    drop_packets,
    interpolate_pilots,
    lmmse_pilots,
    phase_noise,
    quantise,
    timing_drift,
    turn_snapshots,
)
from chanlab.data.windows import CSIWindows
from chanlab.errors import UsageError

BATCH, PORTS, TIME, SUBCARRIERS = 64, 4, 16, 48
SPACING, INTERVAL = 30e3, 2.352e-3


def key(batch=BATCH, *name):
    return counter.keys(torch.arange(batch), "test", *name)


def gaussian(batch=BATCH, *name, subcarriers=SUBCARRIERS):
    return counter.complex_normal(key(batch, "channel", *name), (1, PORTS, TIME, subcarriers))


def exponential_channels(delay_spread, batch=200, subcarriers=96, num_taps=400):
    """Channels with the profile that `lmmse` reckons with."""
    delay = torch.arange(num_taps) * delay_spread * 10 / num_taps
    power = (-delay / delay_spread).exp()
    gain = counter.complex_normal(key(batch, "taps"), (1, 1, 1, num_taps)) * (power / power.sum()).sqrt()
    frequency = torch.arange(subcarriers) * SPACING
    return gain @ torch.polar(torch.ones(num_taps, subcarriers), -2 * math.pi * delay[:, None] * frequency)


def test_counter_numbers_are_gaussian_uniform_and_independent():
    x = counter.complex_normal(key(200), (5000,))
    n = x.numel()
    assert x.mean().abs() < 4 / n**0.5
    assert x.abs().square().mean() == pytest.approx(1, abs=4 / n**0.5)
    assert (x * x).mean().abs() < 6 / n**0.5  # circular
    assert x.abs().pow(4).mean() == pytest.approx(2, abs=20 / n**0.5)
    assert (x[1:] * x[:-1].conj()).mean().abs() < 4 / n**0.5  # of neighbouring samples
    assert (x[:, 1:] * x[:, :-1].conj()).mean().abs() < 4 / n**0.5  # of neighbouring entries
    u = counter.uniform(key(1000), (1000,))
    assert u.min() >= 0
    assert u.max() < 1
    assert torch.histc(u, 20).div(u.numel() / 20).sub(1).abs().max() < 0.03


def test_counter_numbers_depend_on_their_sample_alone():
    all_of_them = counter.complex_normal(key(8), (3, 50))
    assert torch.equal(counter.complex_normal(key(8)[5:6], (3, 50))[0], all_of_them[5])
    assert not torch.equal(counter.complex_normal(key(8, "other"), (3, 50)), all_of_them)


def test_cfo_turns_snapshots_linearly_and_not_the_last():
    history = gaussian()
    offset = torch.linspace(-100, 100, BATCH)
    turned = carrier_offset(history, offset, INTERVAL)
    torch.testing.assert_close(turned[:, :, :, -1], history[:, :, :, -1])
    step = (turned[:, :, :, 1:] / turned[:, :, :, :-1]) / (history[:, :, :, 1:] / history[:, :, :, :-1])
    expected = torch.polar(torch.ones(BATCH), 2 * math.pi * offset * INTERVAL)
    torch.testing.assert_close(step, expected[:, None, None, None, None].expand_as(step), rtol=1e-3, atol=1e-3)


def test_timing_drift_is_a_phase_linear_over_subcarriers_and_time():
    history, drift = torch.ones(1, 1, 1, TIME, SUBCARRIERS, dtype=torch.complex64), torch.tensor([1e-6])
    phase = timing_drift(history, drift, INTERVAL, SPACING).angle()[0, 0, 0]
    torch.testing.assert_close(phase[-1], torch.zeros(SUBCARRIERS))
    slope = 2 * math.pi * 1e-6 * INTERVAL * SPACING  # per subcarrier and snapshot before the last
    expected = slope * (torch.arange(SUBCARRIERS) - SUBCARRIERS // 2) * torch.arange(TIME - 1, -1, -1)[:, None]
    torch.testing.assert_close(phase, expected)


def test_common_phase_has_its_deviation_and_leaves_relations_within_a_snapshot():
    history = gaussian()
    turned = turn_snapshots(history, 0.1, key())
    ratio = turned / history
    torch.testing.assert_close(ratio, ratio[:, :1, :1, :, :1].expand_as(ratio), rtol=1e-3, atol=1e-3)
    phase = ratio[:, 0, 0, :, 0].angle()
    assert phase[:, :-1].std() == pytest.approx(0.1 * 2**0.5, rel=0.1)  # against the last one's, which is as large
    torch.testing.assert_close(phase[:, -1], torch.zeros(BATCH))
    anywhere = (turn_snapshots(history, math.inf, key()) / history)[:, 0, 0, :-1, 0]
    assert anywhere.mean().abs() < 4 / anywhere.numel() ** 0.5


def test_ls_has_the_noise_at_pilots_and_half_of_it_in_the_middle():
    variance, spacing = 0.1, 4
    flat = torch.ones(200, 1, PORTS, TIME, 4 * 12 + 1, dtype=torch.complex64)
    noisy = flat + variance**0.5 * counter.complex_normal(key(200, "noise"), flat.shape[1:])
    error = interpolate_pilots(noisy[..., ::spacing], flat.shape[-1], spacing) - flat
    by_place = error.abs().square().mean((0, 1, 2, 3))
    torch.testing.assert_close(by_place[::spacing], torch.full((13,), variance), rtol=0.05, atol=0)
    torch.testing.assert_close(by_place[2::spacing], torch.full((12,), variance / 2), rtol=0.05, atol=0)


def test_ls_is_exact_without_noise_where_the_channel_is_linear_and_holds_the_edge():
    line = torch.arange(47, dtype=torch.float32).to(torch.complex64) * (1 + 2j)
    estimate = interpolate_pilots(line[::4], 47, 4)
    torch.testing.assert_close(estimate[:45], line[:45])
    torch.testing.assert_close(estimate[45:], line[44].expand(2))


@pytest.mark.parametrize("variance", [0.01, 0.3])
def test_lmmse_reaches_its_error_in_theory_and_beats_ls(variance):
    delay_spread, spacing = 300e-9, 4
    channel = exponential_channels(delay_spread, batch=400)
    noisy = channel + variance**0.5 * counter.complex_normal(key(400, "noise"), channel.shape[1:])
    pilots, subcarriers = noisy[..., ::spacing], channel.shape[-1]
    noise = torch.full((400,), variance)
    error = (lmmse_pilots(pilots, noise, subcarriers, spacing, SPACING, delay_spread) - channel).abs().square().mean()
    ls = (interpolate_pilots(pilots, subcarriers, spacing) - channel).abs().square().mean()
    distance = (torch.arange(subcarriers)[:, None] - torch.arange(0, subcarriers, spacing)) * SPACING
    cross = (1 / (1 + 2j * math.pi * distance * delay_spread)).to(torch.complex128)
    covariance = cross[::spacing] + variance * torch.eye(cross.shape[1])
    theory = 1 - (cross @ torch.linalg.solve(covariance, cross.mH)).diagonal().real.mean()
    assert error == pytest.approx(float(theory), rel=0.15)
    assert error < 0.8 * ls


def test_quantisation_gains_six_db_per_bit():
    history = gaussian()
    sqnr = []
    for bits in range(3, 11):
        error = quantise(history, bits) - history
        sqnr.append(10 * math.log10(history.abs().square().mean() / error.abs().square().mean()))
    steps = torch.tensor(sqnr).diff()
    torch.testing.assert_close(steps, torch.full_like(steps, 6.02), rtol=0, atol=0.2)
    parts = torch.view_as_real(quantise(history[:1], 2))[0, :, :, 3].flatten()
    assert len(parts.unique()) == 4
    assert not quantise(torch.zeros_like(history), 3).abs().any()


def test_phase_noise_has_the_error_power_of_a_gaussian_phase():
    history = gaussian()
    error = phase_noise(history, 0.32, key()) - history
    ratio = error.abs().square().mean() / history.abs().square().mean()
    assert ratio == pytest.approx(2 * (1 - math.exp(-(0.32**2) / 2)), rel=0.02)  # 10 dB


def test_dropped_packets_are_whole_snapshots():
    history = gaussian(2000, subcarriers=4)
    power = drop_packets(history, 0.1, key(2000)).abs().square().sum((1, 2, 4))
    dropped = power == 0
    assert dropped.float().mean() == pytest.approx(0.1, abs=4 * (0.09 / dropped.numel()) ** 0.5)
    torch.testing.assert_close(power[~dropped], history.abs().square().sum((1, 2, 4))[~dropped])


@pytest.mark.parametrize(("degree", "snr_db"), [(0.29, 10), (0.16, 15), (0.09, 20), (0.054, 25)])
def test_bursts_have_the_snr_they_are_named_after(degree, snr_db):
    history = torch.zeros(4000, 1, 1, TIME, 8, dtype=torch.complex64)
    noise = burst_noise(history, degree, key(4000))
    power = noise.abs().square().mean()
    assert 10 * math.log10(1 / power) == pytest.approx(snr_db, abs=0.7)
    hit = noise.abs().square().sum((1, 2, 4)) > 0
    assert hit.any(1).float().mean() == pytest.approx(1 - (1 - 2 * degree) ** 17, abs=0.03)
    assert hit.sum(1).max() == 10
    assert ((hit.int().diff(dim=1) == 1).sum(1) + hit[:, 0] <= 1).all()  # one stretch


def test_all_together_are_each_samples_own():
    impairments = Impairments(
        pilot_spacing=4, estimator="lmmse", common_phase=0.2, cfo=20.0, timing_drift=1e-7, quantisation_bits=6
    )
    history, variance = gaussian(8), torch.full((8,), 0.1)
    apart = impairments.apply(history[3:4], variance[3:4], key(8)[3:4], INTERVAL, SPACING)
    torch.testing.assert_close(impairments.apply(history, variance, key(8), INTERVAL, SPACING)[3:4], apart)
    scaled = impairments.apply(3 * history, 9 * variance, key(8), INTERVAL, SPACING)
    torch.testing.assert_close(scaled[3:4], 3 * apart, rtol=1e-4, atol=0.1)  # a level may tip over


def test_nothing_is_done_by_default():
    history = gaussian(2)
    assert Impairments().apply(history, torch.zeros(2), key(2), INTERVAL, SPACING) is history


@pytest.mark.parametrize(
    "arguments", [{"pilot_spacing": 0}, {"estimator": "ml"}, {"cfo": -1.0}, {"quantisation_bits": 2.5}]
)
def test_bad_arguments(arguments):
    with pytest.raises(UsageError, match=next(iter(arguments))):
        Impairments(**arguments)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("impairments") / "store")


@pytest.mark.parametrize("mode", ["paths", "materialised"])
def test_windows_of_a_store_are_impaired(store, tmp_path, mode):
    common = {"snr_db": 20.0, "mode": mode, "view_dir": tmp_path}
    plain = CSIWindows(store, "train", **common)
    phase = CSIWindows(store, "train", impairments=Impairments(common_phase=math.inf), **common)
    one, two = plain.batch([0, 3, 5]), phase.batch([0, 3, 5])
    torch.testing.assert_close(two.target, one.target)
    torch.testing.assert_close(two.history.abs(), one.history.abs())
    torch.testing.assert_close(two.history[:, :, :, -1], one.history[:, :, :, -1])
    assert not torch.isclose(two.history[:, :, :, :-1], one.history[:, :, :, :-1]).any()
    torch.testing.assert_close(phase.batch([5]).history[0], two.history[2])  # whatever its batch
    assert not torch.isclose(phase.batch([(1, 5)]).history[0, ..., 0, :], two.history[2][..., 0, :]).all()


def test_feedback_delay_of_windows_moves_the_target_away(store):
    view = {"snr_db": math.inf, "by_epoch": False, "history": 4}
    late = CSIWindows(store, "train", horizons=2, impairments=Impairments(feedback_delay=3), **view).batch([0])
    far = CSIWindows(store, "train", horizons=[4, 5], **view).batch([0])
    torch.testing.assert_close(late.history, far.history)
    torch.testing.assert_close(late.target, far.target)
