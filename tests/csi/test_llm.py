"""The LLM predictor: what is frozen, what it must be equivariant to, and that the language model has a say."""

import pytest
import torch
from exponentials import exponentials, nmse_db, noisy
from torch import nn

from chanlab.csi import AR, LLM, NoPrediction
from chanlab.csi.angle_delay import from_angle_delay, neighbours, to_angle_delay
from chanlab.csi.module import nmse_loss
from chanlab.csi.pooled_prediction import Statistics
from chanlab.errors import UsageError

T, H, K = 16, 4, 12
SHAPE = [2, 2, 2]


@pytest.fixture(scope="module")
def make(tiny_llama):
    def build(awake: bool = True, **options) -> LLM:
        torch.manual_seed(0)
        settings = {"tx_shape": SHAPE, "layers": 2, "taps": 4, "bins": 20, "features": 16} | options
        predictor = LLM(backbone=str(tiny_llama), **settings)
        if awake:  # the controls begin as constants; give them something to say
            nn.init.normal_(predictor.controls.weight, std=0.3)
        return predictor.eval()

    return build


@pytest.fixture
def channels():
    return exponentials(batch=5, num_tx=8, num_rx=2, num_steps=T + H, num_subcarriers=K)


def test_angle_delay_domain_is_unitary_and_compact(channels):
    bins = to_angle_delay(channels, (2, 2, 2))
    assert bins.shape == (5, 2, 2, 2, 2, K, T + H)
    assert torch.allclose(bins.abs().square().sum(), channels.abs().square().sum(), rtol=1e-5)
    assert torch.allclose(from_angle_delay(bins), channels, atol=1e-5)
    one_tap = torch.exp(-2j * torch.pi * 3 * torch.arange(K) / K).expand(1, 1, 8, 1, K)
    power = to_angle_delay(one_tap, (2, 2, 2)).abs().square().flatten()
    assert power.argmax() == 3, "a delay of three taps, broadside, is bin (0, 0, 0, 3)"
    assert power.max() > 0.999 * power.sum()


def test_neighbours_of_a_bin():
    index, weight = neighbours((1, 2, 1, 4, 6))
    assert weight.tolist() == [1.0, 0.5, 0.5, 0.5, 0.5]
    assert index[0].tolist() == [24, 18, 6, 5, 1], "other polarization, rows 3 and 1, delays 5 and 1"


def test_only_norms_of_the_language_model_are_trained(make):
    predictor = make()
    trained = {name for name, p in predictor.backbone.named_parameters() if p.requires_grad}
    assert trained
    assert all("norm" in name for name in trained)
    before = {name: p.detach().clone() for name, p in predictor.named_parameters()}
    optimizer = torch.optim.SGD([p for p in predictor.parameters() if p.requires_grad], lr=1.0)
    window = exponentials(num_tx=8, num_steps=T + H, num_subcarriers=K)
    predictor(window[..., :T, :]).abs().square().sum().backward()
    optimizer.step()
    moved = {name for name, p in predictor.named_parameters() if not torch.equal(p, before[name])}
    assert {f"backbone.{name}" for name in trained} <= moved
    assert not any(name.startswith("backbone.") and "norm" not in name for name in moved)


@pytest.mark.parametrize(("tuning", "frozen", "full"), [("frozen", 0, False), ("full", None, True)])
def test_tuning(make, tuning, frozen, full):
    parameters = list(make(tuning=tuning).backbone.parameters())
    assert sum(p.requires_grad for p in parameters) == (len(parameters) if full else frozen)


def test_lora_adds_low_rank_updates_that_begin_at_zero(make, channels):
    pytest.importorskip("peft")
    history = channels[..., :T, :]
    plain, lora = make(), make(tuning="lora", lora_rank=2)
    names = [name for name, p in lora.backbone.named_parameters() if p.requires_grad]
    assert any("lora_" in name for name in names)
    assert all("lora_" in name or "norm" in name for name in names)
    lora.load_state_dict({k: v for k, v in plain.state_dict().items() if not k.startswith("backbone.")}, strict=False)
    assert torch.allclose(lora(history), plain(history), atol=1e-5)


def test_a_prediction_depends_on_its_sample_alone(make, channels):
    history, variance = noisy(channels[..., :T, :], 15)
    predictor = make()
    together = predictor(history, variance)
    assert together.shape == (5, 2, 8, H, K)
    mixed = predictor(torch.cat([history[:1], 1e3 * history[1:]]), torch.cat([variance[:1], torch.ones(4)]))
    assert torch.allclose(mixed[:1], together[:1], atol=1e-4)


def test_a_prediction_follows_scale_and_phase(make, channels):
    history, variance = noisy(channels[..., :T, :], 15)
    predictor = make()
    expected = predictor(history, variance)
    assert torch.allclose(predictor(history * 1e-5, variance * 1e-10) / 1e-5, expected, atol=1e-3)
    assert torch.allclose(predictor(history * 1j, variance) / 1j, expected, atol=1e-3)


def test_the_language_model_has_a_say(make, channels):
    history, variance = noisy(channels[..., :T, :], 10)
    predictor = make()
    before = predictor(history, variance)
    with torch.no_grad():
        for name, parameter in predictor.backbone.named_parameters():
            if "layers.0" in name:
                parameter += torch.randn_like(parameter)
    after = predictor(history, variance)
    assert (after - before).abs().max() > 1e-4 * before.abs().max()


