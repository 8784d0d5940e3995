"""How far each predictor is from the truth, by horizon, with intervals that respect trajectories."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from chanlab.metrics import bootstrap_interval, nmse_terms, to_db
from chanlab.metrics.functional import sgcs_values
from chanlab.records import Record, record

_OVER = (1, 2, 4)  # antennas and subcarriers: what is left is batch and time


@torch.no_grad()
def prediction_terms(predictors: Mapping[str, Any], batches: Iterable[Any]) -> dict[str, dict[str, Tensor]]:
    """Errors of several predictors on the same windows.

    Args:
        predictors: By name; each takes a history and its noise variance.
        batches: `CSIBatch`es.

    Returns:
        For each predictor `error` and `power` `[window, horizon]`, `sgcs` `[window, horizon]` and `sample_id`
        `[window]`.
    """
    collected: dict[str, dict[str, list[Tensor]]] = {name: {} for name in predictors}
    for batch in batches:
        for name, predictor in predictors.items():
            prediction = predictor(batch.history, batch.noise_variance)
            error, power = nmse_terms(prediction, batch.target, dim=_OVER)
            terms = {
                "error": error,
                "power": power,
                "sgcs": sgcs_values(prediction, batch.target).mean(-1),
                "sample_id": batch.sample_id,
            }
            for key, value in terms.items():
                collected[name].setdefault(key, []).append(value.cpu())
    return {name: {key: torch.cat(parts) for key, parts in terms.items()} for name, terms in collected.items()}


def prediction_records(
    terms: Mapping[str, Mapping[str, Tensor]],
    *,
    data: str,
    split: str,
    snr_db: float,
    interval: float,
    seeds: Sequence[int],
) -> list[Record]:
    """Pooled NMSE by horizon and over all of them, in dB, with 95 % intervals over trajectories.

    Args:
        terms: From `prediction_terms`.
        data: Name of the data set.
        split: Its split.
        snr_db: SNR of the histories [dB].
        interval: Time between snapshots [s].
        seeds: Seeds of data and training.
    """
    made = []
    for system, term in terms.items():
        groups = term["sample_id"]
        steps = term["error"].shape[1]
        columns: list[tuple[int | str, slice]] = [(h + 1, slice(h, h + 1)) for h in range(steps)]
        for horizon, pick in [*columns, ("all", slice(None))]:
            error, power = term["error"][:, pick].sum(1), term["power"][:, pick].sum(1)
            found = bootstrap_interval(error, power, groups=groups)
            condition: dict[str, Any] = {"snr_db": snr_db, "horizon": horizon}
            if isinstance(horizon, int):
                condition["ahead_ms"] = round(horizon * interval * 1e3, 6)
            about = partial(
                record, system=system, data=data, split=split, condition=condition, seeds=seeds, n=int(groups.numel())
            )
            low, high = _db(found.low), _db(found.high)
            made.append(about(metric="nmse_pooled", value=_db(found.value), unit="dB", interval=[low, high]))
            made.append(about(metric="sgcs", value=float(term["sgcs"][:, pick].mean())))
    return made


def _db(ratio: float) -> float:
    return float(to_db(max(ratio, 1e-30)))
