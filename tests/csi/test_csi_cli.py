"""fit, validate, test and predict, as users run them."""

import csv

import h5py
import pytest
import torch
import yaml

import chanlab.csi
from chanlab.cli.main import main
from chanlab.csi import load_predictor, save_weights


def run(*arguments):
    assert main([str(a) for a in arguments]) == 0


@pytest.fixture
def config(tmp_path, tiny_store, monkeypatch):
    """A recipe over the tiny store, and everything a run writes in the test's own folder."""
    monkeypatch.chdir(tmp_path)

    def write(predictor, init_args=None, lr=1e-3, epochs=2, **trainer):
        content = {
            "seed_everything": 3,
            "model": {
                "class_path": "chanlab.csi.CSIPredictionModule",
                "init_args": {"lr": lr, "predictor": {"class_path": predictor, "init_args": init_args or {}}},
            },
            "data": {
                "class_path": "chanlab.data.CSIDataModule",
                "init_args": {"store": str(tiny_store), "batch_size": 16, "num_workers": 0, "windows_per_sample": 2},
            },
            "trainer": {
                "max_epochs": epochs,
                "default_root_dir": "out",
                "accelerator": "cpu",
                "log_every_n_steps": 1,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "callbacks": [
                    {
                        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                        "init_args": {
                            "filename": "best",
                            "monitor": "val/nmse_db",
                            "enable_version_counter": False,
                        },
                    },
                    {
                        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                        "init_args": {
                            "filename": "last",
                            "save_on_exception": True,
                            "enable_version_counter": False,
                        },
                    },
                    {"class_path": "chanlab.csi.PredictionWriter"},
                ],
                **trainer,
            },
        }
        path = tmp_path / "tiny.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return write


GRU = ("chanlab.csi.GRU", {"num_subcarriers": 8, "hidden": 8, "layers": 1})


def test_from_fit_to_predictions(config, tmp_path, capsys):
    path = config(*GRU)
    run("fit", "--config", path)
    rows = list(csv.DictReader((tmp_path / "out/logs/version_0/metrics.csv").open()))
    assert {"train/nmse", "val/nmse_db"} <= set(rows[0])
    assert (tmp_path / "out/logs/version_0/config.yaml").is_file()

    run("validate", "--config", path, "--ckpt_path", "last")
    capsys.readouterr()
    run("test", "--config", path, "--ckpt_path", "best")
    assert "test/nmse_step4_db" in capsys.readouterr().out

    run("predict", f"--config={path}", "--ckpt_path", tmp_path / "out/best.ckpt")
    predictor = load_predictor(tmp_path / "out/best.ckpt")
    assert predictor.gru.hidden_size == 8
    with h5py.File(tmp_path / "out/predictions.h5") as file:
        assert file["prediction"].shape == file["target"].shape
        assert file["prediction"].shape[1:] == (1, 4, 4, 8)
        assert len(file["sample_id"]) == len(file["prediction"]) > 0
        assert file.attrs["checkpoint"].endswith("best.ckpt")


@pytest.mark.parametrize("predictor", ["NoPrediction", "AR", "PAD"])
def test_classical_predictors_are_evaluated_without_a_checkpoint(predictor, config, tmp_path, capsys):
    path = config(f"chanlab.csi.{predictor}")
    run("test", "--config", path)
    assert "test/nmse_db" in capsys.readouterr().out
    run("predict", "--config", path)
    assert (tmp_path / "out/predictions.h5").is_file()
    assert main(["fit", "--config", str(path)]) == 2
    assert f"{predictor} has nothing to train: evaluate it with `chanlab test" in capsys.readouterr().err


def test_the_transformer_learns_through_the_command_line(config):
    run(
        "fit",
        "--config",
        config("chanlab.csi.Transformer", {"num_subcarriers": 8, "width": 8, "heads": 2, "layers": 1}),
    )