def test_pretrained_weights_are_used(make):
    assert not torch.equal(
        next(iter(make().backbone.parameters())), next(iter(make(pretrained=False).backbone.parameters()))
    )


def test_untrained_it_already_beats_no_prediction_and_ar(make):
    """Ten paths of ten Dopplers are more than AR can follow at once; apart in angle and delay they are easy."""
    channels = exponentials(16, num_tx=32, num_steps=T + H, num_subcarriers=32, num_paths=10, max_doppler=0.4)
    history, variance = noisy(channels[..., :T, :], 15)
    target = channels[..., T:, :]
    with torch.no_grad():
        ours = nmse_db(make(awake=False, tx_shape=[1, 32, 1], taps=12, bins=256)(history, variance), target)
    assert ours < nmse_db(AR(H, order=12)(history, variance), target) - 1.0
    assert ours < nmse_db(NoPrediction(H)(history, variance), target) - 10.0


def test_without_noise_and_loading_a_doppler_is_continued_exactly(make):
    channels = exponentials(num_tx=8, num_steps=T + H, num_subcarriers=K, num_paths=1)
    predictor = make(awake=False)
    with torch.no_grad():
        predictor.controls.bias[4:] = 20.0  # gains of one
    prediction = predictor(channels[..., :T, :], torch.zeros(4))
    assert nmse_db(prediction, channels[..., T:, :]) < -35


def test_training_lowers_the_loss(make):
    predictor = make(awake=False).train()
    optimizer = torch.optim.Adam([p for p in predictor.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for step in range(40):
        channels = exponentials(batch=16, num_tx=8, num_steps=T + H, num_subcarriers=K, seed=step, num_paths=4)
        history, variance = noisy(channels[..., :T, :], 10, seed=step)
        loss = nmse_loss(predictor(history, variance), channels[..., T:, :])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-10:]) < 0.97 * sum(losses[:10])


def test_a_shift_in_frequency_while_training_is_undone(make):
    channels = exponentials(num_tx=8, num_steps=T + H, num_subcarriers=K, num_paths=1, max_doppler=0.2)
    predictor = make(awake=False, doppler_shift=0.15).train()
    prediction = predictor(channels[..., :T, :], torch.full((4,), 1e-6))
    assert nmse_db(prediction, channels[..., T:, :]) < -20


def test_borrowing_leads_from_each_bin_alone_to_all_together():
    """Weights of zero are PAD's equations; with much of the whole channel, all bins share one set of coefficients."""
    channels = exponentials(batch=2, num_tx=8, num_steps=T, num_subcarriers=K)
    noise = torch.full((2,), 1e-3)
    stats = Statistics(to_angle_delay(channels, (2, 2, 2)), noise, order=6, bins=10)
    zero, loading = torch.zeros(2, 10, 3), torch.ones(2, 10)
    alone = stats.predict(zero, loading, H)
    shared = stats.predict(torch.tensor([0.0, 0.0, 1e6]).expand(2, 10, 3), loading, H)
    assert not torch.allclose(alone, shared, rtol=1e-2)
    whole = stats.whole[:, 0] / stats.whole[:, 0].diagonal(dim1=-2, dim2=-1).real.mean(-1)[:, None, None]
    coefficients = torch.linalg.solve(whole[..., :-1, :-1] + 1e-9 * torch.eye(6), whole[..., :-1, -1])
    first = (stats.last * coefficients[:, None]).sum(-1)
    assert torch.allclose(shared[..., 0], first, atol=1e-2 * float(first.abs().max()))


def test_unstable_fits_are_held():
    """A history that grows isn't continued exponentially; one that doesn't grow is left alone."""
    steps = torch.arange(T)
    growing = torch.exp((0.1 + 0.5j) * steps).to(torch.complex64)
    steady = torch.exp(0.5j * steps).to(torch.complex64)
    bins = torch.stack([growing, steady]).reshape(2, 1, 1, 1, 1, 1, T)
    stats = Statistics(bins, torch.full((2,), 1e-6), order=2, bins=1)
    zero, loading = torch.zeros(2, 1, 3), torch.ones(2, 1)
    free, held = (stats.predict(zero, loading, 20, stable=stable) for stable in (False, True))
    assert free[0, 0, -1].abs() > 5 * growing[-1].abs(), "exp(2), nearly"
    assert held[0, 0, -1].abs() < 2.5 * growing[-1].abs()
    assert torch.equal(free[1], held[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch": 5}, "must divide"),
        ({"order": 16}, "below history"),
        ({"taps": 0}, "at least 1"),
        ({"tx_shape": [4, 4]}, "polarizations, columns, rows"),
        ({"tuning": "half"}, "norms, lora, frozen or full"),
    ],
)
def test_bad_options_are_named(make, options, message):
    with pytest.raises(UsageError, match=message):
        make(**options)


def test_bad_histories_are_named(make, channels):
    predictor = make()
    with pytest.raises(UsageError, match="built for 16 snapshots"):
        predictor(channels)
    with pytest.raises(UsageError, match="8 ports, the channel 4"):
        predictor(channels[:, :, :4, :T])
    with pytest.raises(UsageError, match="below the number of subcarriers"):
        predictor(channels[..., :T, :4])
