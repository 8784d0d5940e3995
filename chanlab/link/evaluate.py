"""What CSI is worth: spectral efficiency and coded block errors of precoders fed by each system's CSI."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from chanlab.channels.source import sample_generator
from chanlab.errors import UsageError
from chanlab.link.codedlink import BlerResult, CodedLink, Transmission
from chanlab.link.ensemble import PERFECT, CSIEnsemble, CSIPredictor, Windows, collect, group_users
from chanlab.link.precoding import PrecoderName, effective_gain, precode
from chanlab.records import Record, record

_STREAM = 16  # random stream of the link's bits and noise (see sample_generator); step s uses 16 + s
_SETS_AT_ONCE = 32


def evaluate_csi(
    systems: Mapping[str, CSIPredictor],
    batches: Iterable[Windows],
    snr_db: Sequence[float],
    *,
    base_station: Literal["tx", "rx"] = "tx",
    **options: Any,
) -> list[Record]:
    """Evaluate predictors on batches of windows: `collect`, then `evaluate_ensemble` with the other options."""
    return evaluate_ensemble(collect(systems, batches, base_station), snr_db, **options)


def evaluate_ensemble(
    ensemble: CSIEnsemble,
    snr_db: Sequence[float],
    *,
    users: int = 4,
    precoder: PrecoderName = "rzf",
    granularity: int = 1,
    normalise: Literal["user", "none"] = "user",
    link: CodedLink | None = None,
    coded_steps: Sequence[int] | None = None,
    coded_sets: int | None = None,
    target_block_errors: int | None = None,
    seed: int = 0,
    data: str = "",
    split: str = "",
    condition: Mapping[str, str | int | float | bool] | None = None,
    progress: bool = False,
) -> list[Record]:
    """Serve sets of users with precoders computed from each system's CSI, and measure on the true channel.

    The transmit power is 1 for a set and resource element; the SNR is 1/N0: with `normalise="user"` that is each user's
    mean SNR per port, before array gain. Users, bits and noise are the same for every system and SNR. The channel is
    constant in a slot, at the value of its step.

    Args:
        ensemble: True channels and what each system believes.
        snr_db: SNRs of the downlink [dB].
        users: Users served at once, from different trajectories.
        precoder: `mrt`, `rzf` (α = K N0) or `zf`.
        granularity: Adjacent subcarriers that share a precoder.
        normalise: `user`: unit mean power per entry of each window, large-scale fading removed. `none`: as they are.
        link: The coded link; None measures spectral efficiency alone.
        coded_steps: Steps (1, 2, ...) that the coded link is run on; all by default.
        coded_sets: Sets of users that the coded link is run on at most; all by default.
        target_block_errors: Stop a point of the coded link after so many block errors, at a multiple of 32 sets.
        seed: Of users, bits and noise.
        data: Recipe, for the records.
        split: Split, for the records.
        condition: More of what the figures depend on, for the records, such as the SNR of the CSI.
        progress: Show a progress bar.

    Returns:
        Records per system, step (`horizon`) and SNR (`link_snr_db`): `spectral_efficiency` (mean of log2(1 + SINR) over
        users and subcarriers), `spectral_efficiency_ratio` (to that of perfect CSI for the same users), and with a link
        `bler` and `goodput` ((1 - BLER) rate), all per user. `deviation` is the bootstrap's over trajectories, `low`
        and `high` its 95 % interval.

    Raises:
        UsageError: If an option can't be.
    """
    from chanlab.metrics import multiuser_sinr  # late: torchmetrics, which comes with it, takes seconds to import

    if normalise not in ("user", "none"):
        raise UsageError(f"normalise must be 'user' or 'none', not {normalise!r}.")
    if link is not None and link.num_users != users:
        raise UsageError(f"the coded link is made for {link.num_users} users, asked are {users}.")
    if normalise == "user":
        ensemble = ensemble.normalise()
    num_steps = ensemble.channel.shape[2]
    steps = range(1, num_steps + 1)
    coded = set() if link is None else set(steps if coded_steps is None else coded_steps)
    if not coded <= set(steps):
        raise UsageError(f"coded_steps {sorted(coded)} must lie within 1..{num_steps}.")
    sets = group_users(ensemble.sample_id, users, seed)
    fixed: dict[str, Any] = {"users": users, "precoder": precoder}
    if granularity > 1:
        fixed["granularity"] = granularity
    measured = _Measured(
        {"data": data, "split": split, "seeds": [seed]}, fixed | dict(condition or {}), ensemble.sample_id[sets], seed
    )
    best: dict[tuple[int, float], Tensor] = {}
    total = len(ensemble.csi) * len(snr_db) * num_steps
    with tqdm(total=total, desc="link", unit="point", disable=not progress) as bar:
        for step in steps:
            now = slice(step - 1, step)
            true = ensemble.channel[sets][:, :, :, now]
            sent = _transmissions(link, len(sets), coded_sets, seed, step) if link and step in coded else None
            for system, csi in sorted(ensemble.csi.items(), key=lambda item: item[0] != PERFECT):
                known = csi[sets][:, :, :, now]
                for snr in snr_db:
                    where = {"link_snr_db": float(snr), "horizon": step}
                    n0 = 10 ** (-snr / 10)
                    weights = precode(precoder, known, n0, granularity)
                    rate = torch.log2(1 + multiuser_sinr(true, weights, n0)).mean((-2, -1))
                    measured.add(system, "spectral_efficiency", rate, "bit/s/Hz", where)
                    if system == PERFECT:
                        best[step, snr] = rate
                    elif (step, snr) in best:
                        measured.add(system, "spectral_efficiency_ratio", rate, "", where, best[step, snr])
                    if link is not None and sent is not None:
                        result = _run(link, effective_gain(true, weights), sent, n0, target_block_errors)
                        errors = result.errors.cpu().double()
                        where = where | _describe(link)
                        measured.add(system, "bler", errors, "", where)
                        measured.add(system, "goodput", (1 - errors) * result.rate, "bit/s/Hz", where)
                    bar.update()
    return measured.records


class _Measured:
    """Records of values per user, with bootstrap intervals over the users' trajectories."""

    def __init__(self, origin: dict[str, Any], condition: dict[str, Any], sample_id: Tensor, seed: int) -> None:
        self.records: list[Record] = []
        self._origin, self._condition, self._sample_id, self._seed = origin, condition, sample_id, seed

    def add(
        self,
        system: str,
        metric: str,
        values: Tensor,
        unit: str,
        where: dict[str, Any],
        denominators: Tensor | None = None,
    ) -> None:
        """One figure: a mean or a ratio of sums of values `[set, user]` or `[set, user, block]` of the first sets."""
        from chanlab.metrics import bootstrap_interval

        groups = self._sample_id[: values.shape[0]].reshape(*values.shape[:2], *(1,) * (values.ndim - 2))
        groups = groups.expand(values.shape).flatten()
        more: dict[str, Any] = {}
        if len(set(groups.tolist())) > 1:
            below = None if denominators is None else denominators.flatten()
            interval = bootstrap_interval(values.flatten(), below, groups, resamples=300, seed=self._seed)
            more = {"deviation": interval.deviation, "low": interval.low, "high": interval.high}
        self.records.append(
            record(
                system=system,
                metric=metric,
                value=float(values.double().sum() / (values.numel() if denominators is None else denominators.sum())),
                condition=self._condition | where,
                n=values.numel(),
                unit=unit,
                **self._origin,
                **more,
            )
        )


def _transmissions(link: CodedLink, sets: int, at_most: int | None, seed: int, step: int) -> Transmission:
    count = sets if at_most is None else min(sets, at_most)
    return link.transmit([sample_generator(seed, i, _STREAM + step) for i in range(count)])


def _run(
    link: CodedLink, gain: Tensor, sent: Transmission, noise_variance: float, target_block_errors: int | None
) -> BlerResult:
    """Run in chunks of sets, up to a number of block errors."""
    errors: list[Tensor] = []
    for start in range(0, sent.num_sets, _SETS_AT_ONCE):
        part = sent[start : start + _SETS_AT_ONCE]
        errors.append(link.run(gain[start : start + part.num_sets], part, noise_variance).errors)
        if target_block_errors is not None and sum(int(e.sum()) for e in errors) >= target_block_errors:
            break
    return BlerResult(torch.cat(errors), link.k, link.rate)


def _describe(link: CodedLink) -> dict[str, Any]:
    return {
        "bits_per_symbol": link.bits_per_symbol,
        "code_rate": round(link.k / link.n, 4),
        "receiver": link.receiver,
        "block_bits": link.k,
    }
