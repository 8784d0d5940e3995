"""What a predictor of CSI is, and the normalisation that keeps each sample to itself."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from chanlab.errors import UsageError


@runtime_checkable
class Predictor(Protocol):
    """A module that continues channels in time; any `torch.nn.Module` with this `forward` will do.

    A predictor that is trained on something else than its prediction's NMSE, as masked models are, has a method
    `training_loss(history, target, noise_variance) -> Tensor` besides: `CSIPredictionModule` minimises what it returns.

    Attributes:
        horizons: Number of steps predicted, 1 to H ahead, at the interval of the history.
    """

    horizons: int

    def __call__(self, history: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """Predicts the steps that follow the history.

        Args:
            history: Noisy channels, complex `[batch, rx_ant, tx_ant, time, subcarrier]`.
            noise_variance: Variance of the history's complex noise per entry, `[batch]`; None where unknown.

        Returns:
            Channels, complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`. A sample's prediction depends on that
            sample alone, and scales with it.
        """
        ...


def is_trainable(predictor: nn.Module) -> bool:
    """Whether a predictor has anything to learn; the classical ones have no parameters."""
    return any(parameter.requires_grad for parameter in predictor.parameters())


def check_history(history: Tensor, min_time: int = 1) -> None:
    """Checks the shape and type of a history.

    Raises:
        UsageError: It is not complex `[batch, rx_ant, tx_ant, time, subcarrier]`, or too short.
    """
    if history.ndim != 5 or not history.is_complex():
        raise UsageError(
            "A history is complex [batch, rx_ant, tx_ant, time, subcarrier], "
            f"not {str(history.dtype).removeprefix('torch.')} {list(history.shape)}"
        )
    if history.shape[3] < min_time:
        raise UsageError(f"This predictor needs a history of at least {min_time} snapshots, not {history.shape[3]}")


def check_made_for(name: str, history: Tensor, num_subcarriers: int | None = None, steps: int | None = None) -> None:
    """Checks a history against the sizes that a network is bound to; None is any.

    Raises:
        UsageError: They differ.
    """
    found = history.shape[3:]
    if (steps or found[0], num_subcarriers or found[1]) != tuple(found):
        sizes = f"{f'{steps} snapshots' if steps else ''}{' of ' if steps and num_subcarriers else ''}"
        sizes += f"{num_subcarriers} subcarriers" if num_subcarriers else ""
        raise UsageError(
            f"This {name} was made for {sizes}, not {found[0]} snapshots of {found[1]} subcarriers: "
            "set its sizes to those of the data"
        )


def rms(history: Tensor) -> Tensor:
    """Root mean square of each sample over all its entries, real `[batch, 1, 1, 1, 1]`; 1 for an all-zero sample."""
    power = history.abs().square().mean(dim=(1, 2, 3, 4), keepdim=True)
    return power.sqrt().where(power > 0, 1.0)


def normalise(history: Tensor) -> tuple[Tensor, Tensor]:
    """Scales each sample to unit mean power: `(history / scale, scale)`; a prediction is multiplied by scale again."""
    scale = rms(history)
    return history / scale, scale


def antenna_series(history: Tensor) -> Tensor:
    """Each antenna pair as a series of its own, real `[batch * rx_ant * tx_ant, time, 2 * subcarrier]`.

    The last axis holds real and imaginary part of each subcarrier side by side.
    """
    return torch.view_as_real(history.flatten(0, 2).resolve_conj()).flatten(-2)


def from_antenna_series(series: Tensor, batch: int, num_rx: int, num_tx: int) -> Tensor:
    """Inverse of `antenna_series`, complex `[batch, rx_ant, tx_ant, time, subcarrier]`."""
    steps, features = series.shape[-2:]
    return torch.view_as_complex(series.reshape(batch, num_rx, num_tx, steps, features // 2, 2).contiguous())
