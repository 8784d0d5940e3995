"""Release 18's codebook for predicted precoders: what its reports lose by themselves, and after a user's prediction.

A user predicts four intervals and reports them by the enhanced Type II codebook for predicted precoders, whose
coefficients are ideally quantised (`chanlab.csi.doppler_codebook` says what else is idealised). For each size of report
and each frequency unit, the true future is reported (the loss of the report alone) and the one that PAD predicts; PAD
without a report stands beside. NMSE counts gains and phases; SGCS only the directions, for which the codebook is made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chanlab.cli.common import run_script, script_parser
from chanlab.errors import UsageError

EXAMPLES = """examples:
  python sims/csi_doppler_codebook.py                               (a minute on a CPU)
  python sims/csi_doppler_codebook.py --samples 100 --device cuda
"""


def parser() -> argparse.ArgumentParser:
    """The script's arguments."""
    p = script_parser(__doc__, EXAMPLES)
    p.add_argument("--combinations", type=int, nargs="+", default=[1, 3, 6, 9], help="paramCombination-Doppler-r18")
    p.add_argument("--units", type=int, nargs="+", default=[24, 1], help="subcarriers of a frequency unit")
    p.add_argument("--snr-db", type=float, default=15.0, help="of the user's measurements [dB]")
    p.add_argument("--samples", type=int, default=4, help="samples of each cell")
    p.add_argument("--device", default="cpu")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--out", type=Path, default=Path("out/csi_doppler_codebook"), help="folder of results and picture")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate, print a table, write records and a picture."""
    return run_script(run, parser().parse_args(argv), "csi_doppler_codebook")


def run(args: argparse.Namespace) -> None:
    """All reports on all cells."""
    from chanlab.cli.common import table
    from chanlab.cli.figures import save
    from chanlab.records import save_records

    if args.samples < 1:
        raise UsageError("--samples must be at least 1.")
    records = evaluate(args)
    values = {(r["system"], r["metric"]): r["value"] for r in records}
    rows = [
        [system, *(f"{values[system, metric]:.4f}" for metric in ("nmse", "nmse_pooled", "sgcs"))]
        for system in dict.fromkeys(r["system"] for r in records)
    ]
    print(table(["", "NMSE per antenna", "pooled", "SGCS"], rows))
    args.out.mkdir(parents=True, exist_ok=True)
    written = [args.out / "results.json", args.out / "csi_doppler_codebook.png"]
    save_records(written[0], records, replace=True)
    save(picture(records, args), written[1])
    print("written:", *written)


def evaluate(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Means over the regular cells of CSI-4CAST."""
    import torch
    from tqdm import tqdm

    from chanlab.csi import PAD, DopplerCodebook
    from chanlab.data import StreamedCSI
    from chanlab.data.protocol import Condition
    from chanlab.data.streamed import SampleRequest
    from chanlab.metrics import NMSE, SGCS
    from chanlab.records import record

    conditions = [Condition("gaussian", args.snr_db, args.snr_db)]
    stream = StreamedCSI("csi4cast", "test", conditions=conditions, seed=args.seed, block_size=max(4, args.samples))
    shape = (2, stream.protocol.columns, stream.protocol.rows)
    pad = PAD(stream.protocol.horizons, tx_shape=shape)
    codebooks = {
        name(combination, unit): DopplerCodebook(
            stream.protocol.horizons, pad, combination, subcarriers_per_unit=unit, tx_shape=shape
        ).to(args.device)
        for unit in args.units
        for combination in args.combinations
    }
    systems = ["PAD, no report", *(f"{kind}, {c}" for c in codebooks for kind in ("true future", "PAD"))]

    def metrics() -> dict[str, Any]:
        found = {"nmse": NMSE("per_antenna_step"), "nmse_pooled": NMSE("pooled"), "sgcs": SGCS()}
        return {key: metric.to(args.device) for key, metric in found.items()}

    meters = {system: metrics() for system in systems}
    with torch.inference_mode():
        for ids in tqdm(stream.ids(args.samples).view(len(stream.cells), -1), unit="cell"):
            batch = stream.batch(SampleRequest(ids, 0, "test"), args.device)
            predicted = pad(batch.history, batch.noise_variance)
            arrived = {"PAD, no report": predicted}
            for key, codebook in codebooks.items():
                arrived[f"true future, {key}"] = codebook.report(batch.target)
                arrived[f"PAD, {key}"] = codebook.report(predicted)
            for system, channel in arrived.items():
                for metric in meters[system].values():
                    metric.update(channel, batch.target)
    return [
        record(
            system=system,
            data="csi4cast",
            split="regular",
            condition={"duplex": "tdd", "snr_db": args.snr_db},
            metric=key,
            value=float(metric.compute()),
            n=args.samples * len(stream.cells),
            seeds=[args.seed],
        )
        for system, mine in meters.items()
        for key, metric in mine.items()
    ]


def name(combination: int, unit: int) -> str:
    """How a report is called."""
    return f"combination {combination}, {unit} subcarrier{'s' if unit > 1 else ''} a unit"


def picture(records: Sequence[dict[str, Any]], args: argparse.Namespace) -> Any:
    """Bars of NMSE and of what SGCS lacks to 1, for each report: the true future, and the predicted one."""
    from chanlab.cli.figures import COLORS, new_figure, tidy

    values = {(r["system"], r["metric"]): 1 - r["value"] if r["metric"] == "sgcs" else r["value"] for r in records}
    reports = [(c, u) for u in args.units for c in args.combinations]
    figure = new_figure(10, 3.8)
    for axes, (metric, label) in zip(
        figure.subplots(1, 2), (("nmse", "NMSE per antenna and step"), ("sgcs", "1 - SGCS")), strict=True
    ):
        for shift, (kind, color) in enumerate((("true future", COLORS["val"]), ("PAD", COLORS["train"]))):
            heights = [values[f"{kind}, {name(*report)}", metric] for report in reports]
            places = [i + 0.4 * shift - 0.2 for i in range(len(reports))]
            axes.bar(places, heights, 0.38, color=color, label=f"{kind}, reported")
        axes.axhline(values["PAD, no report", metric], color=COLORS["test"], linewidth=1.2, label="PAD, no report")
        axes.set_xticks(range(len(reports)), [f"{c}\n{u}" for c, u in reports], fontsize=7)
        tidy(axes, f"Release 18 reports, {args.snr_db:g} dB", "combination, and subcarriers of a unit", label)
    figure.legend(*axes.get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside lower center", ncols=3)
    return figure


if __name__ == "__main__":
    sys.exit(main())
