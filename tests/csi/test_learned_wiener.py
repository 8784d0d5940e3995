"""Wiener prediction with learned Doppler spectra: the filter, the taps, what the network may not depend on, weights."""

import math
from pathlib import Path

import pytest
import torch

from chanlab.channels import subcarrier_frequencies
from chanlab.csi import CachedPrediction, LearnedWiener, NoPrediction, evaluate_protocol, load_weights
from chanlab.csi.beam_taps import noise_level, pick_taps, snapshot_noise, strongest_taps
from chanlab.csi.doppler_wiener import doppler_posterior
from chanlab.csi.hermitian import solve_hermitian
from chanlab.csi.learned_wiener import _to_places
from chanlab.csi.localised_taps import NUM_TAPS, localised_taps
from chanlab.csi.lost_snapshots import fill_lost, unreached
from chanlab.csi.student_t import ComplexStudentT
from chanlab.csi.window_augmentation import augment_windows
from chanlab.data import StreamedCSI
from chanlab.data.protocol import CSI4CAST, Cell
from chanlab.data.streamed import cell_channels
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


def hermitian(count, size):
    generator = torch.Generator().manual_seed(3)
    root = torch.randn(count, size, size, dtype=torch.complex128, generator=generator)
    return root @ root.mH / size + 1e-4 * torch.eye(size)


def test_the_solver_and_its_gradient():
    matrix, right = hermitian(3, 5), torch.randn(3, 5, 2, dtype=torch.complex128)
    torch.testing.assert_close(matrix @ solve_hermitian(matrix, right), right)
    root = torch.randn(3, 5, 5, dtype=torch.complex128, requires_grad=True)
    right.requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: solve_hermitian(a @ a.mH + torch.eye(5), b), (root, right))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("size", "columns"), [(2, 1), (5, 2), (16, 8), (31, 3), (40, 2)])
def test_the_kernel_solves_as_lapack_does(size, columns):
    matrix, right = hermitian(1001, size), torch.randn(1001, size, columns, dtype=torch.complex128)
    found = solve_hermitian(matrix.cuda(), right.cuda()).cpu()
    torch.testing.assert_close(found, torch.linalg.solve(matrix, right), rtol=1e-8, atol=1e-8)


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


def test_the_strongest_taps_are_found_and_picked_in_order_of_delay():
    taps = 0.1 * noise(2, 1, 2, 2, NUM_TAPS, 4)
    taps[0, ..., [7, 3, 59], :] += 5
    taps[1, ..., [0, 1, 2], :] += 5
    strong, weak = strongest_taps(taps, 3)
    assert strong.tolist() == [[3, 7, 59], [0, 1, 2]]
    assert weak[1].tolist() == list(range(3, NUM_TAPS))
    picked = pick_taps(taps, strong + 1)
    assert torch.equal(picked[0, :, :, :, 1], taps[0, :, :, :, 8])
    assert not picked[0, :, :, :, 2].any(), "there is nothing behind the last tap"


def test_spread_taps_land_beside_their_own_and_nothing_wraps_around():
    spread, number = noise(2, 1, 3, 5, 2, 2, 4), torch.tensor([[0, 1, 30, 59], [5, 6, 7, 58]])
    found = _to_places(spread, number)
    wanted = torch.zeros(2, 1, 3, 2, 2, NUM_TAPS, dtype=torch.complex64)
    for sample in range(2):
        for shift in range(5):
            for tap in range(4):
                place = int(number[sample, tap]) + shift - 2
                if 0 <= place < NUM_TAPS:
                    wanted[sample, ..., place] += spread[sample, :, :, shift, :, :, tap]
    torch.testing.assert_close(found, wanted)


# Uncertainty


