"""Wiener prediction with learned Doppler spectra: the filter, the taps, what the network may not depend on, weights."""

import math
from pathlib import Path

import pytest
import torch

from chanlab.csi import CachedPrediction, LearnedWiener, NoPrediction, evaluate_protocol, load_weights
from chanlab.csi.beam_taps import snapshot_noise
from chanlab.csi.doppler_wiener import doppler_posterior
from chanlab.csi.localised_taps import NUM_TAPS, localised_taps
from chanlab.data import StreamedCSI
from chanlab.errors import UsageError

WEIGHTS = Path(__file__).parents[2] / "models/csi/learned_wiener.safetensors"
AHEAD = torch.tensor([1.0, 2.5, 4.0])


def small(**kw):
    torch.manual_seed(0)
    return LearnedWiener(**{"dim": 32, "layers": 1, **kw}).eval()


def noise(*shape):
    return torch.randn(*shape, dtype=torch.complex64)


def gaussian(spectrum, count, steps, generator):
    """Realisations of processes with these line spectra, at instants -15 ... 0 and AHEAD."""
    line = torch.arange(64) / 64
    line = torch.where(line < 0.5, line, line - 1)
    times = torch.cat([torch.arange(1 - steps, 1).float(), AHEAD])
    amplitude = torch.randn(count, 64, dtype=torch.complex64, generator=generator) * spectrum.sqrt()
    return amplitude @ torch.exp(2j * math.pi * line[:, None] * times)


# The filter


def test_one_line_without_noise_goes_on_as_it_is():
    spectrum = torch.zeros(1, 64)
    spectrum[0, 60] = 2.0  # -1/16 cycle per snapshot
    wave = torch.exp(-2j * math.pi / 16 * torch.cat([torch.arange(-15.0, 1.0), AHEAD]))
    found = doppler_posterior(spectrum, torch.full((16,), 1e-9), wave[None, :16].to(torch.complex64), AHEAD)
    torch.testing.assert_close(found.mean[0, 0], wave[16:].to(torch.complex64), atol=1e-5, rtol=0)
    assert (found.variance < 1e-6).all()


def test_without_signal_the_mean_is_zero_and_far_ahead_the_variance_is_the_prior():
    spectrum = torch.full((2, 64), 1.0 / 64)
    found = doppler_posterior(spectrum, torch.ones(16), torch.zeros(3, 16, dtype=torch.complex64), AHEAD)
    assert not found.mean.any()
    assert (found.variance <= 2.0 + 1e-6).all()
    assert found.variance[0] == pytest.approx(2.0, rel=1e-4), "a white process can't be predicted at whole steps"


def test_variance_is_calibrated_on_gaussian_channels():
    generator = torch.Generator().manual_seed(1)
    spectrum = torch.rand(64, generator=generator).pow(6)
    spectrum /= spectrum.sum()
    truth = gaussian(spectrum, 4000, 16, generator)
    noisy = truth[:, :16] + 0.3 * math.sqrt(0.5) * torch.view_as_complex(torch.randn(4000, 16, 2, generator=generator))
    found = doppler_posterior(spectrum[None], torch.full((16,), 0.09), noisy, AHEAD)
    ratio = (found.mean[0] - truth[:, 16:]).abs().square() / found.variance
    for level in (0.5, 0.9):
        covered = (ratio < -math.log(1 - level)).float().mean(0)
        assert ((covered - level).abs() < 0.03).all(), (level, covered)


def test_a_missing_snapshot_counts_for_nothing():
    spectrum = torch.rand(1, 64)
    history, variance = noise(1, 16), torch.full((16,), 0.1)
    variance[5] = 1e9
    one = doppler_posterior(spectrum, variance, history, AHEAD).mean
    history[0, 5] = 100.0
    torch.testing.assert_close(doppler_posterior(spectrum, variance, history, AHEAD).mean, one, atol=1e-4, rtol=1e-4)


# Taps


@pytest.mark.parametrize("offset", [0.0, 1.5])
def test_taps_are_orthonormal_and_hold_the_window(offset):
    taps = localised_taps(300, offset).to(torch.complex128)
    torch.testing.assert_close(taps.mH @ taps, torch.eye(NUM_TAPS, dtype=torch.complex128), atol=1e-5, rtol=0)
    frequency = torch.arange(300, dtype=torch.float64) / 300 + offset
    delay = torch.linspace(-1.5, 49.5, 211, dtype=torch.float64)
    path = torch.exp(-2j * math.pi * frequency[:, None] * delay)
    lost = (path - taps @ (taps.mH @ path)).abs().square().sum(0) / 300
    assert lost.max() < 1e-5
    centre = ((taps.mH @ path).abs().square() * torch.arange(NUM_TAPS)[:, None]).sum(0) / 300
    assert ((centre - centre.round()).abs() <= 0.5).all()
    assert (centre.diff() > 0).all(), "a later path stands in later taps"


