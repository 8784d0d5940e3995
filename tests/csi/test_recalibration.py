"""Corrections of stated errors: distances from known kinds, misfit, what weights hold of them, and that they help."""

import math
import sys
from pathlib import Path

import pytest
import torch
import yaml

from chanlab.channels import CIR
from chanlab.csi import LearnedWiener, load_weights, save_weights
from chanlab.csi.doppler_wiener import doppler_posterior
from chanlab.csi.recalibration import KINDS, Circumstances, Familiarity, Signatures, misfits, tap_profile
from chanlab.data.recipe import find_recipe
from chanlab.errors import ChanlabError, UsageError
from chanlab.weights import save_part

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import csi_recalibrate as benchmark


def small(**kw):
    torch.manual_seed(0)
    return LearnedWiener(**{"dim": 32, "layers": 1, "duplex": "both", **kw}).eval()


def noise(*shape):
    return torch.randn(*shape, dtype=torch.complex64)


def fitted(predictor):
    """Any correction at all."""
    for name, buffer in predictor.recalibration.named_buffers():
        drawn = 0.3 * torch.randn(buffer.shape)
        buffer.copy_(drawn.abs() if name.endswith("gains") else drawn)
    return predictor


def test_distances_are_mahalanobis_and_smallest_at_home():
    torch.manual_seed(1)
    width, count = 60, 4000
    kind = torch.arange(count) % KINDS
    centres = 4 * torch.randn(KINDS, width)
    deviation = torch.where(torch.arange(width) < 14, 3.0, 0.5)
    known = centres[kind] + deviation * torch.randn(count, width)
    part = Familiarity(width)
    part.estimate(known, kind, shrinkage=0.0)
    found = part(centres[kind] + deviation * torch.randn(count, width))
    assert found.shape == (count, KINDS + 1)
    assert (found[:, :KINDS].argmin(1) == kind).float().mean() > 0.99
    assert found[:, -1].exp().mean() == pytest.approx(1.0, abs=0.05), "squared distance per dimension"
    assert part(known + 5 * deviation)[:, -1].exp().mean() == pytest.approx(26.0, rel=0.1)


def test_misfit_is_one_where_the_spectrum_is_right_and_grows_with_power():
    torch.manual_seed(2)
    spectrum = torch.zeros(1, 64)
    spectrum[0, :6] = 1.0
    line, time = torch.arange(64) / 64, torch.arange(16.0)
    waves = torch.exp(2j * math.pi * line[:, None] * time)
    history = (noise(4000, 64) * spectrum.sqrt()) @ waves + math.sqrt(0.3) * noise(4000, 16)
    ahead = torch.tensor([1.0])
    found = doppler_posterior(spectrum, torch.full((16,), 0.3), history, ahead, with_misfit=True)
    assert found.misfit.item() == pytest.approx(1.0, abs=0.03)
    plain = doppler_posterior(spectrum, torch.full((16,), 0.3), history, ahead)
    assert plain.misfit is None
    torch.testing.assert_close(plain.mean, found.mean)
    assert doppler_posterior(spectrum, torch.full((16,), 0.3), 2 * history, ahead, True).misfit == 4 * found.misfit


def test_the_profile_is_in_order_of_delay():
    taps = noise(2, 1, 2, 2, 7, 5) * torch.arange(1.0, 8.0)[:, None]
    number, rest = torch.tensor([[1, 4, 6], [0, 2, 3]]), torch.tensor([[0, 2, 3, 5], [1, 4, 5, 6]])
    rows = torch.arange(2)[:, None]
    strong, weak = (taps.movedim(4, 1)[rows, i].movedim(1, 4) for i in (number, rest))
    expected = taps.abs().square().mean((1, 2, 3, 5))
    torch.testing.assert_close(tap_profile(strong, weak, number, rest), expected)


@pytest.mark.parametrize("duplex", ["tdd", "fdd", "both"])
@pytest.mark.parametrize(("shape", "rx", "steps", "subcarriers"), [((2, 4, 4), 1, 16, 96), ((1, 2, 3), 2, 5, 48)])
def test_only_what_is_stated_changes(duplex, shape, rx, steps, subcarriers):
    predictor = small(duplex=duplex, tx_shape=shape)
    history, variance = noise(2, rx, math.prod(shape), steps, subcarriers), torch.tensor([0.1, 0.5])
    ahead = torch.tensor([0.5, 2.0, 7.0])
    with torch.no_grad():
        before = predictor.distribution(history, variance, ahead)
        after = fitted(predictor).distribution(history, variance, ahead)
    assert torch.equal(after.mean, before.mean)
    factor = (after.variance / before.variance).log()
    assert factor.abs().max() > 1e-3
    assert factor.abs().max() <= 4.0 + 1e-4
    bands = factor.unflatten(-1, (-1, subcarriers))
    torch.testing.assert_close(bands, bands[:, :1, :1, :, :, :1].expand_as(bands), rtol=1e-3, atol=1e-4)
    assert (after.shape > 1.0).all()
    assert not torch.equal(after.shape, before.shape)


