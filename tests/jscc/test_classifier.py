"""The recipe of the downstream classifier, run as users run it, on pictures whose classes can be seen."""

import io
import tarfile

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer

from chanlab.cli.main import main
from chanlab.errors import UsageError
from chanlab.jscc import ImageClassifier, ImageDataModule
from chanlab.metrics import DownstreamAccuracy


@pytest.fixture
def archive(tmp_path):
    """Pictures in CIFAR-10's binary version; the class is the place of a bright bar, in noise."""
    rng = np.random.default_rng(0)
    path = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as file:
        for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
            label = rng.integers(0, 10, 100)
            images = rng.integers(0, 80, (100, 3, 32, 32))
            for image, place in zip(images, label, strict=True):
                image[:, :, 3 * place + 1 : 3 * place + 3] += 120
            data = np.concatenate([label[:, None], images.reshape(100, -1)], 1).astype(np.uint8).tobytes()
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(data)
            file.addfile(member, io.BytesIO(data))
    return path


def test_recipe_trains_and_tests(archive, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    common = ["--config", "jscc/classifier", "--data.images", str(archive), "--data.batch_size", "32"]
    common += ["--data.flip", "false", "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
    common += ["--model.width", "8", "--model.lr", "0.02"]
    assert main(["fit", *common, "--trainer.max_epochs", "5", "--trainer.log_every_n_steps", "5"]) == 0
    capsys.readouterr()
    assert main(["test", *common, "--ckpt_path", "best"]) == 0
    assert "test/accuracy" in capsys.readouterr().out
    model = ImageClassifier.load_from_checkpoint(
        tmp_path / "out/jscc/classifier/best.ckpt", weights_only=True, map_location="cpu"
    ).eval()
    data = ImageDataModule(archive, crop=32)
    clean, noisy = DownstreamAccuracy(model), DownstreamAccuracy(model)
    with torch.no_grad():
        for batch in data.batches("test"):
            clean.update(batch["image"], batch["label"])
            noise = torch.randn(batch["image"].shape, generator=torch.Generator().manual_seed(0))
            noisy.update((batch["image"] + 2 * noise).clamp(0, 1), batch["label"])
    assert clean.compute() > 0.8
    assert noisy.compute() < clean.compute() - 0.2


def test_images_without_classes_are_refused():
    batch = {"image": torch.rand(2, 3, 32, 32), "id": torch.arange(2)}
    with pytest.raises(UsageError, match="have no classes"):
        ImageClassifier(width=4).training_step(batch, 0)


def test_it_trains_for_a_time_whose_steps_nobody_knows():
    model = ImageClassifier(classes=2, width=4)
    samples = [{"image": torch.rand(3, 32, 32), "id": i, "label": i % 2} for i in range(4)]
    trainer = Trainer(
        max_epochs=-1,
        max_time={"seconds": 1},
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(samples, batch_size=4))
    assert trainer.global_step > 0
    assert trainer.optimizers[0].param_groups[0]["lr"] == model.lr
