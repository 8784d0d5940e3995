"""Trains predictors by their recipes on CSI-4CAST's protocol, each on the same budget, and evaluates what was kept.

A grid of system, duplex and seed. Every run has the same budget of minutes (or windows) of training on fresh channels,
the recipe's learning rate with a linear warm-up and a cosine to zero over that budget, and the loss that CSI-4CAST
trains on: error over power per antenna and step, with 1 % of the window's mean power added to powers (--floor), as
LearnedWiener has it; WiFo brings its own. Systems for which each antenna is a series of its own (LLM4CP, RNN, LSTM,
GRU, CNN, Transformer) may see a few antennas of more windows (--antennas), drawn anew each step; they are evaluated on
all of them.

Below --out: weights/*.safetensors, which are loaded again for the evaluation; runs/*.json with learning curves, cost
and records of each run; results.json with means and deviations over seeds; learning_curves.png. Finished runs are
skipped when the command is given again.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

import torch
from csi_train_grid import SYSTEMS, Run, Shelf, Trained, build, costs
from csi_trainer import PER_ANTENNA, Trainer, objective

from chanlab.cli.common import table
from chanlab.csi import (
    CSIPredictionModule,
    load_weights,
    save_weights,
)
from chanlab.data import CSIBatch
from chanlab.errors import ChanlabError, UsageError
from chanlab.records import save_records

CHECK_STEPS = 20
EXAMPLES = """examples:
  python benchmarks/csi_train.py --check --systems rnn --duplex tdd --antennas 1 --batch 2     (on a CPU)
  python benchmarks/csi_train.py --check --antennas 8 --device cuda
  python benchmarks/csi_train.py --systems llm4cp llm4cp_random llm4cp_nollm --seeds 1 2 3 --minutes 0.4 --antennas 8 \\
    --device cuda
  python benchmarks/csi_train.py --plot
