"""Trains codecs of images on the same photographs for the same number of steps, and compares them on held-out ones.

Runs (--arms): `ours`, AdaptiveJSCC for all SNRs and bandwidth ratios at once; `adjscc`, for one ratio each;
`specialists`, our network for one SNR each and all ratios; `deepjscc`, for one SNR and ratio each; single runs by name,
`adaptive_1_6_10dB` for example. ADJSCC and DeepJSCC have as many parameters as ours. All have the same loss, batches,
crops, schedule and steps, over AWGN; runs come in the order asked for.

Below --out: weights/*.safetensors; runs/*.json, each with its loss and its PSNR on test photographs (--split), shrunk
to 96x96, in crops of 96x96, and at 512x768; results.json, whose intervals are a bootstrap over photographs; psnr.png.
Runs whose weights are there are not trained again, and those evaluated not evaluated again, when the command is given
again; the rest then has as many steps as they had, and a run that was interrupted goes on from partial/*.pt. Runs of
other settings than asked for are refused, not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from jscc_arms import DEFAULT, Arm, arms
from jscc_engine import Engine, Trained
from jscc_table import SIZES, comparisons, plot, psnr_records, psnr_table

from chanlab.errors import ChanlabError, UsageError
from chanlab.jscc.base_batches import pool_crops
from chanlab.jscc.bases import BasePool
from chanlab.jscc.codec import as_ratio
from chanlab.jscc.images import ImageDataModule
from chanlab.records import save_records
from chanlab.weights import load_weights, save_weights

EXAMPLES = """examples:
  python benchmarks/jscc_train.py --images photos --steps 50 --batch 4 --widths 16 24 --arms ours adjscc     (on a CPU)
  python benchmarks/jscc_train.py --images photos --check --device cuda
  python benchmarks/jscc_train.py --images photos --minutes 8 --total-minutes 9.5 --device cuda
  python benchmarks/jscc_train.py --images photos --evaluate --device cuda
