"""True channels of many windows beside what a base station believes them to be, and who is served together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from chanlab.errors import UsageError

PERFECT = "perfect CSI"
"""The system that knows the true channel of each step."""
NO_PREDICTION = "no prediction"
"""The system that takes the last noisy snapshot for every step: outdated CSI."""


class CSIPredictor(Protocol):
    """Continues a noisy history: what `chanlab.csi` calls a predictor, or any callable of this form."""

    def __call__(self, history: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """Complex `[batch, rx_ant, tx_ant, time, subcarrier]` to `[batch, rx_ant, tx_ant, horizon, subcarrier]`."""
        ...


class Windows(Protocol):
    """What is read of a batch of CSI windows (`chanlab.data.CSIBatch`)."""

    @property
    def history(self) -> Tensor:
        """Noisy, complex `[batch, rx_ant, tx_ant, time, subcarrier]`."""

    @property
    def target(self) -> Tensor:
        """Without noise, complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`."""

    @property
    def noise_variance(self) -> Tensor:
        """Of the history's noise, real `[batch]`."""

    @property
    def sample_id(self) -> Tensor:
        """Trajectory of each window, int64 `[batch]`."""

    @property
    def window(self) -> Tensor:
        """Index of the window within its trajectory, int64 `[batch]`."""


@dataclass(frozen=True)
class CSIEnsemble:
    """Downlink channels of windows from M ports to single-antenna users, and each system's idea of them.

    Attributes:
        channel: True channels, complex64 `[window, tx_ant, step, subcarrier]`.
        csi: What each system believes, by name, each of the shape of `channel`.
        sample_id: Trajectory of each window, int64 `[window]`.
        window: Index of the window within its trajectory, int64 `[window]`.
    """

    channel: Tensor
    csi: Mapping[str, Tensor]
    sample_id: Tensor
    window: Tensor

    def __post_init__(self) -> None:
        if self.channel.ndim != 4 or not self.channel.is_complex():
            raise UsageError(f"channel must be complex [window, tx_ant, step, subcarrier], not {[*self.channel.shape]}")
        for name, known in self.csi.items():
            if known.shape != self.channel.shape:
                raise UsageError(
                    f"{name!r} knows channels of shape {list(known.shape)}; the true ones are "
                    f"{list(self.channel.shape)} [window, tx_ant, step, subcarrier]."
                )
            if not bool(torch.isfinite(torch.view_as_real(known)).all()):
                raise UsageError(f"{name!r} predicts NaN or infinity: no precoder can be computed from it.")

    def select(self, index: Tensor) -> CSIEnsemble:
        """The windows of an index, in its order."""
        return replace(
            self,
            channel=self.channel[index],
            csi={name: known[index] for name, known in self.csi.items()},
            sample_id=self.sample_id[index],
            window=self.window[index],
        )

    def sort(self) -> CSIEnsemble:
        """The windows in the order of (sample id, window), however they came."""
        order = torch.argsort(self.window, stable=True)
        return self.select(order[torch.argsort(self.sample_id[order], stable=True)])

    def normalise(self) -> CSIEnsemble:
        """Scale each window, truth and CSI alike, so that its true channel has unit mean power per entry.

        The mean is over ports, steps and subcarriers: path loss and shadowing go, fading stays. Windows whose channel
        is zero (a user without any path) are left out.
        """
        power = self.channel.abs().square().mean((1, 2, 3))
        kept = self.select((power > 0).nonzero().squeeze(-1))
        scale = power[power > 0].rsqrt()[:, None, None, None]
        return replace(
            kept, channel=kept.channel * scale, csi={name: known * scale for name, known in kept.csi.items()}
        )


def collect(
    systems: Mapping[str, CSIPredictor], batches: Iterable[Windows], base_station: Literal["tx", "rx"] = "tx"
) -> CSIEnsemble:
    """Run predictors over batches of windows; perfect CSI and no prediction are added.

    Windows are put in the order of (sample id, window): the result does not depend on how they were batched.

    Args:
        systems: Predictors by name.
        batches: Batches of windows, such as a test DataLoader yields.
        base_station: Which end of the link has the M ports. `rx`: the windows are of the uplink; by reciprocity their
            transpose is the downlink.

    Raises:
        UsageError: If there is no batch, a user has several antennas or a prediction has the wrong shape.
    """
    axis = {"tx": 1, "rx": 2}[base_station]
    channel, sample_id, window = [], [], []
    csi: dict[str, list[Tensor]] = {name: [] for name in (PERFECT, NO_PREDICTION, *systems)}
    for batch in batches:
        target, history = batch.target, batch.history
        if target.shape[axis] != 1:
            raise UsageError(
                f"a user has {target.shape[axis]} antennas; the link serves users of one antenna: take a view with "
                f"one, or base_station={'rx' if base_station == 'tx' else 'tx'!r} if this is the base station's side."
            )
        with torch.inference_mode():
            known = {
                PERFECT: target,
                NO_PREDICTION: history[..., -1:, :].expand_as(target),
                **{name: predict(history, batch.noise_variance) for name, predict in systems.items()},
            }
        for name, value in known.items():
            if value.shape != target.shape:
                raise UsageError(f"{name!r} predicts {list(value.shape)}, the target is {list(target.shape)}.")
            csi[name].append(value.squeeze(axis).cpu())
        channel.append(target.squeeze(axis).cpu())
        sample_id.append(batch.sample_id.cpu())
        window.append(batch.window.cpu())
    if not channel:
        raise UsageError("there is no batch of windows to evaluate.")
    known = {name: torch.cat(parts) for name, parts in csi.items()}
    return CSIEnsemble(torch.cat(channel), known, torch.cat(sample_id), torch.cat(window)).sort()


def group_users(sample_id: Tensor, users: int, seed: int) -> Tensor:
    """Draw who is served together: users of one set are from different trajectories.

    Round by round each trajectory gives one of its windows, in an order drawn anew; what is left over at the end of a
    round is not used.

    Args:
        sample_id: Trajectory of each window, int64 `[window]`.
        users: Users of a set.
        seed: Seed of the draw.

    Returns:
        Indices of windows, int64 `[set, user]`; a window occurs once at most.

    Raises:
        UsageError: If there are fewer trajectories than users.
    """
    generator = torch.Generator().manual_seed(seed)
    names, trajectory = torch.unique(sample_id, return_inverse=True)
    if users < 1 or len(names) < users:
        raise UsageError(f"{users} users at once need as many trajectories; there are {len(names)}.")
    shuffled = torch.randperm(len(sample_id), generator=generator)
    seen = torch.zeros(len(names), dtype=torch.int64)
    rounds: list[list[int]] = []
    for index in shuffled.tolist():
        turn = int(seen[trajectory[index]])
        seen[trajectory[index]] += 1
        if turn == len(rounds):
            rounds.append([])
        rounds[turn].append(index)
    sets = [part[i : i + users] for part in rounds for i in range(0, len(part) - users + 1, users)]
    return torch.tensor(sets, dtype=torch.int64)
