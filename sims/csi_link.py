"""What CSI predictions are worth on a link: spectral efficiency and coded block errors over SNR.

A base station serves users at once on the same resource elements, with a precoder computed from what each system
believes the channel to be; the true channel decides what arrives. The channels come from a store, or from files that
`chanlab predict` wrote.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from chanlab.cli.common import run_script, script_parser
from chanlab.errors import UsageError

EXAMPLES = """examples:
  python sims/csi_link.py --store data/street_canyon --systems ar pad
  python sims/csi_link.py --store data/street_canyon --systems pad llm=out/csi/llm/best.ckpt --csi-snr 15
  python sims/csi_link.py --predictions pad=out/csi/pad/predictions.h5 llm=out/csi/llm/predictions.h5
  python sims/csi_link.py --store data/street_canyon --users 1 --precoder mrt --snr -20 -15 -10 -5 0
"""


def parser() -> argparse.ArgumentParser:
    """The script's arguments."""
    p = script_parser(__doc__, EXAMPLES)
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--store", type=Path, help="folder that `chanlab generate` wrote")
    source.add_argument("--predictions", nargs="+", metavar="NAME=FILE", help="HDF5 files that `chanlab predict` wrote")
    p.add_argument(
        "--systems",
        nargs="*",
        default=["ar", "pad"],
        metavar="NAME[=CHECKPOINT]",
        help="with --store: recipes of models/ that need no training, or checkpoints; no prediction and perfect CSI "
        "are always there (default: ar pad)",
    )
    p.add_argument("--split", default="test", help="split of the store (default: test)")
    p.add_argument("--csi-snr", type=float, default=15.0, metavar="DB", help="SNR of the histories (default: 15)")
    p.add_argument("--history", type=int, help="snapshots of the history (default: the store's recipe)")
    p.add_argument("--horizon", type=int, default=4, help="steps predicted (default: 4)")
    p.add_argument(
        "--snr", type=float, nargs="+", default=[-5.0, 0.0, 5.0, 10.0, 15.0], metavar="DB", help="of the link"
    )
    p.add_argument("--users", type=int, default=4, help="users served at once (default: 4)")
    p.add_argument("--precoder", choices=["mrt", "rzf", "zf"], default="rzf")
    p.add_argument("--granularity", type=int, default=1, help="subcarriers that share a precoder (default: 1)")
    p.add_argument("--step", type=int, help="step of the horizon for the coded link (default: the last)")
    p.add_argument("--bits-per-symbol", type=int, choices=[2, 4, 6, 8], default=4, help="QPSK to 256-QAM (default: 4)")
    p.add_argument("--code-rate", type=float, default=0.5)
    p.add_argument("--symbols", type=int, default=7, help="OFDM symbols of a slot, the third has pilots (default: 7)")
    p.add_argument("--receiver", choices=["ls", "perfect"], default="ls", help="how a user knows its effective channel")
    p.add_argument("--sets", type=int, default=250, help="sets of users of the coded link at most (default: 250)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path, default=Path("out/csi_link"), help="folder of results.json and csi_link.png")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate, print a table, write records and a picture."""
    return run_script(evaluate, parser().parse_args(argv), "csi_link")


def evaluate(args: argparse.Namespace) -> None:
    """Run the comparison."""
    from chanlab.cli.figures import save
    from chanlab.link import CodedLink, collect, evaluate_ensemble, read_predictions
    from chanlab.records import save_records

    if args.store:
        data = _data(args)
        windows = data.windows(args.split)
        ensemble = collect(_systems(args.systems, windows.view), _batches(data, args.split))
        name = windows.store.recipe.name
    else:
        ensemble = read_predictions(dict(map(_pair, args.predictions)))
        name = ""
    steps, subcarriers = ensemble.channel.shape[2:]
    step = args.step or steps
    link = CodedLink(
        subcarriers,
        num_users=args.users,
        num_symbols=args.symbols,
        pilot_symbols=(min(2, args.symbols - 1),),
        bits_per_symbol=args.bits_per_symbol,
        code_rate=args.code_rate,
        receiver=args.receiver,
    )
    records = evaluate_ensemble(
        ensemble,
        args.snr,
        users=args.users,
        precoder=args.precoder,
        granularity=args.granularity,
        link=link,
        coded_steps=[step],
        coded_sets=args.sets,
        seed=args.seed,
        data=name,
        split=args.split if args.store else "",
        condition={"snr_db": args.csi_snr} if args.store else None,
        progress=True,
    )
    print(text_table(records, step))
    written = [args.out / "results.json", args.out / "csi_link.png"]
    args.out.mkdir(parents=True, exist_ok=True)
    save_records(written[0], records, replace=True)
    save(picture(records, step, link.rate), written[1])
    print("written:", *written)


def text_table(records: Sequence[dict[str, Any]], step: int) -> str:
    """Spectral efficiency, block error rate and goodput by SNR at one step, a row per system and metric."""
    from chanlab.cli.common import table
    from chanlab.records import lookup, select

    levels = sorted({lookup(r, "link_snr_db") for r in records})
    rows = []
    for metric, name in (
        ("spectral_efficiency", "SE [bit/s/Hz]"),
        ("spectral_efficiency_ratio", "SE / perfect CSI's"),
        ("bler", "BLER"),
        ("goodput", "goodput [bit/s/Hz]"),
    ):
        for system in dict.fromkeys(r["system"] for r in select(records, metric=metric)):
            cells = []
            for snr in levels:
                (item,) = select(records, metric=metric, system=system, horizon=step, link_snr_db=snr)
                cells.append(f"{item['value']:.3f}" + (f" ±{item['deviation']:.3f}" if item["deviation"] else ""))
            rows.append([name, system, *cells])
    head = [f"step {step}, per user", "CSI", *(f"{snr:g} dB" for snr in levels)]
    return table(head, rows)


def picture(records: Sequence[dict[str, Any]], step: int, rate: float) -> Any:
    """Spectral efficiency and block errors over SNR, and the share of perfect CSI's over the horizon."""
    from chanlab.cli.figures import new_figure, tidy
    from chanlab.records import lookup, select

    figure = new_figure(12.5, 4.2)
    over_snr, errors, over_steps = figure.subplots(1, 3)
    levels = sorted({lookup(r, "link_snr_db") for r in records})
    steps = sorted({lookup(r, "horizon") for r in records})
    middle = levels[len(levels) // 2]
    ratio = select(records, metric="spectral_efficiency_ratio", link_snr_db=middle)
    draw(over_snr, select(records, metric="spectral_efficiency", horizon=step), "link_snr_db")
    draw(errors, select(records, metric="bler", horizon=step), "link_snr_db")
    draw(over_steps, [r | {"value": 100 * r["value"], **_percent(r)} for r in ratio], "horizon")
    tidy(over_snr, f"Spectral efficiency, step {step}", "SNR of the link [dB]", "bit/s/Hz per user")
    tidy(errors, f"Coded block errors, {rate:.2f} bit/s/Hz, step {step}", "SNR of the link [dB]", "block error rate")
    tidy(over_steps, f"Spectral efficiency at {middle:g} dB", "step of the horizon", "% of perfect CSI's")
    errors.set_yscale("symlog", linthresh=1e-2)
    errors.set_ylim(0, 1.3)
    errors.set_yticks([0, 0.01, 0.1, 1], ["0", "0.01", "0.1", "1"])
    over_snr.set_xticks(levels)
    errors.set_xticks(levels)
    over_steps.set_xticks(steps)
    over_snr.legend(fontsize=8, frameon=False)
    return figure


def draw(axes: Any, items: Sequence[dict[str, Any]], along: str) -> None:
    """One curve per system with its 95 % interval."""
    from chanlab.cli.demo.figures import STYLES
    from chanlab.records import lookup, select

    for system in dict.fromkeys(r["system"] for r in items):
        mine = sorted(select(items, system=system), key=lambda r: lookup(r, along))
        label, color, line, marker = STYLES.get(system, (system, None, "-", "."))
        x, y = [lookup(r, along) for r in mine], [r["value"] for r in mine]
        (curve,) = axes.plot(x, y, line, marker=marker, color=color, label=label, linewidth=1.7, markersize=4.5)
        if all("low" in r for r in mine):
            low, high = [r["low"] for r in mine], [r["high"] for r in mine]
            axes.fill_between(x, low, high, color=curve.get_color(), alpha=0.13, linewidth=0)


def _percent(item: dict[str, Any]) -> dict[str, float]:
    return {end: 100 * item[end] for end in ("low", "high") if end in item}


def _data(args: argparse.Namespace) -> Any:
    from chanlab.data import CSIDataModule

    return CSIDataModule(
        args.store, num_workers=0, eval_snr_db=args.csi_snr, history=args.history, horizons=args.horizon
    )


def _batches(data: Any, split: str) -> Iterator[Any]:
    """The windows of a split, their channels computed, with a progress bar."""
    from tqdm import tqdm

    loaders = {"val": data.val_dataloader, "test": data.test_dataloader}
    if split not in loaders:
        raise UsageError(f"--split must be val or test, not {split!r}: a link is judged on held-out trajectories.")
    for batch in tqdm(loaders[split](), desc="predict", unit="batch"):
        yield data.on_after_batch_transfer(batch, 0)


def _systems(names: Sequence[str], view: Any) -> dict[str, Any]:
    """Predictors by name: from their recipe, or from a checkpoint."""
    from chanlab.cli.demo.models import predictor
    from chanlab.csi import load_predictor

    made: dict[str, Any] = {}
    for item in names:
        name, _, checkpoint = item.partition("=")
        made[name] = load_predictor(checkpoint) if checkpoint else predictor(name, view)
    return made


def _pair(item: str) -> tuple[str, str]:
    name, equals, path = item.partition("=")
    if not equals:
        raise UsageError(f"--predictions takes NAME=FILE, not {item!r}.")
    return name, path


if __name__ == "__main__":
    sys.exit(main())