def test_older_weights_load_and_correct_nothing(tmp_path):
    predictor, path = small(), tmp_path / "new.safetensors"
    save_weights(fitted(predictor), path, bits=32)
    state = {n: v for n, v in predictor.state_dict().items() if "recalibration" not in n}

    class Older(torch.nn.Module):
        def state_dict(self, *args, **kw):
            return state

    save_weights(Older(), tmp_path / "old.safetensors", bits=32)
    loaded = fitted(small())
    load_weights(loaded, tmp_path / "old.safetensors")
    assert not any(b.any() for b in loaded.recalibration.buffers()), "not those that were there before"
    load_weights(loaded, path)
    assert torch.equal(loaded.recalibration.first, predictor.recalibration.first)
    assert not fitted(loaded).load_state_dict(state).missing_keys
    assert not loaded.recalibration.first.any()
    state["recalibration.gain"] = predictor.recalibration.gain
    save_weights(Older(), tmp_path / "torn.safetensors", bits=32)
    with pytest.raises(ChanlabError, match="lacks recalibration"):
        load_weights(loaded, tmp_path / "torn.safetensors")


def test_a_part_is_replaced_and_the_rest_stays_to_the_bit(tmp_path):
    old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    predictor = small(dim=80)
    save_weights(predictor, old, bits=6)
    load_weights(predictor, old)
    save_part(fitted(predictor), "recalibration.", old, new)
    other = small(dim=80)
    load_weights(other, new)
    for name, value in predictor.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    with pytest.raises(UsageError, match="no part named"):
        save_part(predictor, "nothing.", old, new)


def test_nothing_is_computed_for_no_correction(monkeypatch):
    history, variance = noise(2, 1, 32, 16, 96), torch.tensor([0.1, 0.5])
    predictor, asked = small(), []
    monkeypatch.setattr("chanlab.csi.learned_wiener.misfits", lambda *given: asked.append(1) or misfits(*given))
    with torch.no_grad():
        predictor.distribution(history, variance)
        assert not asked
        predictor.recalibration.observing = True
        predictor.distribution(history, variance)
        assert asked
        predictor.recalibration.observing = False
        assert fitted(predictor).recalibration.active
        for buffer in predictor.recalibration.buffers():
            buffer.zero_()
        assert not predictor.recalibration.active


def test_no_training_touches_it():
    predictor = fitted(small()).train()
    assert not any("recalibration" in name for name, _ in predictor.named_parameters())
    loss = predictor.training_loss(noise(2, 1, 32, 16, 96), noise(2, 1, 32, 4, 192), torch.full((2,), 0.1))
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in predictor.parameters())


def test_a_fit_finds_errors_that_grow_with_distance():
    """Stated variance 1, shape 3; errors are Gaussian, four times as strong (in power) where the kind is unknown."""
    torch.manual_seed(3)
    predictor, count = small(dim=16), 1200
    kind = torch.where(torch.arange(count) % 2 == 0, torch.arange(count) // 2 % KINDS, -1)
    centres = 3 * torch.randn(KINDS, 16)
    mean = centres[kind.clamp_min(0)] + torch.where(kind < 0, 8.0, 1.0)[:, None] * torch.randn(count, 16)
    signatures = Signatures(mean, torch.randn(count, 16), torch.randn(count, 60))
    scale = torch.where(kind < 0, 4.0, 1.0)[:, None, None, None]
    shape = (count, 2, 4, benchmark.ENTRIES)
    error = scale * -torch.rand(shape).log()
    steps = torch.zeros(count, 2, 4, 4)
    found = benchmark.Windows(
        signatures, torch.zeros(count, 3), steps, error, torch.ones(shape), torch.full(shape, 3.0), kind
    )
    part = predictor.recalibration
    before, after = benchmark.fit(part, found, 300, 0)
    assert after < before
    with torch.no_grad():
        seen = Circumstances(signatures, found.window, steps[:, 0])
        growth = part(seen, 0)[:, :, 0].mean(1)
    assert growth[kind < 0].mean() - growth[kind >= 0].mean() == pytest.approx(math.log(4.0), abs=0.3)


def test_changed_channels_keep_their_motion_and_lie_within_the_taps():
    cir = CIR(noise(50, 1, 4, 6, 9), 100e-9 * torch.rand(50, 9).cumsum(1), 2.4e9)
    found = benchmark.changed(cir, torch.Generator().manual_seed(0))
    assert found.delay.max() <= benchmark.LONGEST
    factor = found.coefficients / cir.coefficients
    assert torch.allclose(factor, factor[:, :, :1, :1].expand_as(factor), atol=1e-5), "one factor per cluster"
    scaled = (found.delay / cir.delay)[:, :1].expand(-1, 9)
    alone = torch.isclose(found.delay, cir.delay * scaled, rtol=1e-4).all(1).float().mean()
    assert 0.15 < alone < 0.6, "a third is scaled alone"


def test_the_script_writes_weights_that_load(tmp_path, capsys, monkeypatch):
    config = yaml.safe_load(find_recipe("models", "learned_wiener").read_text())
    config["model"]["init_args"]["predictor"]["init_args"] |= {"dim": 16, "layers": 1}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(config))
    save_weights(small(dim=16), tmp_path / "small.safetensors")
    monkeypatch.chdir(tmp_path)
    line = ["--model", "small.yaml", "--weights", "small.safetensors", "--windows", "54", "--batch-size", "2"]
    assert benchmark.main([*line, "--steps", "5", "--out", "found.safetensors"]) == 0
    assert "5 windows held out" in capsys.readouterr().out
    loaded = small(dim=16)
    load_weights(loaded, "found.safetensors")
    assert loaded.recalibration.second.any()
    assert benchmark.main(["--model", "csi4cast_pad"]) == 2
