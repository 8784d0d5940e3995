"""Block error rates of 5G LDPC and QAM over AWGN, for the separation baseline of image transmission.

Every modulation and coding scheme of TS 38.214 (tables 1, 2 and 4) that sionna.phy can encode, code blocks of six
lengths. Writes the table that `chanlab.jscc.separation` looks operating points up in, and a picture of its curves; a
run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chanlab.cli.common import run_script, script_parser
from chanlab.errors import UsageError

EXAMPLES = """examples:
  python sims/ldpc_bler.py                                  (about half an hour on a CPU core of its own)
  python sims/ldpc_bler.py --device cuda --rounds 12 --blocks 200
  python sims/ldpc_bler.py --every 6 --lengths 1024 --rounds 6
"""


def parser() -> argparse.ArgumentParser:
    """The script's arguments."""
    p = script_parser(__doc__, EXAMPLES)
    p.add_argument("--every", type=int, default=1, help="take one scheme of so many")
    p.add_argument("--lengths", type=int, nargs="+", help="information bits of a block; a plan of six by default")
    p.add_argument("--rounds", type=int, default=8, help="rounds of each curve")
    p.add_argument("--blocks", type=int, default=16, help="blocks of a round")
    p.add_argument("--iterations", type=int, default=50, help="iterations of belief propagation")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--device", default="cpu")
    p.add_argument("--out", type=Path, default=Path("out/ldpc_bler"), help="folder of table and picture")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the table and a picture."""
    return run_script(run, parser().parse_args(argv), "ldpc_bler")


def run(args: argparse.Namespace) -> None:
    """All curves."""
    from importlib.metadata import version

    from chanlab import records
    from chanlab.channels.sionna_phy import device_name
    from chanlab.cli.figures import save
    from chanlab.jscc.separation.bler import BlerTable, measure_curve, plan, save_table

    if min(args.every, args.rounds, args.blocks, args.iterations) < 1:
        raise UsageError("--every, --rounds, --blocks and --iterations must be at least 1.")
    settings = {"rounds": args.rounds, "blocks": args.blocks, "seed": args.seed, "num_iterations": args.iterations}
    origin = {
        "command": f"python sims/ldpc_bler.py --every {args.every} --rounds {args.rounds} --blocks {args.blocks} "
        f"--iterations {args.iterations} --seed {args.seed}",
        "commit": records.commit(),
        "hardware": records.hardware(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "sionna": version("sionna"),
        "torch": version("torch"),
        "decoder": "boxplus-phi, flooding",
        **settings,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "bler.json"
    curves = []
    if path.exists():
        held = BlerTable.load(path)
        if any(held.origin.get(k) != v for k, v in settings.items()):
            raise UsageError(f"{path} was measured with other settings: take another --out, or delete it.")
        curves, origin = list(held.curves), held.origin
    done = {(c.bits_per_symbol, c.rate_1024, c.block_bits) for c in curves}
    for mcs, length in plan(args.every, args.lengths):
        if (mcs.bits_per_symbol, mcs.rate_1024, length) in done:
            continue
        curve = measure_curve(mcs, length, device=device_name(args.device), **settings)
        curves.append(curve)
        save_table(path, curves, origin)
        print(f"{mcs!s:18} K {length:5}: {curve.mean_db:6.2f} dB, width {curve.deviation_db:.3f} dB", flush=True)
    save(picture(BlerTable(curves)), args.out / "ldpc_bler.png")
    print("written:", path, args.out / "ldpc_bler.png")


def picture(table: Any) -> Any:
    """Measured points and fitted lines of the longest blocks; distance from capacity of all lengths."""
    import math

    import numpy as np
    from matplotlib import colormaps
    from scipy.special import ndtr

    from chanlab.cli.figures import new_figure, tidy

    figure = new_figure(11, 4.2)
    left, right = figure.subplots(1, 2)
    longest = max(c.block_bits for c in table.curves)
    orders = sorted({c.bits_per_symbol for c in table.curves})
    colors = {o: colormaps["viridis"](i / max(1, len(orders))) for i, o in enumerate(orders)}
    for curve in (c for c in table.curves if c.block_bits == longest):
        z = np.linspace(-2, 3.2, 60)
        color = colors[curve.bits_per_symbol]
        left.plot(curve.mean_db + z * curve.deviation_db, ndtr(-z), color=color, linewidth=0.8)
        left.plot(
            [s for s, _, _ in curve.points], [e / b or np.nan for _, b, e in curve.points], ".", color=color, ms=3
        )
    left.set_yscale("log")
    tidy(left, f"Code blocks of {longest} bits", "SNR [dB]", "block error rate")
    dashes = (":", (0, (2, 1)), "-.", "--", (0, (6, 1)), "-")
    styles = dict(zip(sorted({c.block_bits for c in table.curves}), dashes, strict=False))
    for order in orders:
        for length, style in styles.items():
            held = [c for c in table.curves if (c.bits_per_symbol, c.block_bits) == (order, length)]
            gap = [
                c.mean_db + 2.33 * c.deviation_db - 10 * math.log10(2 ** (order * c.block_bits / c.codeword_bits) - 1)
                for c in held
            ]
            rate = [order * c.block_bits / c.codeword_bits for c in held]
            name = ("QPSK" if order == 2 else f"{2**order}-QAM") if length == longest else None
            right.plot(rate, gap, linestyle=style, color=colors[order], label=name, linewidth=1)
    for length, style in styles.items():
        right.plot([], [], linestyle=style, color="black", linewidth=1, label=f"K = {length}")
    tidy(right, "Distance from capacity at BLER 1 %", "bit per channel use", "SNR gap [dB]")
    right.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


if __name__ == "__main__":
    sys.exit(main())
