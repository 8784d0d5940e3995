"""`chanlab fit`, `validate`, `test` and `predict`: Lightning's command line, for any model and data by class path."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from chanlab.data.recipe import find_recipe, recipe_folders
from chanlab.errors import UsageError


class ChanlabCLI(LightningCLI):
    """LightningCLI in subclass mode, with loggers, checkpoints and errors as chanlab promises them."""

    weights: str | None = None
    """A file of `chanlab.weights.save_weights` in place of a checkpoint."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds what a recipe may say beside model, data and trainer."""
        parser.add_argument(
            "--weights",
            type=str | None,
            default=None,
            help="weights (chanlab.weights.save_weights) that the predictor or codec starts from where no checkpoint "
            "is given: a path, or one below models/",
        )

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        defaults: dict[str, Any] = {"weights_only": True}  # a checkpoint is never read as a pickle
        if subcommand == "predict":
            defaults["return_predictions"] = False  # PredictionWriter keeps them; memory need not
        parser.set_defaults(defaults)
        return parser

    def _parse_ckpt_path(self) -> None:
        """Finds the file behind `best` and `last`; what its hyperparameters change in the model is told."""
        subcommand = self.config.subcommand
        config = self.config[subcommand]
        config.ckpt_path = _checkpoint(config, subcommand)
        if str(config.ckpt_path).endswith(".safetensors"):
            self.weights, config.ckpt_path = config.ckpt_path, None
        asked = dict(config.model.items()) if config.get("model") else {}
        super()._parse_ckpt_path()
        model = self.config[subcommand].get("model")
        for key, value in dict(model.items()).items() if asked and model else ():
            if key in asked and asked[key] != value and not key.startswith("class_path"):
                print(f"from the checkpoint: model.{key}: {value}, not {asked[key]}", file=sys.stderr)

    def before_instantiate_classes(self) -> None:
        """Keeps the configuration beside the logs, where there are logs."""
        if self.subcommand == "predict":
            self.save_config_callback = None

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Keeps checkpoints and logs in `default_root_dir`, unless the configuration says otherwise.

        Logs are CSV, and TensorBoard's too if it is installed.
        """
        config = self._get(self.config_init, "trainer")
        root = config.default_root_dir or "."
        if config.logger is None or config.logger is True:
            kwargs["logger"] = False if self.subcommand == "predict" else _loggers(root)
        trainer = super().instantiate_trainer(**kwargs)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = os.path.abspath(root)
        return trainer

    def after_instantiate_classes(self) -> None:
        """Loads a file of weights, for `fit` to start from; refuses to evaluate a network that has learnt nothing.

        Raises:
            UsageError: A model with parameters is to be evaluated without a checkpoint; there are no such weights.
            ChanlabError: The weights are not those of the configured predictor.
        """
        config = self.config[self.subcommand]
        if self.weights is None and config.weights and not config.get("ckpt_path"):
            self.weights = str(find_weights(config.weights))
        if self.weights is not None:
            from chanlab.weights import learner, load_weights

            load_weights(learner(self.model), self.weights)
            return
        if self.subcommand == "fit" or config.get("ckpt_path"):
            return
        if any(parameter.requires_grad for parameter in self.model.parameters()):
            raise UsageError(
                f"`chanlab {self.subcommand}` of an untrained {type(self.model).__name__}: add --ckpt_path best "
                "(what `chanlab fit` kept), --ckpt_path last, or a checkpoint's path"
            )


def main(argv: list[str]) -> None:
    """Runs one of fit, validate, test and predict.

    Args:
        argv: The subcommand and its arguments, e.g. `["fit", "--config", "gru"]`. A configuration is a YAML file or
            the short name of a model recipe.

    Raises:
        UsageError: No such recipe or checkpoint; nothing to train; a network without its checkpoint.
        SystemExit: jsonargparse has explained a mistake in the arguments (code 2), or help was asked for.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # class paths may name a user's own modules, as with `python -m`
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda r: "💡" not in r.getMessage())
    for expected in (".*exists and is not empty", ".*is smaller than the logging interval", ".*LeafSpec"):
        warnings.filterwarnings("ignore", expected)
    # What is logged of an epoch are metrics, which all processes have computed together.
    warnings.filterwarnings("ignore", ".*sync_dist=True")
    # The program stays what was started: strategies of several processes (ddp) start it again.
    before, sys.argv = sys.argv, [sys.argv[0], *_resolve_configs(argv)]
    try:
        ChanlabCLI(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            seed_everything_default=1,
            auto_configure_optimizers=False,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"prog": "chanlab"},
        )
    finally:
        sys.argv = before


