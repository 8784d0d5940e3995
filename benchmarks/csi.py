"""Predictors side by side on CSI-4CAST's protocol: accuracy on its three sets, parameters, latency.

Accuracy is the protocol's mean per-antenna NMSE, with pooled and median beside, over the cells of a set; intervals come
from a bootstrap over channel realisations. Latency is the median over calls with one window at a time.

Networks are judged with weights of `chanlab.csi.save_weights`, beside the recipes or in a folder given by --weights:
`NAME_tdd.safetensors` and `NAME_fdd.safetensors` for one band each, NAME being the system's or the recipe's, as
`csi_train.py` writes them (of several seeds the first is taken), or `NAME.safetensors` for the bands that the recipe is
for. A network without weights is timed, never judged. With a GPU channels are drawn there and networks run there;
classical predictors, which solve many small eigenvalue problems, run on all cores of the CPU. Where the noise isn't
told, those that have to know it take what weak delay taps hold.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from csi_train_grid import SYSTEMS as TRAINED
from csi_train_grid import for_band
from torch import Tensor, nn

from chanlab.cli.common import run_script, script_parser, table, time_text
from chanlab.cli.demo import models
from chanlab.csi import (
    AR,
    PAD,
    PerBand,
    ProtocolResult,
    VectorKalman,
    evaluate_protocol,
    few_cells,
    is_trainable,
    join_results,
    load_weights,
    protocol_records,
)
from chanlab.csi.angle_delay import tap_noise
from chanlab.csi.exponentials import Exponentials
from chanlab.csi.latency import Mode, median_latency
from chanlab.data import SampleRequest, StreamedCSI
from chanlab.data.protocol import Condition
from chanlab.errors import ChanlabError, UsageError
from chanlab.records import record, save_records

MODELS = Path(__file__).resolve().parents[1] / "models" / "csi"
BANDS = ("tdd", "fdd")
CORES = len(os.sched_getaffinity(0))
EIGENPROBLEMS = (AR, PAD, VectorKalman, Exponentials)
"""Predictors that solve many small ones, for which a GPU takes longer."""
SAMPLES = 100
"""Of each cell, in a full run."""
SUBSETS = Path("out/csi/results.json")
"""Records of anything less."""
PART = 9
"""Cells between two looks at the clock."""

EXAMPLES = """examples:
  python benchmarks/csi.py --samples 2 --every 10                     (minutes on a CPU; records in out/csi)
  python benchmarks/csi.py --device cuda --systems learned            (100 channels a cell, all cells)
  python benchmarks/csi.py --device cuda --systems classical --sets regular
  python benchmarks/csi.py --systems ours --sets robustness --every 3 --samples 2    (a subset, too)
  python benchmarks/csi.py --device cuda --sets --systems learned     (parameters and latency alone)
