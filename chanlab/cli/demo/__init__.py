"""`chanlab demo`: trace a street, fine-tune the shipped predictor on it, judge it on a link; minutes on two cores."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from chanlab.cli.common import subparser


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    parser = subparser(
        commands,
        "demo",
        "trace a street, fine-tune a predictor on it, judge it on a link",
        [
            "chanlab demo",
            "chanlab demo --model llm --out out/llm",
            "chanlab demo --out out/munich --recipe munich_mobility --samples 400",
            "chanlab demo --quick --out out/quick",
        ],
        "Writes report.html, results.json and the store into the output folder. Run it again after an interruption: "
        "stages that are done are kept. A model whose recipe names weights is judged as it is, fine-tuned, "
        "and trained from scratch. Eight minutes on two cores; --quick takes about one, and its figures mean nothing.",
    )
    parser.add_argument("--out", default="out/demo", metavar="PATH", help="folder of everything it writes")
    parser.add_argument("--recipe", metavar="NAME", default="street_canyon", help="recipe of the channels")
    parser.add_argument("--model", metavar="NAME", default="learned_wiener_street", help="recipe of the model to train")
    parser.add_argument("--samples", type=int, metavar="N", help="users to trace, instead of the recipe's number")
    parser.add_argument("--epochs", type=int, metavar="N", help="epochs of training, instead of the model recipe's")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="seed of training")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes that trace")
    parser.add_argument("--quick", action="store_true", help="few users, one epoch: does everything work?")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run left in the output folder")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the stages, print the table, write the report."""
    from chanlab.cli.demo import models
    from chanlab.cli.demo.journal import Journal
    from chanlab.cli.demo.stages import judge, make_channels, say, train
    from chanlab.cli.demo.story import conclude
    from chanlab.cli.demo.training import check_weights

    settings = settings_of(args)
    if args.fresh:
        forget(settings.out)
    models.fetch_backbone(models.read(settings.model))
    check_weights(settings.model)
    journal = Journal(settings.out / "journal.json")
    store = make_channels(settings, journal)
    checkpoints = train(settings, journal, store)
    records = judge(settings, journal, store, checkpoints)
    say(4, "report")
    print(conclude(settings, journal, store, records))
    return 0


def settings_of(args: argparse.Namespace) -> Any:
    """`Settings` of the command line.

    Raises:
        UsageError: If an option can't be.
    """
    from chanlab.cli.demo.stages import Settings
    from chanlab.cli.generate import load
    from chanlab.errors import UsageError

    for name in ("epochs", "workers"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name} must be at least 1, not {getattr(args, name)}.")
    samples = args.samples or (48 if args.quick else None)
    settings = Settings(
        out=Path(args.out),
        recipe=load(args.recipe, samples),
        model=args.model,
        seed=args.seed,
        workers=args.workers,
        epochs=args.epochs or (1 if args.quick else None),
    )
    return replace(settings, windows=1, link_snr_db=(0.0, 10.0), sets=8) if args.quick else settings


def forget(out: Path) -> None:
    """Remove what a demo writes, and nothing else."""
    for name in ("store", "store.views", "training"):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in ("journal.json", "results.json", "report.html"):
        (out / name).unlink(missing_ok=True)
