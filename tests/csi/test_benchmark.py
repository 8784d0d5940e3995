"""benchmarks/csi.py: which weights a system gets, on which bands it is judged, which cells are taken."""

import json
import sys
from pathlib import Path

import pytest
import torch

from chanlab.csi import CNN, PerBand, WiFo, save_weights
from chanlab.data.protocol import CSI4CAST, Cell
from chanlab.errors import UsageError

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import csi as benchmark


@pytest.fixture
def weights(tmp_path):
    """Writes a CNN's weights from a seed under a name."""

    def write(name, seed):
        torch.manual_seed(seed)
        save_weights(network := CNN(), tmp_path / f"{name}.safetensors", bits=32)
        return network

    return write


def first(module):
    return next(module.parameters())


def test_a_network_for_each_band_side_by_side(weights, tmp_path):
    weights("cnn_tdd_2", 2)
    tdd, fdd = weights("cnn_tdd_1", 1), weights("csi4cast_cnn_fdd", 3)
    system = benchmark.system("cnn", [tmp_path], "cpu")
    assert isinstance(system.predictor, PerBand)
    assert system.bands == ("tdd", "fdd")
    assert torch.equal(first(system.predictor.tdd), first(tdd))
    assert torch.equal(first(system.predictor.fdd), first(fdd))
    assert sum(p.numel() for p in system.timed.parameters()) == sum(p.numel() for p in tdd.parameters())
    history = torch.randn(1, 1, 2, 16, 300, dtype=torch.complex64)
    with torch.inference_mode():
        both = system.predictor(history)
        assert torch.equal(both, torch.cat([tdd.eval()(history), fdd.eval()(history)], -1))


def test_a_recipes_other_band_has_its_own_arguments(tmp_path):
    save_weights(WiFo(width=32, layers=1, decoder_layers=1), tmp_path / "wifo_fdd.safetensors")
    small = {"width": 32, "layers": 1, "decoder_layers": 1}
    config = benchmark.models.read("csi4cast_wifo")
    config["model"]["init_args"]["predictor"]["init_args"].update(small)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark.models, "read", lambda recipe: config)
        for name in ("wifo", "csi4cast_wifo"):
            assert benchmark.system(name, [tmp_path], "cpu").timed.frequency_offset == 0
            patch.setattr(benchmark, "find", lambda names, folders: tmp_path / "wifo_fdd.safetensors")
            assert benchmark.system(name, [tmp_path], "cpu").predictor.fdd.frequency_offset == 450


def test_judged_only_on_bands_with_weights(weights, tmp_path):
    assert benchmark.system("cnn", [tmp_path], "cpu").predictor is None
    weights("cnn_fdd", 1)
    assert benchmark.system("cnn", [tmp_path], "cpu").bands == ("fdd",)
    assert benchmark.system("pad", [tmp_path], "cpu").bands == ("tdd", "fdd")


def test_horizons_of_both_bands_agree():
    with pytest.raises(UsageError, match="set horizons of both to the same number"):
        PerBand(CNN(horizons=4), CNN(horizons=2))


def test_classical_predictors_on_all_cores_say_the_same():
    pad = benchmark.system("pad", [], "cpu").predictor
    history, noise = benchmark.window("cpu")
    history, noise = torch.cat([history, 2 * history.flip(3)]), torch.cat([noise, 4 * noise])
    for told in (noise, None):
        pad.denoise = told is not None
        torch.testing.assert_close(benchmark.OnCores(pad)(history, told), pad(history, told))