"""

CLASSICAL = {
    "no prediction": "csi4cast_no_prediction",
    "ar": "csi4cast_ar",
    "pad": "csi4cast_pad",
    "kalman": "csi4cast_kalman",
    "esprit": "csi4cast_esprit",
    "matrix pencil": "csi4cast_matrix_pencil",
}
LEARNED = {"ours": "learned_wiener", **TRAINED}
SYSTEMS = CLASSICAL | LEARNED
"""Recipe of each system."""


@dataclass
class System:
    """A predictor as it is judged and timed.

    Attributes:
        predictor: Judged; None if it has no weights.
        timed: Timed: of two networks the first one.
        bands: Those that it is judged on.
    """

    predictor: nn.Module | None
    timed: nn.Module
    bands: Sequence[str] = field(default=BANDS)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print tables, write records."""
    p = script_parser(__doc__, EXAMPLES)
    p.add_argument(
        "--systems",
        nargs="+",
        default=["classical", "ours"],
        metavar="NAME",
        help=f"{', '.join(SYSTEMS)}; classical, learned; or any recipe (default: classical and ours)",
    )
    p.add_argument("--sets", nargs="*", default=["regular", "generalization", "robustness"], metavar="SET")
    p.add_argument("--samples", type=int, default=SAMPLES, help=f"samples of each cell (default: {SAMPLES})")
    p.add_argument("--every", type=int, default=1, help="take one cell of so many, spread evenly (default: 1, all)")
    p.add_argument(
        "--weights", type=Path, nargs="+", default=[], help="folders of weights, before those of the recipes"
    )
    p.add_argument("--device", default="cpu")
    p.add_argument("--batch-size", type=int, help="windows per call (default: 200 on a GPU, 8 on a CPU)")
    p.add_argument(
        "--block-size",
        type=int,
        help="samples of a cell that are drawn at once; names the samples (default: 100 on a GPU, 10 on a CPU)",
    )
    p.add_argument("--seed", type=int, default=1)
    p.add_argument(
        "--total-minutes", type=float, help="stop between parts of a set after this time, and write what is there"
    )
    p.add_argument("--no-latency", action="store_true", help="leave out parameters and latency")
    p.add_argument("--modes", nargs="+", choices=["eager", "cuda graph", "compiled"], default=["eager", "cuda graph"])
    p.add_argument("--runs", type=int, help="calls that are timed (default: 200 on a GPU, 20 on a CPU)")
    p.add_argument("--tf32", action="store_true", help="matrix products of float32 in TF32, on a GPU")
    p.add_argument(
        "--results",
        type=Path,
        help=f"where the records go (default: of all cells of a set, {SAMPLES} samples each, by the recipes' own "
        f"weights, models/csi/results.json, which the card shows; of anything else {SUBSETS})",
    )
    return run_script(run, p.parse_args(argv), "csi")


def run(args: argparse.Namespace) -> None:
    """All sets, then all latencies; records are written after each set and each system."""
    start = time.monotonic()
    end = None if args.total_minutes is None else start + 60 * args.total_minutes
    on_gpu = torch.device(args.device).type == "cuda"
    for name, gpu, cpu in (("batch_size", 200, 8), ("block_size", 100, 10), ("runs", 200, 20)):
        if getattr(args, name) is None:
            setattr(args, name, gpu if on_gpu else cpu)
    if args.samples < 2:
        raise UsageError("--samples must be at least 2: a bootstrap needs two realisations.")
    if min(args.every, args.batch_size, args.block_size, args.runs) < 1:
        raise UsageError("--every, --batch-size, --block-size and --runs must be at least 1.")
    if args.tf32:
        torch.set_float32_matmul_precision("high")
    systems = {}
    for name in chosen(args.systems):
        models.read(SYSTEMS.get(name, name))  # an unknown name ends it here
        try:
            systems[name] = system(name, [*args.weights, MODELS], args.device)
        except ChanlabError as error:  # a language model that isn't here
            print(f"{name} is left out: {error}", file=sys.stderr)
    rows = []
    for cells in args.sets:
        rows += [
            [r["system"], cells, r["condition"]["duplex"], f"{r['value']:.4f}", f"{r['low']:.4f} ... {r['high']:.4f}"]
            for r in accuracy(systems, cells, args, end)
            if r["metric"] == "nmse" and set(r["condition"]) == {"duplex"}
        ]
    if rows:
        print(table(["system", "set", "duplex", "mean per-antenna NMSE", "95 %"], rows), end="\n\n")
    if not args.no_latency:
        costs(systems, args, end)
    print(f"done in {time_text(time.monotonic() - start)}")


def destination(args: argparse.Namespace, whole: bool = True) -> Path:
    """Where records go: what isn't whole, or of others' weights, must not take the place of the card's own."""
    whole = whole and args.every == 1 and args.samples >= SAMPLES and not args.weights
    return args.results or (MODELS / "results.json" if whole else SUBSETS)


def chosen(names: Iterable[str]) -> list[str]:
    """Names of systems, groups replaced by their members."""
    groups = {"classical": CLASSICAL, "learned": LEARNED}
    return list(dict.fromkeys(one for name in names for one in groups.get(name, [name])))


