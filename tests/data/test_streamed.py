"""Streamed windows: what a sample depends on, what batches hold, and the protocol's own definitions."""

import jsonargparse
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from chanlab.data import CSIBatch, Impairments, SampleRequest, StreamedCSI, StreamedCSIDataModule
from chanlab.data.protocol import CSI4CAST, Cell, cell_number, find_protocol, number_in_cell, sample_ids
from chanlab.data.streamed_datamodule import EvaluationOrder, TrainingOrder
from chanlab.errors import UsageError


@pytest.fixture(autouse=True)
def few_cells(monkeypatch):
    """Four cells, so that a round of training takes a blink."""
    cells = (Cell("A", 30e-9, 1.0), Cell("D", 300e-9, 10.0), Cell("C", 100e-9, 30.0), Cell("D", 30e-9, 30.0))
    monkeypatch.setitem(CSI4CAST.cells, "regular", cells)


def test_cells_are_the_published_ones(monkeypatch):
    monkeypatch.undo()
    assert len(CSI4CAST.set_cells("regular")) == 27
    assert len(CSI4CAST.set_cells("generalization")) == 510
    assert len(set(CSI4CAST.set_cells("generalization"))) == 510
    assert set(CSI4CAST.set_cells("regular")) < set(CSI4CAST.set_cells("generalization"))
    assert CSI4CAST.set_cells("robustness") == CSI4CAST.set_cells("regular")
    assert [len(CSI4CAST.conditions[s]) for s in ("regular", "generalization", "robustness")] == [6, 6, 18]
    assert CSI4CAST.interval == pytest.approx(2.352e-3)
    assert (CSI4CAST.fft_size, CSI4CAST.band_distance, CSI4CAST.ports) == (750, 450, 32)


def test_ids_name_cell_and_number():
    ids = StreamedCSI().ids(3, start=7)
    assert cell_number(ids).tolist() == [c for c in range(4) for _ in range(3)]
    assert number_in_cell(ids).tolist() == [7, 8, 9] * 4
    assert [CSI4CAST.cell(c) for c in cell_number(ids).tolist()] == [
        c for c in CSI4CAST.cells["regular"] for _ in range(3)
    ]
    again = StreamedCSI(cells="generalization").ids(1)
    assert len(set(again.tolist())) == 510


@pytest.mark.parametrize(("duplex", "subcarriers"), [("tdd", 300), ("fdd", 300), ("both", 600)])
def test_shapes_and_bands(duplex, subcarriers):
    stream = StreamedCSI(duplex=duplex, block_size=2)
    ids = stream.ids(2)
    batch = stream.batch(SampleRequest(ids))
    assert batch.history.shape == (8, 1, 32, 16, 300)
    assert batch.target.shape == (8, 1, 32, 4, subcarriers)
    assert batch.speed.tolist() == [1.0, 1.0, 10.0, 10.0, 30.0, 30.0, 30.0, 30.0]
    assert torch.equal(batch.sample_id, ids)
    both = StreamedCSI(duplex="both", block_size=2).channels(ids)[1]
    torch.testing.assert_close(batch.target, {"tdd": both[..., :300], "fdd": both[..., 300:], "both": both}[duplex])


def test_the_channel_is_continuous_from_history_to_target_and_has_unit_energy():
    stream = StreamedCSI(block_size=32)
    history, target = stream.channels(sample_ids(0, torch.arange(32)))  # 1 m/s: hardly anything changes in a step
    step = (target[:, :, :, 0] - history[:, :, :, -1]).abs().square().mean()
    assert step < 0.1 * history[:, :, :, -1].abs().square().mean()
    assert history.abs().square().mean() == pytest.approx(1, rel=0.15)


def test_a_sample_is_its_own_whatever_its_batch():
    stream = StreamedCSI(block_size=4)
    whole = stream.batch(SampleRequest(stream.ids(4)))
    chosen = torch.tensor([13, 2, 7])
    for other in (stream, StreamedCSI(block_size=4, max_blocks=1)):
        part = other.batch(SampleRequest(stream.ids(4)[chosen]))
        for name, a, b in zip(CSIBatch._fields, part, whole, strict=True):
            torch.testing.assert_close(a, b[chosen], msg=name)
    torch.manual_seed(5)
    before = torch.rand(3)
    torch.manual_seed(5)
    StreamedCSI(block_size=1).channels(stream.ids(1))
    assert torch.equal(torch.rand(3), before)  # nobody else's random numbers are touched


