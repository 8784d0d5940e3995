"""Which samples train, validate and test: whole trajectories or areas, with a guard distance, never snapshots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.spatial import cKDTree

from chanlab.channels.source import Motion
from chanlab.data.draws import hashed
from chanlab.errors import UsageError

SPLITS = ("guard", "train", "val", "test")
"""Names of the codes that `assign_splits` gives; `guard` samples belong to no split."""

_NAMES = SPLITS[1:]
_EMPTY_HELP = "take more samples, other fractions, a smaller guard, or splits by area with larger cells"

Codes = npt.NDArray[np.int8]
Box = Sequence[Sequence[float]]
"""A rectangle seen from above [m]: [[x0, x1], [y0, y1]]."""


@dataclass(frozen=True)
class SplitSpec:
    """How samples are divided: the `splits` section of a recipe.

    Attributes:
        by: `trajectory`: samples are drawn one by one; `area`: all samples of a place go together.
        fractions: Share of each split, adding up to 1; a split that is not named gets none.
        guard: Least distance between samples of different splits [m], over all anchors. Of two that are nearer, that of
            train goes (val, if the other is of test).
        cell: For `area`: side of the cells that are dealt to splits [m], a number or [x, y]; `[20, .inf]`
            makes stripes.
        regions: For `area`, in place of `cell`: boxes [[x0, x1], [y0, y1]] [m] by split, as `test: [box, ...]`; what
            lies in none of them goes to train.
    """

    by: str = "trajectory"
    fractions: Mapping[str, float] = field(default_factory=lambda: {"train": 0.8, "val": 0.1, "test": 0.1})
    guard: float = 0.0
    cell: float | Sequence[float] | None = None
    regions: Mapping[str, Sequence[Box]] | None = None

    def __post_init__(self) -> None:
        if self.by not in ("trajectory", "area"):
            raise UsageError(f"splits.by must be 'trajectory' or 'area', not {self.by!r}.")
        if not _is_number(self.guard) or self.guard < 0 or math.isinf(self.guard):
            raise UsageError(f"splits.guard must be a distance >= 0 in metres, not {self.guard!r}.")
        _check_names("fractions", self.fractions)
        shares = list(self.fractions.values())
        if any(not _is_number(x) or x < 0 for x in shares) or abs(sum(shares) - 1) > 1e-6:
            raise UsageError(f"splits.fractions must be numbers >= 0 that add up to 1, not {dict(self.fractions)}.")
        if self.by == "trajectory" and (self.cell is not None or self.regions is not None):
            raise UsageError("splits.cell and splits.regions go with by: area.")
        if self.by == "area" and (self.cell is None) == (self.regions is None):
            raise UsageError("splits by area need either cell (side in metres) or regions (boxes by split).")
        if self.cell is not None:
            self.cell_sides()
        if self.regions is not None:
            _check_names("regions", self.regions)
            for box in (box for boxes in self.regions.values() for box in boxes):
                _check_box(box)

    def cell_sides(self) -> tuple[float, float]:
        """Sides of a cell along x and y [m]."""
        cell = self.cell
        sides = [cell, cell] if isinstance(cell, int | float) else list(cell or ())
        if len(sides) != 2 or not all(_is_number(s) and s > 0 for s in sides):
            raise UsageError(f"splits.cell must be a length > 0 in metres or two of them, not {cell!r}.")
        return float(sides[0]), float(sides[1])

    @classmethod
    def parse(cls, section: Mapping[str, Any] | SplitSpec) -> SplitSpec:
        """Read the `splits` section of a recipe.

        Raises:
            UsageError: If a key is unknown (the message lists the known ones) or a value is wrong.
        """
        if isinstance(section, SplitSpec):
            return section
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(section) - set(known))
        if unknown:
            raise UsageError(f"splits: unknown key {', '.join(map(str, unknown))}; known keys are {', '.join(known)}.")
        return cls(**section)


def assign_splits(
    motion: Motion,
    spec: SplitSpec | Mapping[str, Any],
    seed: int,
    ids: Sequence[int] | None = None,
    together: int = 1,
) -> Codes:
    """Assign every sample to a split.

    By trajectory, samples (or what goes `together`) are ranked by a hash of (seed, id) and cut at the fractions. By
    area, a sample belongs to a split if all its anchors lie in that split's cells or regions; one that crosses a border
    is `guard`. Then samples nearer than the guard distance to another split are marked `guard`.

    Args:
        motion: Where all samples of the store are, `[user, anchor, ...]`.
        spec: A `SplitSpec`, or the mapping of a recipe.
        seed: The recipe's seed.
        ids: Sample ids, `[user]`; None: 0, 1, 2, ...
        together: Consecutive ids, from a multiple of it on, that depend on one another and go to the same split.

    Returns:
        Indices into `SPLITS`, int8 `[user]`; deterministic.

    Raises:
        UsageError: If the specification is wrong, or a split that should hold samples would be empty.
    """
    spec = SplitSpec.parse(spec)
    positions = motion.positions.detach().cpu().numpy().astype(np.float64)
    names = np.arange(len(positions)) if ids is None else np.asarray(ids, dtype=np.int64)
    if len(names) != len(positions):
        raise UsageError(f"{len(names)} sample ids for {len(positions)} samples.")
    if np.isnan(positions).any() and (spec.by == "area" or spec.guard > 0):
        raise UsageError("users of these channels have no places: split them by trajectory, without a guard distance.")
    if together > 1 and spec.by == "area":
        raise UsageError(f"{together} samples at a time depend on one another: split them by trajectory.")
    if spec.by == "trajectory":
        groups, member = np.unique(names // together, return_inverse=True)
        codes = _by_trajectory(groups, spec, seed)[member]
    elif spec.cell is not None:
        codes = _by_cell(positions[..., :2], spec, seed)
    else:
        codes = _by_region(positions[..., :2], spec)
    _require_all(codes, spec, "before the guard distance is applied")
    if spec.guard > 0:
        _apply_guard(codes, positions, spec.guard)
        _require_all(
            codes, spec, f"after {int((codes == 0).sum())} samples were set aside by the guard of {spec.guard} m"
        )
    return codes


def _by_trajectory(ids: npt.NDArray[np.int64], spec: SplitSpec, seed: int) -> Codes:
    order = np.argsort([hashed(seed, int(i)) for i in ids], kind="stable")
    codes = np.zeros(len(ids), np.int8)
    start = 0
    for code, count in _counts(len(ids), spec).items():
        codes[order[start : start + count]] = code
        start += count
    return codes


def _by_cell(xy: npt.NDArray[np.float64], spec: SplitSpec, seed: int) -> Codes:
    sides = np.array(spec.cell_sides())
    cells = np.where(np.isinf(sides), 0, np.floor(xy / np.where(np.isinf(sides), 1.0, sides))).astype(np.int64)
    unique, index = np.unique(cells.reshape(-1, 2), axis=0, return_inverse=True)
    index = index.reshape(cells.shape[:-1])
    start_cell = np.bincount(index[:, 0], minlength=len(unique))
    # Deal cells in an order of their hash, each to the split that lacks most samples.
    lacking = {code: float(count) for code, count in _counts(len(xy), spec).items()}
    owner = np.zeros(len(unique), np.int8)
    for cell in sorted(range(len(unique)), key=lambda c: hashed(seed, *(int(v) for v in unique[c]))):
        code = max(lacking, key=lambda c: lacking[c])
        owner[cell] = code
        lacking[code] -= start_cell[cell]
    return _agreed(owner[index])


def _by_region(xy: npt.NDArray[np.float64], spec: SplitSpec) -> Codes:
    codes = np.full(xy.shape[:-1], SPLITS.index("train"), np.int8)
    claimed = np.zeros(xy.shape[:-1], bool)
    for name, boxes in (spec.regions or {}).items():
        inside = np.zeros(xy.shape[:-1], bool)
        for (x0, x1), (y0, y1) in boxes:
            inside |= (xy[..., 0] >= x0) & (xy[..., 0] <= x1) & (xy[..., 1] >= y0) & (xy[..., 1] <= y1)
        if (inside & claimed).any():
            raise UsageError(f"splits.regions: the boxes of {name} overlap those of another split where samples are.")
        claimed |= inside
        codes[inside] = SPLITS.index(name)
    return _agreed(codes)


def _agreed(codes: Codes) -> Codes:
    """The split that all anchors agree on, `[user, anchor]` -> `[user]`; `guard` where they don't."""
    return np.where((codes == codes[:, :1]).all(1), codes[:, 0], 0).astype(np.int8)


