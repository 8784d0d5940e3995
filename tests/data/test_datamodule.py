import jsonargparse
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from window_store import make_store

from chanlab.channels import PlanarArray
from chanlab.data.datamodule import CSIDataModule
from chanlab.data.sampler import WindowSampler
from chanlab.data.windows import CSIBatch, CSIWindows, collate
from chanlab.errors import StoreError, UsageError


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("datamodule") / "store")


class Scale(LightningModule):
    """One weight; keeps what it saw."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen, self.targets = [], []

    def step(self, batch):
        assert isinstance(batch, CSIBatch)
        error = self.weight * batch.history[..., -1:, :] - batch.target
        return (error.abs().square().sum() / batch.target.abs().square().sum()).sum()

    def training_step(self, batch):
        snr = batch.snr_db.tolist()
        self.seen.append([(self.trainer.current_epoch, *x) for x in zip(batch.sample_id.tolist(), snr, strict=True)])
        return self.step(batch)

    def validation_step(self, batch):
        self.log("val", self.step(batch))

    def test_step(self, batch):
        self.log("test", self.step(batch), batch_size=len(batch.snr_db))

    def predict_step(self, batch):
        return batch.sample_id

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer(tmp_path, **kwargs):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return Trainer(default_root_dir=tmp_path, **{**quiet, "enable_checkpointing": False, **kwargs})


@pytest.mark.parametrize("mode", ["paths", "materialised"])
def test_fit_test_and_predict(store, tmp_path, mode):
    data = CSIDataModule(store.path, 16, num_workers=1, mode=mode, view_dir=tmp_path / "views", snr_db=(5.0, 15.0))
    module = Scale()
    run = trainer(tmp_path, max_epochs=2)
    run.fit(module, data)
    assert [len(b) for b in module.seen] == [16, 16, 16, 16, 8] * 2
    assert module.weight != 0
    one, two = (sorted(x for b in module.seen[k : k + 5] for x in b) for k in (0, 5))
    assert [x[1] for x in one] == [x[1] for x in two]  # each window once per epoch
    assert [x[2] for x in one] != [x[2] for x in two]  # with new noise
    run.test(module, data, verbose=False)
    assert torch.cat(run.predict(module, data)).tolist() == data.windows("test").sample_ids.tolist()
    files = {p.name.split("-")[0] for p in (tmp_path / "views").iterdir()} if mode == "materialised" else set()
    assert files == ({"train", "val", "test"} if mode == "materialised" else set())


@pytest.mark.parametrize("every", [{"every_n_train_steps": 3}, {"every_n_epochs": 1}])
def test_a_resumed_run_sees_the_same_windows(store, tmp_path, every):
    """Interrupted within an epoch or at its end: what follows is what would have followed."""

    def run(name, steps, checkpoint=None, **kwargs):
        module = Scale()
        data = CSIDataModule(store.path, 16, num_workers=0)
        keep = ModelCheckpoint(tmp_path / name, save_last=True, save_top_k=-1, **every)
        fit = trainer(tmp_path, max_epochs=4, max_steps=steps, enable_checkpointing=True, callbacks=[keep])
        fit.fit(module, data, ckpt_path=checkpoint)
        return module

    whole = run("whole", 15)
    assert len(whole.seen) == 15
    checkpoints = sorted((tmp_path / "whole").glob("epoch*.ckpt"))
    assert len(checkpoints) >= 3
    for checkpoint in checkpoints:
        done = torch.load(checkpoint, weights_only=True)["global_step"]
        resumed = run("resumed", 15, checkpoint)
        assert resumed.seen == whole.seen[done:], checkpoint.name
        torch.testing.assert_close(resumed.weight, whole.weight)


def test_processes_share_the_windows(store):
    windows = CSIWindows(store, "train", windows_per_sample=3)  # 54
    orders = [list(WindowSampler(windows, True, 1, rank, 4, clock=lambda: 2)) for rank in range(4)]
    assert {len(o) for o in orders} == {14}
    assert {e for o in orders for e, _ in o} == {2}
    assert {i for o in orders for _, i in o} == set(range(54))
    whole = [i for _, i in WindowSampler(windows, True, 1, clock=lambda: 2)]
    assert [i for _, i in orders[1]][:13] == whole[1::4][:13]
    assert whole != [i for _, i in WindowSampler(windows, True, 1, clock=lambda: 3)]
    assert whole != [i for _, i in WindowSampler(windows, True, 2, clock=lambda: 2)]
    evaluated = [list(WindowSampler(windows, False, 1, rank, 4, even=False)) for rank in range(4)]
    assert [len(o) for o in evaluated] == [14, 14, 13, 13]
    assert sorted(i for o in evaluated for _, i in o) == list(range(54))  # none twice


def test_workers_follow_the_epoch(store):
    data = CSIDataModule(store.path, 8, num_workers=2, snr_db=(0.0, 20.0))
    loader = data.train_dataloader()
    snr = []
    for epoch in (0, 1, 0):
        loader.sampler.set_epoch(epoch)
        snr.append(torch.cat([b.snr_db for b in loader]))
    assert torch.equal(snr[0], snr[2])
    assert not torch.equal(snr[0], snr[1])


def test_lightning_leaves_the_sampler_alone(store, tmp_path):
    data = CSIDataModule(store.path, 8, num_workers=0)
    run = trainer(tmp_path, max_epochs=1)
    run.fit(Scale(), data)
    loader = data.train_dataloader()
    assert run._data_connector._prepare_dataloader(loader, shuffle=True, mode=None) is loader


def test_read_from_a_config(store):
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(CSIDataModule, "data")
    config = f"""
data:
  store: {store.path}
  batch_size: 4
  snr_db: [0, 20]
  eval_snr_db: [0, 10, 20]
  horizons: [1, 2.5]
  tx_array: {{num_rows: 1, num_cols: 4, pattern: tr38901}}
"""
    data = parser.instantiate(parser.parse_string(config)).data
    assert data.snr_db == (0, 20)
    assert data.view.tx_array == PlanarArray(1, 4, pattern="tr38901")
    assert data.view.horizons == (1.0, 2.5)
    assert data.view.num_subcarriers == 6  # the recipe's
    assert len(data.windows("val")) == 3 * 24
    scalar = parser.instantiate(parser.parse_args([f"--data.store={store.path}", "--data.snr_db=7"])).data
    assert scalar.windows("train").batch([0]).snr_db == 7


def test_errors_name_the_remedy(tmp_path, store):
    with pytest.raises(StoreError, match=r"chanlab generate .*--out .*nowhere"):
        CSIDataModule(tmp_path / "nowhere").setup("fit")
    with pytest.raises(UsageError, match="num_workers"):
        CSIDataModule(store.path, num_workers=-1)


def test_plain_torch_loop(store):
    windows = CSIWindows(store, "train")
    loader = DataLoader(windows, 32, shuffle=True, collate_fn=collate)
    assert sum(len(windows.to_batch(b).history) for b in loader) == len(windows)
