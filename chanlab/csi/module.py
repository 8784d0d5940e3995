"""The LightningModule that trains and evaluates predictors of CSI."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters
from torch import Tensor, nn
from torchmetrics import MetricCollection

from chanlab.csi.predictor import is_trainable
from chanlab.errors import UsageError
from chanlab.metrics import NMSE, SGCS, NMSEByStep, nmse_terms, to_db
from chanlab.schedule import warmup_cosine
from chanlab.weights import check_origins, reloadable

if TYPE_CHECKING:
    from chanlab.data.windows import CSIBatch


class CSIPredictionModule(LightningModule):
    """Trains a predictor on windows of CSI and evaluates any predictor, classical ones included.

    The loss is the NMSE per sample, averaged: each window counts alike, whatever its path loss; a predictor may bring
    its own (see `chanlab.csi.Predictor`). AdamW, linear warm-up, then a cosine to zero over the steps of the whole run.
    Frozen parameters of a pre-trained backbone aren't stored in checkpoints; they are loaded again from where they came
    from, and checked.

    Logged for `val` and `test`: `nmse_db` (per sample), `nmse_pooled_db`, `nmse_median_db` and `sgcs`; for `test` also
    `nmse_per_antenna` (linear, the figure of CSI-4CAST's protocol, for one band; where each antenna has power) and
    `nmse_step1_db`, … by step of the horizon (per sample).

    Args:
        predictor: Any module with the `forward` of `chanlab.csi.Predictor`.
        lr: Highest learning rate.
        weight_decay: Of AdamW, on matrices only (not on biases and norms).
        warmup: Fraction of the steps over which the learning rate rises.
        phase_augmentation: Turns each training window by a random common phase: a channel's common phase carries
            nothing, and a network should learn so. Predictors that are linear in the history don't notice.
        compile: Compiles those parts of the predictor that are marked `compilable` with `torch.compile` for training:
            half a minute at the start, then faster on a GPU.
    """

    skipped: Tensor

    def __init__(
        self,
        predictor: nn.Module,
        lr: float = 1e-3,
        weight_decay: float = 1e-2,
        warmup: float = 0.05,
        phase_augmentation: bool = True,
        compile: bool = False,
    ) -> None:
        super().__init__()
        # From the command line the hyperparameters are plain configuration, the predictor's included; from Python the
        # predictor is an object, which a checkpoint can't hold.
        self.save_hyperparameters(ignore=["predictor"] if _given_hyperparameters.get() is None else [])
        if not hasattr(predictor, "horizons"):
            raise UsageError(
                f"{type(predictor).__name__} is no predictor: it lacks `horizons`, the number of steps it predicts "
                "(see chanlab.csi.Predictor)"
            )
        self.predictor = predictor
        self.horizons = int(predictor.horizons)  # type: ignore[arg-type]
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup = warmup
        self.phase_augmentation = phase_augmentation
        self.compiled = compile
        self.register_buffer("skipped", torch.zeros((), dtype=torch.int64), persistent=False)
        self.metrics = nn.ModuleDict({f"{split}_metrics": _metrics(split) for split in ("val", "test")})
        self.test_steps = NMSEByStep(self.horizons, reduction="per_sample")
        self.test_antennas = NMSE("per_antenna_step")
        self.silent_antennas = False

    def forward(self, history: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """The predictor's own forward; see `chanlab.csi.Predictor`."""
        prediction: Tensor = self.predictor(history, noise_variance)
        return prediction

    def setup(self, stage: str) -> None:
        """Checks that there is something to train.

        Raises:
            UsageError: Asked to fit a predictor without trainable parameters.
        """
        if stage == "fit" and not is_trainable(self.predictor):
            name = type(self.predictor).__name__
            raise UsageError(f"{name} has nothing to train: evaluate it with `chanlab test --config ...`")
        if stage == "fit" and self.compiled:
            parts = [part for part in self.predictor.modules() if getattr(part, "compilable", False)]
            if not parts:
                raise UsageError(f"{type(self.predictor).__name__} has no parts to compile: set compile to false")
            for part in parts:
                part.compile()

    def training_step(self, batch: CSIBatch, batch_idx: int) -> Tensor:
        """NMSE of one batch, or the predictor's own `training_loss`."""
        history, target = batch.history, batch.target
        if self.phase_augmentation:
            phase = _phase(batch.sample_id, batch.window, self.current_epoch).view(-1, 1, 1, 1, 1)
            history, target = history * phase, target * phase
        if hasattr(self.predictor, "training_loss"):
            loss: Tensor = self.predictor.training_loss(history, target, batch.noise_variance)  # type: ignore[operator]
        else:
            loss = nmse_loss(self(history, batch.noise_variance), target)
        self.log("train/nmse", loss, prog_bar=True, batch_size=len(target))
        return loss

    def validation_step(self, batch: CSIBatch, batch_idx: int) -> None:
        """Updates the metrics of the validation split."""
        self._evaluate(batch, "val")

    def test_step(self, batch: CSIBatch, batch_idx: int) -> None:
        """Updates the metrics of the test split."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: CSIBatch, batch_idx: int) -> dict[str, Tensor]:
        """Predictions beside their targets and what describes each window; `PredictionWriter` keeps them."""
        described = {
            key: value for key, value in _fields(batch).items() if key != "history" and isinstance(value, Tensor)
        }
        return {"prediction": self(batch.history, batch.noise_variance), **described}

    def on_validation_epoch_end(self) -> None:
        """Logs the metrics of the validation split."""
        self._log("val")

    def on_test_epoch_end(self) -> None:
        """Logs the metrics of the test split, by step too."""
        self._log("test")
        if self.test_steps.update_called:
            by_step = to_db(self.test_steps.compute())
            self.log_dict({f"test/nmse_step{step + 1}_db": value.float() for step, value in enumerate(by_step)})
        self.test_steps.reset()
        if self.test_antennas.update_called and not self.silent_antennas:
            self.log("test/nmse_per_antenna", self.test_antennas.compute().float())
        self.test_antennas.reset()
        self.silent_antennas = False

    def on_train_batch_start(self, batch: CSIBatch, batch_idx: int) -> None:
        """Sets the learning rate from the number of steps done and to come.

        A scheduler would have to know the number of steps when optimizers are set up, for which Lightning loads the
        data before it has restored where a resumed run stopped within its epoch.
        """
        factor = warmup_cosine(self.trainer.global_step, self.trainer.estimated_stepping_batches, self.warmup)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = self.lr * factor
        self.log("lr", self.lr * factor)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Drops gradients that aren't finite, and counts such steps: one bad batch must not end a run."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        finite = nn.utils.get_total_norm(gradients).isfinite()
        for gradient in gradients:
            gradient.copy_(torch.where(finite, gradient, 0.0))
        self.skipped += ~finite
        self.log("train/skipped", self.skipped.float())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over the trainable parameters."""
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=self.lr)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leaves out the frozen weights of pre-trained backbones, and notes which they are."""
        frozen, origins = reloadable(self)
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k not in frozen}
        checkpoint["backbones"] = origins

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Puts the frozen weights back.

        Raises:
            ChanlabError: The backbone here is not the one that the checkpoint was trained with.
        """
        check_origins(self, checkpoint.get("backbones", {}), "The checkpoint")
        frozen, _ = reloadable(self)
        checkpoint["state_dict"] = {**frozen, **checkpoint["state_dict"]}

    def _evaluate(self, batch: CSIBatch, split: str) -> None:
        prediction, target = self(batch.history, batch.noise_variance), batch.target
        self.metrics[f"{split}_metrics"].update(prediction, target)  # type: ignore[operator]
        if split == "test":
            self.test_steps.update(prediction, target)
            _, power = nmse_terms(prediction, target, dim=-1, validate=False)
            if (power > 0).all():
                self.test_antennas.update(prediction, target)
            else:
                self.silent_antennas = True

    def _log(self, split: str) -> None:
        metrics = self.metrics[f"{split}_metrics"]
        assert isinstance(metrics, MetricCollection)
        if any(metric.update_called for metric in metrics.values()):
            for name, value in metrics.compute().items():
                self.log(name, value.float(), prog_bar=name == "val/nmse_db")
        metrics.reset()


