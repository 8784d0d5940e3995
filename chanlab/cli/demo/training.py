"""What the demo trains: one network, or one from shipped weights and the same from scratch; and how it went."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from chanlab.cli.demo import models
from chanlab.cli.lightning import find_weights
from chanlab.records import Record, record

ZERO_SHOT, FINE_TUNED, FROM_SCRATCH = "zero-shot", "fine-tuned", "from scratch"
"""What follows the name of a network that weights are shipped for."""
MONITOR = "val/nmse_db"


@dataclass(frozen=True)
class Training:
    """One run of `chanlab fit`.

    Attributes:
        system: What it makes, as records name it.
        stage: Its stage in the journal.
        folder: Where checkpoints (`best.ckpt`, `last.ckpt`) and logs go.
        recipe: Model recipe; its `weights` are what training starts from, if any.
    """

    system: str
    stage: str
    folder: Path
    recipe: Mapping[str, Any]

    @property
    def weights(self) -> Path | None:
        """The file that training starts from.

        Raises:
            UsageError: It isn't there.
        """
        name = self.recipe.get("weights")
        return None if name is None else find_weights(name)


def trainings(model: str, folder: Path) -> tuple[Training, ...]:
    """What a model recipe asks for: one run, or fine-tuning and training from scratch if it names weights.

    Args:
        model: Name or path of the recipe.
        folder: Folder of checkpoints and logs.
    """
    recipe = models.read(model)
    if recipe.get("weights") is None:
        return (Training(Path(model).stem, "training", folder, recipe),)
    name = network(recipe)
    return (
        Training(f"{name} {FINE_TUNED}", "fine-tuning", folder / "fine_tuned", recipe),
        Training(
            f"{name} {FROM_SCRATCH}", "training from scratch", folder / "from_scratch", {**recipe, "weights": None}
        ),
    )


def check_weights(model: str) -> None:
    """Make sure that the weights which a model recipe names are there and fit, before minutes are spent.

    Raises:
        UsageError: They aren't there.
        ChanlabError: They are those of another network.
    """
    from chanlab.weights import load_weights

    weights = trainings(model, Path())[0].weights
    if weights is not None:
        load_weights(models.predictor(model), weights)


def network(recipe: Mapping[str, Any]) -> str:
    """Class name of the predictor."""
    return str(recipe["model"]["init_args"]["predictor"]["class_path"]).rpartition(".")[2]


class FirstValidation(Callback):
    """Logs the validation that precedes training as step 0: where a learning curve starts.

    Lightning calls it a sanity check; `num_sanity_val_steps` -1 makes it a whole one. A resumed run has none.
    """

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Passes on what the module logged."""
        found = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        for logger in trainer.loggers:
            logger.log_metrics(found, step=0)


def learning_curve(folder: Path) -> list[tuple[int, float]]:
    """Steps of training done and NMSE [dB] of each validation, from the logs of a run and of those that it resumed."""
    curve: dict[int, float] = {}
    for path in sorted(folder.glob("logs/version_*/metrics.csv"), key=lambda p: int(p.parent.name.split("_")[1])):
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row.get(MONITOR):
                    step = int(row["step"])
                    curve[step + 1 if step else 0] = float(row[MONITOR])  # Lightning counts from 0
    return sorted(curve.items())


def curve_records(
    system: str, curve: Sequence[tuple[int, float]], *, data: str, n: int, seeds: Sequence[int]
) -> list[Record]:
    """Records of a learning curve: NMSE per sample on the validation split by step."""
    about: dict[str, Any] = {"data": data, "split": "val", "n": n, "seeds": seeds, "unit": "dB"}
    return [
        record(system=system, metric="nmse_per_sample", value=value, condition={"step": step}, **about)
        for step, value in curve
    ]
