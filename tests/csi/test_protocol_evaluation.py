"""Figures of a protocol's sets are those of `chanlab.metrics`, cell by cell."""

from collections import Counter

import pytest
import torch
from torch import nn

from chanlab.csi import NoPrediction, evaluate_protocol, few_cells, join_results, protocol_records
from chanlab.data import Cell, SampleRequest, StreamedCSI
from chanlab.data.protocol import CSI4CAST
from chanlab.errors import UsageError
from chanlab.metrics import nmse, nmse_by_step

CELLS = (Cell("D", 300e-9, 10.0), Cell("A", 30e-9, 30.0))


class Recorder(nn.Module):
    """Predicts nothing and keeps what it was told of the noise."""

    horizons = 4

    def __init__(self, subcarriers=600):
        super().__init__()
        self.subcarriers, self.told = subcarriers, []

    def forward(self, history, noise_variance=None):
        self.told.append(noise_variance)
        return history.new_zeros(*history.shape[:3], 4, self.subcarriers)


@pytest.fixture(autouse=True)
def two_cells(monkeypatch):
    monkeypatch.setitem(CSI4CAST.cells, "regular", CELLS)


def test_figures_are_the_metrics_own():
    stream = StreamedCSI(split="test", duplex="both", block_size=6)
    tdd, fdd, zero, _ = evaluate_protocol({"np": NoPrediction(), "zero": Recorder()}, stream, 6, 4)
    assert (tdd.system, tdd.duplex, fdd.duplex) == ("np", "tdd", "fdd")
    ids = stream.ids(6)[6:]  # the second cell, whatever the batches were
    batch = stream.batch(SampleRequest(ids, 3, "test"))
    prediction = NoPrediction()(batch.history)
    for result, target in ((tdd, batch.target[..., :300]), (fdd, batch.target[..., 300:])):
        for reduction in ("per_antenna_step", "pooled", "per_sample", "median"):
            expected = nmse_by_step(prediction, target, reduction)
            torch.testing.assert_close(result.nmse(reduction)[1, 3].float(), expected, rtol=1e-4, atol=1e-5)
        chosen = result.interval(where=lambda c, d: c == CELLS[1] and d.snr_db == 15.0)
        assert chosen.value == pytest.approx(nmse(prediction, target, "per_antenna_step").item(), rel=1e-4)
        assert chosen.low < chosen.value < chosen.high
    torch.testing.assert_close(zero.nmse(), torch.ones(2, 6, 4, dtype=torch.float64))


def test_records_have_the_published_figure_and_its_parts():
    stream = StreamedCSI(split="test", cells="robustness", block_size=2)
    results = evaluate_protocol({"np": NoPrediction()}, stream, 2, 8)
    records = protocol_records(results, "csi4cast", "robustness", resamples=20)
    whole = next(r for r in records if r["condition"] == {"duplex": "tdd"} and r["metric"] == "nmse")
    assert whole["value"] == pytest.approx(results[0].nmse().mean().item())
    for part in ("horizon", "speed", "level"):
        values = [r["value"] for r in records if part in r["condition"]]
        assert sum(values) / len(values) == pytest.approx(whole["value"])


def test_parts_of_a_set_join_to_the_whole():
    stream = StreamedCSI(split="test", block_size=3)
    (whole,) = evaluate_protocol({"np": NoPrediction()}, stream, 3, 8)
    parts = []
    for cell in CELLS:
        stream.cells = (cell,)
        parts += evaluate_protocol({"np": NoPrediction()}, stream, 3, 8)
    joined = join_results(parts)
    assert joined.cells == whole.cells
    torch.testing.assert_close(joined.nmse("pooled"), whole.nmse("pooled"))
    assert joined.interval("median") == pytest.approx(whole.interval("median"), rel=1e-5)
    other = evaluate_protocol({"other": NoPrediction()}, stream, 3, 8)
    with pytest.raises(UsageError, match=r"'np' and 'other' differ in system.*join those of each"):
        join_results([*parts, *other])
    fewer = evaluate_protocol({"np": NoPrediction()}, stream, 2, 8)
    with pytest.raises(UsageError, match=r"differ in number of samples"):
        join_results([*parts, *fewer])
    with pytest.raises(UsageError, match="at least one"):
        join_results([])


def test_nothing_chosen_tells_what_there_is():
    stream = StreamedCSI(split="test", block_size=2)
    (result,) = evaluate_protocol({"np": NoPrediction()}, stream, 2, 8)
    with pytest.raises(UsageError, match=r"choose among models A, D, delay spreads 30, 300 ns, speeds 10, 30 m/s"):
        result.interval(where=lambda cell, condition: cell.speed == 3.0)


@pytest.mark.parametrize("models", ["ACD", "ABCDE"])
def test_few_cells_hold_all_kinds(models):
    speeds = (1.0, 10.0, 30.0) if models == "ACD" else tuple(map(float, range(1, 18)))
    cells = [Cell(m, d * 1e-9, v) for m in models for d in (30, 100, 300) for v in speeds]
    assert sorted(few_cells(cells)) == sorted(cells)
    for every in (2, 3):
        chosen = few_cells(cells, every)
        assert len(chosen) == -(-len(cells) // every)
        for kind in range(3):
            counts = Counter(cell[kind] for cell in chosen)
            assert set(counts) == {cell[kind] for cell in cells}
            assert max(counts.values()) <= 2 * min(counts.values())


def test_only_gaussian_noise_is_told():
    for cells, told in (("regular", True), ("robustness", False)):
        recorder = Recorder(300)
        evaluate_protocol({"zero": recorder}, StreamedCSI(split="test", cells=cells, block_size=1), 1, 2)
        assert {noise is not None for noise in recorder.told} == {told}


def test_a_wrong_shape_is_refused():
    with pytest.raises(UsageError, match="shape"):
        evaluate_protocol({"zero": Recorder(7)}, StreamedCSI(split="test", block_size=1), 1, 2)