def nmse_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean over the batch of each sample's Σ|e|² / Σ|h|²; samples without power count 0.

    Args:
        prediction: Complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`.
        target: Same shape.
    """
    if prediction.shape != target.shape:
        raise UsageError(
            f"The predictor gave {list(prediction.shape)} for targets {list(target.shape)}: "
            "its horizons must be those of the data"
        )
    error, power = nmse_terms(prediction, target, validate=False)
    return torch.where(power > 0, error / torch.where(power > 0, power, 1.0), 0.0).mean()


def load_predictor(checkpoint: str | os.PathLike[str], map_location: str = "cpu") -> nn.Module:
    """The predictor of a checkpoint that `chanlab fit` wrote, in evaluation mode.

    Args:
        checkpoint: Path; read as plain weights, never as a pickle.
        map_location: Device.

    Raises:
        UsageError: There is no such file.
        ChanlabError: Its backbone isn't here.
    """
    if not os.path.isfile(checkpoint):
        raise UsageError(f"There is no checkpoint {os.fspath(checkpoint)}: train one with `chanlab fit`")
    module = CSIPredictionModule.load_from_checkpoint(
        os.fspath(checkpoint), map_location=map_location, weights_only=True
    )
    return module.predictor.eval()


def _metrics(split: str) -> MetricCollection:
    return MetricCollection(
        {
            f"{split}/nmse_db": NMSE("per_sample", db=True),
            f"{split}/nmse_pooled_db": NMSE("pooled", db=True),
            f"{split}/nmse_median_db": NMSE("median", db=True),
            f"{split}/sgcs": SGCS(),
        },
        compute_groups=False,
    )


def _fields(batch: Any) -> dict[str, Any]:
    """The fields of a batch, named tuple or dataclass, without copying."""
    return dict(batch._asdict()) if hasattr(batch, "_asdict") else dict(vars(batch))


def _phase(sample_id: Tensor, window: Tensor, epoch: int) -> Tensor:
    """A unit complex number that depends on (sample, window, epoch) alone, well spread over the circle."""
    turns = sample_id.double() * 0.6180339887498949 + window.double() * 0.7548776662466927 + epoch * 0.5698402909980532
    angle = 2 * math.pi * turns.frac()
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)