@pytest.mark.parametrize("change", [{"seed": 1}, {"split": "val"}])
def test_seed_and_split_change_everything(change):
    request = SampleRequest(StreamedCSI().ids(1))
    one, two = StreamedCSI(block_size=1).batch(request), StreamedCSI(block_size=1, **change).batch(request)
    for a, b in ((one.history, two.history), (one.target, two.target), (one.snr_db, two.snr_db)):
        assert not torch.isclose(a, b, rtol=1e-3).view(4, -1).all(1).any()


def test_snr_is_that_of_the_history():
    stream = StreamedCSI(block_size=8)
    ids = stream.ids(8)
    clean, _ = stream.channels(ids)
    batch = stream.batch(SampleRequest(ids))
    assert (batch.snr_db >= 0).all()
    assert (batch.snr_db <= 25).all()
    assert batch.snr_db.std() > 4
    noise = (batch.history - clean).abs().square().mean((1, 2, 3, 4))
    torch.testing.assert_close(noise, batch.noise_variance, rtol=0.02, atol=0)
    snr = 10 * (clean.abs().square().mean((1, 2, 3, 4)) / noise).log10()
    torch.testing.assert_close(snr, batch.snr_db, rtol=0, atol=0.1)
    fixed = stream.batch(SampleRequest(ids, 4))
    assert (fixed.snr_db == 20).all()


def test_robustness_disturbs_without_noise():
    stream = StreamedCSI(cells="robustness", block_size=4)
    ids = stream.ids(4)
    clean, target = stream.channels(ids)
    for number, condition in enumerate(stream.conditions):
        batch = stream.batch(SampleRequest(ids, number))
        assert (batch.noise_variance == 0).all()
        assert torch.equal(batch.target, target)
        if condition.kind == "phase":
            torch.testing.assert_close(batch.history.abs(), clean.abs())
        if condition.kind == "drop":
            kept = batch.history != 0
            assert torch.equal(batch.history[kept], clean[kept])


def test_feedback_delay_ends_the_history_earlier():
    late = StreamedCSI(block_size=4, impairments=Impairments(feedback_delay=3))
    ids = sample_ids(0, torch.arange(4))
    history, target = late.channels(ids)
    assert history.shape[3] == 16
    assert target.shape[3] == 4
    now = StreamedCSI(block_size=4).channels(ids)
    error = [(t[:, :, :, 0] - h[:, :, :, -1]).abs().square().mean() for h, t in ((history, target), now)]
    assert error[0] > 3 * error[1]


def test_training_never_sees_a_sample_twice_and_mixes_cells():
    stream = StreamedCSI(block_size=16)
    orders = [TrainingOrder(stream, 24, 10, rank, 2) for rank in range(2)]
    ids = [r.sample_id for order in orders for r in order]
    assert all(len(i) == 24 for i in ids)
    assert len(set(torch.cat(ids).tolist())) == 2 * 10 * 24
    assert all(len(cell_number(i).unique()) == 4 for i in ids)
    later = TrainingOrder(stream, 24, 10, 1, 2, clock=lambda: 3)
    assert not set(torch.cat([r.sample_id for r in later]).tolist()) & set(torch.cat(ids).tolist())
    resumed = list(TrainingOrder(stream, 24, 10, 1, 2, clock=lambda: 3, seen=(3, 6)))
    assert [r.sample_id.tolist() for r in resumed] == [r.sample_id.tolist() for r in later][6:]


def test_training_draws_each_block_once():
    drawn = []
    stream = StreamedCSI(block_size=4, max_blocks=4)
    original = stream._draw
    stream._draw = lambda *args: drawn.append(args[:2]) or original(*args)
    for request in TrainingOrder(stream, 6, 8):  # three rounds; batches lie across their borders
        stream.batch(request)
    assert len(drawn) == len(set(drawn)) == 12


def test_evaluation_holds_every_sample_under_every_condition_once():
    stream = StreamedCSI(cells="robustness", split="test")
    seen = [
        (i, r.condition)
        for rank in range(3)
        for r in EvaluationOrder(stream, 5, 8, rank, 3)
        for i in r.sample_id.tolist()
    ]
    assert len(seen) == len(set(seen)) == 4 * 5 * 18