def test_an_interrupted_run_goes_on(config, tmp_path, capsys):
    """Epochs hold 4 steps: lost in the 7th of 12, it goes on after the 6th and ends where it should."""
    path = config("small_predictors.Interrupted", {"fail_at": 7}, lr=0.05, epochs=3)
    (tmp_path / "lost").touch()
    assert main(["fit", "--config", str(path)]) == 1
    assert "the machine is lost" in capsys.readouterr().err
    last = torch.load(tmp_path / "out/last.ckpt", weights_only=True)
    assert (last["epoch"], last["global_step"]) == (1, 6)

    (tmp_path / "lost").unlink()
    run("fit", "--config", path, "--ckpt_path", "last")
    resumed = torch.load(tmp_path / "out/last.ckpt", weights_only=True)
    assert (resumed["epoch"], resumed["global_step"]) == (2, 12)
    epochs = [int(r["epoch"]) for r in csv.DictReader((tmp_path / "out/logs/version_1/metrics.csv").open())]
    assert min(epochs) == 1

    run("fit", "--config", path, "--trainer.default_root_dir", "undisturbed")
    undisturbed = torch.load(tmp_path / "undisturbed/last.ckpt", weights_only=True)
    assert resumed["state_dict"].keys() == undisturbed["state_dict"].keys()
    for key, value in undisturbed["state_dict"].items():
        assert torch.allclose(resumed["state_dict"][key], value, atol=1e-6), key


def test_last_without_a_checkpoint_starts_from_the_beginning(config, tmp_path, capsys):
    path = config("small_predictors.Interrupted", epochs=1)
    run("fit", "--config", path, "--ckpt_path", "last")
    assert "training starts from the beginning" in capsys.readouterr().err
    assert (tmp_path / "out/last.ckpt").is_file()


def test_hyperparameters_in_a_checkpoint_are_plain_and_come_back(config, tmp_path, tiny_llama):
    run("fit", "--config", config("small_predictors.OnBackbone", {"backbone": str(tiny_llama)}, epochs=1))
    checkpoint = torch.load(tmp_path / "out/last.ckpt", weights_only=True)
    predictor = checkpoint["hyper_parameters"]["predictor"]
    assert predictor["class_path"].endswith("OnBackbone")
    assert predictor["init_args"]["backbone"] == str(tiny_llama)
    assert not any("q_proj" in key for key in checkpoint["state_dict"])
    assert load_predictor(tmp_path / "out/last.ckpt").backbone.width == 16


def test_shipped_weights_are_evaluated_and_trained_on(config, tmp_path, capsys):
    """A file of `save_weights` goes where a checkpoint goes."""
    path = config(*GRU)
    run("fit", "--config", path)
    given = load_predictor(tmp_path / "out/best.ckpt")
    save_weights(given, tmp_path / "gru.safetensors", bits=32)
    figures = []
    for checkpoint in ("best", tmp_path / "gru.safetensors"):
        capsys.readouterr()
        run("test", "--config", path, "--ckpt_path", checkpoint)
        figures.append(capsys.readouterr().out)
    assert figures[0].strip()
    assert figures[0] == figures[1]

    run("fit", "--config", path, "--ckpt_path", tmp_path / "gru.safetensors", "--model.lr", 0)
    tuned = load_predictor(tmp_path / "out/last.ckpt")
    assert all(torch.equal(p, q) for p, q in zip(tuned.parameters(), given.parameters(), strict=True))
    assert main(["test", "--config", str(path), "--ckpt_path", "none.safetensors"]) == 2
    other = [
        "test",
        "--config",
        str(path),
        "--model.predictor.hidden",
        "9",
        "--ckpt_path",
        f"{tmp_path}/gru.safetensors",
    ]
    assert main(other) == 1
    assert "build GRU with the arguments that it was trained with" in capsys.readouterr().err


