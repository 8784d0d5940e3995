"""The grid that csi_train.py trains: systems, runs, what is kept of each and how figures and curves come of them."""

from __future__ import annotations

import argparse
import copy
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from chanlab.cli.demo import models
from chanlab.csi import (
    CSIPredictionModule,
)
from chanlab.errors import UsageError
from chanlab.records import Record, over_seeds, record, save_records

SYSTEMS = {
    "llm4cp": "llm4cp",
    "llm4cp_random": "llm4cp_random",
    "llm4cp_nollm": "llm4cp_nollm",
    **{name: f"csi4cast_{name}" for name in ("rnn", "lstm", "gru", "cnn", "softs", "wifo", "transformer")},
}
"""Recipe of each system."""
FDD: dict[str, dict[str, Any]] = {
    "chanlab.csi.SOFTS": {"instance_norm": False},
    "chanlab.csi.WiFo": {"frequency_offset": 450},
}
"""Arguments of predictors that differ with targets on another band, as their recipes say; see `for_band`."""


@dataclass(frozen=True)
class Run:
    """A cell of the grid; with duplex `both` one network learns TDD and FDD at once."""

    system: str
    duplex: str
    seed: int

    @property
    def label(self) -> str:
        """The system's name in records: a recipe's without folder."""
        return Path(self.system).stem

    @property
    def name(self) -> str:
        """Name of its files."""
        return f"{self.label}_{self.duplex}_{self.seed}"


@dataclass
class Trained:
    """What a run cost and how it went.

    Attributes:
        complete: Whether the budget was used up.
        minutes: Time of training, without compiling and validation.
        windows: Windows seen.
        steps: Steps tried.
        skipped: Steps left out, their gradients not being finite.
        batch: Windows per step.
        antennas: Antennas seen of each.
        warm_up: Time of the first, compiling passes [s].
        compiled: Whether parts were compiled.
        validation: Windows per second in validation.
        memory: Largest memory on the GPU [byte].
        parameters: Trained parameters.
        weights: Size of the file of weights [byte].
        curve: Points of the learning curve: minutes, windows, steps, mean training loss since the last point, NMSE of
            the validation set.
    """

    complete: bool = False
    minutes: float = 0.0
    windows: int = 0
    steps: int = 0
    skipped: int = 0
    batch: int = 0
    antennas: int = 0
    warm_up: float = 0.0
    compiled: bool = False
    validation: float = 0.0
    memory: int = 0
    parameters: int = 0
    weights: int = 0
    curve: list[dict[str, float | None]] = field(default_factory=list)


def recipe(system: str) -> dict[str, Any]:
    """A system's recipe as plain values; other names than those of `SYSTEMS` are recipes' own."""
    return models.read(SYSTEMS.get(system, system))


def for_band(node: dict[str, Any], duplex: str) -> dict[str, Any]:
    """The node of a recipe's predictor, whatever the recipe's name, with the arguments that a band asks for."""
    changes = FDD.get(node["class_path"], {}) if duplex == "fdd" else {}
    return {**node, "init_args": {**(node.get("init_args") or {}), **changes}}


def build(run: Run) -> CSIPredictionModule:
    """A run's predictor as its recipe has it, from its seed, in the module that knows how it is trained.

    Raises:
        UsageError: One network can't learn both bands.
    """
    config = copy.deepcopy(recipe(run.system)["model"]["init_args"])
    node = for_band(config.pop("predictor"), run.duplex)
    if "duplex" in node["init_args"]:
        node["init_args"]["duplex"] = run.duplex
    elif run.duplex == "both":
        raise UsageError(f"{run.label} predicts one band: train it with --duplex tdd fdd.")
    torch.manual_seed(run.seed)
    return CSIPredictionModule(models.instantiate(node, nn.Module), **config)


