"""No prediction on CSI-4CAST's regular cells, drawn here with Sionna, against the figures its authors published.

If the channels, the bands, the noise and the metric are theirs, the two differ by sampling error alone. Their figures
come from 100 samples a cell: an interval says where such a figure lies with 95 % probability, by a bootstrap over our
samples. Means of ratios are heavy-tailed (no prediction, 30 ns: a few deep fades carry the mean), so that intervals of
those cells say little; 300 ns and CDL-D are the ones to look at. The noise is scaled as theirs (`Protocol.offset` of
chanlab.data.protocol says how): that matters for CDL-D at 1 m/s only.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chanlab.cli.common import run_script, script_parser
from chanlab.errors import UsageError

EXAMPLES = """examples:
  python sims/csi4cast_check.py                                     (all 27 cells, minutes on a CPU)
  python sims/csi4cast_check.py --samples 1000 --device cuda --duplex fdd
"""
PUBLISHED = Path(__file__).parents[1] / "tests/data/assets/csi4cast_np.csv"
PUBLISHED_SAMPLES = 100


def parser() -> argparse.ArgumentParser:
    """The script's arguments."""
    p = script_parser(__doc__, EXAMPLES)
    p.add_argument("--duplex", choices=["tdd", "fdd", "both"], default="both", help="band of the targets")
    p.add_argument("--samples", type=int, default=100, help="samples of each cell (default: 100)")
    p.add_argument("--batch-size", type=int, default=50)
    p.add_argument("--device", default="cpu")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--published", type=Path, default=PUBLISHED, help="CSV of the published figures")
    p.add_argument("--out", type=Path, default=Path("out/csi4cast_check"), help="folder of results and picture")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate, print a table, write records and a picture."""
    return run_script(run, parser().parse_args(argv), "csi4cast_check")


def run(args: argparse.Namespace) -> None:
    """The comparison."""
    from chanlab.cli.figures import save
    from chanlab.csi import NoPrediction, evaluate_protocol
    from chanlab.data import StreamedCSI
    from chanlab.records import save_records

    if args.samples < 2:
        raise UsageError("--samples must be at least 2: a bootstrap needs two realisations.")
    published = read_published(args.published)
    stream = StreamedCSI("csi4cast", "test", duplex=args.duplex, seed=args.seed, block_size=50)
    stream.conditions = tuple(c._replace(offset=stream.protocol.offset) for c in stream.conditions)
    results = evaluate_protocol(
        {"no prediction": NoPrediction(stream.protocol.horizons)},
        stream,
        args.samples,
        args.batch_size,
        args.device,
        progress=True,
    )
    records = [r for result in results for r in compare(result, published, args)]
    totals = [summary(result, records, args) for result in results]
    for result in results:
        mine = [r for r in records if r["condition"]["duplex"] == result.duplex]
        print(text_table(mine, result.duplex), end="\n\n")
    args.out.mkdir(parents=True, exist_ok=True)
    written = [args.out / "results.json", args.out / "csi4cast_check.png"]
    save_records(written[0], [r for pair in totals for r in pair] + records, replace=True)
    save(picture(records), written[1])
    print("written:", *written)


def read_published(path: Path) -> dict[tuple[str, str, float, float, float], list[float]]:
    """Published NMSE by step, by (duplex, model, delay spread [s], speed [m/s], SNR [dB])."""
    if not path.is_file():
        raise UsageError(f"there is no {path}: give the CSV of published figures by --published.")
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return {
        (
            row["duplex"],
            row["cdl_model"],
            float(row["delay_spread_s"]),
            float(row["speed_mps"]),
            float(row["snr_db"]),
        ): [float(row[f"nmse_step{step}"]) for step in range(1, 5)]
        for row in rows
    }


def compare(result: Any, published: dict[Any, list[float]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A record for each cell and SNR: ours, the interval for a figure of 100 samples, and the published one."""
    from chanlab.records import record

    records = []
    for cell in result.cells:
        for condition in result.conditions:
            key = (result.duplex, cell.model, round(cell.delay_spread, 12), cell.speed, condition.snr_db)
            interval = result.interval(where=lambda c, d, cell=cell, condition=condition: (c, d) == (cell, condition))
            # Both figures are samples: their difference has the variance of either, as their numbers of samples go.
            stretch = (1 + args.samples / PUBLISHED_SAMPLES) ** 0.5
            low, high = (interval.value + stretch * (end - interval.value) for end in (interval.low, interval.high))
            peer = sum(published[key]) / 4
            records.append(
                record(
                    system="no prediction",
                    data="csi4cast",
                    split="regular",
                    condition={
                        "duplex": result.duplex,
                        "model": cell.model,
                        "delay_spread_ns": round(cell.delay_spread * 1e9),
                        "speed": cell.speed,
                        "snr_db": condition.snr_db,
                    },
                    metric="nmse",
                    value=interval.value,
                    n=args.samples,
                    seeds=[args.seed],
                    low=low,
                    high=high,
                    peer=peer,
                    ratio=interval.value / peer,
                    inside=low <= peer <= high,
                )
            )
    return records


