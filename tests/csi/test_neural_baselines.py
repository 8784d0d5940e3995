"""The neural baselines of the published comparisons: their definitions, and what every learned predictor owes."""

import pytest
import torch
from exponentials import exponentials, nmse_db, noisy

from chanlab.csi import CNN, GRU, RNN, SOFTS, NoPrediction, Transformer
from chanlab.csi.module import nmse_loss
from chanlab.csi.softs import STAR
from chanlab.errors import UsageError

T, H, K = 16, 4, 8

SMALL = {
    "rnn": lambda: RNN(K, H, "rnn", hidden=32, layers=2),
    "lstm": lambda: RNN(K, H, "lstm", hidden=32, layers=1),
    "gru": lambda: RNN(K, H, "gru", hidden=32, layers=1),
    "gru, all steps at once": lambda: GRU(K, H, hidden=32, layers=1, residual=False),
    "cnn": lambda: CNN(T, H, levels=3),
    "softs": lambda: SOFTS(K, T, H, width=64, core=16, layers=2, feed_forward=64),
    "softs, series of subcarriers": lambda: SOFTS(None, T, H, "subcarriers", 64, core=16, layers=2, feed_forward=64),
    "softs, no norm": lambda: SOFTS(K, T, H, width=64, core=16, layers=2, feed_forward=64, instance_norm=False),
    "transformer": lambda: Transformer(K, T, H, width=32, layers=2, heads=2, residual=False),
}
RATES = {"rnn": 3e-3, "cnn": 1e-2}


@pytest.fixture(params=SMALL)
def name(request):
    return request.param


@pytest.fixture
def predictor(name):
    torch.manual_seed(0)
    predictor = SMALL[name]().eval()
    for parameter in predictor.parameters():
        if not parameter.any():  # heads and biases that start at zero
            torch.nn.init.normal_(parameter, std=0.1)
    return predictor


@pytest.fixture
def history():
    return noisy(exponentials(batch=5, num_rx=2, num_steps=T, num_subcarriers=K), 15)[0]


def size(predictor):
    return sum(p.numel() for p in predictor.parameters())


# What every learned predictor owes


