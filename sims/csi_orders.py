"""Orders of classical predictors on CSI-4CAST's protocol, chosen on split `val`.

Each predictor's recipe is tried with several orders (ESPRIT: windows; matrix pencil: pencil parameters; both with
Dopplers of each delay tap and of each bin; AR: with a ridge) on the same channels of a set's cells, TDD, under all its
conditions. What has the least mean per-antenna NMSE belongs in the recipe; `test` is not touched.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chanlab.cli.common import run_script, script_parser
from chanlab.errors import UsageError

EXAMPLES = """examples:
  python sims/csi_orders.py                                  (9 cells, 3 channels each: some minutes on a CPU)
  python sims/csi_orders.py --systems pad --every 1 --samples 10
  python sims/csi_orders.py --systems ar --cells robustness  (the others have to be told the noise)
"""
TRIED: dict[str, list[dict[str, Any]]] = {
    "ar": [{"ridge": r, "order": n} for r in (0.0, 1e-3, 1e-2, 1e-1) for n in (8, 10, 12, 14, 15)],
    "pad": [{"order": n} for n in (4, 5, 6, 7, 8)],
    "kalman": [{"order": n} for n in (4, 5, 6, 7, 8)],
    "esprit": [
        *({"share": "tap", "window": n} for n in (11, 12, 13, 14, 15)),
        *({"share": "bin", "window": n} for n in (6, 8, 10, 12)),
    ],
    "matrix_pencil": [
        *({"share": "tap", "pencil": n} for n in (10, 11, 12, 13, 14)),
        *({"share": "bin", "pencil": n} for n in (5, 7, 9, 11)),
    ],
}
"""Arguments of each recipe's predictor that are tried, the order last."""


def parser() -> argparse.ArgumentParser:
    """The script's arguments."""
    p = script_parser(__doc__, EXAMPLES)
    p.add_argument("--systems", nargs="+", choices=list(TRIED), default=list(TRIED))
    p.add_argument("--cells", choices=["regular", "generalization", "robustness"], default="regular")
    p.add_argument("--samples", type=int, default=3, help="samples of each cell")
    p.add_argument("--every", type=int, default=3, help="take one cell of so many, spread evenly")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--out", type=Path, default=Path("out/csi_orders"), help="folder of results and picture")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate, print a table, write records and a picture."""
    return run_script(run, parser().parse_args(argv), "csi_orders")


def run(args: argparse.Namespace) -> None:
    """All orders of all systems."""
    from chanlab.cli.common import table
    from chanlab.cli.figures import save
    from chanlab.records import save_records

    if args.samples < 2 or args.every < 1:
        raise UsageError("--samples must be at least 2 (a bootstrap needs two realisations) and --every 1.")
    records = evaluate(args)
    rows = []
    for name in args.systems:
        found = {m: [r for r in records if (r["system"], r["metric"]) == (name, m)] for m in ("nmse", "nmse_pooled")}
        best = min(found["nmse"], key=lambda r: r["value"])
        for r, pooled in zip(*found.values(), strict=True):
            setting = ", ".join(f"{argument} {value}" for argument, value in r["condition"].items())
            figures = [f"{x['value']:.4f}" for x in (r, pooled)]
            rows.append([name, setting, *figures, "least" if r is best else ""])
    print(table(["", "", "NMSE per antenna", "pooled", ""], rows))
    args.out.mkdir(parents=True, exist_ok=True)
    written = [args.out / "results.json", args.out / "csi_orders.png"]
    save_records(written[0], records, replace=True)
    save(picture(records, args.cells), written[1])
    print("written:", *written)


def evaluate(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Records of mean and pooled NMSE for each order."""
    from torch import nn

    from chanlab.cli.demo import models
    from chanlab.csi import evaluate_protocol, few_cells
    from chanlab.data import StreamedCSI
    from chanlab.records import record

    tried, predictors = [], {}
    for name in args.systems:
        node = models.read(f"csi4cast_{name}")["model"]["init_args"]["predictor"]
        for setting in TRIED[name]:
            one = copy.deepcopy(node)
            one["init_args"].update(setting)
            predictors[f"{name} {setting}"] = models.instantiate(one, nn.Module).eval()
            tried.append((name, setting))
    stream = StreamedCSI("csi4cast", "val", cells=args.cells, seed=args.seed, block_size=args.samples)
    stream.cells = few_cells(stream.cells, args.every)
    results = evaluate_protocol(predictors, stream, args.samples, 8, progress=True)
    return [
        record(
            system=name,
            data="csi4cast",
            split="val",
            condition=setting,
            metric=metric,
            value=(interval := result.interval(reduction)).value,
            low=interval.low,
            high=interval.high,
            n=result.error.shape[0] * args.samples,
            seeds=[args.seed],
        )
        for (name, setting), result in zip(tried, results, strict=True)
        for metric, reduction in (("nmse", "per_antenna_step"), ("nmse_pooled", "pooled"))
    ]


def picture(records: Sequence[dict[str, Any]], cells: str) -> Any:
    """NMSE over the order, a line per system."""
    from matplotlib.ticker import MaxNLocator

    from chanlab.cli.figures import new_figure, tidy

    figure = new_figure(10, 4)
    for axes, (metric, label) in zip(
        figure.subplots(1, 2), (("nmse", "per antenna and step, mean"), ("nmse_pooled", "pooled")), strict=True
    ):
        lines: dict[str, list[tuple[int, float]]] = {}
        for r in (r for r in records if r["metric"] == metric):
            *others, (argument, value) = r["condition"].items()
            line = ", ".join([f"{r['system']}: {argument}", *(f"{k} {v}" for k, v in others)])
            lines.setdefault(line, []).append((value, r["value"]))
        for line, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker=".", label=line)
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        tidy(axes, f"{cells.capitalize()}, split val, TDD", "order, window or pencil parameter", f"NMSE {label}")
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


if __name__ == "__main__":
    sys.exit(main())
