"""The Kalman filter, ESPRIT and the matrix pencil, on channels whose future is known."""

import math

import pytest
import torch
import yaml
from exponentials import exponentials, nmse_db, noisy

from chanlab.cli.main import main
from chanlab.csi import AR, ESPRIT, MatrixPencil, NoPrediction, VectorKalman, is_trainable
from chanlab.csi.linear_prediction import window_gram
from chanlab.csi.predictor import Predictor
from chanlab.errors import UsageError

T, H = 16, 4
NONE = torch.zeros(4)
ALL = [
    VectorKalman(H),
    VectorKalman(H, fit="yule_walker"),
    ESPRIT(H),
    ESPRIT(H, share="bin"),
    ESPRIT(H, order="mdl"),
    ESPRIT(H, unit_modulus=True),
    MatrixPencil(H),
    MatrixPencil(H, share="bin"),
    MatrixPencil(H, order="mdl"),
]


def split(channels):
    return channels[:, :, :, :T], channels[:, :, :, T:]


@pytest.mark.parametrize(
    "predictor",
    [
        VectorKalman(H),
        VectorKalman(H, order=3),
        ESPRIT(H),
        ESPRIT(H, window=4),
        ESPRIT(H, order=3),
        ESPRIT(H, order="mdl"),
        ESPRIT(H, share="bin"),
        ESPRIT(H, share="bin", order="mdl"),
        ESPRIT(H, unit_modulus=True),
        MatrixPencil(H),
        MatrixPencil(H, pencil=3),
        MatrixPencil(H, order=3),
        MatrixPencil(H, order="mdl"),
        MatrixPencil(H, share="bin"),
    ],
)
def test_few_exponentials_are_continued_exactly(predictor):
    history, future = split(exponentials(num_paths=3, max_doppler=0.45))
    prediction = predictor(history, NONE)
    assert prediction.dtype == torch.complex64
    assert nmse_db(prediction, future) < -80


def test_yule_walker_knows_a_single_exponential():
    """Its autocovariances of several are off by their cross terms over a short window."""
    history, future = split(exponentials(num_paths=1, max_doppler=0.45))
    assert nmse_db(VectorKalman(H, order=1, fit="yule_walker")(history, NONE), future) < -80


@pytest.mark.parametrize("method", [ESPRIT, MatrixPencil])
def test_fading_is_continued_and_an_option_forbids_it(method):
    steps = torch.arange(T + H)
    fading = (0.95 * torch.exp(torch.tensor(0.7j))) ** steps
    history, future = split(fading.to(torch.complex64).view(1, 1, 1, -1, 1))
    assert nmse_db(method(H, order=1, forward_backward=False)(history), future) < -80
    assert nmse_db(method(H, order=1, forward_backward=False, unit_modulus=True)(history), future) > -20


def test_poles_are_those_of_the_pencil_of_the_paper():
    """Y1⁺ Y2 from the singular value decomposition of the Hankel matrices themselves, noise included."""
    generator = torch.Generator().manual_seed(3)
    series = torch.randn(T, dtype=torch.complex128, generator=generator)
    pencil, order = 6, 3
    hankel = series.unfold(0, pencil + 1, 1)
    left, singular, right = torch.linalg.svd(hankel[:, :-1], full_matrices=False)
    inverse = (right[:order].mH / singular[:order]) @ left[:, :order].mH
    expected = torch.linalg.eigvals(inverse @ hankel[:, 1:])
    expected = expected[expected.abs().argsort()[-order:]]  # the others are zero
    method = MatrixPencil(H, pencil=pencil, order=order)
    gram = window_gram(series[None, None], pencil)
    values, vectors = method.subspace(gram)
    found = method.poles(gram, values[:, -order:], vectors[..., -order:])[0]
    assert torch.allclose(found[found.angle().argsort()], expected[expected.angle().argsort()])


def test_both_find_a_doppler_in_noise_as_well_as_can_be():
    """Within 2 dB of the Cramér-Rao bound of a single exponential (Rife and Boorstyn, 1974), from many windows."""
    doppler, snr = 0.17, 100.0
    steps = torch.arange(T, dtype=torch.float64)
    wave = torch.exp(2j * math.pi * doppler * steps)
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(2000, 1, T, dtype=torch.complex128, generator=generator) / math.sqrt(snr)
    gram = window_gram(wave + noise, 10, forward_backward=True)
    bound = 6 / (snr * T * (T**2 - 1)) / (2 * math.pi) ** 2
    for method in (ESPRIT(H), MatrixPencil(H)):
        values, vectors = method.subspace(gram)
        poles = method.poles(gram, values[:, -1:], vectors[..., -1:])
        error = (poles.angle() / (2 * math.pi) - doppler).square().mean()
        assert bound < error < 10**0.2 * bound


class Counting(ESPRIT):
    """Remembers how many exponentials it found."""

    def _orders(self, *arguments):
        self.found = super()._orders(*arguments)
        return self.found


@pytest.mark.parametrize("order", ["mdl", "noise"])
@pytest.mark.parametrize("paths", [1, 2, 4])
def test_the_number_of_exponentials_is_found(order, paths):
    clean = exponentials(batch=1, num_tx=16, num_subcarriers=1, num_paths=paths, max_doppler=0.45, seed=paths)
    esprit = Counting(H, order=order)
    esprit(*noisy(split(clean)[0], 25))
    assert esprit.found.tolist() == [paths]