def test_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "MODELS", tmp_path)  # no weights, whatever the checkout has
    monkeypatch.setitem(CSI4CAST.cells, "regular", (Cell("D", 300e-9, 10.0), Cell("A", 30e-9, 30.0)))
    results = tmp_path / "results.json"
    line = ["--sets", "regular", "--samples", "2", "--runs", "2", "--results", str(results)]
    assert benchmark.main([*line, "--systems", "no prediction", "csi4cast_ar", "softs"]) == 0
    said = capsys.readouterr()
    assert "softs has no weights" in said.err
    records = json.loads(results.read_text())
    judged = {(r["system"], r["condition"]["duplex"]) for r in records if r["metric"] == "nmse"}
    assert judged == {(s, d) for s in ("no prediction", "csi4cast_ar") for d in ("tdd", "fdd")}
    latency = {r["system"]: r["condition"] for r in records if r["metric"] == "latency"}
    assert latency["softs"] == {"device": "cpu", "mode": "eager", "batch": 1}
    counts = {r["system"]: r["value"] for r in records if r["metric"] == "trained_parameters"}
    assert counts["csi4cast_ar"] == 0 < counts["softs"]


def test_who_has_to_know_the_noise_estimates_it_where_nobody_tells(tmp_path, monkeypatch):
    monkeypatch.setitem(CSI4CAST.cells, "regular", (Cell("D", 100e-9, 30.0),))
    results = tmp_path / "results.json"
    line = ["--sets", "robustness", "--samples", "2", "--no-latency", "--results", str(results)]
    assert benchmark.main([*line, "--systems", "no prediction", "pad"]) == 0
    records = [r for r in json.loads(results.read_text()) if r["metric"] == "nmse"]
    value = {r["system"]: r["value"] for r in records if r["condition"] == {"duplex": "tdd"}}
    assert value["pad"] < 0.5 * value["no prediction"]


def test_a_subset_leaves_the_cards_records_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark, "MODELS", tmp_path / "card")
    monkeypatch.setitem(CSI4CAST.cells, "regular", (Cell("D", 300e-9, 10.0), Cell("A", 30e-9, 30.0)))
    card, subset = tmp_path / "card" / "results.json", tmp_path / "out" / "csi" / "results.json"
    line = ["--systems", "no prediction", "--sets", "regular", "--runs", "2"]
    assert benchmark.main([*line, "--samples", "2"]) == 0
    assert {r["metric"] for r in json.loads(subset.read_text())} >= {"nmse", "latency"}
    monkeypatch.setattr(benchmark, "SAMPLES", 2)
    assert benchmark.main([*line, "--samples", "2", "--every", "2"]) == 0
    assert benchmark.main([*line, "--samples", "2", "--weights", "elsewhere"]) == 0
    assert not card.exists()
    subset.unlink()
    assert benchmark.main([*line, "--samples", "2"]) == 0
    assert {r["metric"] for r in json.loads(card.read_text())} >= {"nmse", "latency"}
    assert not subset.exists()


def test_a_set_cut_short_is_a_subset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark, "MODELS", tmp_path / "card")
    monkeypatch.setattr(benchmark, "SAMPLES", 2)
    monkeypatch.setattr(benchmark, "PART", 1)
    monkeypatch.setitem(CSI4CAST.cells, "regular", (Cell("D", 300e-9, 10.0), Cell("A", 30e-9, 30.0)))
    clock = iter((0.0, 0.0, 30.0, 90.0))
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: next(clock, 100.0))
    line = ["--systems", "no prediction", "--sets", "regular", "--samples", "2", "--no-latency", "--total-minutes", "1"]
    assert benchmark.main(line) == 0
    assert not (tmp_path / "card").exists()
    records = json.loads((tmp_path / "out" / "csi" / "results.json").read_text())
    assert {r["cells"] for r in records} == {1}


def test_time_is_kept(tmp_path, capsys):
    results = tmp_path / "results.json"
    line = ["--systems", "no prediction", "--total-minutes", "0", "--results", str(results)]
    assert benchmark.main(line) == 0
    assert "time is up: 0 of 27 cells" in capsys.readouterr().err
    assert not results.exists()
    assert benchmark.main(["--samples", "1"]) == 2
    assert benchmark.main(["--systems", "nonsense"]) == 2