"""


def perform(trainer: Trainer, shelf: Shelf, run: Run) -> bool:
    """Trains a run, keeps its weights, evaluates what was kept; False if there was no time to finish."""
    args = trainer.args
    known = shelf.read(run)
    if known.get("records"):
        print(f"{run.name}: done before", flush=True)
        return True
    module, weights = build(run), shelf.weights(run)
    if known and known["trained"]["complete"] and weights.is_file():
        done = Trained(**known["trained"])
        module.predictor.to(trainer.device)
    else:
        if args.minutes and trainer.left() < 60 * args.minutes + trainer.overhead:
            return False
        begin = time.perf_counter()
        done = trainer.train(run, module)
        save_weights(module.predictor, weights, args.bits)
        done.weights = weights.stat().st_size
        trainer.overhead = time.perf_counter() - begin - 60 * done.minutes
        shelf.write(run, done, [])
        if not done.complete:
            return False
    begin = time.perf_counter()
    load_weights(module.predictor, weights)
    shelf.write(run, done, trainer.evaluate(run, module.predictor) + costs(run, done, args))
    if done.weights > args.max_weights * 1e6:
        print(f"{run.name}: weights of {done.weights / 1e6:.1f} MB are not kept (--max-weights)", flush=True)
        weights.unlink()
    trainer.overhead += time.perf_counter() - begin
    return True


def check(trainer: Trainer, runs: list[Run]) -> None:
    """Some steps of every system and band: throughput, and whether losses are finite."""
    args = trainer.args
    rows, minutes = [], 0.0
    for run in runs:
        module = build(run)
        work = gflop(module, args.floor)
        done = trainer.train(run, module, CHECK_STEPS)
        scratch = args.out / f".{run.name}.safetensors"
        save_weights(module.predictor, scratch, args.bits)
        size = scratch.stat().st_size
        scratch.unlink()
        rate = done.windows / (60 * done.minutes)
        share = done.antennas / 32
        test = sum(
            len(s.cells) * len(s.conditions) * n
            for s, n in (
                (trainer.test_stream(c, run.duplex, n), n) for c, n in zip(args.sets, args.samples, strict=True)
            )
        )
        evaluation = test / done.validation
        validation = (args.points + 1) * len(trainer.validation(run.duplex).history) / done.validation
        budget_minutes = args.minutes or args.windows / rate / 60
        minutes += done.warm_up / 60 + len(args.seeds) * (budget_minutes + (evaluation + validation) / 60)
        if args.profile:
            print(trainer.profile(run, module, done))
        loss = done.curve[-1]["loss"]
        rows.append(
            [
                run.name,
                f"{done.batch} x {done.antennas}",
                f"{60e3 * done.minutes / done.steps:.0f}",
                f"{rate:.0f}",
                f"{work * share:.1f}",
                f"{work * share * rate / 1e3:.1f}",
                f"{done.memory / 1e9:.1f}",
                f"{done.warm_up:.0f}",
                "yes" if done.compiled else "no",
                f"{done.validation:.0f}",
                f"{evaluation:.0f}",
                f"{done.parameters / 1e6:.2f}",
                f"{size / 1e6:.2f}",
                "none finite" if loss is None else f"{loss:.3f}",
                done.skipped,
            ]
        )
        del module
    head = "run|batch|ms/step|windows/s|GFLOP/window|TFLOP/s|GB|warm-up s|compiled|eval. windows/s|eval. s"
    print(table([*head.split("|"), "M trained", "MB kept", "loss", "skipped"], rows))
    print(f"the grid takes about {minutes:.1f} minutes")


def gflop(module: CSIPredictionModule, floor: float) -> float:
    """Floating-point operations of training on one window of 32 antennas, forward and backward [10⁹]."""
    from torch.utils.flop_counter import FlopCounterMode

    antennas = 1 if isinstance(module.predictor, PER_ANTENNA) else 32
    width = 600 if getattr(module.predictor, "duplex", None) == "both" else 300
    batch = CSIBatch(
        torch.randn(1, 1, antennas, 16, 300, dtype=torch.complex64),
        torch.randn(1, 1, antennas, 4, width, dtype=torch.complex64),
        *(torch.full((1,), 0.1) for _ in range(5)),
    )
    counter = FlopCounterMode(display=False)
    mkldnn = torch.backends.mkldnn.flags(enabled=False)  # whose LSTM isn't counted
    with warnings.catch_warnings(action="ignore"), mkldnn, counter:
        objective(module, batch, floor).backward()  # type: ignore[no-untyped-call]
    module.zero_grad(set_to_none=True)
    return counter.get_total_flops() * 32 / antennas / 1e9


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        UsageError: Arguments contradict each other.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ", ".join(SYSTEMS)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), metavar="NAME", help=f"{known}, or recipes")
    parser.add_argument("--duplex", nargs="+", choices=["tdd", "fdd", "both"], default=["tdd", "fdd"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--minutes", type=float, help="of training for each run (default: 0.4)")
    parser.add_argument("--windows", type=int, help="of training for each run, in place of --minutes")
    parser.add_argument("--total-minutes", type=float, default=float("inf"), help="of the whole command")
    parser.add_argument("--antennas", type=int, help="of each window, where antennas are series of their own")
    parser.add_argument("--batch", type=int, help="windows per step (default: as many antennas as in the recipe's)")
    parser.add_argument("--lr", type=float, help="highest learning rate (default: the recipe's)")
    parser.add_argument(
        "--floor", type=float, default=0.01, help="added to powers in the loss (default: 0.01; published: 0)"
    )
    parser.add_argument("--points", type=int, default=8, help="of learning curves (default: 8)")
    parser.add_argument("--val-samples", type=int, default=8, help="of each cell, in validation (default: 8)")
    parser.add_argument(
        "--sets", nargs="+", default=["regular"], metavar="SET", help="regular, generalization, robustness"
    )
    parser.add_argument("--samples", nargs="+", type=int, default=[20], help="of each cell, for all sets or each")
    parser.add_argument("--every", type=int, default=1, help="one cell of so many, spread evenly (default: 1, all)")
    parser.add_argument("--test-seed", type=int, default=1, help="of validation and test sets (default: 1)")
    parser.add_argument("--resamples", type=int, default=100, help="of the bootstrap (default: 100)")
    parser.add_argument("--bits", type=int, choices=[6, 8, 16, 32], default=8, help="of kept weights (default: 8)")
    parser.add_argument("--max-weights", type=float, default=16.0, help="larger files are not kept [MB] (default: 16)")
    parser.add_argument("--precision", choices=["bf16", "32"], help="of networks (default: bf16 on a GPU)")
    parser.add_argument("--block-size", type=int, help="samples drawn at once (default: 512 on a GPU, else 8)")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="without torch.compile")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("out/csi_train"))
    parser.add_argument("--check", action="store_true", help=f"{CHECK_STEPS} steps of everything: how fast is it?")
    parser.add_argument("--profile", action="store_true", help="with --check: where the time of a step goes")
    parser.add_argument("--plot", action="store_true", help="only draw curves and join records of what is in --out")
    args = parser.parse_args(given)
    if args.minutes and args.windows:
        raise UsageError("--minutes and --windows are two budgets: give one.")
    if not args.windows:
        args.minutes = 0.4 if args.minutes is None else args.minutes
    positive = ("minutes", "windows", "antennas", "batch", "lr", "points", "val_samples", "every", "block_size")
    for name in positive:
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            raise UsageError(f"--{name.replace('_', '-')} must be above 0.")
    if len(args.samples) == 1:
        args.samples *= len(args.sets)
    if len(args.samples) != len(args.sets) or min(args.samples) < 1:
        raise UsageError("--samples is one number, or one for each of --sets, at least 1.")
    args.precision = args.precision or ("bf16" if args.device.startswith("cuda") else "32")
    return args


def main(given: list[str] | None = None) -> None:
    """Trains what isn't yet trained, evaluates it, writes records, draws learning curves."""
    start = time.perf_counter()
    args = arguments(given)
    shelf = Shelf(args)
    if args.plot:
        save_records(args.out / "results.json", shelf.records(), replace=True)
        print(shelf.plot())
        return
    args.out.mkdir(parents=True, exist_ok=True)
    if args.device.startswith("cuda"):
        torch.backends.cudnn.benchmark = True
    trainer = Trainer(args, start)
    for duplex in args.duplex:
        for cells, samples in zip(args.sets, args.samples, strict=True):
            trainer.test_stream(cells, duplex, samples)
    if args.check:
        check(trainer, [Run(s, d, args.seeds[0]) for d in args.duplex for s in args.systems])
        return
    # Seeds change slowest: if time runs out, as many systems as possible have been trained.
    runs = [Run(s, d, n) for n in args.seeds for d in args.duplex for s in args.systems]
    for i, run in enumerate(runs):
        if not perform(trainer, shelf, run):
            print(f"--total-minutes is over: {len(runs) - i} of {len(runs)} runs are left; give the command again.")
            break
    if shelf.curves():
        shelf.plot()
    rows = [
        [
            r["system"],
            r["condition"]["duplex"],
            r["split"],
            f"{r['value']:.4f}",
            f"{r['deviation'] or 0:.4f}",
            r["seeds"],
        ]
        for r in shelf.records()
        if r["metric"] == "nmse" and set(r["condition"]) == {"duplex"}
    ]
    print(table(["system", "duplex", "set", "mean per-antenna NMSE", "deviation", "seeds"], rows))


if __name__ == "__main__":
    try:
        main()
    except ChanlabError as error:
        sys.exit(f"{type(error).__name__}: {error}")