def summary(result: Any, records: Sequence[dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The mean over everything beside the published one, and the share of intervals that hold the published figure."""
    from chanlab.records import record

    mine = [r for r in records if r["condition"]["duplex"] == result.duplex]
    interval = result.interval()
    peer = sum(r["peer"] for r in mine) / len(mine)
    common: dict[str, Any] = {
        "system": "no prediction",
        "data": "csi4cast",
        "split": "regular",
        "condition": {"duplex": result.duplex},
        "n": args.samples * len(result.cells),
        "seeds": [args.seed],
    }
    ends = {"low": interval.low, "high": interval.high}
    return [
        record(metric="nmse", value=interval.value, peer=peer, ratio=interval.value / peer, **ends, **common),
        record(metric="nmse", value=peer, **common | {"system": "no prediction, published", "n": 2700, "seeds": []}),
        record(metric="published_inside", value=100 * sum(r["inside"] for r in mine) / len(mine), unit="%", **common),
    ]


def text_table(records: Sequence[dict[str, Any]], duplex: str) -> str:
    """A row per cell: ours and the published figure at 0 and 20 dB, and at how many of the SNRs it is inside."""
    from chanlab.cli.common import table

    rows = []
    for name, mine in _by_cell(records).items():
        columns = []
        for snr in (0.0, 20.0):
            (item,) = (r for r in mine if r["condition"]["snr_db"] == snr)
            columns += [f"{item['value']:.3f} [{item['low']:.3f}, {item['high']:.3f}]", f"{item['peer']:.3f}"]
        rows.append([name, *columns, f"{sum(r['inside'] for r in mine)} of {len(mine)}"])
    ours, theirs = (sum(r[key] for r in records) / len(records) for key in ("value", "peer"))
    inside = sum(r["inside"] for r in records)
    rows.append(["mean of all", f"{ours:.3f}", f"{theirs:.3f}", "", "", f"{inside} of {len(records)}"])
    return table([duplex.upper(), "0 dB, ours [95 %]", "published", "20 dB, ours [95 %]", "published", "inside"], rows)


def picture(records: Sequence[dict[str, Any]]) -> Any:
    """Ours over published for every cell at 20 dB, with intervals, a panel per band."""
    from chanlab.cli.figures import COLORS, new_figure, tidy

    bands = list(dict.fromkeys(r["condition"]["duplex"] for r in records))
    figure = new_figure(11, 3.6 * len(bands))
    for axes, band in zip(figure.subplots(len(bands), squeeze=False)[:, 0], bands, strict=True):
        cells = _by_cell([r for r in records if r["condition"]["duplex"] == band])
        levels = sorted({r["condition"]["snr_db"] for r in records})
        for i, mine in enumerate(cells.values()):
            for r in mine:
                x = i + 0.11 * (levels.index(r["condition"]["snr_db"]) - (len(levels) - 1) / 2)
                ends = [[r["value"] - r["low"]], [r["high"] - r["value"]]]
                first = i == 0 and r["condition"]["snr_db"] == levels[0]
                axes.errorbar(
                    x,
                    r["value"],
                    [[max(0.0, v[0])] for v in ends],
                    fmt=".",
                    color=COLORS["train"],
                    markersize=4,
                    elinewidth=1,
                    label="ours, where 100 samples may lie (95 %)" if first else None,
                )
                axes.plot(x, r["peer"], "x", color=COLORS["test"], markersize=4.5, label="published" if first else None)
        axes.set_yscale("log")
        axes.set_xticks(range(len(cells)), cells, rotation=55, ha="right", fontsize=7)
        axes.set_xlim(-0.7, len(cells) - 0.3)
        title = f"No prediction, {band.upper()}: the six marks of a cell are 0, 5, … 25 dB"
        tidy(axes, title, "", "NMSE per antenna and step, mean")
        axes.legend(fontsize=8, frameon=False, ncols=2, loc="upper right")
    return figure


def _by_cell(records: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    cells: dict[str, list[dict[str, Any]]] = {}
    for r in records:
        c = r["condition"]
        cells.setdefault(f"{c['model']} {c['delay_spread_ns']} ns {c['speed']:g} m/s", []).append(r)
    return cells


if __name__ == "__main__":
    sys.exit(main())