def test_a_recipe_may_name_weights_to_start_from(config, tmp_path, capsys):
    path = config(*GRU)
    save_weights(given := chanlab.csi.GRU(num_subcarriers=8, hidden=8, layers=1), tmp_path / "gru.safetensors", bits=32)
    run("test", "--config", path, "--ckpt_path", tmp_path / "gru.safetensors")
    as_checkpoint = capsys.readouterr().out
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"weights": "gru.safetensors"}))
    run("test", "--config", path)
    assert capsys.readouterr().out == as_checkpoint

    def kept():
        found = load_predictor(tmp_path / "out/last.ckpt").parameters()
        return all(torch.equal(p, q) for p, q in zip(found, given.parameters(), strict=True))

    run("fit", "--config", path, "--ckpt_path", "last", "--model.lr", 0)  # there is none yet
    assert kept()
    run("fit", "--config", path, "--weights", "null", "--model.lr", 0)
    assert not kept()
    (tmp_path / "models/csi").mkdir(parents=True)
    (tmp_path / "gru.safetensors").rename(tmp_path / "models/csi/moved.safetensors")
    for name in ("csi/moved.safetensors", "moved.safetensors"):
        run("fit", "--config", path, "--weights", name, "--model.lr", 0)
        assert kept()
    capsys.readouterr()
    run("test", "--config", path, "--weights", "null", "--ckpt_path", "moved.safetensors")
    assert capsys.readouterr().out == as_checkpoint
    assert main(["test", "--config", str(path), "--ckpt_path", "gone.safetensors"]) == 2
    assert "There are no weights gone.safetensors" in capsys.readouterr().err
    assert main(["fit", "--config", str(path)]) == 2
    assert "There are no weights gru.safetensors" in capsys.readouterr().err


def test_a_checkpoints_own_arguments_win_and_are_told(config, capsys):
    path = config(*GRU, epochs=1)
    run("fit", "--config", path, "--model.predictor.hidden", 12)
    capsys.readouterr()
    run("test", "--config", path, "--ckpt_path", "best")
    assert "model.init_args.predictor.init_args.hidden: 12, not 8" in capsys.readouterr().err


def test_print_config_shows_every_option(config, capsys):
    assert main(["fit", "--config", str(config(*GRU)), "--print_config"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["model"]["init_args"]["warmup"] == 0.05
    assert shown["seed_everything"] == 3


def test_mistakes_cost_a_line_and_exit_code_2(config, tmp_path, capsys):
    path = str(config(*GRU))
    mistakes = {
        ("test", "--config", path): "--ckpt_path best",
        ("predict", "--config", path, "--ckpt_path", "best"): "train first",
        ("test", "--config", path, "--ckpt_path", "none.ckpt"): "no checkpoint none.ckpt",
        ("fit", "--config", "no_such_recipe"): "csi/gru",
        ("fit", "--config", path, "--model.predictor.bogus", "1"): "'bogus' is not accepted",
        ("fit", "--config", path, "--data.store", "none"): "chanlab generate",
        ("fit", "--config", path, "--model.predictor.num_subcarriers", "9"): "9 subcarriers, not 8",
    }
    for arguments, remedy in mistakes.items():
        code = main(list(arguments))
        error = capsys.readouterr().err
        assert code == (1 if "none" in arguments else 2), (arguments, error)
        assert remedy in error
        assert "Traceback" not in error


@pytest.mark.parametrize(
    "name", ["no_prediction", "ar", "pad", "ray_pursuit", "gru", "transformer", "learned_wiener_street"]
)
def test_recipes_are_found_by_name_and_parse(name, monkeypatch, tmp_path, capsys):
    assert main(["fit", "--config", name, "--print_config"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["trainer"]["default_root_dir"] == f"out/csi/{name}"
    assert shown["data"]["init_args"]["store"] == "data/street_canyon"


@pytest.mark.parametrize("name", ["llm4cp", "llm4cp_random", "llm4cp_nollm"])
def test_recipes_on_streamed_channels_parse(name, capsys):
    assert main(["fit", "--config", name, "--data.duplex", "fdd", "--print_config"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["trainer"]["default_root_dir"] == f"out/csi/{name}"
    assert shown["data"]["init_args"]["duplex"] == "fdd"
    predictor = shown["model"]["init_args"]["predictor"]["init_args"]
    assert (predictor["backbone"] is None) == (name == "llm4cp_nollm")
    assert predictor["pretrained"] == (name != "llm4cp_random")
