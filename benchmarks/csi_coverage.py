"""How often the true channel lies within the bounds that LearnedWiener states, cell by cell of CSI-4CAST's protocol.

Over all antennas, steps, subcarriers, SNRs and channels of a cell, the share of entries whose error stays below the
bound for 50 % and 90 %. Cells are what a reader would call held out: their models, delay spreads and speeds are as the
set says, `generalization` for those that training never saw.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from chanlab.cli.common import run_script, script_parser, table, time_text
from chanlab.cli.demo import models
from chanlab.csi import LearnedWiener, few_cells, load_weights
from chanlab.data import StreamedCSI
from chanlab.data.protocol import cell_number
from chanlab.data.streamed_datamodule import EvaluationOrder
from chanlab.errors import UsageError
from chanlab.records import record, save_records

MODELS = Path(__file__).resolve().parents[1] / "models" / "csi"
PROBABILITIES = (0.5, 0.9)
NEAR = 0.03
EXAMPLES = """examples:
  python benchmarks/csi_coverage.py --samples 2 --every 9            (minutes on a CPU)
  python benchmarks/csi_coverage.py --samples 20 --device cuda
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, write records."""
    p = script_parser(__doc__, EXAMPLES)
    p.add_argument("--model", default="learned_wiener", metavar="NAME", help="recipe (default: learned_wiener)")
    p.add_argument("--weights", type=Path, help="its weights (default: those beside the recipe)")
    p.add_argument("--sets", nargs="+", default=["regular", "generalization"], metavar="SET")
    p.add_argument("--samples", type=int, default=20, help="samples of each cell (default: 20)")
    p.add_argument("--every", type=int, default=1, help="take one cell of so many, spread evenly (default: 1, all)")
    p.add_argument("--batch-size", type=int, default=20, help="windows per call (default: 20)")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--device", default="cpu")
    p.add_argument("--results", type=Path, default=MODELS / "results.json", help="where the records go")
    return run_script(run, p.parse_args(argv), "csi_coverage")


def run(args: argparse.Namespace) -> None:
    """All sets."""
    predictor = models.predictor(args.model)
    if not isinstance(predictor, LearnedWiener):
        raise UsageError(f"{args.model} is {type(predictor).__name__}, which states no uncertainty.")
    load_weights(predictor, args.weights or MODELS / f"{args.model}.safetensors")
    predictor = predictor.to(args.device).eval()
    if predictor.duplex != "both":
        raise UsageError(f"{args.model} predicts {predictor.duplex} only: both bands are asked for.")
    start = time.monotonic()
    rows, records = [], []
    for cells in args.sets:
        stream = StreamedCSI("csi4cast", "test", cells=cells, duplex="both", seed=args.seed, block_size=args.samples)
        stream.cells = few_cells(stream.cells, args.every)
        found = coverage(predictor, stream, args)
        for band, duplex in enumerate(("tdd", "fdd")):
            for i, probability in enumerate(PROBABILITIES):
                shares = found[:, band, i]
                near = ((shares - probability).abs() <= NEAR).double().mean()
                worst = int((shares - probability).abs().argmax())
                rows.append(
                    [
                        cells,
                        duplex,
                        f"{probability:.0%}",
                        f"{shares.mean():.3f}",
                        f"{near:.2f}",
                        f"{shares[worst]:.3f} in {stream.cells[worst]}",
                    ]
                )
                about = {"duplex": duplex, "probability": probability}
                note = {"cells": len(stream.cells), "samples_per_cell": args.samples}
                for metric, value in (
                    ("coverage", shares.mean()),
                    ("coverage_worst_cell", shares[worst]),
                    ("cells_within_3_points", near),
                ):
                    records.append(
                        record(
                            system="ours",
                            data="csi4cast",
                            split=cells,
                            condition=about,
                            metric=metric,
                            value=float(value),
                            n=len(stream.cells) * args.samples,
                            seeds=[args.seed],
                            **note,
                        )
                    )
        save_records(args.results, records)
    print(table(["set", "duplex", "bound", "share inside", "cells within 3 points", "worst cell"], rows))
    print(f"done in {time_text(time.monotonic() - start)}; records in {args.results}")


@torch.inference_mode()
def coverage(predictor: LearnedWiener, stream: StreamedCSI, args: argparse.Namespace) -> torch.Tensor:
    """Share of entries inside each bound, `[cell, band, probability]`."""
    place = {number: i for i, number in enumerate(stream.protocol.cell_numbers(stream.cells))}
    inside = torch.zeros(len(place), 2, len(PROBABILITIES), dtype=torch.float64)
    count = torch.zeros(len(place), 1, 1, dtype=torch.float64)
    for request in tqdm(EvaluationOrder(stream, args.samples, args.batch_size), unit="batch", leave=False):
        batch = stream.batch(request, args.device)
        gaussian = stream.conditions[request.condition].kind == "gaussian"
        found = predictor.distribution(batch.history, batch.noise_variance if gaussian else None)
        error = (batch.target - found.mean).abs()
        rows = torch.tensor([place[n] for n in cell_number(request.sample_id).tolist()])
        for i, probability in enumerate(PROBABILITIES):
            hit = (error < found.bound(probability)).unflatten(-1, (2, -1)).float().mean((1, 2, 3, 5))
            inside[:, :, i].index_add_(0, rows, hit.cpu().double())
        count.index_add_(0, rows, torch.ones(len(rows), 1, 1, dtype=torch.float64))
    return inside / count


if __name__ == "__main__":
    raise SystemExit(main())
