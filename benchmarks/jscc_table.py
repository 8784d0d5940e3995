"""What jscc_train.py reports: PSNR with intervals, paired differences, a table and curves."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jscc_arms import Arm

from chanlab.cli.common import table
from chanlab.jscc.images import ImageDataModule
from chanlab.metrics import bootstrap_interval
from chanlab.records import Record, record, select

SIZES = {"shrunk": "96x96", "crop": "96x96 crops", "photo": "512x768"}
"""What photographs are evaluated as, and what records call it: shrunk to 96x96, cut at their own size, shrunk."""
Results = Mapping[Arm, Mapping[str, Any]]


def sources(data: ImageDataModule, split: str) -> npt.NDArray[np.int64]:
    """The source photograph of each image of a split, as a number."""
    of_name = {entry.name: entry.source for entry in data.collection(split).entries}
    names = [of_name[data.picture(split, i)] for i in range(len(data.crops(split)))]
    return np.unique(names, return_inverse=True)[1].astype(np.int64)


def measured(results: Results, size: str) -> dict[tuple[str, Fraction, float], npt.NDArray[np.float64]]:
    """PSNR of each image [dB] by system, ratio and SNR."""
    found = {}
    for arm, known in results.items():
        for key, values in known["psnr"][size].items():
            ratio, snr = key.split()
            found[arm.label, Fraction(ratio), float(snr)] = np.asarray(values, np.float64)
    return found


def psnr_records(results: Results, data: Mapping[str, ImageDataModule], args: argparse.Namespace) -> list[Record]:
    """Mean PSNR of each system, with its interval over source photographs."""
    made = []
    for size in SIZES:
        groups = sources(data[size], args.split)
        for (system, ratio, snr), values in measured(results, size).items():
            made.append(_record(system, "psnr", values, groups, size, ratio, snr, args, *_cost(results, system, ratio)))
    return made


def comparisons(results: Results, data: Mapping[str, ImageDataModule], args: argparse.Namespace) -> list[Record]:
    """Ours minus each other system, image by image, under the same noise."""
    made = []
    for size in SIZES:
        groups, found = sources(data[size], args.split), measured(results, size)
        for (system, ratio, snr), values in found.items():
            ours = found.get(("adaptive", ratio, snr))
            if ours is None or system == "adaptive":
                continue
            extra = {"peer": system, "peer_value": float(values.mean())}
            made.append(
                _record("adaptive", f"psnr_over_{system}", ours - values, groups, size, ratio, snr, args, extra)
            )
    return made


def _cost(results: Results, system: str, ratio: Fraction) -> tuple[dict[str, Any]]:
    """Parameters, steps and seconds of training of a system."""
    for arm, known in results.items():
        if arm.label == system and arm.ratio in (None, ratio) and "trained" in known:
            return ({name: known["trained"][name] for name in ("parameters", "steps", "seconds")},)
    return ({},)


def _record(
    system: str,
    metric: str,
    values: npt.NDArray[np.float64],
    groups: npt.NDArray[np.int64],
    size: str,
    ratio: Fraction,
    snr: float,
    args: argparse.Namespace,
    extra: Mapping[str, Any],
) -> Record:
    condition = {"snr_db": snr, "ratio": str(ratio), "size": SIZES[size], "channel": "awgn", "loss": args.loss}
    interval = bootstrap_interval(values, groups=groups) if len(np.unique(groups)) > 1 else None
    ends = {} if interval is None else {"low": interval.low, "high": interval.high}
    return record(
        system=system,
        metric=metric,
        value=float(values.mean()),
        data="photographs",
        split=args.split,
        condition=condition,
        n=len(values),
        seeds=[args.seed],
        unit="dB",
        **ends,
        **extra,
    )


def psnr_table(records: Iterable[Record]) -> str:
    """PSNR and differences, a row for each system."""
    records, parts = list(records), []
    snrs = sorted({r["condition"]["snr_db"] for r in records})
    for size in SIZES.values():
        for ratio in sorted({r["condition"]["ratio"] for r in records}, key=Fraction, reverse=True):
            chosen = select(records, size=size, ratio=ratio)
            rows = [
                [r_name, *(_cell(select(chosen, system=system, metric=metric), snr) for snr in snrs)]
                for system, metric, r_name in dict.fromkeys((r["system"], r["metric"], _row(r)) for r in chosen)
            ]
            parts.append(table([f"{size}, k/n = {ratio}", *(f"{s:g} dB" for s in snrs)], rows))
    return "\n\n".join(parts)


def _row(item: Record) -> str:
    return item["system"] if item["metric"] == "psnr" else f"  ours over {item['peer']}"


def _cell(records: Iterable[Record], snr: float) -> str:
    for item in records:
        if item["condition"]["snr_db"] == snr:
            if "low" not in item:
                return f"{item['value']:.2f}"
            return f"{item['value']:.2f} [{item['low']:.2f}, {item['high']:.2f}]"
    return ""


def plot(records: Iterable[Record], path: Path) -> Path:
    """PSNR over SNR, a panel for each size and ratio; intervals are those of the photographs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    records = select(records, metric="psnr")
    ratios = sorted({r["condition"]["ratio"] for r in records}, key=Fraction, reverse=True)
    systems = list(dict.fromkeys(r["system"] for r in records))
    figure, axes = plt.subplots(
        len(ratios), len(SIZES), figsize=(12, 3.6 * len(ratios)), sharex=True, squeeze=False, layout="constrained"
    )
    for row, ratio in zip(axes, ratios, strict=True):
        for axis, size in zip(row, SIZES.values(), strict=True):
            for i, system in enumerate(systems):
                points = sorted(
                    (r["condition"]["snr_db"], r["value"])
                    for r in select(records, system=system, size=size, ratio=ratio)
                )
                if points:
                    line = "--" if system.startswith("adaptive, one") else "-"
                    axis.plot(*zip(*points, strict=True), line, color=f"C{i}", marker="o", markersize=3, label=system)
            axis.set_title(f"{size}, k/n = {ratio}", fontsize=10)
            axis.grid(alpha=0.3)
        row[0].set_ylabel("PSNR [dB]")
    for axis in axes[-1]:
        axis.set_xlabel("SNR [dB]")
    axes[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
