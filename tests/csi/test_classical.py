"""No prediction, AR and PAD on channels whose future is known."""

import pytest
import torch
from exponentials import exponentials, nmse_db, noisy

from chanlab.csi import AR, PAD, NoPrediction, is_trainable
from chanlab.csi.predictor import Predictor
from chanlab.errors import UsageError

T, H = 16, 4


def split(channels):
    return channels[:, :, :, :T], channels[:, :, :, T:]


def test_no_prediction_repeats_the_last_snapshot():
    history, _ = split(exponentials())
    prediction = NoPrediction(H)(history)
    assert prediction.shape == (4, 1, 4, H, 8)
    assert torch.equal(prediction, history[:, :, :, -1:].expand_as(prediction))


@pytest.mark.parametrize("predictor", [AR(H), AR(H, order=3), AR(H, order=5, forward_backward=False), PAD(H)])
def test_few_exponentials_are_continued_exactly(predictor):
    history, future = split(exponentials(num_paths=3, max_doppler=0.45))
    prediction = predictor(history, torch.zeros(4))
    assert prediction.dtype == torch.complex64
    assert nmse_db(prediction, future) < -80


def test_too_low_an_order_is_not_exact():
    history, future = split(exponentials(num_paths=3, max_doppler=0.45))
    assert nmse_db(AR(H, order=1)(history), future) > -20


def test_pad_separates_what_ar_can_not():
    """More Dopplers than AR has coefficients, each alone in its angle-delay bin."""
    steps = torch.arange(T + H)
    doppler = torch.linspace(-0.4, 0.4, 32).reshape(4, 8)
    bins = torch.exp(2j * torch.pi * doppler[:, None, :] * steps[None, :, None]).to(torch.complex64)[None, None]
    channels = torch.fft.fft(torch.fft.ifft(bins, dim=2, norm="ortho"), dim=4, norm="ortho")
    history, future = split(channels)
    assert nmse_db(PAD(H, order=1)(history, torch.zeros(1)), future) < -80
    assert nmse_db(AR(H)(history), future) > -10


@pytest.mark.parametrize("snr_db", [5, 15, 25])
def test_noise_leaves_them_better_than_no_prediction(snr_db):
    channels = exponentials(batch=16, num_tx=16, num_subcarriers=32, num_paths=6, max_doppler=0.1)
    clean, future = split(channels)
    history, variance = noisy(clean, snr_db)
    nothing = nmse_db(NoPrediction(H)(history), future)
    assert nmse_db(AR(H)(history, variance), future) < nothing - 5
    assert nmse_db(PAD(H)(history, variance), future) < nothing - 8


def test_knowing_the_noise_keeps_pad_from_exploding():
    clean, future = split(exponentials(batch=8, num_tx=16, num_subcarriers=16, num_paths=4))
    history, variance = noisy(clean, 15)
    informed, uninformed = PAD(H), PAD(H, order=8, denoise=False, forward_backward=False, stable=False)
    assert nmse_db(informed(history, variance), future) < -10
    assert nmse_db(uninformed(history), future) > nmse_db(informed(history, variance), future) + 10


def test_pad_finds_nothing_in_noise_alone():
    noise = torch.randn(4, 1, 8, T, 16, dtype=torch.complex64)
    assert PAD(H, margin=4.0)(noise, torch.ones(4)).abs().square().mean() < 0.05


def test_pad_keeps_the_strongest_bins():
    history, _ = split(exponentials(num_paths=2, num_tx=8, num_subcarriers=16))
    prediction = PAD(H, power=0.9)(history, torch.zeros(4))
    kept = (prediction.abs().square().mean((1, 2, 3, 4)) / history.abs().square().mean((1, 2, 3, 4))).tolist()
    assert all(0.85 < fraction < 1.0 for fraction in kept)


def test_pad_transforms_a_planar_array_along_its_axes():
    """A wave over columns and rows falls into one bin when the DFT knows the array, and spreads when it doesn't."""
    columns, rows = torch.arange(4)[:, None], torch.arange(4)
    element = torch.exp(2j * torch.pi * (columns * 0.25 + rows * 0.5)).flatten()
    channel = torch.cat([element, -element])[None, None, :, None, None].to(torch.complex64).expand(1, 1, 32, T, 8)
    planar = PAD(H, tx_shape=[2, 4, 4])._transform(channel).abs()
    assert int((planar > 1e-3).sum()) == T  # one bin, the two polarizations being opposite
    linear = PAD(H)._transform(channel).abs()
    assert int((linear > 1e-3).sum()) > 4 * T
    with pytest.raises(UsageError, match="tx_shape"):
        PAD(H, tx_shape=[2, 4, 2])(channel, torch.zeros(1))


def test_compensated_coefficients_approach_the_channels_own():
    """With very many equations, removing the noise power leaves the exponential's own coefficient."""
    clean = exponentials(batch=1, num_tx=32, num_subcarriers=128, num_paths=1)
    history, variance = noisy(clean, 0)
    biased = AR(1, order=1)(history, variance) / history[:, :, :, -1:]
    own = AR(1, order=1, compensate=True)(history, variance) / history[:, :, :, -1:]
    assert biased.abs().mean() < 0.6
    assert own.abs().mean() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("predictor", [NoPrediction(H), AR(H), PAD(H)])
def test_they_have_nothing_to_train_and_fit_the_protocol(predictor):
    assert not is_trainable(predictor)
    assert isinstance(predictor, Predictor)


def test_mistakes_are_named():
    history, _ = split(exponentials())
    for make in (lambda: AR(0), lambda: AR(4, order=0), lambda: PAD(4, power=0.0)):
        with pytest.raises(UsageError):
            make()
    with pytest.raises(UsageError, match="noise_variance"):
        PAD(H)(history)
    with pytest.raises(UsageError, match="noise_variance"):
        AR(H, compensate=True)(history)
    with pytest.raises(UsageError, match="at least 17"):
        AR(H, order=16)(history)
    with pytest.raises(UsageError, match="complex"):
        AR(H)(history.real)


def test_ar_takes_the_highest_order_its_equations_carry():
    ar = AR(H)
    assert ar._highest_order(num_series=1536, num_steps=16) == 15
    assert ar._highest_order(num_series=1, num_steps=16) == 5  # 22 equations for 5 coefficients
    assert ar._highest_order(num_series=1, num_steps=2) == 1


@pytest.mark.parametrize("make", [AR, PAD])
def test_a_stable_prediction_does_not_explode(make):
    """Noise alone, fitted with as many coefficients as it allows."""
    torch.manual_seed(0)
    noise = torch.randn(64, 1, 1, T, 1, dtype=torch.complex64)
    options = {"order": 8} if make is AR else {"order": 8, "denoise": False}
    wild = make(16, forward_backward=False, stable=False, **options)(noise).abs().amax()
    tame = make(16, forward_backward=False, **options)(noise).abs().amax()
    assert tame < 100
    assert wild > 10 * tame
