"""Training, evaluation and checkpoints, without the command line."""

import math
from itertools import pairwise

import h5py
import pytest
import torch
from exponentials import exponentials, noisy
from lightning.pytorch import LightningDataModule, Trainer
from small_predictors import OnBackbone
from torch import nn
from torch.utils.data import DataLoader

from chanlab.csi import (
    AR,
    GRU,
    CSIPredictionModule,
    NoPrediction,
    PredictionWriter,
    WeightsWriter,
    load_predictor,
    load_weights,
)
from chanlab.csi.module import _phase, nmse_loss, warmup_cosine
from chanlab.data.windows import CSIBatch
from chanlab.errors import ChanlabError, UsageError
from chanlab.metrics import nmse

T, H, K = 16, 4, 8


def batch(size=6, seed=0, snr_db=15.0):
    channels = exponentials(batch=size, num_tx=2, num_steps=T + H, num_subcarriers=K, seed=seed)
    history, variance = noisy(channels[:, :, :, :T], snr_db)
    return CSIBatch(
        history,
        channels[:, :, :, T:],
        variance,
        torch.full((size,), snr_db),
        torch.arange(size) + 10 * seed,
        torch.zeros(size, dtype=torch.int64),
        torch.ones(size),
    )


class Windows(LightningDataModule):
    """Two batches of exponentials."""

    def loader(self):
        return DataLoader([batch(seed=seed) for seed in range(2)], batch_size=None)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader


def trainer(path, **kwargs):
    return Trainer(
        default_root_dir=path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        **{"max_epochs": 1, "enable_checkpointing": False, "log_every_n_steps": 1, **kwargs},
    )


def test_the_loss_counts_each_sample_alike():
    target = torch.ones(2, 1, 1, H, K, dtype=torch.complex64) * torch.tensor([1.0, 100.0])[:, None, None, None, None]
    prediction = target * torch.tensor([0.0, 1.1])[:, None, None, None, None]
    assert nmse_loss(prediction, target).item() == pytest.approx((1 + 0.01) / 2, rel=1e-5)
    assert nmse_loss(prediction, target) == nmse(prediction, target, "per_sample")
    assert nmse_loss(prediction, torch.zeros_like(target)) == 0
    with pytest.raises(UsageError, match="horizons"):
        nmse_loss(prediction, target[:, :, :, 1:])


def test_evaluation_logs_the_metrics_of_all_windows(tmp_path):
    results = trainer(tmp_path).test(CSIPredictionModule(AR(H)), datamodule=Windows(), verbose=False)[0]
    windows = [batch(seed=seed) for seed in range(2)]
    prediction = torch.cat([AR(H)(w.history) for w in windows])
    target = torch.cat([w.target for w in windows])
    for name, reduction in (("nmse", "per_sample"), ("nmse_pooled", "pooled"), ("nmse_median", "median")):
        expected = 10 * math.log10(nmse(prediction, target, reduction))
        assert results[f"test/{name}_db"] == pytest.approx(expected, abs=1e-3)
    expected = nmse(prediction, target, "per_antenna_step").item()
    assert results["test/nmse_per_antenna"] == pytest.approx(expected, rel=1e-4)
    steps = [results[f"test/nmse_step{step}_db"] for step in range(1, H + 1)]
    expected = nmse(prediction[:, :, :, :1], target[:, :, :, :1], "per_sample")
    assert steps[0] == pytest.approx(10 * math.log10(expected), abs=1e-3)
    assert 0 < results["test/sgcs"] <= 1


def test_an_antenna_without_power_leaves_the_other_figures(tmp_path):
    class Silent(Windows):
        def loader(self):
            window = batch()
            window.target[0, 0, 0] = 0
            return DataLoader([window], batch_size=None)

        test_dataloader = loader

    results = trainer(tmp_path).test(CSIPredictionModule(AR(H)), datamodule=Silent(), verbose=False)[0]
    assert math.isfinite(results["test/nmse_db"])
    assert "test/nmse_per_antenna" not in results