def test_few_subcarriers_make_a_tight_frame():
    taps = localised_taps(48)
    torch.testing.assert_close(taps @ taps.mH, torch.eye(48, dtype=taps.dtype), atol=1e-5, rtol=0)


# The predictor


@pytest.mark.parametrize("shape", [(2, 4, 4), (1, 8, 1), (2, 2, 3)])
@pytest.mark.parametrize(("steps", "subcarriers", "rx"), [(16, 300, 1), (5, 48, 2), (70, 64, 1)])
def test_one_set_of_weights_serves_any_shape(shape, steps, subcarriers, rx):
    trained = small()
    other = small(tx_shape=shape)
    other.load_state_dict(trained.state_dict())
    history = noise(2, rx, math.prod(shape), steps, subcarriers)
    with torch.no_grad():
        found = other(history, torch.full((2,), 0.1))
        assert found.shape == (2, rx, math.prod(shape), 4, subcarriers)
        assert found.isfinite().all()
        assert other(history, torch.full((2,), 0.1), torch.tensor([0.5, 7.25])).shape[3] == 2


@pytest.mark.parametrize("duplex", ["tdd", "fdd", "both"])
def test_phase_scale_and_companions_change_nothing_else(duplex):
    predictor = small(duplex=duplex)
    history, variance = noise(3, 1, 32, 16, 96), torch.tensor([0.1, 0.5, 0.01])
    with torch.no_grad():
        found = predictor.distribution(history, variance)
        turned = predictor.distribution(history[1:2] * 5j, variance[1:2] * 25)
    torch.testing.assert_close(turned.mean, found.mean[1:2] * 5j, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(turned.variance, found.variance[1:2] * 25, rtol=1e-3, atol=1e-3)
    assert found.mean.shape[-1] == (192 if duplex == "both" else 96)


def test_streaming_equals_the_whole_window():
    predictor = small()
    history = noise(1, 1, 32, 20, 96)
    variance = torch.full((1,), 0.2)
    cached = CachedPrediction(predictor, 16)
    assert cached.push(history[:, :, :, 0], variance) is None
    with torch.no_grad():
        for step in range(1, 20):
            found = cached.push(history[:, :, :, step], variance)
            whole = predictor(history[:, :, :, max(0, step - 15) : step + 1], variance)
            torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_is_refused():
    with pytest.raises(UsageError, match="tx_shape"):
        small()(noise(1, 1, 8, 16, 96))
    with pytest.raises(UsageError, match="at least 2"):
        small()(noise(1, 1, 32, 1, 96))


def test_noise_is_found_snapshot_by_snapshot_and_lost_ones_are_marked():
    torch.manual_seed(2)
    taps = noise(1, 2, 4, 4, NUM_TAPS, 16) * 0.3
    taps[..., :6, :] += 2.0
    taps[..., 3] = 0
    taps[..., 9] *= 3
    found = snapshot_noise(taps)[0]
    assert found[3] > 100
    kept = [i for i in range(16) if i not in (3, 9)]
    assert found[kept].mean() == pytest.approx(0.09, rel=0.35)
    assert found[9] > 4 * found[kept].mean()


def test_it_learns():
    predictor = small(duplex="both").train()
    optimizer = torch.optim.Adam(predictor.parameters(), 3e-3)
    time, frequency = torch.arange(20.0), torch.arange(192.0)
    turn = torch.rand(8, 1, 32, 1, 1) + 0.03 * time[:, None] * torch.rand(8, 1, 1, 1, 1) - 0.05 * frequency
    channel = torch.exp(2j * math.pi * turn)
    history, target = channel[..., :16, :96], channel[..., 16:, :]
    losses = []
    for _ in range(12):
        loss = predictor.training_loss(history + 0.1 * noise(*history.shape), target, torch.full((8,), 0.02))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in predictor.parameters())


# The shipped weights


@pytest.mark.slow
def test_shipped_weights_beat_the_published_figures_on_a_subset():
    ours = LearnedWiener(duplex="both").eval()
    load_weights(ours, WEIGHTS)
    stream = StreamedCSI("csi4cast", "test", duplex="both", block_size=1, seed=5)
    stream.cells = stream.cells[::5]
    stream.conditions = stream.conditions[3:4]  # 15 dB
    results = evaluate_protocol({"ours": ours, "no prediction": NoPrediction(4)}, stream, 1, 6)
    found = {(r.system, r.duplex): float(r.nmse().mean()) for r in results}
    assert found["ours", "tdd"] < 0.1246, "the best published figure"
    assert found["ours", "fdd"] < 0.2692, "the best published figure"
    assert found["ours", "tdd"] < 0.1 * found["no prediction", "tdd"]
