"""How often the true channel lies within the bounds that LearnedWiener states, cell by cell of CSI-4CAST's protocol.

Over all antennas, steps, subcarriers, SNRs and channels of a cell, the share of entries whose error stays below the
bound for 50 % and 90 %; beside the share of cells within three points of that, the share which bounds that are right in
every cell would show with as many channels. Channels are always new. Cells of `regular` are those that training draws
from, not held out; of those of `generalization`, training saw about one in twenty: its own.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from chanlab.cli.common import run_script, script_parser, table, time_text
from chanlab.cli.demo import models
from chanlab.csi import LearnedWiener, few_cells, load_weights
from chanlab.data import StreamedCSI
from chanlab.data.protocol import cell_number, number_in_cell
from chanlab.data.recipe import find_recipe
from chanlab.data.streamed_datamodule import EvaluationOrder
from chanlab.errors import UsageError
from chanlab.records import record, save_records

MODELS = Path(__file__).resolve().parents[1] / "models" / "csi"
PROBABILITIES = (0.5, 0.9)
NEAR = 0.03
SAMPLES = 20
"""Of each cell, in a full run."""
SUBSETS = Path("out/csi/results.json")
"""Records of anything less."""
EXAMPLES = """examples:
  python benchmarks/csi_coverage.py --samples 2 --every 9            (minutes on a CPU; records in out/csi)
  python benchmarks/csi_coverage.py --device cuda
  python benchmarks/csi_coverage.py --weights out/mine.safetensors --results out/mine.json
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, write records."""
    p = script_parser(__doc__, EXAMPLES)
    p.add_argument("--model", default="learned_wiener", metavar="NAME", help="recipe (default: learned_wiener)")
    p.add_argument("--weights", type=Path, help="its weights (default: those beside the recipe)")
    p.add_argument("--sets", nargs="+", default=["regular", "generalization"], metavar="SET")
    p.add_argument("--samples", type=int, default=SAMPLES, help=f"samples of each cell (default: {SAMPLES})")
    p.add_argument("--every", type=int, default=1, help="take one cell of so many, spread evenly (default: 1, all)")
    p.add_argument("--batch-size", type=int, default=20, help="windows per call (default: 20)")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--device", default="cpu")
    p.add_argument(
        "--results",
        type=Path,
        help=f"where the records go (default: of all cells of a set, {SAMPLES} samples each, models/csi/results.json, "
        f"which the card shows; of anything less {SUBSETS})",
    )
    return run_script(run, p.parse_args(argv), "csi_coverage")


def run(args: argparse.Namespace) -> None:
    """All sets."""
    predictor = models.predictor(args.model)
    if not isinstance(predictor, LearnedWiener):
        kind = type(predictor).__name__
        raise UsageError(f"{args.model} is {kind}, which states no bounds: take a recipe of LearnedWiener.")
    if predictor.duplex != "both":
        raise UsageError(f"{args.model} predicts {predictor.duplex} only: take a recipe with `duplex: both`.")
    name, weights = system(args.model, args.weights)
    load_weights(predictor, weights)
    predictor = predictor.to(args.device).eval()
    whole = args.every == 1 and args.samples >= SAMPLES
    path = args.results or (MODELS / "results.json" if whole else SUBSETS)
    start = time.monotonic()
    rows, records = [], []
    for cells in args.sets:
        stream = StreamedCSI("csi4cast", "test", cells=cells, duplex="both", seed=args.seed, block_size=args.samples)
        stream.cells = few_cells(stream.cells, args.every)
        realisations = coverage(predictor, stream, args)
        found, right = realisations.mean(1), expected_near(realisations)
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
                        f"{right[band, i]:.2f}",
                        f"{shares[worst]:.3f} in {stream.cells[worst]}",
                    ]
                )
                about = {"duplex": duplex, "probability": probability}
                note = {"cells": len(stream.cells), "samples_per_cell": args.samples}
                values = {
                    "coverage": shares.mean(),
                    "coverage_worst_cell": shares[worst],
                    "cells_within_3_points": near,
                    "cells_within_3_points_if_right": right[band, i],
                }
                for metric, value in values.items():
                    if value.isnan():  # of one sample
                        continue
                    records.append(
                        record(
                            system=name,
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
        save_records(path, records)
    print(
        table(
            ["set", "duplex", "bound", "share inside", "cells within 3 points", "if all were right", "worst cell"], rows
        )
    )
    print(f"done in {time_text(time.monotonic() - start)}; records in {path}")


def system(model: str, weights: Path | None) -> tuple[str, Path]:
    """Name in the records, and file of weights: `ours` is the recipe learned_wiener with the weights beside it."""
    recipe = find_recipe("models", model)
    beside = MODELS / f"{recipe.stem}.safetensors"
    if weights is not None and weights.resolve() != beside.resolve():
        return weights.stem, weights
    return "ours" if recipe.resolve() == (MODELS / "learned_wiener.yaml").resolve() else recipe.stem, beside


@torch.inference_mode()
def coverage(predictor: LearnedWiener, stream: StreamedCSI, args: argparse.Namespace) -> torch.Tensor:
    """Share of entries inside each bound, `[cell, sample, band, probability]`."""
    place = {number: i for i, number in enumerate(stream.protocol.cell_numbers(stream.cells))}
    inside = torch.zeros(len(place), args.samples, 2, len(PROBABILITIES), dtype=torch.float64)
    for request in tqdm(EvaluationOrder(stream, args.samples, args.batch_size), unit="batch", leave=False):
        batch = stream.batch(request, args.device)
        gaussian = stream.conditions[request.condition].kind == "gaussian"
        found = predictor.distribution(batch.history, batch.noise_variance if gaussian else None)
        error = (batch.target - found.mean).abs()
        rows = torch.tensor([place[n] for n in cell_number(request.sample_id).tolist()])
        numbers = number_in_cell(request.sample_id)
        for i, probability in enumerate(PROBABILITIES):
            hit = (error < found.bound(probability)).unflatten(-1, (2, -1)).float().mean((1, 2, 3, 5))
            inside[rows, numbers, :, i] += hit.cpu().double()
    return inside / len(stream.conditions)


def expected_near(realisations: torch.Tensor) -> torch.Tensor:
    """Share of cells that would be seen within three points if every one of them were right, `[band, probability]`.

    Channels of a cell differ, and there are only so many: the mean over them is taken as normal about the truth.

    Args:
        realisations: Shares of entries, `[cell, sample, band, probability]`.
    """
    deviation = realisations.std(1) / math.sqrt(realisations.shape[1])
    return torch.erf(NEAR / (math.sqrt(2) * deviation.clamp_min(1e-9))).mean(0)


if __name__ == "__main__":
    raise SystemExit(main())
