"""The neural baselines of the published comparisons: their definitions, and what every learned predictor owes."""

import re

import pytest
import torch
import yaml
from exponentials import exponentials, nmse_db, noisy

import chanlab.csi
from chanlab.cli.main import main
from chanlab.csi import CNN, GRU, RNN, SOFTS, CSIPredictionModule, NoPrediction, Transformer, WiFo
from chanlab.csi.module import nmse_loss
from chanlab.csi.softs import STAR
from chanlab.csi.wifo import encode_places, from_patches, to_patches
from chanlab.data import find_recipe
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
    "wifo": lambda: WiFo(H, width=32, layers=2, decoder_layers=1, heads=4, masks=["time"]),
    "wifo, other band": lambda: WiFo(H, 32, 2, 1, heads=4, frequency_offset=K, masks=["time"]),
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
    other_band = "residual" in vars(predictor) or "no norm" in name or "other band" in name
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


def test_parameters_are_as_many_as_the_docstrings_say():
    assert round(size(RNN(300)) / 1e6, 1) == 11.9
    assert round(size(CNN()) / 1e6, 1) == 0.2
    assert round(size(SOFTS(300)) / 1e6, 1) == 10.5


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


# Recipes on the published protocol

RECIPES = ("rnn", "lstm", "gru", "cnn", "softs", "wifo", "transformer")


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_on_the_protocol_make_their_predictors(name, capsys):
    """In FDD with the arguments that the recipe's first lines name; as large as they say, where they do."""
    text = find_recipe("models", f"csi4cast_{name}").read_text()
    (fdd,) = re.findall(r"^# FDD: (.*)$", text, re.MULTILINE)
    for arguments in ([], fdd.split()):
        assert main(["fit", "--config", f"csi4cast_{name}", *arguments, "--print_config"]) == 0
        shown = yaml.safe_load(capsys.readouterr().out)
        folder = f"out/csi/csi4cast_{name}" + ("_fdd" if arguments else "")
        assert shown["trainer"]["default_root_dir"] == folder
        assert shown["data"]["init_args"]["duplex"] == ("fdd" if arguments else "tdd")
        assert shown["data"]["init_args"]["protocol"] == "csi4cast"
        made = shown["model"]["init_args"]["predictor"]
        predictor = getattr(chanlab.csi, made["class_path"].split(".")[-1])(**made["init_args"])
        assert predictor.horizons == 4
        assert getattr(predictor, "frequency_offset", 0) == (450 if arguments and name == "wifo" else 0)
        assert not getattr(predictor, "residual", False)
    (said,) = re.findall(r"\(?(\d+(?:\.\d)?) M\b", text)
    assert round(size(predictor) / 1e6, 1 if "." in said else None) == float(said)