def _apply_guard(codes: Codes, positions: npt.NDArray[np.float64], guard: float) -> None:
    for kept, others in ((("test",), "val"), (("val", "test"), "train")):
        keep = np.isin(codes, [SPLITS.index(name) for name in kept])
        ask = np.flatnonzero(codes == SPLITS.index(others))
        if not keep.any() or not ask.size:
            continue
        tree = cKDTree(positions[keep].reshape(-1, 3))
        distance, _ = tree.query(positions[ask].reshape(-1, 3), distance_upper_bound=guard)
        codes[ask[np.isfinite(distance).reshape(len(ask), -1).any(1)]] = 0


def _counts(samples: int, spec: SplitSpec) -> dict[int, int]:
    """Samples per split: fractions rounded down, the rest to train, and none left empty if there are enough samples."""
    wanted = {code: spec.fractions.get(name, 0.0) for code, name in enumerate(SPLITS) if spec.fractions.get(name, 0.0)}
    counts = {code: max(1, int(share * samples + 1e-9)) for code, share in wanted.items()}
    first = max(counts, key=lambda c: wanted[c])
    counts[first] += samples - sum(counts.values())
    if counts[first] < 1:
        raise UsageError(f"{samples} samples are too few for splits {dict(spec.fractions)}: {_EMPTY_HELP}.")
    return counts


def _require_all(codes: Codes, spec: SplitSpec, when: str) -> None:
    wanted = (
        {name for name in _NAMES if spec.fractions.get(name, 0.0) > 0} if spec.regions is None else set(spec.regions)
    )
    wanted |= {"train"} if spec.regions is not None else set()
    empty = [name for name in _NAMES if name in wanted and not (codes == SPLITS.index(name)).any()]
    if empty:
        counts = ", ".join(f"{name} {int((codes == code).sum())}" for code, name in enumerate(SPLITS))
        raise UsageError(f"no sample is left for {' and '.join(empty)} {when} ({counts}): {_EMPTY_HELP}.")


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and not math.isnan(x)


def _check_names(what: str, mapping: Mapping[str, Any]) -> None:
    unknown = sorted(set(mapping) - set(_NAMES))
    if unknown or not mapping:
        raise UsageError(
            f"splits.{what}: unknown split {', '.join(unknown) or '(none)'}; splits are {', '.join(_NAMES)}."
        )


def _check_box(box: Any) -> None:
    try:
        (x0, x1), (y0, y1) = box
        good = all(_is_number(v) for v in (x0, x1, y0, y1)) and x0 < x1 and y0 < y1
    except (TypeError, ValueError):
        good = False
    if not good:
        raise UsageError(
            f"splits.regions: a box is [[x0, x1], [y0, y1]] in metres with x0 < x1 and y0 < y1, not {box!r}."
        )