@pytest.mark.parametrize("shape", [1.5, 4.0, 200.0])
def test_bounds_hold_what_they_promise_and_the_density_integrates_to_one(shape):
    generator = torch.Generator().manual_seed(2)
    gamma = torch.distributions.Gamma(shape, shape)
    torch.manual_seed(1)
    power = 0.3 / gamma.sample((200_000,))  # of a complex Gaussian: its mean is 0.3 shape / (shape - 1)
    error = torch.randn(200_000, dtype=torch.complex64, generator=generator) * power.sqrt()
    variance = torch.full((200_000,), 0.3 * shape / (shape - 1))
    found = ComplexStudentT(torch.zeros_like(error), variance, torch.full_like(variance, shape))
    for probability in (0.5, 0.9):
        assert (error.abs() < found.bound(probability)).float().mean() == pytest.approx(probability, abs=0.005)
    radius = torch.logspace(-4, 3, 4001, dtype=torch.float64)
    one = ComplexStudentT(torch.zeros(1, dtype=torch.complex128), variance[:1].double(), torch.tensor([shape]).double())
    density = one.log_likelihood(radius.to(torch.complex128)).exp()
    assert torch.trapezoid(2 * math.pi * radius * density, radius) == pytest.approx(1.0, abs=0.01)
    with pytest.raises(UsageError, match="between 0 and 1"):
        found.bound(1.0)


def test_a_distribution_almost_gaussian_has_gaussian_bounds():
    one = torch.ones(3)
    found = ComplexStudentT(torch.zeros(3, dtype=torch.complex64), one, one * 1e8).bound(0.9)
    torch.testing.assert_close(found, one * math.sqrt(math.log(10)), rtol=1e-5, atol=0)


# Augmentation


@pytest.mark.parametrize(("bands", "offset"), [(1, 0.0), (1, 1.5), (2, 1.5)])
def test_a_changed_window_is_a_window_still(bands, offset):
    """A path that is shifted in Doppler, delay and angle is a path: history and target stay parts of one channel."""
    torch.manual_seed(5)
    place = torch.arange(24) / 24
    places = torch.cat([place, place + 1.5]) if bands == 2 else place + offset
    port, time = torch.arange(8), torch.arange(-5.0, 3.0)

    def path(frequency):
        turn = 0.03 * time[:, None] + 0.2 * port[:, None, None] - 1.3 * frequency
        return torch.exp(2j * math.pi * turn)[None, None].to(torch.complex64).expand(64, -1, -1, -1, -1)

    before = path(place)[:, :, :, :6], path(places)[:, :, :, 6:], torch.full((64,), 0.1)
    history, target, _ = augment_windows(*before, (1, 8, 1), 1.5 if bands == 2 else offset, 0.9)
    changed = (history - before[0]).abs().amax((1, 2, 3, 4)) > 1e-3
    assert changed.float().mean() > 0.9
    # One path: every ratio between neighbours is the same in history and target. Mixtures aren't one path: leave them.
    single = (history.abs() - 1).abs().amax((1, 2, 3, 4)) < 1e-4
    assert 0 < single.sum() < 64
    for x in (history[single], target[single]):
        over_time, over_ports = x[:, :, :, 1:] / x[:, :, :, :-1], x[:, :, 1:] / x[:, :, :-1]
        reference = history[single][:, 0, 0, 1, 0] / history[single][:, 0, 0, 0, 0]
        torch.testing.assert_close(
            over_time, reference[:, None, None, None, None].expand_as(over_time), rtol=0, atol=1e-3
        )
        reference = history[single][:, 0, 1, 0, 0] / history[single][:, 0, 0, 0, 0]
        torch.testing.assert_close(
            over_ports, reference[:, None, None, None, None].expand_as(over_ports), rtol=0, atol=1e-3
        )
    # Its delay, from neighbouring subcarriers of the history, tells every subcarrier of the target.
    found = history[single]
    delay = (found[..., 1:] / found[..., :-1]).angle().mean((1, 2, 3, 4)) * -24 / (2 * math.pi)
    next_step = found[:, :, :, -1, 0] * found[:, :, :, 1, 0] / found[:, :, :, 0, 0]
    expected = next_step[..., None] * torch.exp(-2j * math.pi * delay[:, None, None, None] * places)
    torch.testing.assert_close(target[single][:, :, :, 0], expected, rtol=0, atol=0.02)


