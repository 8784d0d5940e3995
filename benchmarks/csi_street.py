"""Compares CSI predictors on held-out trajectories of a ray-traced data set, learned ones over several seeds.

Example:
    python benchmarks/csi_street.py --models llm --seeds 1 2 3
    python benchmarks/csi_street.py --models gru transformer --seeds 1 --out out/csi_street

Every learned predictor is trained through `chanlab fit` by its recipe in models/csi; how AR's and PAD's orders were
chosen, the card says. Goes on where it stopped. Writes records to models/csi/results.json; then `make cards`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from chanlab.cli.common import table
from chanlab.cli.demo import models
from chanlab.cli.demo.evaluate import nmse_records
from chanlab.cli.demo.journal import Journal
from chanlab.cli.demo.stages import CLASSICAL, Settings, make_channels, train
from chanlab.csi.module import load_predictor
from chanlab.data import CSIDataModule
from chanlab.data.recipe import load_recipe
from chanlab.link import NO_PREDICTION, PERFECT, collect
from chanlab.metrics import nmse_terms, to_db
from chanlab.records import Record, over_seeds, record, save_records

RESULTS = Path(__file__).resolve().parents[1] / "models" / "csi" / "results.json"


def per_sample_records(ensemble: Any, about: dict[str, Any]) -> list[Record]:
    """NMSE of each window over all steps: mean of ratios and median [dB]."""
    made = []
    for system, csi in ensemble.csi.items():
        if system == PERFECT:
            continue
        error, power = nmse_terms(csi, ensemble.channel, dim=(1, 3))
        ratio = error.sum(1) / power.sum(1)
        item = partial(record, system=system, n=len(ratio), **about)
        made.append(item(metric="nmse_per_sample", value=float(to_db(ratio.mean())), unit="dB"))
        made.append(item(metric="nmse_median", value=float(to_db(ratio.median())), unit="dB"))
    return made


def main() -> None:
    """Trains what is missing, evaluates everything, prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["llm"], help="recipes of models/csi that are trained")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="seeds of training")
    parser.add_argument("--recipe", default="street_canyon", help="data set recipe")
    parser.add_argument("--snr-db", type=float, default=15.0, help="SNR of the histories that are judged [dB]")
    parser.add_argument("--out", type=Path, default=Path("out/csi_street"), help="folder of store and checkpoints")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the records go")
    args = parser.parse_args()
    base = Settings(out=args.out, recipe=load_recipe(args.recipe))
    store = make_channels(base, Journal(args.out / "journal.json"))
    runs: list[Record] = []
    for seed in args.seeds:
        systems: dict[str, Any] = {}
        for name in args.models:
            folder = args.out / f"{name}-{seed}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "store").unlink(missing_ok=True)
            (folder / "store").symlink_to(base.store.resolve())
            settings = replace(base, out=folder, model=name, seed=seed)
            trained = train(settings, Journal(folder / "journal.json"), store)
            systems |= {system: load_predictor(path) for system, path in trained.items()}
        data = CSIDataModule(base.store, eval_snr_db=args.snr_db, num_workers=0, history=16, horizons=4)
        windows = data.windows("test")
        if seed == args.seeds[0]:
            systems |= {name: models.predictor(name, windows.view) for name in CLASSICAL}
        with torch.inference_mode():
            ensemble = collect(systems, (data.on_after_batch_transfer(b, 0) for b in data.test_dataloader()))
        ahead = [h * windows.view.interval for h in windows.view.horizons]
        about: dict[str, Any] = {"data": store.recipe.name, "split": "test", "seeds": [seed]}
        found = nmse_records(ensemble, **about, snr_db=args.snr_db, ahead=ahead)
        found += per_sample_records(ensemble, {**about, "condition": {"snr_db": args.snr_db, "horizon": "all"}})
        runs += [r for r in found if r["system"] not in (NO_PREDICTION, *CLASSICAL) or seed == args.seeds[0]]
    records = over_seeds(runs)
    save_records(args.results, records)
    metrics = ("nmse_pooled", "nmse_per_sample", "nmse_median")
    rows = []
    for system in dict.fromkeys(r["system"] for r in records):
        mine = [r for r in records if r["system"] == system and r["condition"]["horizon"] == "all"]
        values = {r["metric"]: r for r in mine}
        rows.append([system, *(f"{values[m]['value']:.2f} ± {values[m]['deviation'] or 0:.2f}" for m in metrics)])
    print(table(["system", *(f"{m} [dB]" for m in metrics)], rows))


if __name__ == "__main__":
    main()