def test_a_prediction_has_the_shape_of_the_target_and_is_its_samples_own(predictor, history):
    together = predictor(history)
    assert together.shape == (5, 2, 4, H, K)
    assert together.dtype == torch.complex64
    louder = history * torch.tensor([1.0, 1e3, 1e-3, 7.0, 0.1])[:, None, None, None, None]
    torch.testing.assert_close(predictor(history[:1]), together[:1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(predictor(louder)[:1], together[:1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("scale", [1e-6, 300.0])
def test_a_prediction_scales_with_the_channel(predictor, history, scale):
    torch.testing.assert_close(predictor(history * scale) / scale, predictor(history), atol=1e-4, rtol=1e-4)


def test_a_prediction_depends_on_every_snapshot(predictor, history):
    x = history.clone().requires_grad_()
    predictor(x).abs().square().sum().backward()
    assert (x.grad.abs().amax((0, 1, 2, 4)) > 0).all()


def test_predictions_are_single_precision_under_autocast(predictor, history):
    with torch.autocast("cpu", torch.bfloat16):
        out = predictor(history)
    assert out.dtype == torch.complex64
    exact = predictor(history).detach()
    assert torch.equal(out, exact) or nmse_db(out, exact) < -20


def test_it_learns_a_few_channels_by_heart(name):
    """Three quarters of the error of no prediction are gone in seconds, on FDD targets as on TDD ones."""
    torch.manual_seed(1)
    predictor = SMALL[name]().train()
    channels = exponentials(batch=4, num_tx=2, num_steps=T + H, num_subcarriers=2 * K, num_paths=2, max_doppler=0.1)
    history = channels[..., :T, :K]
    other_band = "residual" in vars(predictor) or "no norm" in name
    target = channels[..., T:, K:] if other_band else channels[..., T:, :K]
    optimizer = torch.optim.Adam(predictor.parameters(), RATES.get(name, 5e-3))
    for _ in range(200):
        optimizer.zero_grad()
        loss = nmse_loss(predictor(history), target)
        loss.backward()
        optimizer.step()
    nothing = nmse_loss(NoPrediction(H)(history), target)
    assert nmse_loss(predictor.eval()(history), target) < 0.25 * min(1.0, nothing.item())


def test_sizes_that_do_not_fit_are_named(predictor, history):
    if isinstance(predictor, CNN):
        with pytest.raises(UsageError, match="CNN was made for 16 snapshots, not 15 snapshots of 8 subcarriers"):
            predictor(history[..., 1:, :])
    elif isinstance(predictor, RNN):
        with pytest.raises(UsageError, match="RNN was made for 8 subcarriers, not 16 snapshots of 7"):
            predictor(history[..., 1:])
    elif isinstance(predictor, SOFTS) and predictor.series == "antennas":
        with pytest.raises(UsageError, match="SOFTS was made for 16 snapshots of 8 subcarriers"):
            predictor(history[..., 1:])


# Published definitions


def test_sizes_are_those_of_the_published_configurations():
    assert round(size(RNN(300)) / 1e6, 1) == 11.9
    assert round(size(CNN()) / 1e6, 1) == 0.2


@pytest.mark.parametrize("cell", ["rnn", "lstm", "gru"])
def test_a_recurrent_network_goes_on_from_its_own_predictions(cell, history):
    """Two steps are one step, then another from a history that holds the first as a snapshot."""
    torch.manual_seed(0)
    predictor = RNN(K, 2, cell, hidden=16, layers=2).eval()
    unit = history / history.abs().square().mean((1, 2, 3, 4), keepdim=True).sqrt()
    first, second = predictor(unit).split(1, dim=3)
    seen = torch.view_as_real(torch.cat([unit, first], dim=3).flatten(0, 2)).flatten(-2)
    states, _ = predictor.recurrent(predictor.encoder(seen))
    for step, expected in ((-2, first), (-1, second)):
        said = torch.view_as_complex(predictor.decoder(states[:, step]).unflatten(-1, (K, 2)))
        torch.testing.assert_close(said.view_as(expected), expected, atol=1e-5, rtol=1e-4)


def test_a_convolutional_network_takes_any_antennas_and_subcarriers():
    predictor = CNN(T, H, levels=2)
    for num_tx, num_subcarriers in ((2, 5), (3, 40)):
        history = exponentials(batch=2, num_tx=num_tx, num_steps=T, num_subcarriers=num_subcarriers)
        assert predictor(history).shape == (2, 1, num_tx, H, num_subcarriers)


@pytest.mark.parametrize("series", ["antennas", "subcarriers"])
def test_softs_treats_all_series_alike(series, history):
    torch.manual_seed(0)
    predictor = SOFTS(K, T, H, series, width=16, core=8, layers=2, feed_forward=16).eval()
    order = torch.randperm(K if series == "subcarriers" else 4)
    axis = 4 if series == "subcarriers" else 2
    shuffled = predictor(history.index_select(axis, order))
    torch.testing.assert_close(shuffled, predictor(history).index_select(axis, order), atol=1e-5, rtol=1e-4)


def test_softs_series_hear_of_each_other_through_the_core_alone():
    torch.manual_seed(0)
    star, series = STAR(16, 4).eval(), torch.randn(2, 6, 16)
    changed = series.clone()
    changed[:, 0] += 1
    assert (star(changed)[:, 1:] - star(series)[:, 1:]).abs().amax() > 1e-4
    core = star.core(series)
    assert core.shape == (2, 1, 4)
    torch.testing.assert_close(star.redistribute(changed, core)[:, 1:], star.redistribute(series, core)[:, 1:])


def test_stochastic_pooling_draws_a_series_in_training_and_averages_in_evaluation():
    """Drawn with the softmax's probabilities: the mean over many draws is what evaluation takes (Han et al., 3.2)."""
    torch.manual_seed(0)
    star = STAR(8, 3)
    series = torch.randn(1, 5, 8)
    with torch.no_grad():
        said = 3 * star.aggregate(series)
        star.aggregate[2].weight.mul_(3), star.aggregate[2].bias.mul_(3)
        torch.testing.assert_close(star.aggregate(series), said)
        drawn = star.train().core(series.expand(20_000, -1, -1))
        expected = star.eval().core(series)
    assert (drawn - said).abs().amin(1).max() < 1e-5, "features of some series each"
    torch.testing.assert_close(drawn.mean(0), expected[0], atol=0.03, rtol=0.0)


def test_the_cost_of_star_is_linear_in_the_number_of_series():
    from torch.utils.flop_counter import FlopCounterMode

    star, cost = STAR(16, 8).eval(), []
    for number in (10, 20, 40):
        with FlopCounterMode(display=False) as counter:
            star(torch.randn(1, number, 16))
        cost.append(counter.get_total_flops())
    assert cost == [cost[0], 2 * cost[0], 4 * cost[0]]


def test_mistakes_are_named():
    for make, said in {
        (lambda: RNN(8, cell="mgu")): "rnn, lstm, gru",
        (lambda: RNN(0)): "at least 1",
        (lambda: CNN(levels=0)): "at least 1",
        (lambda: SOFTS()): "need num_subcarriers",
        (lambda: SOFTS(8, series="paths")): "antennas or subcarriers",
    }.items():
        with pytest.raises(UsageError, match=said):
            make()