def test_a_classical_predictor_can_not_be_fitted(tmp_path):
    with pytest.raises(UsageError, match="chanlab test"):
        trainer(tmp_path).fit(CSIPredictionModule(NoPrediction(H)), datamodule=Windows())


def test_a_module_without_horizons_is_no_predictor():
    with pytest.raises(UsageError, match="horizons"):
        CSIPredictionModule(nn.Linear(2, 2))


def test_frozen_weights_stay_and_are_not_stored(tmp_path, tiny_llama):
    module = CSIPredictionModule(OnBackbone(str(tiny_llama)), lr=0.1)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    fit = trainer(tmp_path)
    fit.fit(module, datamodule=Windows())
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name

    fit.save_checkpoint(tmp_path / "x.ckpt")
    stored = torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert set(stored) == trained
    again = CSIPredictionModule.load_from_checkpoint(
        tmp_path / "x.ckpt", predictor=OnBackbone(str(tiny_llama)), weights_only=True
    )
    w = batch()
    assert torch.equal(again(w.history), module(w.history))


def test_random_frozen_weights_are_stored(tmp_path, tiny_llama):
    """No name brings them back."""
    module = CSIPredictionModule(OnBackbone(str(tiny_llama), pretrained=False))
    fit = trainer(tmp_path)
    fit.fit(module, datamodule=Windows())
    fit.save_checkpoint(tmp_path / "x.ckpt")
    assert set(torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]) == set(module.state_dict())


def test_another_backbone_under_the_same_name_is_refused(tmp_path, tiny_llama):
    import transformers

    module = CSIPredictionModule(OnBackbone(str(tiny_llama)))
    fit = trainer(tmp_path)
    fit.fit(module, datamodule=Windows())
    fit.save_checkpoint(tmp_path / "x.ckpt")
    config = transformers.AutoConfig.from_pretrained(tiny_llama)
    torch.manual_seed(5)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    other = OnBackbone(str(tmp_path / "other"))
    with pytest.raises(ChanlabError, match="trained on backbone"):
        CSIPredictionModule.load_from_checkpoint(tmp_path / "x.ckpt", predictor=other, weights_only=True)


def test_a_missing_trained_weight_is_an_error(tmp_path):
    fit = trainer(tmp_path)
    fit.fit(CSIPredictionModule(GRU(K, H, hidden=8, layers=1)), datamodule=Windows())
    fit.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(RuntimeError, match="Missing key"):
        CSIPredictionModule.load_from_checkpoint(
            tmp_path / "x.ckpt", predictor=GRU(K, H, hidden=8, layers=2), weights_only=True
        )


def test_load_predictor_names_a_missing_file(tmp_path):
    with pytest.raises(UsageError, match="chanlab fit"):
        load_predictor(tmp_path / "none.ckpt")


def test_predictions_are_written_beside_their_targets(tmp_path):
    path = tmp_path / "deep" / "p.h5"
    module = CSIPredictionModule(AR(H))
    trainer(tmp_path, callbacks=[PredictionWriter(str(path))]).predict(
        module, datamodule=Windows(), return_predictions=False
    )
    windows = [batch(seed=seed) for seed in range(2)]
    with h5py.File(path) as file:
        assert file.attrs["format"] == "chanlab predictions"
        assert file.attrs["predictor"] == "AR"
        assert file["prediction"].shape == file["target"].shape == (12, 1, 2, H, K)
        assert file["prediction"].dtype == "complex64"
        assert file["sample_id"][:].tolist() == [*range(6), *range(10, 16)]
        assert set(file) == {"prediction", "target", "noise_variance", "snr_db", "sample_id", "window", "speed"}
        assert torch.equal(torch.from_numpy(file["target"][6:]), windows[1].target)
        assert torch.allclose(torch.from_numpy(file["prediction"][:6]), AR(H)(windows[0].history), atol=1e-5)
    assert [p.name for p in path.parent.iterdir()] == ["p.h5"]


