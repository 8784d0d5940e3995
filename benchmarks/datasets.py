"""Measures data sets for their cards: time, size, paths, splits and channel statistics, and draws each.

Example:
    python benchmarks/datasets.py street_canyon
    python benchmarks/datasets.py munich_mobility --samples 100     (time and size of the whole are extrapolated)

Writes records to datasets/results.json and pictures to datasets/NAME.png; `make cards` renews the cards.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from chanlab.cli.figures import save
from chanlab.cli.quicklook import quicklook, survey
from chanlab.data.generate import generate
from chanlab.data.recipe import load_recipe
from chanlab.data.store import Store
from chanlab.records import Record, record, save_records

FOLDER = Path(__file__).resolve().parents[1] / "datasets"


def measure(name: str, samples: int | None, workers: int, store_folder: Path) -> tuple[Store, list[Record]]:
    """Generates a recipe (or its first `samples` users) and measures it."""
    recipe = load_recipe(name)
    whole = recipe.samples
    if samples is not None and samples < whole:
        recipe = replace(recipe, samples=samples, text="")
    start = time.perf_counter()
    store = generate(recipe, store_folder, workers=workers)
    seconds = time.perf_counter() - start
    size = sum(file.stat().st_size for file in store_folder.glob("*.h5"))
    found = survey(store)
    counts = np.concatenate(
        [
            store.links(ids).paths.mask.sum(-1).numpy().ravel()
            for ids in np.array_split(store.sample_ids, 10)
            if len(ids)
        ]
    )
    reached = found.gain > 0
    measured = store.num_samples
    about = partial(record, data=name, n=measured, seeds=[recipe.seed], condition={"users": measured})
    made = [
        about(system="chanlab", metric="generation_time", value=seconds, unit="s"),
        about(system="chanlab", metric="size", value=size / 1e6, unit="MB"),
        about(system="chanlab", metric="anchors_per_user", value=store.num_anchors),
        about(system="chanlab", metric="paths_mean", value=float(counts.mean())),
        about(system="chanlab", metric="paths_max", value=float(counts.max())),
        about(system="chanlab", metric="line_of_sight_share", value=100 * float(found.line_of_sight.mean()), unit="%"),
        about(system="chanlab", metric="users_without_paths", value=100 * float(1 - reached.mean()), unit="%"),
    ]
    for quantile in (10, 50, 90):
        spread = float(np.percentile(found.delay_spread[reached], quantile)) * 1e9
        gain = float(np.percentile(10 * np.log10(found.gain[reached]), quantile))
        made.append(about(system="chanlab", metric=f"delay_spread_p{quantile}", value=spread, unit="ns"))
        made.append(about(system="chanlab", metric=f"path_gain_p{quantile}", value=gain, unit="dB"))
    for split, members in store.splits.items():
        made.append(about(system="chanlab", split=split, metric="users", value=len(members)))
    if measured < whole:
        scaled = partial(record, data=name, n=measured, seeds=[recipe.seed], condition={"users": whole})
        made.append(scaled(system="extrapolated", metric="generation_time", value=seconds * whole / measured, unit="s"))
        made.append(scaled(system="extrapolated", metric="size", value=size / 1e6 * whole / measured, unit="MB"))
    return store, made


def main() -> None:
    """Measures each recipe asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="names of data set recipes")
    parser.add_argument("--samples", type=int, help="users to generate; all when not given")
    parser.add_argument("--workers", type=int, default=2, help="processes that generate")
    parser.add_argument("--keep", type=Path, help="folder to keep the stores in; removed when not given")
    args = parser.parse_args()
    for name in args.recipes:
        with tempfile.TemporaryDirectory() as scratch:
            store, records = measure(name, args.samples, args.workers, (args.keep or Path(scratch)) / name)
            save_records(FOLDER / "results.json", records)
            print(save(quicklook(store), FOLDER / f"{name}.png"))
            for item in records:
                print(f"{name:18} {item['split']:6} {item['metric']:24} {item['value']:12.4g} {item['unit']}")


if __name__ == "__main__":
    main()
