"""What every predictor owes its user, the learned ones above all."""

import pytest
import torch
from exponentials import exponentials, noisy
from torch import nn

from chanlab.csi import AR, GRU, PAD, NoPrediction, Transformer, is_trainable
from chanlab.csi.predictor import antenna_series, from_antenna_series, normalise, rms
from chanlab.errors import UsageError

T, H, K = 16, 4, 8


def awake(predictor):
    """Heads start at zero; give them something to say."""
    torch.manual_seed(0)
    for parameter in predictor.parameters():
        nn.init.normal_(parameter, std=0.1)
    return predictor.eval()


PREDICTORS = {
    "no prediction": lambda: NoPrediction(H),
    "ar": lambda: AR(H),
    "pad": lambda: PAD(H),
    "gru": lambda: awake(GRU(K, H, hidden=16)),
    "transformer": lambda: awake(Transformer(K, T, H, width=16, layers=2, heads=2)),
}
LEARNED = ("gru", "transformer")


@pytest.fixture
def windows():
    return noisy(exponentials(batch=5, num_rx=2, num_steps=T, num_subcarriers=K), 15)


@pytest.mark.parametrize("name", PREDICTORS)
def test_a_prediction_does_not_depend_on_its_batch_companions(name, windows):
    history, variance = windows
    predictor = PREDICTORS[name]()
    together = predictor(history, variance)
    assert together.shape == (5, 2, 4, H, K)
    louder = history * torch.tensor([1.0, 1e3, 1e-3, 7.0, 0.1])[:, None, None, None, None]
    mixed = predictor(torch.cat([history[:1], louder[1:]]), torch.cat([variance[:1], torch.rand(4)]))
    alone = predictor(history[:1], variance[:1])
    assert torch.allclose(alone, together[:1], atol=1e-5)
    assert torch.allclose(alone, mixed[:1], atol=1e-5)


@pytest.mark.parametrize("name", PREDICTORS)
@pytest.mark.parametrize("scale", [1e-6, 300.0])
def test_a_prediction_scales_with_the_channel(name, scale, windows):
    """Path loss of 120 dB changes nothing but the scale."""
    history, variance = windows
    predictor = PREDICTORS[name]()
    scaled = predictor(history * scale, variance * scale**2) / scale
    assert torch.allclose(scaled, predictor(history, variance), atol=1e-4)


@pytest.mark.parametrize("name", [n for n in PREDICTORS if n not in LEARNED])
def test_a_linear_prediction_turns_with_the_common_phase(name, windows):
    history, variance = windows
    predictor, turn = PREDICTORS[name](), torch.exp(torch.tensor(0.7j))
    assert torch.allclose(predictor(history * turn, variance), predictor(history, variance) * turn, atol=1e-4)


@pytest.mark.parametrize("name", LEARNED)
def test_gradients_reach_every_parameter(name, windows):
    history, variance = windows
    predictor = PREDICTORS[name]().train()
    assert is_trainable(predictor)
    predictor(history, variance).abs().square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in predictor.parameters())


@pytest.mark.parametrize("predictor", [GRU(K, H, hidden=16), Transformer(K, T, H, width=16, layers=1, heads=2)])
def test_training_starts_from_no_prediction(predictor, windows):
    history, _ = windows
    assert torch.allclose(predictor(history), NoPrediction(H)(history), atol=1e-6)


def test_a_network_learns_to_turn_a_phase():
    """One Doppler for all: the future is a rotation of the last snapshot, which no prediction misses."""
    torch.manual_seed(0)
    phase = torch.exp(2j * torch.pi * 0.1 * torch.arange(T + H))
    start = torch.randn(64, 1, 2, 1, K, dtype=torch.complex64)
    channels = start * phase[:, None].to(torch.complex64)
    predictor = GRU(K, H, hidden=64, layers=1)
    optimizer = torch.optim.Adam(predictor.parameters(), 1e-2)
    losses = []
    for _ in range(40):
        error = predictor(channels[:, :, :, :T]) - channels[:, :, :, T:]
        loss = error.abs().square().mean() / channels.abs().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_an_empty_channel_stays_empty():
    silent = torch.zeros(2, 1, 4, T, K, dtype=torch.complex64)
    for make in PREDICTORS.values():
        prediction = make()(silent, torch.zeros(2))
        assert torch.isfinite(prediction.abs()).all()


def test_normalisation_is_per_sample():
    x = torch.randn(3, 1, 2, 4, 5, dtype=torch.complex64) * torch.tensor([1.0, 10.0, 0.0])[:, None, None, None, None]
    scaled, scale = normalise(x)
    assert torch.allclose(rms(scaled).flatten(), torch.ones(3))
    assert scale[2] == 1.0
    assert torch.allclose(scaled * scale, x)


def test_antenna_series_come_back_as_they_went():
    x = torch.randn(3, 2, 4, 5, 6, dtype=torch.complex64)
    series = antenna_series(x)
    assert series.shape == (24, 5, 12)
    assert torch.equal(series[1, 2, :2], torch.view_as_real(x[0, 0, 1, 2, 0]))  # real and imaginary part interleaved
    assert torch.equal(from_antenna_series(series, 3, 2, 4), x)


def test_a_wrong_shape_is_named():
    history = torch.zeros(1, 1, 2, T, K + 1, dtype=torch.complex64)
    with pytest.raises(UsageError, match="8 subcarriers, not 9"):
        GRU(K)(history)
    with pytest.raises(UsageError, match="16 snapshots of 8 subcarriers"):
        Transformer(K)(history)
    with pytest.raises(UsageError, match="multiple"):
        Transformer(K, width=10, heads=4)