def find_weights(name: str | os.PathLike[str]) -> Path:
    """The file of weights that a recipe names.

    Args:
        name: A path, or one below a folder of model recipes, its folders left out or not:
            `csi/learned_wiener.safetensors`, `learned_wiener.safetensors`.

    Raises:
        UsageError: There is none.
    """
    places = [Path(name), *(folder / name for folder in recipe_folders("models"))]
    below: list[Path] = []
    if len(Path(name).parts) == 1:
        below = [path for folder in recipe_folders("models") for path in sorted(folder.glob(f"*/{name}"))]
    for path in [*places, *below]:
        if path.is_file():
            return path
    raise UsageError(
        f"There are no weights {os.fspath(name)}, neither here nor below {' or '.join(map(str, places[1:]))}: "
        "write them with chanlab.weights.save_weights, or start without (--weights null)"
    )


def _resolve_configs(argv: list[str]) -> list[str]:
    """Replaces short names after --config by the recipe's path."""
    resolved = []
    for i, argument in enumerate(argv):
        option, equals, value = argument.partition("=")
        if option in ("--config", "-c") and equals:
            argument = f"{option}={find_recipe('models', value)}"
        elif i and argv[i - 1] in ("--config", "-c"):
            argument = str(find_recipe("models", argument))
        resolved.append(argument)
    return resolved


def _checkpoint(config: Any, subcommand: str) -> str | None:
    """The checkpoint that is meant: `best` and `last` are those that the configured ModelCheckpoint wrote.

    A `last` that isn't there yet starts `fit` from the beginning, so that one command line serves first run and resume.
    """
    wanted = config.get("ckpt_path")
    if wanted is None:
        return None
    if wanted not in ("best", "last"):
        if str(wanted).endswith(".safetensors"):
            return str(find_weights(wanted))
        if not Path(wanted).is_file():
            raise UsageError(f"There is no checkpoint {wanted}")
        return str(wanted)
    found = _checkpoint_folder(config.trainer) / f"{wanted}.ckpt"
    if found.is_file():
        return str(found)
    if subcommand == "fit" and wanted == "last":
        print(f"{found} is not there yet: training starts from the beginning", file=sys.stderr)
        return None
    raise UsageError(f"There is no checkpoint {found}: train first, with `chanlab fit` and the same configuration")


def _checkpoint_folder(trainer: Any) -> Path:
    """Where ModelCheckpoint writes: its `dirpath`, else the trainer's root."""
    callbacks = trainer.callbacks if isinstance(trainer.callbacks, list) else [trainer.callbacks]
    for callback in filter(None, callbacks):
        dirpath = callback.get("init_args", {}).get("dirpath")
        if callback.get("class_path", "").endswith(f".{ModelCheckpoint.__name__}") and dirpath:
            return Path(dirpath)
    return Path(trainer.default_root_dir or ".")


def _loggers(root: str) -> list[Logger]:
    csv = CSVLogger(root, name="logs")
    loggers: list[Logger] = [csv]
    if find_spec("tensorboard") is not None:
        loggers.append(TensorBoardLogger(root, name="logs", version=f"version_{csv.version}"))
    return loggers
