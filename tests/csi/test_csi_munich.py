"""benchmarks/csi_munich.py: what knowing rays gives, how orders are chosen, how ours is trained, what is written."""

import json
import sys
from pathlib import Path

import pytest
import torch

from chanlab.cli.demo import models
from chanlab.csi import AR, CSIPredictionModule, LearnedWiener
from chanlab.data import CSIDataModule, CSIWindows
from chanlab.metrics import nmse, to_db

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import csi_munich as benchmark


@pytest.fixture
def windows(tiny_store):
    def make(split="test", snr_db=15.0, **more):
        return CSIWindows(tiny_store, split, snr_db=snr_db, history=16, horizons=4, windows_per_sample=2, **more)

    return make


@pytest.mark.parametrize("joint", [False, True])
def test_rays_that_are_known_leave_little_to_predict(windows, joint):
    some = windows(snr_db=5.0)
    fetched, batch = next(benchmark.batches(some, 8, "cpu"))
    reached = to_db(nmse(benchmark.known_rays(fetched, batch, some, joint), batch.target))
    assert reached < -15  # ten dB below the noise
    few = windows(snr_db=60.0)  # what is left without noise: Doppler shifts and delays that change along the window
    fetched, batch = next(benchmark.batches(few, 8, "cpu"))
    assert to_db(nmse(benchmark.known_rays(fetched, batch, few, joint), batch.target)) < -20


def test_the_better_order_is_chosen_on_val(windows, monkeypatch):
    candidates = {"ar": benchmark.grid(AR, order=(1, 8), ridge=(0.0,))}
    monkeypatch.setattr(benchmark, "CANDIDATES", candidates)
    val = windows("val", snr_db=40.0)
    assert benchmark.choose(["ar"], val, 16, "cpu")["ar"].arguments == {"order": 8, "ridge": 0.0}


def test_training_lowers_the_loss(tiny_store):
    data = CSIDataModule(tiny_store, batch_size=4, num_workers=0, history=16, horizons=4, windows_per_sample=1, seed=1)
    torch.manual_seed(0)
    view = data.view
    array = view.tx_array
    model = LearnedWiener(4, (array.num_polarizations, array.num_cols, array.num_rows), dim=16, layers=1)
    told = benchmark.train(CSIPredictionModule(model, lr=3e-3), data, "cpu", steps=21)
    assert told["steps"] == 21
    assert len(told["losses"]) == 2
    assert told["losses"][-1] < told["losses"][0]


def test_fine_tuning_is_the_recipes(tiny_store, tmp_path, monkeypatch):
    """Rates, decay of matrices alone, augmentation, clipping and batches are those of `chanlab fit`."""
    recipe = models.read("learned_wiener_munich")
    arguments = recipe["model"]["init_args"]
    small = benchmark.ours

    def network(view):
        whole = small(view)
        assert whole.augmentation == arguments["predictor"]["init_args"]["augmentation"] > 0
        return LearnedWiener(view.horizon, whole.tx_shape, dim=16, layers=1, augmentation=whole.augmentation)

    monkeypatch.setattr(benchmark, "ours", network)
    monkeypatch.setattr(benchmark, "load_weights", lambda model, path: None)
    seen, clipped, step, clip = [], [], torch.optim.AdamW.step, torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *a: (seen.append(self.param_groups), step(self, *a))[1])
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda p, most: (clipped.append(most), clip(p, most))[1])
    line = ["--store", str(tiny_store), "--train-only", "--finetune-steps", "1", "--workers", "0"]
    assert benchmark.main([*line, "--batch-size", "2", "--out", str(tmp_path)]) == 0
    for groups in seen:
        assert {g["weight_decay"]: {p.ndim > 1 for p in g["params"]} for g in groups} == {
            arguments["weight_decay"]: {True},
            0.0: {False},
        }
    assert clipped == [recipe["trainer"]["gradient_clip_val"]] * 2
    told = json.loads((tmp_path / "ours_fine_tuned.json").read_text())
    assert told["lr"] == arguments["lr"]
    assert benchmark.parser().parse_args([]).batch_size == recipe["data"]["init_args"]["batch_size"]


def test_what_is_written(tiny_store, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(benchmark.CANDIDATES, "ar", benchmark.grid(AR, order=(2, 4)))
    results = tmp_path / "results.json"
    arguments = ["--store", str(tiny_store), "--systems", "no prediction", "ar", "--snr-db", "15", "--limits"]
    assert benchmark.main([*arguments, "--results", str(results)]) == 0
    assert "rays known" in capsys.readouterr().out
    records = json.loads(results.read_text())
    pooled = [r for r in records if r["metric"] == "nmse_pooled" and r["condition"]["horizon"] == 2]
    assert {r["condition"]["ahead_ms"] for r in pooled} == {5.0}
    value = {r["system"]: r["value"] for r in pooled}
    assert set(value) == {"no prediction", "ar", *benchmark.LIMITS.values()}
    assert value["rays known"] < value["ar"] < value["no prediction"]
    assert all(r["low"] <= r["value"] <= r["high"] for r in records)
    assert {r["metric"] for r in records} == {"nmse_per_antenna", "nmse_pooled", "nmse_per_sample", "nmse_median"}
    assert next(r for r in pooled if r["system"] == "ar")["arguments"]["order"] in (2, 4)


def test_a_view_without_a_step_5_ms_ahead(tiny_store, windows):
    with pytest.raises(benchmark.UsageError, match="5 ms"):
        benchmark.step_of(windows(interval=2e-3).view)