def test_no_change_without_probability_and_noise_mixes_as_power():
    torch.manual_seed(0)
    window = noise(16, 1, 8, 6, 12), noise(16, 1, 8, 2, 12), torch.rand(16)
    for now, then in zip(augment_windows(*window, (1, 8, 1), 0.0, 0.0), window, strict=True):
        torch.testing.assert_close(now, then)
    silent = torch.zeros_like(window[0]), torch.zeros_like(window[1]), window[2]
    assert torch.equal(augment_windows(*silent, (1, 8, 1), 0.0, 0.9)[1], silent[1])
    alone = tuple(x[:1] for x in window)
    assert augment_windows(*alone, (1, 8, 1), 0.0, 0.9)[2] == alone[2], "there is no other window"
    assert augment_windows(*window[:2], None, (1, 8, 1), 0.0, 0.9)[2] is None


def test_mixtures_keep_power_and_state_their_noise():
    torch.manual_seed(1)
    level = torch.logspace(-2, 2, 512)
    pure = 0.001 * noise(512, 1, 8, 6, 12)
    history, _, variance = augment_windows(
        pure * level.view(-1, 1, 1, 1, 1), pure[:, :, :, :2], 1e-6 * level**2, (1, 8, 1), 0.0, 0.9
    )
    ratio = history.abs().square().mean((1, 2, 3, 4)) / variance
    assert ratio.mean() == pytest.approx(1.0, abs=0.02), "all of it is noise"
    assert (variance / (1e-6 * level**2)).min() > 0.5, "no window drowns in a stronger one"


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


def test_a_still_channel_is_predicted_before_any_training():
    """Weak taps included: the network's start is a Wiener filter already."""
    torch.manual_seed(4)
    paths = torch.exp(-2j * math.pi * torch.arange(96) / 96 * torch.tensor([0.3, 7.0, 18.6])[:, None])
    still = (noise(2, 1, 32, 3) @ paths.to(torch.complex64))[:, :, :, None].expand(-1, -1, -1, 20, -1)
    predictor, errors = small(strong_taps=4), []
    with torch.no_grad():
        for weak in (1.0, 0.0):
            predictor.rest.fill_(weak)
            error = predictor(still[..., :16, :], torch.full((2,), 1e-3)) - still[..., 16:, :]
            errors.append(error.abs().square().mean() / still.abs().square().mean())
    assert errors[0] < 0.1
    assert errors[0] < 0.6 * errors[1], "weak taps are predicted too"


@pytest.mark.parametrize("kind", ["pretrained", "random", "none"])
def test_a_language_model_reads_along_the_taps(kind, tiny_llama):
    name = None if kind == "none" else str(tiny_llama)
    predictor = small(backbone=name, backbone_layers=2, pretrained=kind == "pretrained", duplex="both")
    trunk = predictor.blocks[1]
    trained = {n for n, p in trunk.backbone.named_parameters() if p.requires_grad}
    assert trained
    assert kind == "none" or all("norm" in n for n in trained)
    history, target = noise(2, 1, 32, 16, 96), noise(2, 1, 32, 4, 192)
    before = predictor.training_loss(history, target, torch.full((2,), 0.1))
    before.backward()
    assert all(p.grad is not None for p in trunk.parameters() if p.requires_grad)
    with torch.no_grad():
        trunk.write.weight.zero_()
        trunk.write.bias.fill_(1.0)
    assert predictor.training_loss(history, target, torch.full((2,), 0.1)) != before


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


def test_training_after_inference_of_a_new_shape():
    """Tables that are made in inference mode and kept would be of no use to a backward pass."""
    predictor, history, target = small(tx_shape=(1, 3, 2)), noise(1, 1, 6, 7, 41), noise(1, 1, 6, 4, 41)
    with torch.inference_mode():
        predictor(history)
    predictor.training_loss(history, target, torch.full((1,), 0.1)).backward()


def test_what_does_not_fit_is_refused():
    with pytest.raises(UsageError, match="tx_shape"):
        small()(noise(1, 1, 8, 16, 96))
    with pytest.raises(UsageError, match="at least 2"):
        small()(noise(1, 1, 32, 1, 96))
    with pytest.raises(UsageError, match="probability below 1"):
        small(augmentation=1.0)


