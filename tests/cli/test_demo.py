import json

import pytest
import yaml

from chanlab.cli.demo import journal as journals
from chanlab.cli.demo import models, report, stages
from chanlab.cli.main import main
from chanlab.records import load_records, record, select


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
    assert {r["system"] for r in records} == {"perfect CSI", "no prediction", "ar", "pad", "gru"}
    assert {r["metric"] for r in records} >= {"nmse_pooled", "sgcs", "spectral_efficiency", "bler"}
    for item in records:
        assert item["data"] == "two_ray"
        assert item["split"] == "test"
        assert item["hardware"]
        assert item["n"] > 0
    overall = select(records, metric="nmse_pooled", horizon="all")
    assert all(r["low"] <= r["value"] <= r["high"] for r in overall)
    # Two rays are two exponentials: what is not predicted is noise, which a model of order 12 averages out.
    by_name = {r["system"]: r["value"] for r in overall}
    assert by_name["ar"] < by_name["no prediction"] - 10


def test_report_is_one_file_with_pictures_and_origin(done):
    page = (done / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 4
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
