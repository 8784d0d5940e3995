import json

import pytest
import torch
import yaml

from chanlab.cli.demo import journal as journals
from chanlab.cli.demo import models, report, stages, training
from chanlab.cli.main import main
from chanlab.csi import load_predictor, save_weights
from chanlab.records import load_records, lookup, record, select


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Command line of a demo on few antennas and users, and its folder."""
    folder = tmp_path_factory.mktemp("demo")
    from chanlab.data.recipe import find_recipe

    data = yaml.safe_load(find_recipe("datasets", "two_ray").read_text())
    data["splits"] = {"by": "trajectory", "fractions": {"train": 0.5, "val": 0.2, "test": 0.3}}
    data["view"] = {
        "tx_array": {"num_rows": 1, "num_cols": 4},
        "num_subcarriers": 24,
        "subcarrier_spacing": 360e3,
        "windows_per_sample": 2,
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(data))
    model = models.read("gru")
    model["model"]["init_args"]["predictor"]["init_args"] |= {"num_subcarriers": 24, "hidden": 8, "layers": 1}
    model["data"]["init_args"] |= {"num_workers": 0}
    (folder / "gru.yaml").write_text(yaml.safe_dump(model))
    command = ["demo", "--quick", "--recipe", str(folder / "tiny.yaml"), "--model", str(folder / "gru.yaml")]
    return [*command, "--samples", "40", "--workers", "1", "--out", str(folder / "out")], folder / "out"


@pytest.fixture(scope="module")
def done(tiny):
    command, out = tiny
    assert main(command) == 0
    return out


def test_results_hold_every_system(done):
    records = load_records(done / "results.json")
    assert {r["system"] for r in records} == {"perfect CSI", "no prediction", "ar", "pad", "ray_pursuit", "gru"}
    assert {r["metric"] for r in records} >= {"nmse_pooled", "sgcs", "spectral_efficiency", "bler"}
    for item in records:
        assert item["data"] == "two_ray"
        assert item["split"] == ("val" if item["metric"] == "nmse_per_sample" else "test")
        assert item["hardware"]
        assert item["n"] > 0
    overall = select(records, metric="nmse_pooled", horizon="all")
    assert all(r["low"] <= r["value"] <= r["high"] for r in overall)
    # Two rays are two exponentials: what is not predicted is noise, which a model of order 12 averages out.
    by_name = {r["system"]: r["value"] for r in overall}
    assert by_name["ar"] < by_name["no prediction"] - 10


def test_report_is_one_file_with_pictures_and_origin(done):
    page = (done / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 5
    assert 'src="http' not in page
    assert all(word in page for word in ("no prediction", "PAD", "coded BLER", "hardware", "cores", "sionna"))


def test_a_second_run_keeps_what_is_done(tiny, done, capsys, monkeypatch):
    results = (done / "results.json").read_bytes()
    for name in ("_judge", "_quiet"):  # neither judges nor trains again
        monkeypatch.setattr(stages, name, None)
    assert main(tiny[0]) == 0
    said = capsys.readouterr()
    assert said.err.count("already") == 3
    assert "no prediction" in said.out
    assert (done / "results.json").read_bytes() == results


def test_another_seed_trains_anew_on_the_same_channels(tiny, done, capsys, monkeypatch):
    monkeypatch.setattr(stages, "_judge", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    before = json.loads((done / "journal.json").read_text())
    assert main([*tiny[0], "--seed", "2", "--epochs", "1"]) == 130
    after = json.loads((done / "journal.json").read_text())
    assert after["channels"] == before["channels"]
    assert after["training"]["key"] != before["training"]["key"]
    assert not after["judgement"]["done"]
    assert yaml.safe_load((done / "training" / "model.yaml").read_text())["seed_everything"] == 2


@pytest.mark.parametrize(
    "option", [["--epochs", "0"], ["--workers", "0"], ["--recipe", "no_such"], ["--model", "no_such"]]
)
def test_options_that_cannot_be(option, tiny, tmp_path, capsys):
    assert main([*tiny[0], "--out", str(tmp_path / "x"), *option]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_an_interrupted_stage_is_not_done_and_its_time_adds_up(tmp_path):
    journal = journals.Journal(tmp_path / "journal.json")
    with pytest.raises(KeyboardInterrupt), journal.stage("training", "a"):
        raise KeyboardInterrupt
    again = journals.Journal(tmp_path / "journal.json")
    assert again.begun("training", "a")
    assert not again.done("training", "a")
    first = again.seconds("training")
    with again.stage("training", "a") as facts:
        facts["x"] = 1
    assert again.done("training", "a")
    assert not again.done("training", "b")
    assert again.seconds("training") >= first
    assert journals.Journal(tmp_path / "journal.json").facts("training") == {"x": 1}


@pytest.fixture(scope="module")
def tuning(tiny, done):
    """The same with weights to start from and a learning rate of zero: fine-tuned weights are the shipped ones."""
    command, out = tiny
    folder = out.parent
    recipe = yaml.safe_load((folder / "gru.yaml").read_text())
    save_weights(load_predictor(done / "training" / "best.ckpt"), folder / "gru.safetensors", bits=32)
    recipe["weights"] = str(folder / "gru.safetensors")
    recipe["model"]["init_args"]["lr"] = 0.0
    (folder / "tuned.yaml").write_text(yaml.safe_dump(recipe))
    command = [str(folder / "tuned.yaml") if word.endswith("gru.yaml") else word for word in command]
    assert main(command) == 0
    return command, out


def test_a_recipe_with_weights_is_judged_as_it_is_fine_tuned_and_from_scratch(tuning):
    records = load_records(tuning[1] / "results.json")
    overall = {r["system"]: r["value"] for r in select(records, metric="nmse_pooled", horizon="all")}
    names = {f"GRU {how}" for how in ("zero-shot", "fine-tuned", "from scratch")}
    assert set(overall) == {"no prediction", "ar", "pad", "ray_pursuit", *names}
    assert overall["GRU fine-tuned"] == overall["GRU zero-shot"]
    assert overall["GRU from scratch"] != overall["GRU zero-shot"]
    assert {r["system"] for r in select(records, metric="bler")} >= names
    for how in ("fine-tuned", "from scratch"):
        curve = select(records, system=f"GRU {how}", metric="nmse_per_sample", split="val")
        assert lookup(curve[0], "step") == 0
        assert len(curve) > 1
        assert len({r["value"] for r in curve}) == 1  # nothing is learnt at a learning rate of zero
    page = (tuning[1] / "report.html").read_text()
    assert "From shipped weights and from scratch" in page
    assert "0.0 dB better than the same zero-shot" in page or "0.0 dB worse than the same zero-shot" in page


def test_other_weights_are_fine_tuned_anew_while_scratch_is_kept(tuning, capsys, monkeypatch):
    command, out = tuning
    path = out.parent / "gru.safetensors"
    predictor = models.predictor(command[command.index("--model") + 1])
    torch.nn.init.ones_(predictor.gru.weight_hh_l0)
    save_weights(predictor, path, bits=32)
    before = json.loads((out / "journal.json").read_text())
    monkeypatch.setattr(stages, "_judge", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(command) == 130
    after = json.loads((out / "journal.json").read_text())
    assert after["fine-tuning"]["key"] != before["fine-tuning"]["key"]
    assert after["training from scratch"] == before["training from scratch"]
    tuned = load_predictor(out / "training" / "fine_tuned" / "best.ckpt")
    assert torch.equal(tuned.gru.weight_hh_l0, predictor.gru.weight_hh_l0)


def test_missing_or_foreign_weights_cost_no_tracing(tiny, tmp_path, capsys):
    command, out = tiny
    recipe = yaml.safe_load((out.parent / "gru.yaml").read_text())
    arguments = [*command, "--model", str(tmp_path / "x.yaml"), "--out", str(tmp_path / "out")]
    foreign = tmp_path / "foreign.safetensors"
    save_weights(torch.nn.Linear(2, 2), foreign)
    for weights, code, remedy in (("none.safetensors", 2, "--weights null"), (str(foreign), 1, "build GRU")):
        (tmp_path / "x.yaml").write_text(yaml.safe_dump({**recipe, "weights": weights}))
        assert main(arguments) == code
        assert remedy in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_street_recipe_loads_the_shipped_weights():
    """It has the arguments that the weights were trained with, but for the band and how windows are augmented."""
    shipped = models.read("learned_wiener")["model"]["init_args"]["predictor"]
    recipe = models.read("learned_wiener_street")
    predictor = recipe["model"]["init_args"]["predictor"]
    assert predictor["class_path"] == shipped["class_path"]
    for in_training in ("augmentation", "few_rays"):
        shipped["init_args"].pop(in_training, None)
    assert predictor["init_args"] == shipped["init_args"] | {"duplex": "tdd"}
    training.check_weights("learned_wiener_street")


def test_learning_curve_joins_resumed_runs(tmp_path):
    for version, lines in {0: ["0,-1.0,", "3,,-9", "9,-2.0,", "19,-3.0,"], 1: ["29,-4.0,"], 10: ["39,-5.0,"]}.items():
        folder = tmp_path / "logs" / f"version_{version}"
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text("\n".join(["step,val/nmse_db,train/nmse", *lines]))
    assert training.learning_curve(tmp_path) == [(0, -1.0), (10, -2.0), (20, -3.0), (30, -4.0), (40, -5.0)]
    assert training.learning_curve(tmp_path / "none") == []


def test_training_config_keeps_the_recipe_but_for_places(tmp_path):
    recipe = models.read("gru")
    config = models.training_config(recipe, tmp_path / "store", tmp_path / "training", seed=3, epochs=2)
    assert config["model"] == recipe["model"]
    assert config["seed_everything"] == 3
    assert config["trainer"]["max_epochs"] == 2
    assert config["data"]["init_args"]["store"] == str(tmp_path / "store")
    (keeper,) = (c for c in config["trainer"]["callbacks"] if c["class_path"].endswith("ModelCheckpoint"))
    assert keeper["init_args"]["dirpath"] == str(tmp_path / "training")
    assert recipe == models.read("gru")


def test_answer_states_gains_from_records():
    made = [
        record(system=s, metric="nmse_pooled", value=v, condition={"snr_db": 15.0, "horizon": "all"})
        for s, v in {"no prediction": -1.0, "ar": -4.0, "llm": -6.5}.items()
    ]
    said = report.answer(made, 15.0)
    assert "-6.5 dB" in said
    assert "5.5 dB better than no prediction, 2.5 dB better than AR" in said
    assert report.answer(made[:2], 15.0) == ""


def test_answer_compares_what_was_fine_tuned_with_the_same_network():
    made = [
        record(system=s, metric="nmse_pooled", value=v, condition={"snr_db": 15.0, "horizon": "all"})
        for s, v in {"pad": -7.0, "Net zero-shot": -5.0, "Net fine-tuned": -6.5, "Net from scratch": -3.0}.items()
    ]
    said = report.answer(made, 15.0)
    assert "the fine-tuned Net reaches an NMSE of -6.5 dB" in said
    assert "0.5 dB worse than PAD, 1.5 dB better than the same zero-shot, 3.5 dB better than the same from scr" in said
