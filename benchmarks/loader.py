"""How fast windows come out of a store, against the same windows as tensors in memory.

    python benchmarks/loader.py

Three loaders yield the same batches of windows (noisy history, noiseless target and labels) with as many workers each:
tensors in memory, noise included (`torch.utils.data.TensorDataset`); a materialised view, to which noise is added as it
is read; and paths, from which channels are computed on the fly in the learner's process. They take turns, so that a
busy machine slows all of them, and the median over the rounds counts. The view is in the page cache, as the tensors are
in memory.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from chanlab.data.generate import generate
from chanlab.data.recipe import load_recipe
from chanlab.data.store import Store
from chanlab.data.windows import CSIWindows, collate
from chanlab.records import record, save_records

ROOT = Path(__file__).resolve().parents[1]
NAMES = {"memory": "tensors in memory", "materialised": "materialised view", "paths": "paths, on the fly"}


def main() -> int:
    """Measure, print, record; returns 1 if the materialised view is slower than half of memory."""
    parser = argparse.ArgumentParser(description="Windows per second from a store and from memory.")
    parser.add_argument("--recipe", default="two_ray", help="data set recipe")
    parser.add_argument("--store", type=Path, help="a store that exists, in place of the recipe's")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2, help="worker processes of each loader")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--windows", type=int, default=1600, help="windows per round (all of them held in memory once)")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results.json", help="where records go")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chanlab-loader-"))
    try:
        path = args.store or folder / "store"
        if not args.store:
            generate(load_recipe(args.recipe), path, workers=args.workers)
        store = Store(path)
        rates, shape = measure(store, folder, args.batch_size, args.workers, args.windows, args.rounds)
    finally:
        shutil.rmtree(folder)
    memory = statistics.median(rates["memory"])
    condition = {"workers": args.workers, "batch_size": args.batch_size, "entries_per_window": shape}
    records = []
    for name, values in rates.items():
        rate = statistics.median(values)
        print(f"{NAMES[name]:<18} {rate:8.0f} windows/s  {rate / memory:5.2f} of memory")
        records.append(
            record(
                system=NAMES[name],
                data=store.recipe.name,
                split="train",
                condition=condition,
                metric="windows_per_second",
                value=rate,
                deviation=statistics.stdev(values) if len(values) > 1 else None,
                n=args.windows,
                unit="1/s",
                **({} if name == "memory" else {"peer": memory, "ratio": rate / memory}),
            )
        )
    save_records(args.results, records)
    return int(statistics.median(rates["materialised"]) < 0.5 * memory)


def measure(
    store: Store, folder: Path, batch_size: int, workers: int, limit: int, rounds: int
) -> tuple[dict[str, list[float]], int]:
    """Windows per second of each loader in each round, and the complex entries of a window."""
    materialised = CSIWindows(store, "train", snr_db=(0.0, 25.0), mode="materialised", view_dir=folder / "views")
    paths = CSIWindows(store, "train", snr_db=(0.0, 25.0))
    count = min(limit, len(paths))
    parts = [materialised.batch(range(i, min(i + 256, count))) for i in range(0, count, 256)]
    memory = TensorDataset(*(torch.cat(x) for x in zip(*parts, strict=True)))
    entries = parts[0].history[0].numel() + parts[0].target[0].numel()
    del parts

    def loader(data: Any, **kwargs: Any) -> DataLoader[Any]:
        sampler = torch.utils.data.SubsetRandomSampler(range(count))
        persistent = workers > 0
        return DataLoader(
            data, batch_size, sampler=sampler, num_workers=workers, persistent_workers=persistent, **kwargs
        )

    loaders: dict[str, tuple[DataLoader[Any], Callable[[Any], Any]]] = {
        "memory": (loader(memory), lambda batch: batch),
        "materialised": (loader(materialised, collate_fn=collate), lambda batch: batch),
        "paths": (loader(paths, collate_fn=collate), paths.to_batch),
    }
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    for round_ in tqdm(range(rounds + 1), desc="rounds", unit="round"):
        for name, (batches, finish) in loaders.items():
            start = time.perf_counter()
            seen = sum(len(finish(batch)[-1]) for batch in batches)
            elapsed = time.perf_counter() - start
            assert seen == count
            if round_:  # the first starts the workers and warms the caches
                rates[name].append(seen / elapsed)
    return rates, entries


if __name__ == "__main__":
    raise SystemExit(main())