class Failing(NoPrediction):
    def forward(self, history, noise_variance=None):
        raise UsageError("no")


def test_a_failed_prediction_leaves_no_file(tmp_path):
    path = tmp_path / "p.h5"
    with pytest.raises(UsageError):
        trainer(tmp_path, callbacks=[PredictionWriter(str(path))]).predict(
            CSIPredictionModule(Failing(H)), datamodule=Windows()
        )
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ChanlabError, match="can't be written"):
        trainer(tmp_path, callbacks=[PredictionWriter(str(tmp_path / "file" / "p.h5"))]).predict(
            CSIPredictionModule(AR(H)), datamodule=Windows()
        )


def test_decay_spares_vectors_and_frozen_parameters_are_left_out(tmp_path, tiny_llama):
    module = CSIPredictionModule(OnBackbone(str(tiny_llama)), weight_decay=0.3)
    fit = trainer(tmp_path)
    fit.fit(module, datamodule=Windows())
    groups = fit.optimizers[0].param_groups
    decays = {id(p): g["weight_decay"] for g in groups for p in g["params"]}
    for parameter in module.parameters():
        expected = (0.3 if parameter.ndim > 1 else 0.0) if parameter.requires_grad else None
        assert decays.get(id(parameter)) == expected


def test_the_learning_rate_rises_then_falls_to_zero():
    rates = [warmup_cosine(step, 100, 0.1) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert rates[100] == pytest.approx(0.0, abs=1e-9)
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert warmup_cosine(1000, math.inf, 0.1) == 1.0


def test_phases_depend_on_sample_window_and_epoch_alone():
    ids = torch.arange(2000)
    phase = _phase(ids, torch.zeros_like(ids), epoch=3)
    assert torch.allclose(phase.abs(), torch.ones(2000))
    assert phase.mean().abs() < 0.02  # spread over the circle
    assert torch.equal(_phase(ids.flip(0), torch.zeros_like(ids), 3).flip(0), phase)
    assert not torch.allclose(_phase(ids, torch.zeros_like(ids), 4), phase, atol=0.1)


def test_gradients_that_are_not_finite_are_dropped_and_counted(tmp_path):
    class Breaks(nn.Module):
        horizons = 4

        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones(()))
            self.calls = 0

        def forward(self, history, noise_variance=None):
            return history[..., -1:, :].expand(-1, -1, -1, 4, -1) * self.factor

        def training_loss(self, history, target, noise_variance=None):
            self.calls += 1
            return self.factor * (math.nan if self.calls == 2 else 1.0)

    module = CSIPredictionModule(Breaks(), lr=0.1)
    trainer(tmp_path, max_steps=4).fit(module, datamodule=Windows())
    assert module.predictor.factor.isfinite()
    assert module.predictor.factor < 1
    assert module.skipped == 1


def test_only_marked_parts_are_compiled(monkeypatch):
    with pytest.raises(UsageError, match="no parts to compile"):
        CSIPredictionModule(GRU(K, H, hidden=4), compile=True).setup("fit")
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled.append(module))
    predictor = GRU(K, H, hidden=4)
    marked = next(predictor.children())
    marked.compilable = True
    module = CSIPredictionModule(predictor, compile=True)
    module.setup("test")
    assert not compiled
    module.setup("fit")
    assert compiled == [marked]


def test_weights_are_written_after_validation_and_load_again(tmp_path):
    module = CSIPredictionModule(GRU(K, H, hidden=4))
    writer = WeightsWriter(bits=32)
    trainer(tmp_path, max_epochs=1, callbacks=[writer]).fit(module, datamodule=Windows())
    other = GRU(K, H, hidden=4)
    load_weights(other, tmp_path / "weights.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), module.predictor.parameters(), strict=True))
    with pytest.raises(UsageError, match="6, 8, 16 or 32"):
        WeightsWriter(bits=7)
