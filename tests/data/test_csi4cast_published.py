"""No prediction on the protocol's channels, against the figures that its authors published."""

import csv
from pathlib import Path

import pytest
import torch

from chanlab.csi import NoPrediction, evaluate_protocol
from chanlab.data import Cell, StreamedCSI
from chanlab.data.protocol import CSI4CAST
from chanlab.metrics import bootstrap_interval

SAMPLES, PUBLISHED_SAMPLES = 32, 100
# Cells whose ratios are not heavy-tailed.
CELLS = [
    *(Cell(m, 300e-9, v) for m, v in (("A", 1.0), ("A", 30.0), ("C", 10.0), ("C", 30.0), ("D", 1.0), ("D", 10.0))),
    *(Cell("D", d, v) for d, v in ((30e-9, 30.0), (100e-9, 1.0), (30e-9, 10.0))),
]


def published():
    lines = (Path(__file__).parent / "assets/csi4cast_np.csv").read_text().splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return {
        (r["duplex"], r["cdl_model"], float(r["delay_spread_s"]), float(r["speed_mps"]), float(r["snr_db"])): [
            float(r[f"nmse_step{step}"]) for step in range(1, 5)
        ]
        for r in rows
    }


@pytest.fixture(scope="module")
def results():
    cells, before = tuple(CELLS), CSI4CAST.cells["regular"]
    CSI4CAST.cells["regular"] = cells
    try:
        stream = StreamedCSI(split="test", duplex="both", block_size=SAMPLES)
        levels = [c for c in stream.conditions if c.snr_db in (0.0, 20.0)]
        stream.conditions = tuple(c._replace(offset=stream.protocol.offset) for c in levels)
        return evaluate_protocol({"no prediction": NoPrediction()}, stream, SAMPLES, SAMPLES)
    finally:
        CSI4CAST.cells["regular"] = before


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_no_prediction_is_as_published(results, cell):
    """99.9 % intervals: there are 144 of them. Both figures are samples, theirs of 100."""
    figures = published()
    for result in results:
        i = result.cells.index(cell)
        for j, condition in enumerate(result.conditions):
            key = (result.duplex, cell.model, round(cell.delay_spread, 12), cell.speed, condition.snr_db)
            for step, peer in enumerate(figures[key]):
                ours = bootstrap_interval(result.antenna_ratio[i, j, :, step], confidence=0.999)
                stretch = (1 + SAMPLES / PUBLISHED_SAMPLES) ** 0.5
                low, high = (ours.value + stretch * (end - ours.value) for end in (ours.low, ours.high))
                assert low <= peer <= high, (key, step + 1, ours, peer)


def test_two_samplings_of_steps_agree(results):
    """Mean over steps of the protocol's figure is its per_antenna_step reduction; pooled and median lie below it."""
    for result in results:
        mean = result.nmse()
        torch.testing.assert_close(mean, result.antenna_ratio.mean(2))
        assert (result.nmse("pooled").mean() < mean.mean()).all()
        assert (result.nmse("median").mean() < mean.mean()).all()


def test_the_published_channels_have_dopplers_of_sionna_before_2(results):
    """With Doppler shifts at the user's own angles no prediction is worse than published, far beyond sampling error."""
    cell = Cell("C", 300e-9, 10.0)
    stream = StreamedCSI("csi4cast_sionna2", "test", block_size=SAMPLES)
    stream.cells, stream.conditions = (cell,), stream.conditions[-1:]
    (ours,) = evaluate_protocol({"no prediction": NoPrediction()}, stream, 4 * SAMPLES, SAMPLES)
    step1 = bootstrap_interval(ours.antenna_ratio[0, 0, :, 0] - 10**-2.5, confidence=0.99)
    assert step1.low > published()["tdd", "C", 300e-9, 10.0, 25.0][0] - 10**-2.5