class Shelf:
    """The folder of results: what each run left there.

    Args:
        args: The command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.out: Path = args.out
        self.args = args

    def weights(self, run: Run) -> Path:
        """A run's file of weights."""
        return self.out / "weights" / f"{run.name}.safetensors"

    def file(self, run: Run) -> Path:
        """A run's curve, cost and records."""
        return self.out / "runs" / f"{run.name}.json"

    def read(self, run: Run) -> dict[str, Any]:
        """What is known of a run, nothing if it wasn't begun.

        Raises:
            UsageError: It was trained or evaluated otherwise.
        """
        if not self.file(run).is_file():
            return {}
        known: dict[str, Any] = json.loads(self.file(run).read_text(encoding="utf-8"))
        if known["settings"] != settings(self.args):
            other = [k for k, v in settings(self.args).items() if known["settings"].get(k) != v]
            raise UsageError(
                f"{self.file(run)} was made with another {', '.join(other)}: give the same, or another --out."
            )
        return known

    def write(self, run: Run, done: Trained, records: list[Record]) -> None:
        """Keeps a run, in one go, and renews the figures over seeds."""
        target = self.file(run)
        target.parent.mkdir(parents=True, exist_ok=True)
        known = {"run": asdict(run), "settings": settings(self.args), "trained": asdict(done), "records": records}
        scratch = target.with_name(f".{target.name}.{os.getpid()}")
        scratch.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        os.replace(scratch, target)
        save_records(self.out / "results.json", self.records(), replace=True)

    def all(self) -> list[dict[str, Any]]:
        """Every run that is here."""
        return [json.loads(f.read_text(encoding="utf-8")) for f in sorted((self.out / "runs").glob("*.json"))]

    def records(self) -> list[Record]:
        """Records of all finished runs, joined over their seeds.

        Raises:
            UsageError: They weren't all trained and evaluated alike.
        """
        for known in self.all()[1:]:
            other = [k for k, v in known["settings"].items() if self.all()[0]["settings"].get(k) != v]
            if other:
                raise UsageError(f"runs in {self.out} differ in {', '.join(other)}: keep them in folders of their own.")
        return over_seeds([r for known in self.all() for r in known["records"]])

    def curves(self) -> list[dict[str, Any]]:
        """Every run that has a curve to draw."""
        return [known for known in self.all() if len(known["trained"]["curve"]) > 1]

    def plot(self) -> Path:
        """Draws learning curves: training loss thin, NMSE of the validation set thick; a colour for each system."""
        from matplotlib import colormaps
        from matplotlib.ticker import ScalarFormatter

        from chanlab.cli.figures import new_figure, tidy

        runs = self.curves()
        if not runs:
            raise UsageError(f"there is no learning curve in {self.out}: train first.")
        systems = list(dict.fromkeys(known["run"]["system"] for known in runs))
        bands = [b for b in ("tdd", "fdd", "both") if any(known["run"]["duplex"] == b for known in runs)]
        figure = new_figure(4.6 * len(bands) + 0.8, 3.8)
        panels = figure.subplots(1, len(bands), squeeze=False)[0]
        by = "windows" if self.args.windows else "minutes"
        for panel, band in zip(panels, bands, strict=True):
            named = set()
            for known in (k for k in runs if k["run"]["duplex"] == band):
                system, curve = known["run"]["system"], known["trained"]["curve"]
                color = colormaps["tab10"](systems.index(system) % 10)
                label = None if system in named else Path(system).stem
                named.add(system)
                panel.plot(
                    [p[by] for p in curve], [p["nmse"] for p in curve], "o-", color=color, lw=1.8, ms=3, label=label
                )
                panel.plot([p[by] for p in curve[1:]], [p["loss"] for p in curve[1:]], ":", color=color, lw=1)
            panel.set_yscale("log")
            panel.yaxis.set_minor_formatter(ScalarFormatter())
            panel.yaxis.set_major_formatter(ScalarFormatter())
            tidy(panel, band.upper(), f"training [{by}]", "mean NMSE per antenna and step")
            panel.legend(fontsize=8, frameon=False)
        path = self.out / "learning_curves.png"
        figure.savefig(path)
        return path


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What figures depend on, besides the run."""
    names = "minutes windows antennas batch lr floor precision bits sets samples every val_samples test_seed block_size"
    return {name: getattr(args, name) for name in names.split()}


def budget(args: argparse.Namespace) -> dict[str, Any]:
    """The budget as records hold it."""
    size = {"training_windows": args.windows} if args.windows else {"training_minutes": args.minutes}
    return {**size, "bits": args.bits}


def costs(run: Run, done: Trained, args: argparse.Namespace) -> list[Record]:
    """Records of what training took."""
    figures = {
        "training_windows": (done.windows, ""),
        "training_antennas": (done.antennas, ""),
        "training_steps": (done.steps, ""),
        "skipped_steps": (done.skipped, ""),
        "training_time": (60 * done.minutes, "s"),
        "parameters": (done.parameters, ""),
        "weights": (done.weights / 1e6, "MB"),
    }
    common: dict[str, Any] = {"data": "csi4cast", "split": "train", "condition": {"duplex": run.duplex}}
    return [
        record(system=run.label, metric=m, value=v, unit=u, seeds=[run.seed], **common, **budget(args))
        for m, (v, u) in figures.items()
    ]