"""


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=Path, required=True, help="folder of photographs, split by source")
    parser.add_argument("--arms", nargs="+", default=list(DEFAULT), help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--ratios", nargs="+", default=["1/6", "1/12"], help="k/n compared (default: 1/6 1/12)")
    parser.add_argument(
        "--train-ratios",
        nargs="+",
        default=["1/24", "1/12", "1/12", "1/8", "1/6", "1/6", "1/6"],
        help="k/n that ours draws from",
    )
    parser.add_argument("--snrs", nargs="+", type=float, default=[0.0, 5.0, 10.0, 15.0, 20.0], help="evaluated [dB]")
    parser.add_argument("--held-snrs", nargs="+", type=float, default=[0.0, 10.0, 20.0], help="of specialists [dB]")
    parser.add_argument("--snr-range", nargs=2, type=float, default=[-1.0, 22.0], help="in training [dB]")
    parser.add_argument(
        "--high-snr-share", type=float, default=0.0, help="of images in the highest quarter of that range (default: 0)"
    )
    parser.add_argument(
        "--bases", type=int, default=0, help="crops with AVIF base layers that ours also learns to refine (default: 0)"
    )
    parser.add_argument("--make-bases", action="store_true", help="make these alone, on processors only")
    parser.add_argument("--refining", type=float, default=0.7, help="share of them that has its base (default: 0.7)")
    parser.add_argument("--steps", type=int, help="of every run; default: as runs that are there, or 8000")
    parser.add_argument("--minutes", type=float, help="of training altogether, from which --steps follows")
    parser.add_argument("--total-minutes", type=float, default=1e9, help="no run is started that would end later")
    parser.add_argument("--batch", type=int, default=64, help="crops a step (default: 64)")
    parser.add_argument("--crop", type=int, default=96, help="size of training crops (default: 96)")
    parser.add_argument("--max-side", type=int, default=768, help="training photographs are shrunk to (default: 768)")
    parser.add_argument(
        "--scales", nargs="+", type=float, default=[1.0, 0.7, 0.5, 0.35, 0.25], help="of shrunk training photographs"
    )
    parser.add_argument("--widths", nargs=2, type=int, default=[64, 96], help="of ours")
    parser.add_argument("--depths", nargs=2, type=int, default=[3, 4], help="of ours")
    parser.add_argument("--kernel", type=int, default=5, help="of ours")
    parser.add_argument("--loss", choices=["psnr", "mse"], default="psnr", help="of all (default: psnr)")
    parser.add_argument(
        "--lr", nargs="+", default=[], metavar="SYSTEM=RATE", help="default: adaptive=1e-3 adjscc=7e-4 deepjscc=7e-4"
    )
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--warmup", type=float, default=0.03, help="part of the steps")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of gradients")
    parser.add_argument("--points", type=int, default=8, help="of the learning curve")
    parser.add_argument("--init", type=Path, help="folder of weights that runs start from, where they are there")
    parser.add_argument(
        "--split",
        choices=["test", "val"],
        default="test",
        help="evaluated: val to choose learning rates (default: test)",
    )
    parser.add_argument("--crops", type=int, default=4, help="evaluated crops of each photograph (default: 4)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bits", type=int, choices=[8, 16, 32], default=16, help="of kept weights (default: 16)")
    parser.add_argument("--precision", choices=["bf16", "32"], help="default: bf16 on a GPU")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile (default: on a GPU)")
    parser.add_argument("--no-graph", dest="graph", action="store_false", help="without a CUDA graph")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("out/jscc_train"))
    parser.add_argument("--check", action="store_true", help="how fast is a step of each network?")
    parser.add_argument("--evaluate", action="store_true", help="train nothing, evaluate the weights that are there")
    args = parser.parse_args(given)
    if args.minutes and args.steps:
        raise UsageError("--minutes and --steps are two budgets: give one.")
    if args.bases < 0 or (args.make_bases and not args.bases):
        raise UsageError("--bases says how many crops have base layers: --make-bases takes some, others none or some.")
    for name in ("refining", "high_snr_share"):
        if not 0 <= getattr(args, name) <= 1:
            raise UsageError(f"--{name.replace('_', '-')} is a share, 0 to 1, not {getattr(args, name)}.")
    for name in ("ratios", "train_ratios"):
        setattr(args, name, [as_ratio(r) for r in getattr(args, name)])
    if max(args.ratios) > max(args.train_ratios):
        raise UsageError("--ratios reach above --train-ratios: ours has no channels for them.")
    rates = {"adaptive": 1e-3, "adjscc": 7e-4, "deepjscc": 7e-4}
    for item in args.lr:
        system, _, rate = item.partition("=")
        if system not in rates:
            raise UsageError(f"--lr is for {', '.join(rates)}, not {system!r}.")
        rates[system] = float(rate)
    args.lr = rates
    cuda = args.device.startswith("cuda")
    args.precision = args.precision or ("bf16" if cuda else "32")
    args.compile = cuda if args.compile is None else args.compile
    return args


SETTINGS = (
    *("loss", "batch", "crop", "scales", "max_side", "train_ratios", "snr_range", "widths", "depths", "kernel"),
    *("weight_decay", "warmup", "clip", "seed", "bits", "precision", "bases", "refining"),
    "high_snr_share",
)


def settings(arm: Arm, args: argparse.Namespace) -> dict[str, Any]:
    """What a run is trained with, but for its steps, as JSON has it."""
    started = args.init is not None and (args.init / f"{arm.name}.safetensors").is_file()
    found = {name: getattr(args, name) for name in SETTINGS} | {"lr": args.lr[arm.system], "init": started}
    return dict(json.loads(json.dumps(found, default=str)))


def evaluation(args: argparse.Namespace) -> dict[str, Any]:
    """What its PSNR depends on beside the weights, as JSON has it."""
    return dict(
        json.loads(
            json.dumps({name: getattr(args, name) for name in ("ratios", "snrs", "crops", "split")}, default=str)
        )
    )


def photographs(args: argparse.Namespace) -> dict[str, ImageDataModule]:
    """Training photographs, and those evaluated at each of `SIZES`."""
    shared: dict[str, Any] = {"images": args.images, "max_side": args.max_side, "threads": 8}
    return {
        "train": ImageDataModule(
            **shared, crop=args.crop, scales=args.scales, min_side=args.crop, batch_size=args.batch
        ),
        "shrunk": ImageDataModule(**shared, eval_size=(96, 96), batch_size=256),
        "crop": ImageDataModule(**shared, eval_crop=96, eval_crops=args.crops, batch_size=256),
        "photo": ImageDataModule(**shared, eval_size=(512, 768), batch_size=8),
    }


def base_pool(data: ImageDataModule, args: argparse.Namespace) -> BasePool:
    """Crops of the training photographs and bases of theirs, each at a quality of its own."""
    crops = pool_crops(data.crops("train"), args.bases)
    return BasePool.make(crops, seed=args.seed, threads=os.cpu_count() or 1, folder=args.out / "bases")


class Shelf:
    """What a run leaves behind.

    Args:
        folder: --out.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def weights(self, arm: Arm) -> Path:
        """The file of its weights."""
        return self.folder / "weights" / f"{arm.name}.safetensors"

    def partial(self, arm: Arm) -> Path:
        """The state of a run that isn't finished."""
        return self.folder / "partial" / f"{arm.name}.pt"

    def read(self, arm: Arm) -> dict[str, Any]:
        """What is known of a run, empty if nothing."""
        path = self.folder / "runs" / f"{arm.name}.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}

    def steps(self, arms: Sequence[Arm]) -> int | None:
        """Steps of runs that are there already, which others must have too; None if there are none.

        Raises:
            UsageError: If they differ.
        """
        found = {known["trained"]["steps"] for arm in arms if "trained" in (known := self.read(arm))}
        if len(found) > 1:
            raise UsageError(f"runs in {self.folder} have {sorted(found)} steps: compare those that are equal.")
        return found.pop() if found else None

    def check(self, arms: Sequence[Arm], args: argparse.Namespace) -> None:
        """Refuses runs that were trained with other settings than those asked for, and would be compared with others.

        Raises:
            UsageError: If there are some.
        """
        for arm in arms:
            asked, had = settings(arm, args), self.read(arm).get("settings", {})
            had = {"high_snr_share": 0.0} | had if had else had  # there was none once
            # Weights that a run starts from matter when it is trained, not when the command is given again.
            other = [name for name in had if name != "init" and had[name] != asked[name]]
            if other:
                told = ", ".join(f"{name} {had[name]} (asked: {asked[name]})" for name in other)
                raise UsageError(f"{arm.name} in {self.folder} has {told}: ask for the same, or give another --out.")
        if len({known["settings"]["init"] for arm in arms if "settings" in (known := self.read(arm))}) > 1:
            raise UsageError(
                f"some runs in {self.folder} started from --init, others not: compare those that are equal."
            )

    def evaluated(self, arm: Arm, args: argparse.Namespace) -> bool:
        """Whether its PSNR is there, at what is asked for."""
        known = self.read(arm)
        return "psnr" in known and known.get("evaluation") == evaluation(args)

    def write(self, arm: Arm, known: dict[str, Any]) -> None:
        """Keeps what is known of a run."""
        path = self.folder / "runs" / f"{arm.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".part")
        scratch.write_text(json.dumps(known) + "\n", encoding="utf-8")
        scratch.replace(path)