def test_more_dopplers_than_one_model_holds_need_bins_of_their_own():
    """Each alone in its angle-delay bin: eight beams of a delay together have too many for windows of 4."""
    steps = torch.arange(T + H)
    doppler = torch.linspace(-0.4, 0.4, 32).reshape(8, 4)
    bins = torch.exp(2j * math.pi * doppler[:, None, :] * steps[None, :, None]).to(torch.complex64)[None, None]
    channels = torch.fft.fft(torch.fft.ifft(bins, dim=2, norm="ortho"), dim=4, norm="ortho")
    history, future = split(channels)
    assert nmse_db(ESPRIT(H, window=4, share="bin")(history, torch.zeros(1)), future) < -80
    assert nmse_db(VectorKalman(H, order=1)(history, torch.zeros(1)), future) < -80
    assert nmse_db(ESPRIT(H, window=4)(history, torch.zeros(1)), future) > -10


@pytest.mark.parametrize("snr_db", [5, 15, 25])
@pytest.mark.parametrize(
    "predictor", [VectorKalman(H), ESPRIT(H), ESPRIT(H, order="mdl"), ESPRIT(H, share="bin"), MatrixPencil(H)]
)
def test_noise_leaves_them_better_than_no_prediction(predictor, snr_db):
    channels = exponentials(batch=16, num_tx=16, num_subcarriers=32, num_paths=6, max_doppler=0.1)
    clean, future = split(channels)
    history, variance = noisy(clean, snr_db)
    nothing = nmse_db(NoPrediction(H)(history), future)
    assert nmse_db(predictor(history, variance), future) < nothing - 8


def test_the_filter_smooths_what_linear_prediction_takes_as_it_is():
    """At low SNR the last values are noisy: the state gathers the whole window."""
    channels = exponentials(batch=16, num_tx=16, num_subcarriers=32, num_paths=2, max_doppler=0.4)
    clean, future = split(channels)
    history, variance = noisy(clean, 0)
    assert nmse_db(VectorKalman(H)(history, variance), future) < nmse_db(AR(H)(history, variance), future) - 3


@pytest.mark.parametrize("predictor", [VectorKalman(H), ESPRIT(H), ESPRIT(H, share="bin"), MatrixPencil(H)])
def test_noise_alone_predicts_next_to_nothing(predictor):
    noise = torch.randn(4, 1, 8, T, 16, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    assert predictor(noise, torch.ones(4)).abs().square().mean() < 0.1


@pytest.mark.parametrize("predictor", ALL)
def test_nothing_to_train_each_sample_alone_and_to_scale(predictor):
    assert not is_trainable(predictor)
    assert isinstance(predictor, Predictor)
    clean, _ = split(exponentials(num_paths=4, num_rx=2, num_tx=4))
    history, variance = noisy(clean, 15)
    whole = predictor(history, variance)
    assert whole.shape == (4, 2, 4, H, 8)
    alone = predictor(2j * history[1:2], 4 * variance[1:2])
    assert torch.allclose(alone, 2j * whole[1:2], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("make", [VectorKalman, ESPRIT, MatrixPencil])
def test_a_planar_array_is_known(make):
    """Its beams are plane waves: of a wave along both axes a single bin holds all."""
    columns, rows, steps = torch.arange(4)[:, None], torch.arange(2), torch.arange(T + H)
    element = torch.exp(2j * math.pi * (columns * 0.25 + rows * 0.5)).flatten()
    ports = torch.cat([element, element])[None, None, :, None, None]
    channels = (ports * torch.exp(0.3j * steps)[:, None]).to(torch.complex64)
    history, future = split(channels)
    assert nmse_db(make(H, tx_shape=[2, 4, 2])(history, torch.zeros(1)), future) < -80
    with pytest.raises(UsageError, match="tx_shape"):
        make(H, tx_shape=[2, 4, 4])(history, torch.zeros(1))


def test_a_channel_without_power_stays_so():
    for predictor in ALL:
        assert not predictor(torch.zeros(1, 1, 2, T, 4, dtype=torch.complex64), torch.ones(1)).any()


@pytest.mark.parametrize("share", ["tap", "bin"])
@pytest.mark.parametrize("method", [ESPRIT, MatrixPencil])
def test_a_number_of_exponentials_above_those_there_are(method, share):
    constant = torch.ones(1, 1, 2, T, 4, dtype=torch.complex64)
    predictor = method(H, order=3, share=share)
    for noise in (None, torch.zeros(1)):
        assert torch.equal(predictor(0 * constant, noise), torch.zeros_like(constant[:, :, :, :H]))
        torch.testing.assert_close(predictor(constant, noise), constant[:, :, :, :H])


def test_mistakes_are_named():
    history, _ = split(exponentials())
    for make in (
        lambda: VectorKalman(0),
        lambda: VectorKalman(fit="burg"),
        lambda: VectorKalman(tx_shape=[8, 4]),
        lambda: ESPRIT(window=1),
        lambda: ESPRIT(order="aic"),
        lambda: ESPRIT(share="all"),
        lambda: ESPRIT(tx_shape=[32]),
        lambda: MatrixPencil(pencil=0),
    ):
        with pytest.raises(UsageError):
            make()
    for predictor in (VectorKalman(H), ESPRIT(H), MatrixPencil(H)):
        with pytest.raises(UsageError, match="noise_variance"):
            predictor(history)
    with pytest.raises(UsageError, match="at least 20"):
        VectorKalman(H, order=10)(history, NONE)
    with pytest.raises(UsageError, match="at least 17"):
        ESPRIT(H, window=17)(history, NONE)
    with pytest.raises(UsageError, match="at least 17"):
        MatrixPencil(H, pencil=16)(history, NONE)


@pytest.mark.parametrize("name", ["esprit", "kalman", "matrix_pencil", "doppler_codebook"])
def test_recipes_on_the_protocol_parse(name, capsys):
    assert main(["fit", "--config", f"csi4cast_{name}", "--print_config"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["data"]["init_args"]["protocol"] == "csi4cast"
    assert shown["trainer"]["default_root_dir"] == f"out/csi/csi4cast_{name}"