def system(name: str, folders: Sequence[Path], device: str) -> System:
    """A system as its recipe has it, with the weights that are there."""
    recipe = SYSTEMS.get(name, name)
    config = models.read(recipe)
    tdd = build(config, "tdd").to(device)
    if not is_trainable(tdd):
        elsewhere = torch.device(device).type == "cuda" and isinstance(tdd, EIGENPROBLEMS)
        return System(OnCores(tdd) if elsewhere else tdd, tdd)
    names = (name, recipe)
    parts = {band: find([f"{n}_{band}{seed}" for n in names for seed in ("", "_*")], folders) for band in BANDS}
    whole = find(names, folders)
    if not any(parts.values()) and whole is not None:
        load_weights(tdd, whole)
        duplex = config["data"]["init_args"].get("duplex", "tdd")
        return System(tdd, tdd, BANDS if duplex == "both" else (duplex,))
    networks = {}
    for band, path in parts.items():
        if path is not None:
            networks[band] = tdd if band == "tdd" else build(config, band).to(device)
            load_weights(networks[band], path)
    if len(networks) == 2:
        return System(PerBand(**networks).eval(), tdd)
    return System(next(iter(networks.values()), None), tdd, tuple(networks))


def build(config: dict[str, Any], band: str) -> nn.Module:
    """The predictor of a recipe, with the arguments that a band asks for."""
    node = for_band(copy.deepcopy(config["model"]["init_args"]["predictor"]), band)
    predictor: nn.Module = models.instantiate(node, nn.Module)
    return predictor.eval()


def find(names: Iterable[str], folders: Sequence[Path]) -> Path | None:
    """The first file of weights with such a name, folder by folder."""
    found = (path for folder in folders for name in names for path in sorted(folder.glob(f"{name}.safetensors")))
    return next(found, None)