class Scale(LightningModule):
    """One weight; keeps what it saw."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen, self.evaluated = [], []

    def step(self, batch):
        assert isinstance(batch, CSIBatch)
        error = self.weight * batch.history[..., -1:, :] - batch.target
        return error.abs().square().sum() / batch.target.abs().square().sum()

    def training_step(self, batch):
        self.seen.append(list(zip(batch.sample_id.tolist(), batch.snr_db.tolist(), strict=True)))
        return self.step(batch)

    def validation_step(self, batch):
        self.log("val", self.step(batch), batch_size=len(batch.snr_db))

    def test_step(self, batch):
        self.evaluated += list(zip(batch.sample_id.tolist(), batch.snr_db.tolist(), strict=True))
        self.log("test", self.step(batch), batch_size=len(batch.snr_db))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer(tmp_path, **kwargs):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return Trainer(default_root_dir=tmp_path, **{**quiet, "enable_checkpointing": False, **kwargs})


def data(**kwargs):
    small = {"batch_size": 6, "batches_per_epoch": 4, "block_size": 2, "val_samples_per_cell": 1}
    return StreamedCSIDataModule(**{**small, "eval_block_size": 2, "samples_per_cell": 2, **kwargs})


def test_fit_and_test(tmp_path):
    module, run = Scale(), trainer(tmp_path, max_epochs=2)
    run.fit(module, data())
    assert [len(b) for b in module.seen] == [6] * 8
    assert len({i for b in module.seen for i, _ in b}) == 48
    assert module.weight != 0
    run.test(module, data(eval_snr_db=[0.0, 10.0]), verbose=False)
    assert len(set(module.evaluated)) == len(module.evaluated) == 2 * 2 * 4
    assert {snr for _, snr in module.evaluated} == {0.0, 10.0}
    validated = trainer(tmp_path, limit_val_batches=1).validate(Scale(), data(), verbose=False)
    assert validated[0]["val"] == pytest.approx(1)


@pytest.mark.parametrize("every", [{"every_n_train_steps": 3}, {"every_n_epochs": 1}])
def test_a_resumed_run_sees_what_it_would_have_seen(tmp_path, every):
    def run(name, checkpoint=None):
        module = Scale()
        keep = ModelCheckpoint(tmp_path / name, save_top_k=-1, **every)
        fit = trainer(tmp_path, max_epochs=3, enable_checkpointing=True, callbacks=[keep], limit_val_batches=0)
        fit.fit(module, data(), ckpt_path=checkpoint)
        return module

    whole = run("whole")
    assert len(whole.seen) == 12
    checkpoints = sorted((tmp_path / "whole").glob("epoch*.ckpt"))
    assert len(checkpoints) >= 3
    for checkpoint in checkpoints:
        done = torch.load(checkpoint, weights_only=True)["global_step"]
        resumed = run("resumed", checkpoint)
        assert resumed.seen == whole.seen[done:], checkpoint.name
        torch.testing.assert_close(resumed.weight, whole.weight)


def test_configured_from_yaml():
    parser = jsonargparse.ArgumentParser()
    parser.add_subclass_arguments(StreamedCSIDataModule, "data")
    config = parser.parse_object(
        {
            "data": {
                "class_path": "chanlab.data.StreamedCSIDataModule",
                "init_args": {
                    "duplex": "fdd",
                    "snr_db": [5, 15],
                    "eval_cells": "robustness",
                    "impairments": {"pilot_spacing": 6, "estimator": "lmmse", "cfo": 20.0},
                },
            }
        }
    )
    module = parser.instantiate(config).data
    assert module.streams["train"].snr_db == (5.0, 15.0)
    assert module.streams["train"].impairments.pilot_spacing == 6
    assert len(module.streams["test"].conditions) == 18


@pytest.mark.parametrize(
    "arguments",
    [{"protocol": "x"}, {"split": "x"}, {"cells": "x"}, {"duplex": "x"}, {"block_size": 0}, {"snr_db": (9, 1)}],
)
def test_bad_arguments(arguments):
    with pytest.raises(UsageError, match=next(iter(arguments))):
        StreamedCSI(**arguments)


def test_unknown_protocol():
    with pytest.raises(UsageError, match="csi4cast"):
        find_protocol("none")


def test_from_the_command_line(tmp_path, capsys):
    main = pytest.importorskip("chanlab.cli.lightning").main
    config = tmp_path / "np.yaml"
    config.write_text(
        f"""
model:
  class_path: chanlab.csi.CSIPredictionModule
  init_args: {{predictor: {{class_path: chanlab.csi.NoPrediction}}}}
data:
  class_path: chanlab.data.StreamedCSIDataModule
  init_args:
    samples_per_cell: 2
    eval_block_size: 2
    eval_cells: robustness
    impairments: {{pilot_spacing: 4, quantisation_bits: 6}}
trainer: {{accelerator: cpu, logger: false, enable_progress_bar: false, default_root_dir: {tmp_path}}}
""",
        encoding="utf-8",
    )
    main(["test", "--config", str(config)])
    assert "test/nmse_db" in capsys.readouterr().out