def test_lost_snapshots_are_filled_and_others_left_alone():
    torch.manual_seed(6)
    doppler = 0.3 * (torch.rand(2, 1, 4, 4, NUM_TAPS, 1) - 0.5)
    taps = torch.exp(2j * math.pi * doppler * torch.arange(16)) + 0.03 * noise(2, 1, 4, 4, NUM_TAPS, 16)
    noise_variance = torch.full((2, 16), 1e-3)
    holed, noise_variance[0, [4, 11]] = taps.clone(), 1e3
    holed[0, ..., [4, 11]] = 0
    filled = fill_lost(holed, noise_variance)
    assert torch.equal(filled[1], taps[1])
    kept = [i for i in range(16) if i not in (4, 11)]
    assert torch.equal(filled[0][..., kept], taps[0][..., kept])
    error = (filled[0] - taps[0])[..., [4, 11]].abs().square().mean()
    assert error < 0.02, "the power is 1"


def test_lost_snapshots_are_found_where_most_are_lost():
    torch.manual_seed(3)
    taps = 0.1 * noise(2, 2, 4, 4, NUM_TAPS, 16)
    taps[..., :30, :] += 1.0
    taps[0, ..., :9] = 0
    found = snapshot_noise(taps)
    assert (found >= 1e3).sum(1).tolist() == [9, 0]
    for level in noise_level(found):
        assert level == pytest.approx(0.01, rel=0.35), "that of snapshots that arrived, in taps without signal"


def test_only_snapshots_lost_at_the_end_leave_a_gap_to_bridge():
    noise_variance = torch.full((4, 16), 1e-3)
    for window, lost in enumerate([[0, 8], [15], [3, 14, 15], [11, 12, 13, 14, 15]]):
        noise_variance[window, lost] = 1e3
    torch.testing.assert_close(unreached(noise_variance), torch.tensor([0.0, 1e-3, 1e-2, 1e-1]))


def test_without_the_last_snapshot_the_shipped_weights_err_by_less_than_the_channels_power():
    """Fast users under CDL-A: where nothing is done about the gap errors are twice the power."""
    predictor = LearnedWiener(tx_shape=(2, 4, 4)).eval()
    load_weights(predictor, WEIGHTS)
    grid = subcarrier_frequencies(CSI4CAST.fft_size, CSI4CAST.subcarrier_spacing)
    channels = cell_channels(CSI4CAST, Cell("A", 30e-9, 30.0)).draw(12, 4242, 20, CSI4CAST.interval)
    window = channels.normalized(grid).cfr(grid[: CSI4CAST.num_subcarriers])
    history, target = window[:, :, :, :16].clone(), window[:, :, :, 16:]
    history[:, :, :, 15] = 0
    with torch.no_grad():
        error = (predictor(history) - target).abs().square().mean((1, 2, 4))
    assert (error / target.abs().square().mean((1, 2, 4))).mean() < 0.6


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


def test_every_tap_may_be_asked_for_and_silent_windows_count_nothing():
    predictor = small(duplex="both", strong_taps=NUM_TAPS)
    history, target = noise(2, 1, 32, 16, 96), noise(2, 1, 32, 4, 192)
    history[1], target[1] = 0, 0
    loss = predictor.training_loss(history, target, torch.full((2,), 0.1))
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in predictor.parameters())


def test_heads_of_a_band_that_is_not_predicted_are_not_trained():
    predictor = small(duplex="tdd")
    predictor.training_loss(noise(2, 1, 32, 16, 96), noise(2, 1, 32, 4, 96), torch.full((2,), 0.1)).backward()
    assert all((p.grad is not None) == p.requires_grad for p in predictor.parameters())
    assert predictor.state_dict().keys() == small(duplex="both").state_dict().keys()


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
    assert found["ours", "tdd"] < 0.06, "half the best published figure"
    assert found["ours", "fdd"] < 0.13, "half the best published figure"
    assert found["ours", "tdd"] < 0.1 * found["no prediction", "tdd"]
