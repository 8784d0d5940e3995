"""Scripts of sims/ about CSI prediction, on few channels."""

import importlib.util
import json
from itertools import combinations
from pathlib import Path

import pytest
import torch
from exponentials import exponentials, noisy
from torch import nn

from chanlab.cli.demo import models
from chanlab.csi import ProtocolResult
from chanlab.data.protocol import CSI4CAST, Cell

CELLS = (Cell("D", 300e-9, 10.0), Cell("A", 30e-9, 30.0))


def script(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "sims" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def two_cells(monkeypatch):
    monkeypatch.setitem(CSI4CAST.cells, "regular", CELLS)


def test_orders_are_tried_on_val(monkeypatch, tmp_path, capsys):
    orders = script("csi_orders")
    monkeypatch.setattr(orders, "TRIED", {"ar": [{"order": 2}, {"order": 15}]})
    line = ["--systems", "ar", "--every", "1", "--samples", "2", "--out", str(tmp_path)]
    assert orders.main(line) == 0
    records = json.loads((tmp_path / "results.json").read_text())
    assert {r["split"] for r in records} == {"val"}
    value = {(r["system"], *r["condition"].items()): r["value"] for r in records if r["metric"] == "nmse"}
    assert value["ar", ("order", 15)] < value["ar", ("order", 2)]
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[1:3] for line in said if "least" in line] == [["order", "15"]]
    assert (tmp_path / "csi_orders.png").is_file()
    assert orders.main([*line[:-2], "--samples", "1"]) == 2


@pytest.mark.parametrize("name", list(script("csi_orders").TRIED))
def test_orders_know_every_argument_that_they_try(name):
    """Each setting is one that the recipe's predictor takes, for 16 snapshots, and predicts otherwise than the rest."""
    history, variance = noisy(exponentials(1, 32, 16, 8, num_paths=6), 10.0)
    node = models.read(f"csi4cast_{name}")["model"]["init_args"]["predictor"]
    found = []
    for setting in script("csi_orders").TRIED[name]:
        predictor = models.instantiate({**node, "init_args": {**node["init_args"], **setting}}, nn.Module)
        found.append(predictor.eval()(history, variance))
    assert all(one.isfinite().all() for one in found)
    assert not any(torch.equal(a, b) for a, b in combinations(found, 2))


@pytest.mark.parametrize(("models", "compared"), [("", True), ("DA", True), ("D", False)])
def test_published_means_stand_beside_whole_sets_only(models, compared, monkeypatch, tmp_path):
    genie = script("csi_genie")
    cells = tuple(cell for cell in CELLS if cell.model in (models or "DA"))
    ones = torch.ones(len(cells), 6, 2, 4, dtype=torch.float64)
    conditions = CSI4CAST.conditions["regular"]
    results = [ProtocolResult("class genie", band, cells, conditions, ones, ones, ones) for band in ("tdd", "fdd")]
    monkeypatch.setattr(genie, "evaluate", lambda args: results)
    drawn = []
    monkeypatch.setattr(genie, "picture", lambda results, published: drawn.append(published) or figure())
    assert genie.main(["--models", models, "--out", str(tmp_path)]) == 0
    assert bool(drawn[0]) == compared


def figure():
    from chanlab.cli.figures import new_figure

    return new_figure(1, 1)
