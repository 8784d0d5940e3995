"""How far each system's CSI is from the truth, by horizon, with intervals that respect trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from chanlab.link import PERFECT, CSIEnsemble
from chanlab.metrics import bootstrap_interval, nmse_terms, to_db
from chanlab.metrics.functional import sgcs_values
from chanlab.records import Record, record


def nmse_records(
    ensemble: CSIEnsemble, *, data: str, split: str, snr_db: float, ahead: Sequence[float], seeds: Sequence[int]
) -> list[Record]:
    """Pooled NMSE [dB] and SGCS by horizon and over all of them, with 95 % intervals over trajectories.

    Args:
        ensemble: True channels and what each system believes.
        data: Name of the data set.
        split: Its split.
        snr_db: SNR of the histories [dB].
        ahead: Time of each step after the last snapshot [s].
        seeds: Seeds of training.

    Returns:
        Records of every system but perfect CSI; `horizon` is a step from 1 on, or `all`.
    """
    made: list[Record] = []
    for system, csi in ensemble.csi.items():
        if system == PERFECT:
            continue
        error, power = nmse_terms(csi, ensemble.channel, dim=(1, 3))
        similarity = sgcs_values(csi, ensemble.channel, dim=(1,)).mean(-1)
        steps: list[tuple[int | str, slice]] = [(h + 1, slice(h, h + 1)) for h in range(error.shape[1])]
        for horizon, pick in [*steps, ("all", slice(None))]:
            condition: dict[str, Any] = {"snr_db": snr_db, "horizon": horizon}
            if isinstance(horizon, int):
                condition["ahead_ms"] = round(ahead[horizon - 1] * 1e3, 6)
            about = partial(
                record,
                system=system,
                data=data,
                split=split,
                condition=condition,
                seeds=seeds,
                n=len(ensemble.sample_id),
            )
            found = bootstrap_interval(error[:, pick].sum(1), power[:, pick].sum(1), groups=ensemble.sample_id)
            low, high = _db(found.low), _db(found.high)
            made.append(about(metric="nmse_pooled", value=_db(found.value), unit="dB", low=low, high=high))
            alike = bootstrap_interval(similarity[:, pick].mean(1), groups=ensemble.sample_id)
            made.append(about(metric="sgcs", value=alike.value, low=alike.low, high=alike.high))
    return made


def _db(ratio: float) -> float:
    return float(to_db(max(ratio, 1e-30)))
