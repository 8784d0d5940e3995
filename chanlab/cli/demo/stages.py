"""The stages of the demo: channels, training, judgement. Each is skipped if it is done already, with the same input."""

from __future__ import annotations

import logging
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from chanlab import __version__
from chanlab.cli.common import time_text
from chanlab.cli.demo import models
from chanlab.cli.demo.journal import Journal, fingerprint
from chanlab.records import Record

if TYPE_CHECKING:
    from chanlab.cli.demo.training import Training
    from chanlab.data.recipe import Recipe
    from chanlab.data.store import Store
    from chanlab.data.views import CSIView
    from chanlab.link import CSIEnsemble

CLASSICAL = ("ar", "pad", "ray_pursuit")
"""Recipes of models/ that need no training; `no prediction` and `perfect CSI` need no recipe."""


@dataclass(frozen=True)
class Settings:
    """What the demo does.

    Attributes:
        out: Folder of everything it writes.
        recipe: Channels.
        model: Recipe of models/ that is trained: fine-tuned and, beside it, from scratch if it names weights.
        seed: Seed of training.
        workers: Processes that trace.
        epochs: Epochs of training, instead of the model recipe's.
        snr_db: SNR of the histories that are judged [dB].
        windows: Windows of each held-out trajectory.
        link_snr_db: SNRs of the link [dB].
        table_snr_db: That of them which the table shows.
        link_step: Step of the horizon that the link is run on.
        users: Users served at once.
        sets: Sets of users that the link is run on, at most.
    """

    out: Path
    recipe: Recipe
    model: str = "learned_wiener_street"
    seed: int = 1
    workers: int = 2
    epochs: int | None = None
    snr_db: float = 15.0
    windows: int = 2
    link_snr_db: tuple[float, ...] = (-5.0, 0.0, 5.0, 10.0, 15.0, 20.0)
    table_snr_db: float = 10.0
    link_step: int = 2
    users: int = 4
    sets: int = 64

    @property
    def store(self) -> Path:
        """Folder of the store."""
        return self.out / "store"

    @property
    def training(self) -> Path:
        """Folder of checkpoints and logs."""
        return self.out / "training"


def say(number: int, what: str) -> None:
    """Announce a stage."""
    print(f"\n[{number}/4] {what}", file=sys.stderr, flush=True)


def make_channels(settings: Settings, journal: Journal) -> Store:
    """Trace and store the channels."""
    from chanlab.data.generate import generate

    say(1, f"channels of {settings.recipe.name}: {settings.recipe.samples} users")
    key = fingerprint(settings.recipe.name, settings.recipe.seed, settings.recipe.samples, settings.recipe.source)
    if journal.done("channels", key):
        store = generate(settings.recipe, settings.store, progress=False)  # checks that it is there, or makes it
        print(f"already in {settings.store}", file=sys.stderr)
        return store
    with journal.stage("channels", key):
        return generate(settings.recipe, settings.store, workers=settings.workers)


def train(settings: Settings, journal: Journal, store: Store) -> dict[str, Path]:
    """Train through Lightning's command line, as `chanlab fit` does; returns the best checkpoint of each system."""
    from chanlab.cli.demo.training import trainings

    runs = trainings(settings.model, settings.training)
    return {run.system: _train(run, settings, journal, store) for run in runs}


def _train(run: Training, settings: Settings, journal: Journal, store: Store) -> Path:
    from chanlab.cli.demo.training import learning_curve

    say(2, f"{run.stage}, {Path(settings.model).stem} on {len(store.splits['train'])} trajectories")
    recipe = dict(run.recipe)
    if run.weights is not None:
        recipe["weights"] = str(run.weights)
    config = models.training_config(recipe, settings.store, run.folder, settings.seed, settings.epochs)
    key = fingerprint(config, run.weights and _digest(run.weights), store.content_hash, __version__)
    best = run.folder / "best.ckpt"
    if journal.done(run.stage, key) and best.is_file():
        print(f"already in {best}", file=sys.stderr)
        return best
    if not journal.begun(run.stage, key):
        shutil.rmtree(run.folder, ignore_errors=True)  # of another configuration: nothing to go on from
    run.folder.mkdir(parents=True, exist_ok=True)
    path = run.folder / "model.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    with journal.stage(run.stage, key) as facts, _quiet():
        from chanlab.cli.lightning import main as learn

        command = ["fit", "--config", str(path), "--ckpt_path", "last"]
        facts["command"] = f"chanlab {' '.join(command)}"
        learn(command)
        facts["curve"] = learning_curve(run.folder)
    return best


