"""benchmarks/csi_coverage.py: whose bounds are judged, under what name, and where the records go."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import yaml

from chanlab.csi import LearnedWiener, save_weights
from chanlab.data.protocol import CSI4CAST, Cell
from chanlab.data.recipe import find_recipe

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import csi_coverage as benchmark


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The recipe of a small network, in an empty folder, with weights beside the recipes."""
    config = yaml.safe_load(find_recipe("models", "learned_wiener").read_text())
    sizes = {"dim": 16, "layers": 1}
    config["model"]["init_args"]["predictor"]["init_args"] |= sizes
    torch.manual_seed(0)
    network = LearnedWiener(duplex="both", **sizes)
    for name in ("learned_wiener", "small", "mine"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config))
        save_weights(network, tmp_path / f"{name}.safetensors")
    monkeypatch.setattr(benchmark, "MODELS", tmp_path)
    monkeypatch.setitem(CSI4CAST.cells, "regular", (Cell("D", 300e-9, 10.0), Cell("A", 30e-9, 30.0)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("model", "weights", "name"),
    [
        ("learned_wiener", None, "ours"),
        ("learned_wiener", "learned_wiener", "ours"),
        ("learned_wiener", "mine", "mine"),
        ("small", None, "small"),
        ("small", "mine", "mine"),
    ],
)
def test_only_the_shipped_weights_are_ours(model, weights, name, small):
    line = ["--model", f"{model}.yaml", "--sets", "regular", "--samples", "1", "--results", "results.json"]
    weights = [] if weights is None else ["--weights", f"{weights}.safetensors"]
    assert benchmark.main([*line, *weights]) == 0
    records = json.loads(Path("results.json").read_text())
    assert {r["system"] for r in records} == {name}
    assert {r["metric"] for r in records} == {"coverage", "coverage_worst_cell", "cells_within_3_points"}
    assert all(0 < r["value"] <= 1 for r in records if r["metric"] == "coverage")


def test_how_many_cells_would_look_right_if_all_were():
    """Shares of one cell vary from channel to channel by a tenth, of the other not at all; a hundred channels."""
    shares = torch.full((2, 100, 2, 2), 0.7, dtype=torch.float64)
    shares[0] += 0.1 * torch.tensor([1.0, -1.0]).repeat(50)[:, None, None]
    deviation = 0.1 * (100 / 99) ** 0.5 / 10
    expected = (1 + math.erf(0.03 / deviation / 2**0.5)) / 2
    torch.testing.assert_close(benchmark.expected_near(shares), torch.full((2, 2), expected, dtype=torch.float64))


def test_a_subset_leaves_the_cards_records_alone(small, monkeypatch):
    card, subset = Path("results.json"), Path("out/csi/results.json")
    line = ["--model", "small.yaml", "--sets", "regular", "--samples", "1"]
    assert benchmark.main(line) == 0
    monkeypatch.setattr(benchmark, "SAMPLES", 1)
    assert benchmark.main([*line, "--every", "2"]) == 0
    assert not card.exists()
    subset.unlink()
    assert benchmark.main(line) == 0
    assert card.exists()
    assert not subset.exists()


def test_mistakes_name_the_remedy(capsys):
    assert benchmark.main(["--model", "csi4cast_pad"]) == 2
    assert "take a recipe of LearnedWiener" in capsys.readouterr().err
    assert benchmark.main(["--model", "learned_wiener_street"]) == 2
    assert "duplex: both" in capsys.readouterr().err
