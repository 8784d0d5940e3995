"""Which samples of a store have room for windows, and which anchors a window needs."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chanlab.data.store import Store
from chanlab.data.views import CSIView
from chanlab.errors import UsageError

log = logging.getLogger(__name__)
_USERS_AT_ONCE = 256


def usable_samples(
    store: Store, split: str, view: CSIView
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], dict[str, int]]:
    """Samples of a split that have room for a window, and paths at every anchor.

    Args:
        store: The store.
        split: Name of the split.
        view: The windows' shape.

    Returns:
        Their ids `[sample]`, the time by which a window can be shifted in each [s] `[sample]` (0 in a store of single
        anchors, which has no end of time), and how many samples were skipped by reason.

    Raises:
        UsageError: If none is left.
    """
    ids = store.splits[split]
    if not len(ids):
        raise UsageError(f"{store.path} has no samples in split {split!r}: change its recipe's splits, generate anew.")
    slack, covered = _room(store, ids, view.span)
    room = slack >= -1e-9
    skipped = {"too short": int((~room).sum()), "without paths": int((room & ~covered).sum())}
    good = room & covered
    if not good.any():
        raise UsageError(
            f"none of the {len(ids)} samples of split {split!r} in {store.path} is usable: {skipped['without paths']} "
            f"have an anchor without paths, {skipped['too short']} last less than the {view.span:.4g} s of a window "
            f"(history {view.history}, last horizon {view.horizons[-1]:g}, interval {view.interval} s; the longest "
            f"lasts {slack.max() + view.span:.4g} s). Take a shorter window, or generate longer or slower trajectories."
        )
    if any(skipped.values()):
        reasons = ", ".join(f"{count} {why}" for why, count in skipped.items() if count)
        log.warning("%s, split %s: skipped %s of %d samples", store.path, split, reasons, len(ids))
    return ids[good], np.maximum(slack[good], 0.0), skipped


def anchors_around(times: Tensor, start: Tensor, span: float) -> Tensor:
    """Indices of the anchors that enclose each window, as many for each of the batch.

    Args:
        times: Times of the anchors [s], `[batch, anchor]`.
        start: Start of each window [s], `[batch]`.
        span: Length of a window [s].

    Returns:
        int64 `[batch, anchors needed by the one that needs most]`, consecutive.
    """
    times = times.contiguous()
    first = (torch.searchsorted(times, start[:, None], right=True) - 1).clamp(min=0)
    last = torch.searchsorted(times, start[:, None] + span).clamp(max=times.shape[1] - 1)
    count = int((last - first).max()) + 1
    return first.clamp(max=times.shape[1] - count) + torch.arange(count)


def _room(
    store: Store, ids: npt.NDArray[np.int64], span: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Time left beside a window [s], and whether all anchors have paths, both `[sample]`."""
    if store.payload == "cir":  # the same snapshots for all: `Snapshots` has checked them
        return np.zeros(len(ids)), np.ones(len(ids), np.bool_)
    slack, covered = [], []
    for start in range(0, len(ids), _USERS_AT_ONCE):
        links = store.links(ids[start : start + _USERS_AT_ONCE])
        duration = (links.times[:, -1] - links.times[:, 0]).numpy()
        slack.append(duration - span if store.num_anchors > 1 else np.zeros_like(duration))
        covered.append(links.paths.mask.any(-1).all(-1).numpy())
    return np.concatenate(slack), np.concatenate(covered)