def judge(settings: Settings, journal: Journal, store: Store, checkpoints: Mapping[str, Path]) -> list[Record]:
    """Compare predictors on held-out trajectories, and on a link."""
    say(3, f"judgement on {len(store.splits['test'])} held-out trajectories")
    names = ("snr_db", "windows", "link_snr_db", "link_step", "users", "sets", "seed")
    key = fingerprint(
        store.content_hash,
        {system: _digest(path) for system, path in checkpoints.items()},
        [models.read(name) for name in CLASSICAL],
        [getattr(settings, name) for name in names],
        __version__,
    )
    if journal.done("judgement", key):
        print("already done", file=sys.stderr)
        return list(journal.facts("judgement")["records"])
    with journal.stage("judgement", key) as facts, _quiet():
        facts["records"] = _judge(settings, journal, store, checkpoints)
        return list(facts["records"])


def _judge(settings: Settings, journal: Journal, store: Store, checkpoints: Mapping[str, Path]) -> list[Record]:
    from lightning.pytorch import LightningDataModule

    from chanlab.cli.demo.evaluate import nmse_records
    from chanlab.cli.demo.training import ZERO_SHOT, curve_records, network, trainings
    from chanlab.csi.module import load_predictor
    from chanlab.link import collect
    from chanlab.weights import load_weights

    runs = trainings(settings.model, settings.training)
    node = models.training_config(dict(runs[0].recipe), settings.store, settings.training, settings.seed)["data"]
    node["init_args"] |= {"num_workers": 0}
    validated = len(models.instantiate(node, LightningDataModule).windows("val"))
    node["init_args"] |= {"eval_snr_db": settings.snr_db, "windows_per_sample": settings.windows}
    data = models.instantiate(node, LightningDataModule)
    view = data.windows("test").view
    systems = {name: models.predictor(name, view) for name in CLASSICAL}
    for run in runs:
        if run.weights is not None:
            shipped = models.predictor(settings.model, view)
            load_weights(shipped, run.weights)
            systems[f"{network(run.recipe)} {ZERO_SHOT}"] = shipped
        systems[run.system] = load_predictor(checkpoints[run.system])
    ensemble = collect(systems, _batches(data))
    name, seeds = store.recipe.name, [settings.seed]
    about: dict[str, Any] = {"data": name, "split": "test"}
    ahead = [h * view.interval for h in view.horizons]
    records = nmse_records(ensemble, **about, snr_db=settings.snr_db, ahead=ahead, seeds=seeds)
    for run in runs:
        curve = journal.facts(run.stage).get("curve", [])
        records += curve_records(run.system, curve, data=name, n=validated, seeds=seeds)
    return records + link_records(settings, ensemble, view, about)


def link_records(settings: Settings, ensemble: CSIEnsemble, view: CSIView, about: Mapping[str, Any]) -> list[Record]:
    """Spectral efficiency and coded BLER at one step of the horizon, for a few sets of users."""
    from chanlab.link import CodedLink, evaluate_ensemble, group_users

    step = min(settings.link_step, view.horizon)
    chosen = group_users(ensemble.sample_id, settings.users, seed=0)[: settings.sets].flatten()
    some = ensemble.select(chosen)
    now = slice(step - 1, step)
    some = replace(some, channel=some.channel[:, :, now], csi={name: x[:, :, now] for name, x in some.csi.items()})
    link = CodedLink(
        view.num_subcarriers,
        num_users=settings.users,
        num_symbols=7,
        pilot_symbols=[2],
        subcarrier_spacing=view.subcarrier_spacing,
    )
    records = evaluate_ensemble(
        some,
        settings.link_snr_db,
        users=settings.users,
        link=link,
        condition={"snr_db": settings.snr_db},
        progress=True,
        **about,
    )
    for item in records:
        item["condition"]["horizon"] = step  # the only one that the ensemble holds
    return records


def _batches(data: Any) -> Iterator[Any]:
    """Test windows, their channels computed, with a progress bar."""
    from tqdm import tqdm

    for batch in tqdm(data.test_dataloader(), desc="predict", unit="batch"):
        yield data.on_after_batch_transfer(batch, 0)


def _digest(path: Path) -> str:
    import hashlib

    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _quiet(warnings.catch_warnings):
    """Keeps what libraries tell their developers away from the progress bars."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.simplefilter("ignore")
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)
        return entered


def timing(settings: Settings, journal: Journal) -> str:
    """How long each stage took."""
    from chanlab.cli.demo.training import trainings

    trained = (run.stage for run in trainings(settings.model, settings.training))
    names = ("channels", *trained, "judgement")
    return ", ".join(f"{name} {time_text(journal.seconds(name))}" for name in names)