def perform(arm: Arm, engine: Engine, steps: int, data: dict[str, ImageDataModule], shelf: Shelf) -> dict[str, Any]:
    """Trains a run unless its weights are there, evaluates what was kept unless that was done."""
    args, known = engine.args, shelf.read(arm)
    if not shelf.weights(arm).is_file():
        if args.evaluate:
            raise UsageError(f"there are no weights {shelf.weights(arm)}: train them, without --evaluate.")
        done: Trained = engine.train(arm, steps, shelf.partial(arm))
        save_weights(engine.codec, shelf.weights(arm), args.bits)
        shelf.partial(arm).unlink(missing_ok=True)
        known = {"trained": asdict(done), "settings": settings(arm, args)}
        shelf.write(arm, known)
    if not shelf.evaluated(arm, args):
        load_weights(engine.codec, shelf.weights(arm))
        known["psnr"] = {
            size: {f"{r} {s:g}": values.tolist() for (r, s), values in engine.evaluate(arm, data[size]).items()}
            for size in SIZES
        }
        known["evaluation"] = evaluation(args)
        shelf.write(arm, known)
        means = {key: sum(v) / len(v) for key, v in known["psnr"]["shrunk"].items()}
        print(f"{arm.name}: PSNR at 96x96: " + ", ".join(f"{k} dB: {v:.2f}" for k, v in means.items()), flush=True)
    return known