@pytest.mark.parametrize("name", ["no_prediction", "ar", "pad"])
def test_recipes_of_predictors_without_training_read_the_protocol(name, capsys):
    assert main(["test", "--config", f"csi4cast_{name}", "--print_config"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["trainer"]["default_root_dir"] == f"out/csi/csi4cast_{name}"
    assert shown["data"]["init_args"]["protocol"] == "csi4cast"


# WiFo


def places(wifo, x):
    return torch.cat([wifo.places(x, x.shape[3], past=True), wifo.places(x, wifo.horizons, past=False)], dim=1)


@pytest.mark.parametrize(("steps", "antennas", "subcarriers"), [(16, 4, 8), (4, 3, 5), (6, 1, 3)])
def test_patches_cut_a_channel_and_put_it_together_again(steps, antennas, subcarriers):
    x = torch.randn(2, 2, antennas, steps, subcarriers, dtype=torch.complex64)
    patches = to_patches(x, (4, 4, 4), past=False)
    assert patches.shape == (2, -(-steps // 4) * -(-2 * antennas // 4) * -(-subcarriers // 4), 128)
    torch.testing.assert_close(patches.square().sum((1, 2)), x.abs().square().sum((1, 2, 3, 4)))
    assert torch.equal(from_patches(patches, (4, 4, 4), x.shape), x)


def test_a_patch_is_four_snapshots_of_four_antennas_on_four_subcarriers():
    x = torch.zeros(1, 1, 8, 16, 12, dtype=torch.complex64)
    x[0, 0, 5, 9, 2] = 3 - 4j
    patches = to_patches(x, (4, 4, 4), past=True)
    where = WiFo(H, width=24, heads=4).places(x, 16, past=True)[0]
    (row,) = patches[0].any(-1).nonzero()
    assert where[row].tolist() == [[2 - 4, 1, 0]], "time counts from the first step to come"
    assert patches[0, row].unflatten(-1, (4, 4, 4, 2))[0, 1, 1, 2].tolist() == [3, -4]


def test_zeros_that_fill_a_history_up_come_before_it():
    x = torch.ones(1, 1, 4, 6, 4, dtype=torch.complex64)
    first = to_patches(x, (4, 4, 4), past=True)[0, 0].unflatten(-1, (4, 4, 4, 2))
    assert (first[:2] == 0).all()
    assert (first[2:, ..., 0] == 1).all()


@pytest.mark.parametrize(("mask", "share"), [("random", 0.85), ("time", 0.2), ("frequency", 0.5)])
def test_a_mask_hides_its_share_and_each_patch_is_either_seen_or_hidden(mask, share):
    wifo, x = WiFo(H, width=24, heads=4), torch.zeros(1, 1, 8, T, 40, dtype=torch.complex64)
    order, seen = wifo.order(places(wifo, x), 3, mask)
    assert (order.sort(1).values == torch.arange(5 * 2 * 10)).all()
    assert seen == round((1 - share) * 100)
    assert len(order) == (3 if mask == "random" else 1)
    at = places(wifo, x)[0][order[0, seen:]]
    if mask == "time":
        assert set(at[:, 0].tolist()) == {0.0}
    elif mask == "frequency":
        assert set(at[:, 2].tolist()) == {5.0, 6.0, 7.0, 8.0, 9.0}
        assert set(at[:, 0].tolist()) == {-4.0, -3.0, -2.0, -1.0, 0.0}
    else:
        assert not torch.equal(order[0], order[1])


def test_the_other_band_is_hidden_whatever_the_mask_but_the_random_one():
    wifo, x = WiFo(H, width=24, heads=4, frequency_offset=450), torch.zeros(1, 1, 4, T, 300, dtype=torch.complex64)
    where = places(wifo, x)
    assert where[0, where[0, :, 0] >= 0, 2].unique().tolist() == [112.5 + k for k in range(75)]
    for mask in ("time", "frequency"):
        order, seen = wifo.order(where, 1, mask)
        assert (where[0, order[0, :seen], 0] < 0).all()


@pytest.mark.parametrize("mask", ["random", "time", "frequency"])
def test_what_is_hidden_says_nothing(mask, monkeypatch):
    """What the network fills in is the same whatever the hidden patches hold, and depends on every one that it sees."""
    torch.manual_seed(0)
    wifo = WiFo(H, 32, 1, 1, heads=4, masks=[mask]).eval()
    x = exponentials(batch=2, num_tx=8, num_steps=T + H, num_subcarriers=16)
    history, target = x[..., :T, :], x[..., T:, :]
    order, num_seen = wifo.order(places(wifo, history), 2)
    order = order.expand(2, -1)
    monkeypatch.setattr(wifo, "order", lambda *_: (order, num_seen))
    said = []
    monkeypatch.setattr(wifo, "fill_in", lambda *a: said.append(WiFo.fill_in(wifo, *a)) or said[-1])

    def cover(future, past):
        """Noise in place of all hidden patches."""
        patches = torch.cat([to_patches(past, (4, 4, 4), True), to_patches(future, (4, 4, 4), False)], dim=1)
        for row, hidden in zip(patches, order[:, num_seen:], strict=True):
            row[hidden] = torch.randn(len(hidden), 128)
        count = to_patches(past, (4, 4, 4), True).shape[1]
        return (
            from_patches(patches[:, count:], (4, 4, 4), future.shape),
            from_patches(patches[:, :count], (4, 4, 4), past.shape),
        )

    monkeypatch.setattr("chanlab.csi.wifo.normalise", lambda x: (x, torch.ones(2, 1, 1, 1, 1)))
    noise, covered = cover(target, history)
    wifo.training_loss(history, target)
    wifo.training_loss(covered, noise)
    assert not torch.equal(noise, target)
    torch.testing.assert_close(said[0], said[1])
    seen = torch.randn(1, num_seen, 128, requires_grad=True)
    WiFo.fill_in(
        wifo, seen, places(wifo, history)[:, order[0, :num_seen]], places(wifo, history)[:, order[0, num_seen:]]
    ).square().sum().backward()
    assert (seen.grad.abs().amax(-1) > 0).all()


@pytest.mark.parametrize(("antennas", "subcarriers", "offset"), [(8, 16, 0), (3, 10, 0), (3, 10, 30)])
def test_the_loss_over_the_future_is_the_nmse_of_the_prediction(antennas, subcarriers, offset):
    """Zeros that fill patches up don't count."""
    torch.manual_seed(0)
    wifo = WiFo(3, 32, 1, 1, heads=4, masks=["time"], frequency_offset=offset)
    x = exponentials(batch=2, num_tx=antennas, num_steps=T + 3, num_subcarriers=subcarriers)
    history, target = x[..., :T, :], x[..., T:, :]
    torch.testing.assert_close(wifo.training_loss(history, target), nmse_loss(wifo(history), target))


def test_one_wifo_takes_any_size():
    wifo = WiFo(H, width=24, heads=4, layers=1, decoder_layers=1)
    for rx, tx, steps, subcarriers in ((1, 4, 16, 8), (2, 3, 7, 10), (1, 1, 24, 3)):
        history = torch.randn(2, rx, tx, steps, subcarriers, dtype=torch.complex64)
        assert wifo(history).shape == (2, rx, tx, H, subcarriers)


def test_places_are_told_by_sinusoids_of_three_axes():
    """Shifts along an axis turn its third of the encoding, and nothing else."""
    for width in (64, 128, 256, 512):
        at = torch.tensor([[0.0, 0, 0], [2, 0, 0], [0, 2, 0], [0, 0, 2.5]])
        code = encode_places(at, width)
        third = 2 * round(width / 6)
        assert code.shape == (4, width)
        for axis, part in enumerate((slice(0, third), slice(third, 2 * third), slice(2 * third, width))):
            others = [1 + other for other in range(3) if other != axis]
            assert torch.equal(code[others][:, part], code[[0, 0]][:, part])
            assert not torch.equal(code[1 + axis, part], code[0, part])


def test_wifo_has_the_published_layers():
    """Ten blocks of 8 w² weights; of the largest of its public code, with norms, biases and ends, 21.4 M parameters."""
    for width in (64, 128, 256, 512):
        weights = [p.numel() for p in WiFo(width=width).parameters() if p.ndim > 1]
        assert sum(weights) == 10 * 8 * width**2 + width**2 + 2 * 128 * width
    assert round(size(WiFo(width=512)) / 1e6, 1) == 21.4


def test_training_takes_the_predictors_own_loss():
    x = exponentials(batch=2, num_tx=4, num_steps=T + H, num_subcarriers=16)

    class Batch:
        history, target = x[..., :T, :], x[..., T:, :]
        noise_variance = torch.full((2,), 0.1)

    for mask in ("random", "frequency", "time"):
        wifo = WiFo(H, 24, 1, 1, heads=4, masks=[mask])
        module = CSIPredictionModule(wifo, phase_augmentation=False)
        torch.manual_seed(0)
        expected = wifo.training_loss(Batch.history, Batch.target, Batch.noise_variance)
        torch.manual_seed(0)
        loss = module.training_step(Batch(), 0)
        assert torch.equal(loss, expected)
        loss.backward()
        assert all(p.grad is not None and p.grad.any() for p in wifo.parameters())


def test_training_on_all_masks_learns_to_predict():
    torch.manual_seed(1)
    wifo = WiFo(H, width=48, layers=2, decoder_layers=1, heads=4)
    channels = exponentials(batch=4, num_tx=8, num_steps=T + H, num_subcarriers=16, num_paths=2, max_doppler=0.1)
    history, target = channels[..., :T, :], channels[..., T:, :]
    optimizer = torch.optim.Adam(wifo.parameters(), 5e-3)
    for _ in range(150):
        optimizer.zero_grad()
        wifo.training_loss(history, target).backward()
        optimizer.step()
    nothing = nmse_loss(NoPrediction(H)(history), target)
    assert nmse_loss(wifo.eval()(history), target) < 0.5 * min(1.0, nothing.item())


def test_mistakes_are_named():
    for make, said in {
        (lambda: RNN(8, cell="mgu")): "rnn, lstm, gru",
        (lambda: RNN(0)): "at least 1",
        (lambda: CNN(levels=0)): "at least 1",
        (lambda: SOFTS()): "need num_subcarriers",
        (lambda: SOFTS(8, series="paths")): "antennas or subcarriers",
        (lambda: WiFo(width=50)): "multiple of heads",
        (lambda: WiFo(patch=[4, 4])): "patch has three",
        (lambda: WiFo(masks=["space"])): "random, time and frequency",
    }.items():
        with pytest.raises(UsageError, match=said):
            make()
