"""Predictors on the sets of a protocol: figures by cell, condition and step, with what intervals and medians need."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from chanlab.csi.predictor import Predictor
from chanlab.data.protocol import Cell, Condition
from chanlab.data.streamed import StreamedCSI
from chanlab.data.streamed_datamodule import EvaluationOrder
from chanlab.errors import UsageError
from chanlab.metrics import Interval, bootstrap_interval, nmse_terms
from chanlab.metrics.functional import NMSEReduction, check_power, median

Kept = Callable[[Cell, Condition], bool]
"""Chooses among cells and conditions."""


@dataclass(frozen=True)
class ProtocolResult:
    """What one predictor reached on one band, for every sample, `[cell, condition, sample, step]`, float64 on the CPU.

    Attributes:
        system: Name of the predictor.
        duplex: Band of the targets, `tdd` or `fdd`.
        cells: Along the first axis.
        conditions: Along the second axis.
        antenna_ratio: Σ|e|² / Σ|h|² over subcarriers, averaged over antenna pairs.
        error: Σ|e|² over antennas and subcarriers.
        power: Σ|h|².
    """

    system: str
    duplex: Literal["tdd", "fdd"]
    cells: tuple[Cell, ...]
    conditions: tuple[Condition, ...]
    antenna_ratio: Tensor
    error: Tensor
    power: Tensor

    def nmse(self, reduction: NMSEReduction = "per_antenna_step") -> Tensor:
        """NMSE of each cell, condition and step, linear, `[cell, condition, step]`; see `chanlab.metrics.nmse`.

        The protocol's own figure is `per_antenna_step`; its mean over everything is the published one.
        """
        if reduction == "per_antenna_step":
            return self.antenna_ratio.mean(2)
        if reduction == "pooled":
            return self.error.sum(2) / self.power.sum(2)
        ratio = self.error / self.power
        return median(ratio, 2) if reduction == "median" else ratio.mean(2)

    def interval(
        self,
        reduction: NMSEReduction = "per_antenna_step",
        where: Kept = lambda cell, condition: True,
        step: int | None = None,
        confidence: float = 0.95,
        resamples: int = 1000,
    ) -> Interval:
        """One figure over chosen cells and conditions with its bootstrap interval over channel realisations.

        A realisation is met under every condition: these are resampled together. Cells count alike.

        Args:
            reduction: As in `chanlab.metrics.nmse`.
            where: Which cells and conditions count.
            step: A step of the horizon, from 1; None: all of them.
            confidence: Probability inside the interval.
            resamples: Number of bootstrap samples.

        Raises:
            UsageError: If nothing is chosen.
        """
        chosen = torch.tensor([[where(cell, condition) for condition in self.conditions] for cell in self.cells])
        if not chosen.any():
            raise UsageError(f"no cell and condition of this result is chosen: {self._choice()}.")
        steps = slice(None) if step is None else slice(step - 1, step)
        kept = chosen.any(1)
        weight = chosen[kept, :, None, None]
        samples = self.error.shape[2]
        stratum = torch.arange(len(self.cells))[kept, None].expand(-1, samples)

        def terms(x: Tensor) -> Tensor:
            return x[kept][..., steps]

        common: dict[str, Any] = {"confidence": confidence, "resamples": resamples}
        if reduction == "median":
            ratio = terms(self.error) / terms(self.power)
            where_chosen = weight.expand_as(ratio)
            group = torch.arange(stratum.numel()).view(-1, 1, samples, 1).expand_as(ratio)
            cell = stratum[:, None, :, None].expand_as(ratio)
            values = (x[where_chosen] for x in (ratio, group, cell))
            ratio, group, cell = values
            return bootstrap_interval(ratio, groups=group, strata=cell, statistic="median", **common)

        def sums(x: Tensor) -> Tensor:  # a realisation's values under all conditions and steps stay together
            return (terms(x) * weight).sum((1, 3)).flatten()

        if reduction == "pooled":
            top, bottom = sums(self.error), sums(self.power)
        else:
            ratio = self.antenna_ratio if reduction == "per_antenna_step" else self.error / self.power
            top, bottom = sums(ratio), sums(torch.ones_like(ratio))
        return bootstrap_interval(top, bottom, strata=stratum.flatten(), **common)

    def _choice(self) -> str:
        """What `where` may choose among."""
        models, spreads, speeds = (sorted(set(values)) for values in zip(*self.cells, strict=True))
        conditions = (f"{condition.kind} {condition.level:g}" for condition in self.conditions)
        return (
            f"choose among models {', '.join(models)}, delay spreads {_listed(1e9 * s for s in spreads)} ns, "
            f"speeds {_listed(speeds)} m/s, and conditions {', '.join(conditions)}"
        )


@torch.inference_mode()
def evaluate_protocol(
    predictors: Mapping[str, Predictor],
    stream: StreamedCSI,
    samples_per_cell: int = 100,
    batch_size: int = 64,
    device: torch.device | str = "cpu",
    progress: bool = False,
) -> list[ProtocolResult]:
    """Run predictors over a set of a protocol.

    The noise variance is told where the disturbance is Gaussian noise; where it is anything else, predictors get None.

    Args:
        predictors: By name, on `device` already. One that predicts the history's band only is judged by that prediction
            on the other band as well.
        stream: The set, split and duplex; with `both` there is a result for each band.
        samples_per_cell: Samples of each cell, met under each condition.
        batch_size: Windows per call of a predictor.
        device: Where channels are drawn.
        progress: Show a progress bar.

    Returns:
        A result for each predictor and band.

    Raises:
        UsageError: If a prediction's shape isn't the target's.
    """
    bands: list[Literal["tdd", "fdd"]] = ["tdd", "fdd"] if stream.duplex == "both" else [stream.duplex]
    horizon = stream.protocol.horizons
    shape = (3, len(stream.conditions), len(stream.cells) * samples_per_cell, horizon)
    tables = {(name, band): torch.zeros(shape, dtype=torch.float64) for name in predictors for band in bands}
    requests = EvaluationOrder(stream, samples_per_cell, batch_size)
    done = [0] * len(stream.conditions)
    for request in tqdm(requests, disable=not progress, unit="batch", leave=False):
        batch = stream.batch(request, device)
        gaussian = stream.conditions[request.condition].kind == "gaussian"
        first = done[request.condition]
        rows = slice(first, first + len(batch.history))
        done[request.condition] = rows.stop
        for name, predictor in predictors.items():
            prediction = predictor(batch.history, batch.noise_variance if gaussian else None)
            for band, (predicted, target) in zip(bands, _by_band(prediction, batch.target, len(bands)), strict=True):
                tables[name, band][:, request.condition, rows] = _terms(predicted, target).cpu()
    return [
        ProtocolResult(
            *key,
            stream.cells,
            stream.conditions,
            *table.unflatten(2, (len(stream.cells), samples_per_cell)).transpose(1, 2),  # type: ignore[no-untyped-call]
        )
        for key, table in tables.items()
    ]


def few_cells(cells: Sequence[Cell], every: int = 1) -> tuple[Cell, ...]:
    """One cell of so many, with about as many of each model, delay spread and speed.

    Taking each k-th of a set's cells would not do: of the regular ones, each third has the same speed.

    Args:
        cells: Of a set, in the protocol's order.
        every: How many there are for each that is taken; 1: all. Any beginning of the result is such a choice too.
    """
    count = len(cells)
    step = round(0.618 * count)  # the golden section scatters best
    while math.gcd(step, count) != 1:
        step += 1
    return tuple(cells[i * step % count] for i in range(-(-count // every)))


def join_results(parts: Sequence[ProtocolResult]) -> ProtocolResult:
    """One result of those that a predictor reached on parts of a set of cells, on one band.

    Args:
        parts: Each of other cells, under the same conditions, of as many samples.

    Raises:
        UsageError: There are none, or they are not of one predictor, band, conditions and number of samples.
    """
    if not parts:
        raise UsageError("there is nothing to join: give at least one result.")
    first = parts[0]
    for part in parts[1:]:
        differ = [
            name
            for name, same in (
                ("system", part.system == first.system),
                ("duplex", part.duplex == first.duplex),
                ("conditions", part.conditions == first.conditions),
                ("number of samples", part.error.shape[2] == first.error.shape[2]),
                ("number of steps", part.error.shape[3] == first.error.shape[3]),
            )
            if not same
        ]
        if differ:
            raise UsageError(
                f"results of {first.system!r} and {part.system!r} differ in {', '.join(differ)}: join those of each "
                "predictor and band by themselves, evaluated with the same conditions and samples_per_cell."
            )
    cells = tuple(cell for part in parts for cell in part.cells)
    tables = (torch.cat([getattr(part, name) for part in parts]) for name in ("antenna_ratio", "error", "power"))
    return ProtocolResult(first.system, first.duplex, cells, first.conditions, *tables)


def protocol_records(
    results: Sequence[ProtocolResult],
    protocol: str,
    split: str,
    seeds: Sequence[int] = (),
    resamples: int = 1000,
    **extra: Any,
) -> list[dict[str, Any]]:
    """Records of results: over everything in each reduction, then `nmse` by step, by speed and by condition.

    Args:
        results: From `evaluate_protocol`.
        protocol: Name of the protocol: the records' `data`.
        split: Set of cells: the records' `split`.
        seeds: Seeds of what was measured.
        resamples: Number of bootstrap samples.
        **extra: More fields.
    """
    from chanlab.records import record

    records = []
    for result in results:
        n = result.error.shape[0] * result.error.shape[2]

        def add(
            metric: str, interval: Interval, result: ProtocolResult = result, n: int = n, **condition: str | float
        ) -> None:
            records.append(
                record(
                    system=result.system,
                    data=protocol,
                    split=split,
                    condition={"duplex": result.duplex, **condition},
                    metric=metric,
                    value=interval.value,
                    n=n,
                    seeds=seeds,
                    low=interval.low,
                    high=interval.high,
                    **extra,
                )
            )

        add("nmse", result.interval(resamples=resamples))
        add("nmse_pooled", result.interval("pooled", resamples=resamples))
        add("nmse_median", result.interval("median", resamples=min(resamples, 100)))  # slow to resample
        for step in range(1, result.error.shape[3] + 1):
            add("nmse", result.interval(step=step, resamples=resamples), horizon=step)
        for speed in sorted({c.speed for c in result.cells}):
            add("nmse", result.interval(where=_at_speed(speed), resamples=resamples), speed=speed)
        for condition in result.conditions:
            gaussian = condition.kind == "gaussian"
            named = (
                {"snr_db": condition.level} if gaussian else {"disturbance": condition.kind, "level": condition.level}
            )
            add("nmse", result.interval(where=_under(condition), resamples=resamples), **named)
    return records


def _listed(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def _at_speed(speed: float) -> Kept:
    return lambda cell, _: cell.speed == speed


def _under(condition: Condition) -> Kept:
    return lambda _, other: other == condition


def _by_band(prediction: Tensor, target: Tensor, bands: int) -> list[tuple[Tensor, Tensor]]:
    """Prediction and target of each band."""
    width = target.shape[-1] // bands
    if prediction.shape[:-1] != target.shape[:-1] or prediction.shape[-1] not in (width, target.shape[-1]):
        raise UsageError(f"a prediction has shape {list(prediction.shape)} for targets {list(target.shape)}.")
    targets = target.split(width, -1)  # type: ignore[no-untyped-call]
    predictions = prediction.split(width, -1)  # type: ignore[no-untyped-call]
    return [(predictions[min(i, len(predictions) - 1)], targets[i]) for i in range(bands)]


def _terms(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean ratio over antennas, error and power, `[3, batch, step]`."""
    error, power = nmse_terms(prediction, target, dim=-1)
    check_power(power)
    return torch.stack([(error / power).mean((1, 2)), error.sum((1, 2)), power.sum((1, 2))]).double()