def main(given: Sequence[str] | None = None) -> None:
    """Trains, evaluates, compares."""
    begin = time.perf_counter()
    args = arguments(given)
    if args.make_bases:
        pool = base_pool(photographs(args)["train"], args)
        print(f"{len(pool)} crops with bases in {args.out / 'bases'}")
        return
    if args.device.startswith("cuda"):
        torch.backends.cudnn.benchmark = True
        torch._dynamo.config.cache_size_limit = 64
        torch.backends.cudnn.allow_tf32 = False  # weights are trained in bfloat16, evaluated in float32
        print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}", flush=True)
    shelf, data, runs = Shelf(args.out), photographs(args), arms(args)
    engines: dict[tuple[str, Fraction | None], Engine] = {}
    results: dict[Arm, dict[str, Any]] = {}
    shelf.check(runs, args)
    todo = [arm for arm in runs if args.check or not shelf.weights(arm).is_file()]
    if todo and not args.evaluate:
        count = len(data["train"].crops("train").pixels)
        print(f"{count} training pictures after {time.perf_counter() - begin:.0f} s", flush=True)
    bases: BasePool | None = None
    for arm in todo if not args.evaluate else []:
        if arm.architecture not in engines:
            if args.bases and not arm.fixed_rate and bases is None:
                bases = base_pool(data["train"], args)
            engines[arm.architecture] = made = Engine(arm, data["train"], args, pool=bases)
            memory = torch.cuda.max_memory_allocated() / 1e9 if made.cuda else 0.0
            print(
                f"{arm.name}: {sum(p.numel() for p in made.weights)} parameters, {1 / made.seconds_per_step:.0f} "
                f"steps/s, ready after {made.warm_up:.0f} s, {memory:.1f} GB"
                f"{', compiled' if made.way.compiled else ''}{', one graph' if made.graph is not None else ''}",
                flush=True,
            )
    known = shelf.steps(runs)
    if args.steps is not None and known not in (None, args.steps):
        raise UsageError(f"runs in {args.out} have {known} steps, not {args.steps}: give another --out.")
    per_step = sum(engines[arm.architecture].seconds_per_step for arm in todo if arm.architecture in engines)
    steps = known or args.steps or 8000
    if known is None and args.minutes:
        steps = max(100, int(60 * args.minutes / max(per_step, 1e-9)) // 100 * 100)
    if todo and not args.evaluate:
        print(f"{len(todo)} runs of {steps} steps: {steps * per_step / 60:.1f} minutes of training", flush=True)
    if args.check:
        return
    slowest = 0.0
    for arm in runs:
        if arm not in todo and shelf.evaluated(arm, args):
            results[arm] = shelf.read(arm)
            continue
        if arm.architecture not in engines:
            engines[arm.architecture] = Engine(arm, data["train"], args, train=False)
        engine = engines[arm.architecture]
        expected = steps * engine.seconds_per_step + slowest if arm in todo else slowest
        if time.perf_counter() - begin + expected > 60 * args.total_minutes:
            print(f"{arm.name}: not before --total-minutes; give the command again", flush=True)
            continue
        started = time.perf_counter()
        results[arm] = perform(arm, engine, steps, data, shelf)
        trained = results[arm]["trained"]["seconds"] if arm in todo else 0.0
        slowest = max(slowest, time.perf_counter() - started - trained)
    records = psnr_records(results, data, args) + comparisons(results, data, args)
    save_records(args.out / "results.json", records, replace=True)
    print(psnr_table(records))
    print(plot(records, args.out / "psnr.png"))


if __name__ == "__main__":
    try:
        main()
    except ChanlabError as error:
        sys.exit(f"{type(error).__name__}: {error}")
