"""Predictors side by side on CSI-4CAST's protocol: accuracy on its three sets, parameters, latency.

Accuracy is the protocol's mean per-antenna NMSE, with pooled and median beside, over the cells of a set; intervals come
from a bootstrap over channel realisations. Latency is the median over repeated calls with one window at a time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from chanlab.cli.common import table
from chanlab.cli.demo import models
from chanlab.csi import evaluate_protocol, is_trainable, load_weights, protocol_records
from chanlab.data import StreamedCSI
from chanlab.errors import UsageError
from chanlab.records import record, save_records

MODELS = Path(__file__).resolve().parents[1] / "models" / "csi"
SHAPE = (1, 1, 32, 16, 300)
EXAMPLES = """examples:
  python benchmarks/csi.py --samples 2 --every 10                (minutes on a CPU)
  python benchmarks/csi.py --samples 100 --device cuda           (everything)
  python benchmarks/csi.py --systems ours --sets robustness --every 3
"""


SYSTEMS = {
    "no prediction": "csi4cast_no_prediction",
    "ar": "csi4cast_ar",
    "pad": "csi4cast_pad",
    "kalman": "csi4cast_kalman",
    "esprit": "csi4cast_esprit",
    "ours": "learned_wiener",
}
"""Recipe of each system; weights of the recipe's name beside it are read."""


def system(name: str) -> nn.Module:
    """A predictor as its recipe has it, with the weights that are shipped, if any."""
    recipe = SYSTEMS[name]
    predictor: nn.Module = models.predictor(recipe)
    weights = MODELS / f"{recipe}.safetensors"
    if weights.is_file():
        load_weights(predictor, weights)
    return predictor


def main() -> None:
    """Measure, print tables, write records."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), metavar="NAME")
    parser.add_argument("--sets", nargs="+", default=["regular", "generalization"], metavar="SET")
    parser.add_argument("--samples", type=int, default=100, help="samples of each cell (default: 100)")
    parser.add_argument("--every", type=int, default=1, help="take every so many cells only (default: 1, all)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-latency", action="store_true", help="leave out parameters and latency")
    parser.add_argument("--results", type=Path, default=MODELS / "results.json", help="where the records go")
    args = parser.parse_args()
    if args.samples < 1 or args.every < 1:
        raise UsageError("--samples and --every must be at least 1.")
    predictors = {name: system(name).to(args.device).eval() for name in args.systems}
    records = []
    for cells in args.sets:
        stream = StreamedCSI("csi4cast", "test", cells=cells, duplex="both", seed=args.seed, block_size=args.samples)
        stream.cells = stream.cells[:: args.every]
        results = evaluate_protocol(predictors, stream, args.samples, 8, args.device, progress=True)
        noted = {"cells": len(stream.cells), "samples_per_cell": args.samples}
        found = protocol_records(results, "csi4cast", cells, [args.seed], resamples=300, **noted)
        if args.samples == 1:  # no interval from a single realisation a cell
            found = [{k: v for k, v in r.items() if k not in ("low", "high")} for r in found]
        records += found
        save_records(args.results, found)
    if not args.no_latency:
        for name, predictor in predictors.items():
            records += cost(name, predictor, args.device)
        save_records(args.results, records)
    rows = [
        [r["system"], r["split"], r["condition"]["duplex"], f"{r['value']:.4f}", interval(r)]
        for r in records
        if r["metric"] == "nmse" and set(r["condition"]) == {"duplex"}
    ]
    print(table(["system", "set", "duplex", "mean per-antenna NMSE", "95 %"], rows))


def interval(r: dict[str, object]) -> str:
    """A record's interval, if it has one."""
    return f"{r['low']:.4f} ... {r['high']:.4f}" if "low" in r else ""


def cost(name: str, predictor: nn.Module, device: str) -> list[dict[str, object]]:
    """Parameters, and latency of one window."""
    history = torch.randn(SHAPE, dtype=torch.complex64, device=device)
    noise = torch.full((1,), 0.1, device=device)
    times = []
    with torch.inference_mode():
        for _ in range(13):
            wait(history)
            start = time.perf_counter()
            predictor(history, noise)
            wait(history)
            times.append((time.perf_counter() - start) * 1e3)
    trained = sum(p.numel() for p in predictor.parameters() if p.requires_grad) if is_trainable(predictor) else 0
    where = {"device": device}
    return [
        record(
            system=name,
            data="csi4cast",
            metric="latency",
            value=statistics.median(times[3:]),
            unit="ms",
            condition=where,
        ),
        record(system=name, data="csi4cast", metric="parameters", value=trained, unit=""),
    ]


def wait(x: Tensor) -> None:
    """Until the device has done its work."""
    if x.is_cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
