"""`chanlab plot`: a quick look at a store."""

from __future__ import annotations

import argparse
from typing import Any

from chanlab.cli.common import subparser


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    parser = subparser(
        commands,
        "plot",
        "draw a quick look at a store",
        ["chanlab plot out/street", "chanlab plot out/street --out street.png --sample 17"],
        "One picture of four: the scene with its users, one channel over time and frequency, the distribution of the "
        "delay spread, and the path gain over distance. For impulse responses: a channel, its taps, delay spreads, "
        "and how fast channels change.",
    )
    parser.add_argument("path", metavar="PATH", help="folder of the store")
    parser.add_argument("--out", metavar="FILE", help="PNG, PDF or SVG to write (default: PATH/quicklook.png)")
    parser.add_argument("--sample", type=int, metavar="ID", help="whose channel to draw (default: the strongest link)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Draw and say where."""
    from pathlib import Path

    from chanlab.cli.figures import save
    from chanlab.cli.quicklook import quicklook
    from chanlab.data.store import Store
    from chanlab.errors import UsageError

    out = Path(args.out) if args.out else Path(args.path) / "quicklook.png"
    if out.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise UsageError(f"--out must end in .png, .pdf or .svg, not {out.name}.")
    print(save(quicklook(Store(args.path, partial=True), args.sample), out))
    return 0
