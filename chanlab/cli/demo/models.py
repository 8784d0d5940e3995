"""From model recipes to what the demo runs: a training configuration of its own, and predictors to compare with."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from chanlab.data.recipe import find_recipe
from chanlab.errors import UsageError

if TYPE_CHECKING:
    from chanlab.data.views import CSIView


def read(name: str) -> dict[str, Any]:
    """A model recipe as plain values.

    Raises:
        UsageError: If there is none of this name, or it is not one for LightningCLI.
    """
    path = find_recipe("models", name)
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict) or not {"model", "data"} <= set(config):
        raise UsageError(f"{path} is no model recipe: it needs the sections model and data.")
    return config


def training_config(
    recipe: dict[str, Any], store: Path, folder: Path, seed: int, epochs: int | None = None
) -> dict[str, Any]:
    """The recipe, pointed at a store and a folder.

    Args:
        recipe: From `read`.
        store: The store to train on.
        folder: Where checkpoints (`best.ckpt`, `last.ckpt`) and logs go.
        seed: Seed of training.
        epochs: Epochs, instead of the recipe's.
    """
    config = copy.deepcopy(recipe)
    config["seed_everything"] = seed
    config["data"].setdefault("init_args", {})["store"] = str(store)
    trainer = config.setdefault("trainer", {})
    trainer["default_root_dir"] = str(folder)
    if epochs is not None:
        trainer["max_epochs"] = epochs
    others = [c for c in trainer.get("callbacks") or [] if _name(c) not in ("ModelCheckpoint", "PredictionWriter")]
    keeper = next((c for c in trainer.get("callbacks") or [] if _name(c) == "ModelCheckpoint"), None)
    keeper = keeper or {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {}}
    keeper["init_args"] = {
        "monitor": "val/nmse_db",
        **(keeper.get("init_args") or {}),
        "dirpath": str(folder),
        "filename": "best",
        "save_last": True,
        "save_on_exception": True,
        "enable_version_counter": False,
    }
    trainer["num_sanity_val_steps"] = -1
    trainer["callbacks"] = [*others, keeper, {"class_path": "chanlab.cli.demo.training.FirstValidation"}]
    return config


def instantiate(node: dict[str, Any], base: type) -> Any:
    """Build `{class_path, init_args}`, typed arguments read by jsonargparse.

    Raises:
        UsageError: If the class or an argument isn't known.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(base, "it")
    try:
        return parser.instantiate(parser.parse_object({"it": node})).it
    except ArgumentError as error:
        raise UsageError(f"{node.get('class_path')}: {error}") from error


def fetch_backbone(recipe: dict[str, Any]) -> None:
    """Fetch the pre-trained language model that a model recipe asks for, unless it is here or comes from elsewhere."""
    from chanlab.csi import backbone

    wanted = ((recipe["model"].get("init_args") or {}).get("predictor", {}).get("init_args") or {}).get("backbone")
    if wanted in backbone.BACKBONES:
        backbone.fetch(wanted)


def predictor(name: str, view: CSIView | None = None) -> Any:
    """A predictor, untrained, from its recipe; for a view's steps and transmit array if there is one."""
    from torch import nn

    node = copy.deepcopy(read(name)["model"]["init_args"]["predictor"])
    arguments = node.setdefault("init_args", {})
    if view is not None:
        arguments["horizons"] = view.horizon
    if view is not None and "tx_shape" in arguments:  # ports are numbered by polarisation, then column by column
        array = view.tx_array
        elements = array.num_rows * array.num_cols
        arguments["tx_shape"] = [array.num_ports // elements, array.num_cols, array.num_rows]
    return instantiate(node, nn.Module).eval()


def _name(callback: dict[str, Any]) -> str:
    return str(callback.get("class_path", "")).rpartition(".")[2]
