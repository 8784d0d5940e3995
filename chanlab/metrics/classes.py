"""The same definitions as torchmetrics classes: they accumulate over batches and over processes (DDP).

States are sums in float64, or all ratios where a median is asked, so that the result doesn't depend on how data are cut
into batches or spread over processes. torchmetrics hands a result of one entry out as a scalar.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from chanlab.errors import UsageError
from chanlab.metrics import functional as F
from chanlab.metrics.rates import beam_gain_ratio, mrt_precoder, spectral_efficiency


def _zero(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


class _Mean(Metric):
    """Mean of values accumulated as sum and count."""

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, steps: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        shape = () if steps is None else (steps,)
        self.add_state("total", _zero(*shape), dist_reduce_fx="sum")
        self.add_state("count", _zero(), dist_reduce_fx="sum")

    def _mean(self) -> Tensor:
        if self.count == 0:
            raise UsageError(f"{type(self).__name__}.compute() before any update().")
        return self.total / self.count


class NMSE(Metric):
    """`chanlab.metrics.nmse` over batches and processes.

    Args:
        reduction: `pooled`, `per_sample`, `per_antenna_step` or `median`.
        dim: Axes summed inside each ratio, as in `nmse`.
        db: Give dB (of the mean) in place of the linear value.
        **kwargs: Of `torchmetrics.Metric`.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    error: Tensor
    power: Tensor
    ratios: list[Tensor]

    def __init__(
        self,
        reduction: F.NMSEReduction = "pooled",
        dim: int | Sequence[int] | None = None,
        db: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        F.ratio_axes(reduction, dim, 5)
        self.reduction: F.NMSEReduction = reduction
        self.dim = dim
        self.db = db
        self._add_states(())

    def _add_states(self, shape: tuple[int, ...]) -> None:
        if self.reduction == "median":
            self.add_state("ratios", [], dist_reduce_fx="cat")
        else:
            # pooled: sums of error and power; else: sum of ratios and their number
            self.add_state("error", _zero(*shape), dist_reduce_fx="sum")
            self.add_state("power", _zero(*shape), dist_reduce_fx="sum")

    def _terms(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Error and power of each ratio, `[ratio]` (or `[ratio, time]`); pooled: of each sample."""
        if self.reduction == "pooled":
            return F.nmse_terms(prediction, target)
        error, power = F.nmse_terms(prediction, target, F.ratio_axes(self.reduction, self.dim, target.ndim))
        return error.flatten(), power.flatten()

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Add a batch, both `[batch, rx_ant, tx_ant, time, subcarrier]`."""
        error, power = (x.detach().double() for x in self._terms(prediction, target))
        if self.reduction == "pooled":
            self.error += error.sum(0)
            self.power += power.sum(0)
            return
        F.check_power(power)
        if self.reduction == "median":
            self.ratios.append(error / power)
        else:
            self.error += (error / power).sum(0)
            self.power += len(error)

    def compute(self) -> Tensor:
        """The NMSE of all that was added, linear or dB."""
        if self.reduction == "median":
            if isinstance(self.ratios, list) and not self.ratios:
                raise UsageError(f"{type(self).__name__}.compute() before any update().")
            value = F.median(dim_zero_cat(self.ratios))
        else:
            F.check_power(self.power)
            value = self.error / self.power
        return F.to_db(value) if self.db else value


class NMSEByStep(NMSE):
    """`chanlab.metrics.nmse_by_step` over batches and processes; gives `[time]`.

    Args:
        steps: Length of the horizon.
        reduction: As in `NMSE`.
        db: Give dB.
        **kwargs: Of `torchmetrics.Metric`.
    """

    def __init__(self, steps: int, reduction: F.NMSEReduction = "pooled", db: bool = False, **kwargs: Any) -> None:
        self.steps = steps
        super().__init__(reduction, db=db, **kwargs)

    def _add_states(self, shape: tuple[int, ...]) -> None:
        super()._add_states((self.steps,))

    def _terms(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        if target.shape[F.TIME_AXIS] != self.steps:
            raise UsageError(f"NMSEByStep(steps={self.steps}) got a target of {target.shape[F.TIME_AXIS]} steps.")
        return F.step_terms(prediction, target, self.reduction)


class SGCS(_Mean):
    """`chanlab.metrics.sgcs` over batches and processes.

    Args:
        dim: Axes of the vectors, as in `sgcs`.
        steps: Length of the horizon: gives `[time]`; None: one figure.
        **kwargs: Of `torchmetrics.Metric`.
    """

    is_differentiable = False
    higher_is_better = True

    def __init__(self, dim: int | Sequence[int] = (-4, -3), steps: int | None = None, **kwargs: Any) -> None:
        super().__init__(steps, **kwargs)
        self.dim = dim
        self.steps = steps

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Add a batch, both `[batch, rx_ant, tx_ant, time, subcarrier]`."""
        similarity = F.sgcs_values(prediction, target, self.dim).detach().double()
        if self.steps is None:
            self.total += similarity.sum()
            self.count += similarity.numel()
        else:
            if target.shape[F.TIME_AXIS] != self.steps:
                raise UsageError(f"SGCS(steps={self.steps}) got a target of {target.shape[F.TIME_AXIS]} steps.")
            self.total += similarity.sum((*range(similarity.ndim - 2), -1))
            self.count += similarity.numel() / self.steps

    def compute(self) -> Tensor:
        """Mean SGCS."""
        return self._mean()


class SpectralEfficiency(_Mean):
    """Spectral efficiency of single-stream MRT with the predicted channel on the true one, over batches and processes.

    The signal-to-noise ratio is per receive antenna and before array gain: N0 = E|h|² / SNR with the mean over each
    sample, unless `update` is given the noise variance.

    Args:
        snr_db: SNR [dB].
        relative: Divide by the spectral efficiency with perfect CSI.
        **kwargs: Of `torchmetrics.Metric`.
    """

    is_differentiable = False
    higher_is_better = True
    perfect: Tensor

    def __init__(self, snr_db: float = 10.0, relative: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.snr_db = snr_db
        self.relative = relative
        self.add_state("perfect", _zero(), dist_reduce_fx="sum")

    def update(self, prediction: Tensor, target: Tensor, noise_variance: Tensor | None = None) -> None:
        """Add a batch `[batch, rx_ant, tx_ant, time, subcarrier]`; `noise_variance` `[batch]`: in place of the SNR."""
        F.check_pair(prediction, target, min_axes=5)
        if noise_variance is None:
            power = target.abs().square().mean(tuple(range(1, target.ndim)))
            F.check_power(power)
            noise_variance = power / 10 ** (self.snr_db / 10)
        rate = spectral_efficiency(target, mrt_precoder(prediction), noise_variance)
        self.total += rate.detach().double().sum()
        self.count += rate.numel()
        if self.relative:
            best = spectral_efficiency(target, mrt_precoder(target), noise_variance)
            self.perfect += best.detach().double().sum()

    def compute(self) -> Tensor:
        """Mean rate [bit/s/Hz], or its ratio to perfect CSI."""
        mean = self._mean()
        return self.total / self.perfect if self.relative else mean


class BeamGainLoss(_Mean):
    """`chanlab.metrics.beam_gain_loss_db` over batches and processes [dB].

    Args:
        codebook: Beams, complex `[beam, tx_ant]`.
        **kwargs: Of `torchmetrics.Metric`.
    """

    is_differentiable = False
    higher_is_better = False
    codebook: Tensor

    def __init__(self, codebook: Tensor, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.register_buffer("codebook", codebook, persistent=False)

    def update(self, channel: Tensor, beam: Tensor) -> None:
        """Add true channels `[batch, rx_ant, tx_ant, time, subcarrier]` and the beams chosen for them, `[batch]`."""
        ratio = beam_gain_ratio(channel, self.codebook, beam).detach().double()
        self.total += ratio.sum()
        self.count += ratio.numel()

    def compute(self) -> Tensor:
        """Loss in dB of the mean ratio."""
        return -F.to_db(self._mean())