class OnCores(nn.Module):
    """A classical predictor on all cores of the CPU, whatever the device of its history."""

    def __init__(self, predictor: nn.Module) -> None:
        super().__init__()
        self.predictor, self.horizons = predictor, predictor.horizons
        self.pool = ThreadPoolExecutor(CORES)

    def forward(self, history: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """As the predictor's own; each thread takes a share of the windows."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            parts = history.cpu().tensor_split(min(CORES, len(history)))
            sizes = [len(part) for part in parts]
            noise = [None] * len(parts) if noise_variance is None else noise_variance.cpu().split(sizes)
            return torch.cat(list(self.pool.map(self._one, parts, noise))).to(history.device)
        finally:
            torch.set_num_threads(threads)

    def _one(self, history: Tensor, noise_variance: Tensor | None) -> Tensor:
        with torch.inference_mode():
            found: Tensor = self.predictor(history, noise_variance)
        return found


class Untold(nn.Module):
    """A predictor that has to know the noise, where nobody tells it."""

    def __init__(self, predictor: nn.Module) -> None:
        super().__init__()
        self.predictor, self.horizons = predictor, predictor.horizons

    def forward(self, history: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """As the predictor's own, with the noise as the delay taps show it."""
        found: Tensor = self.predictor(history, tap_noise(history) if noise_variance is None else noise_variance)
        return found


def accuracy(
    systems: dict[str, System], cells: str, args: argparse.Namespace, end: float | None
) -> list[dict[str, Any]]:
    """Records of a set, written; of the cells that there was time for."""
    stream = StreamedCSI("csi4cast", "test", cells=cells, duplex="both", seed=args.seed, block_size=args.block_size)
    told = all(condition.kind == "gaussian" for condition in stream.conditions)
    predictors = {}
    for name, one in systems.items():
        if one.predictor is None:
            print(f"{name} has no weights and is not judged", file=sys.stderr)
        elif not told and not works_untold(one.predictor, args.device):
            predictors[name] = Untold(one.predictor)
        else:
            predictors[name] = one.predictor
    wanted = few_cells(stream.cells, args.every)
    parts = []
    start = time.monotonic()
    for first in range(0, len(wanted) if predictors else 0, PART):
        if end is not None and time.monotonic() >= end:
            print(f"time is up: {first} of {len(wanted)} cells of {cells}", file=sys.stderr)
            break
        stream.cells = wanted[first : first + PART]
        parts.append(evaluate_protocol(predictors, stream, args.samples, args.batch_size, args.device, progress=True))
    if not parts:
        return []
    results = [join_results(same) for same in zip(*parts, strict=True)]
    results = [result for result in results if result.duplex in systems[result.system].bands]
    path = destination(args, len(results[0].cells) == len(wanted))
    print(f"{cells}: {len(results[0].cells)} cells in {time_text(time.monotonic() - start)}; records in {path}")
    noted = {"cells": len(results[0].cells), "samples_per_cell": args.samples}

    def described(result: ProtocolResult) -> list[dict[str, Any]]:
        return protocol_records([result], "csi4cast", cells, [args.seed], resamples=300, **noted)

    with ThreadPoolExecutor(CORES) as pool:  # a bootstrap of a whole set takes seconds
        found = [r for records in pool.map(described, results) for r in records]
    save_records(path, found)
    return found


def works_untold(predictor: nn.Module, device: str) -> bool:
    """Whether a predictor works where nobody tells the noise's variance."""
    history, _ = window(device)
    try:
        with torch.inference_mode():
            predictor(history, None)
    except UsageError:
        return False
    return True


def window(device: str) -> tuple[Tensor, Tensor]:
    """A history at 10 dB from the regular cell in the middle, and its noise variance."""
    stream = StreamedCSI("csi4cast", "test", conditions=[Condition("gaussian", 10.0, 10.0)], block_size=1)
    stream.cells = stream.cells[len(stream.cells) // 2 :][:1]
    batch = stream.batch(SampleRequest(stream.ids(1), 0, "test"))
    return batch.history.to(device), batch.noise_variance.to(device)


def costs(systems: dict[str, System], args: argparse.Namespace, end: float | None) -> None:
    """Parameters and latency of each system, printed and written."""
    rows = []
    for name, one in systems.items():
        if end is not None and time.monotonic() >= end:
            print(f"time is up before the latency of {name}", file=sys.stderr)
            break
        found = cost(name, one.timed, args)
        save_records(destination(args), found)
        by = {r["condition"].get("mode", r["metric"]): r["value"] for r in found}
        times = [f"{by[mode]:.2f}" if mode in by else "" for mode in args.modes]
        rows.append([name, f"{by['parameters']:,.0f}", f"{by['trained_parameters']:,.0f}", *times])
    print(table(["system", "parameters", "trained", *(f"{mode} [ms]" for mode in args.modes)], rows))
    print(f"records in {destination(args)}", end="\n\n")


def cost(name: str, predictor: nn.Module, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Records of parameters, and of the latency of one window in each mode that works."""
    device = "cpu" if isinstance(predictor, EIGENPROBLEMS) else args.device
    history, noise = window(device)
    counts = {
        "parameters": sum(p.numel() for p in predictor.parameters()),
        "trained_parameters": sum(p.numel() for p in predictor.parameters() if p.requires_grad),
    }
    records = [record(system=name, data="csi4cast", metric=metric, value=n) for metric, n in counts.items()]
    modes: list[Mode] = args.modes if device != "cpu" else [mode for mode in args.modes if mode == "eager"]
    for mode in modes:
        try:
            value = median_latency(predictor.to(device), history, noise, mode, args.runs, min(10, args.runs))
        except ChanlabError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        where = {"device": torch.device(device).type, "mode": mode, "batch": 1}
        records.append(
            record(
                system=name,
                data="csi4cast",
                metric="latency",
                value=value,
                unit="ms",
                n=args.runs,
                condition=where,
                tf32=args.tf32 and device != "cpu",
            )
        )
    return records


if __name__ == "__main__":
    sys.exit(main())
