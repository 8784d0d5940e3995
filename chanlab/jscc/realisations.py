"""Channels for an OFDM link: of a store, of a source of paths, of a 3GPP model drawn on the device that asks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chanlab.channels import (
    CIR,
    SPEED_OF_LIGHT,
    CIRLinks,
    Links,
    Paths,
    PlanarArray,
    Source,
    ThreeGPP,
    cfr_along,
    subcarrier_frequencies,
)
from chanlab.data import Store
from chanlab.data.coverage import anchors_around, usable_samples
from chanlab.data.draws import FIXED, START, uniform
from chanlab.data.recipe import build_source, load_recipe
from chanlab.data.views import CSIView
from chanlab.errors import UsageError

_LARGEST_TURN = 0.1  # cycles of Doppler between snapshots that linear interpolation is trusted with: an error of -26 dB
_PER_USER = ("times", "positions", "velocities", "orientations", "sample_ids")


@dataclass(frozen=True)
class Grid:
    """A resource grid in time and frequency.

    Attributes:
        num_symbols: OFDM symbols.
        num_subcarriers: Subcarriers.
        subcarrier_spacing: [Hz].
        symbol_duration: Time between OFDM symbols, cyclic prefix included [s].
    """

    num_symbols: int
    num_subcarriers: int
    subcarrier_spacing: float
    symbol_duration: float

    def times(self) -> Tensor:
        """Times of the OFDM symbols [s], float64 `[symbol]`."""
        return torch.arange(self.num_symbols, dtype=torch.float64) * self.symbol_duration

    def frequencies(self) -> Tensor:
        """Subcarriers relative to the carrier [Hz], ascending, float64 `[subcarrier]`."""
        return subcarrier_frequencies(self.num_subcarriers, self.subcarrier_spacing)

    @property
    def span(self) -> float:
        """Time from the first to the last OFDM symbol [s]."""
        return (self.num_symbols - 1) * self.symbol_duration


class Realisations(ABC):
    """Channels that a link draws from, by number: the same number is the same channel."""

    @abstractmethod
    def count(self, grid: Grid) -> int:
        """How many there are that last as long as a grid."""

    @abstractmethod
    def cfr(self, numbers: Sequence[int], grid: Grid, device: torch.device) -> Tensor:
        """Frequency responses on a grid, complex64 `[batch, rx_ant, tx_ant, symbol, subcarrier]` on the device."""


class StoreRealisations(Realisations):
    """Channels of one split of a store, each from a start of its own on the user's trajectory.

    Where a channel starts depends on (seed, sample id, window) alone. Stores of paths are seen through any arrays and
    at any times (moving users between their anchors, `cfr_along`); in stores of impulse responses taps are interpolated
    linearly between stored snapshots, and a single snapshot is a channel that stands still.

    Args:
        store: A `Store` or its folder.
        split: `train`, `val` or `test`.
        windows_per_sample: Starts on each trajectory.
        tx_array: Transmit array, for stores of paths.
        rx_array: Receive array, for stores of paths.
        seed: Seed of the starts; None takes the recipe's.

    Raises:
        UsageError: If the split is not in the store, or (later) no sample lasts as long as a grid.
        StoreError: If the store can't be read.
    """

    def __init__(
        self,
        store: Store | str | Path,
        split: str = "train",
        windows_per_sample: int = 1,
        tx_array: PlanarArray | None = None,
        rx_array: PlanarArray | None = None,
        seed: int | None = None,
    ) -> None:
        self.store = store if isinstance(store, Store) else Store(store)
        if split not in self.store.splits:
            raise UsageError(f"unknown split {split!r}; splits are {', '.join(self.store.splits)}.")
        self.split = split
        self.windows_per_sample = windows_per_sample
        self.tx_array, self.rx_array = tx_array or PlanarArray(), rx_array or PlanarArray()
        self.seed = self.store.recipe.seed if seed is None else seed
        self._usable: dict[Grid, tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]] = {}

    def count(self, grid: Grid) -> int:
        """See `Realisations.count`."""
        return len(self._samples(grid)[0]) * self.windows_per_sample

    def cfr(self, numbers: Sequence[int], grid: Grid, device: torch.device) -> Tensor:
        """See `Realisations.cfr`."""
        ids, slack = self._samples(grid)
        rows, window = np.divmod(np.asarray(numbers, np.int64), self.windows_per_sample)
        share = [uniform(self.seed, int(i), int(w), FIXED, START) for i, w in zip(ids[rows], window, strict=True)]
        links = self.store.read(ids[rows])
        if isinstance(links, CIRLinks):
            return _taps_cfr(links, torch.tensor(share, dtype=torch.float64), grid, device)
        return _paths_cfr(
            links, torch.from_numpy(slack[rows] * np.array(share)), grid, self.tx_array, self.rx_array, device
        )

    def _samples(self, grid: Grid) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Ids of the samples that last as long as a grid, and the time left in each [s]."""
        if grid not in self._usable:
            if self.store.payload == "cir":
                ids = self.store.splits[self.split]
                self._usable[grid] = ids, np.zeros(len(ids))
            else:
                view = CSIView(
                    grid.num_subcarriers,
                    grid.subcarrier_spacing,
                    history=grid.num_symbols,
                    horizons=(0.0,),
                    interval=grid.symbol_duration,
                )
                self._usable[grid] = usable_samples(self.store, self.split, view)[:2]
        return self._usable[grid]


class SourceRealisations(Realisations):
    """Channels of a source of paths: closed forms, plane waves, a traced scene. Each is computed when it is asked for.

    A store of the same source is faster for anything that is traced.

    Args:
        source: The source, or the name or file of a recipe (`datasets/`), whose source is taken.
        samples: Number of channels, whole groups of the source.
        seed: Seed of the source.
        first: Sample id of the first one: apart for training, validation and test.
        tx_array: Transmit array.
        rx_array: Receive array.

    Raises:
        UsageError: If the source draws impulse responses, or its groups don't fit.
    """

    def __init__(
        self,
        source: Source | str,
        samples: int = 1024,
        seed: int = 0,
        first: int = 0,
        tx_array: PlanarArray | None = None,
        rx_array: PlanarArray | None = None,
    ) -> None:
        if isinstance(source, str):
            source = build_source(load_recipe(source))
        if getattr(source, "payload", "paths") == "cir":
            raise UsageError("a source of impulse responses has its own instants: give its model to ModelRealisations.")
        if samples < 1 or samples % source.group or first % source.group:
            raise UsageError(f"samples and first must be multiples of the source's group of {source.group}.")
        self.source = source
        self.samples, self.seed, self.first = samples, seed, first
        self.tx_array, self.rx_array = tx_array or PlanarArray(), rx_array or PlanarArray()
        self._groups: OrderedDict[int, Links] = OrderedDict()

    def count(self, grid: Grid) -> int:
        """See `Realisations.count`."""
        return self.samples

    def cfr(self, numbers: Sequence[int], grid: Grid, device: torch.device) -> Tensor:
        """See `Realisations.cfr`."""
        size = self.source.group
        places = [divmod(self.first + number, size) for number in numbers]
        rows = [_row(self._group(group), row) for group, row in places]
        links = replace(
            rows[0],
            paths=Paths.cat([r.paths for r in rows]),
            **{name: torch.cat([getattr(r, name) for r in rows]) for name in _PER_USER},
        )
        start = torch.zeros(len(rows), dtype=torch.float64)
        return _paths_cfr(links, start, grid, self.tx_array, self.rx_array, device)

    def _group(self, index: int) -> Links:
        if index not in self._groups:
            size = self.source.group
            links = self.source.links(range(index * size, (index + 1) * size), self.seed)
            assert isinstance(links, Links)
            self._groups[index] = links
            if len(self._groups) > max(1, 4096 // size):
                self._groups.popitem(last=False)
        self._groups.move_to_end(index)
        return self._groups[index]


class ModelRealisations(Realisations):
    """Channels of a 3GPP model, drawn at the instants of the grid on the device that asks, block by block.

    Args:
        model: CDL, TDL or cell drops; its `block` channels are drawn together.
        samples: Number of channels, whole blocks.
        seed: Seed.
        blocks_kept: Blocks kept on the device, of one grid.

    Raises:
        UsageError: If `samples` is not a multiple of the model's block.
    """

    def __init__(self, model: ThreeGPP, samples: int = 4096, seed: int = 0, blocks_kept: int = 16) -> None:
        if samples < 1 or samples % model.block:
            raise UsageError(f"samples must be a multiple of the model's block of {model.block}, not {samples}.")
        self.model = model
        self.samples, self.seed, self.blocks_kept = samples, seed, blocks_kept
        self._blocks: OrderedDict[tuple[int, Grid, torch.device], CIR] = OrderedDict()

    def count(self, grid: Grid) -> int:
        """See `Realisations.count`."""
        return self.samples

    def cfr(self, numbers: Sequence[int], grid: Grid, device: torch.device) -> Tensor:
        """See `Realisations.cfr`."""
        chosen = torch.as_tensor(numbers, dtype=torch.int64)
        which = chosen // self.model.block
        order, parts = [], []
        for block in torch.unique(which).tolist():
            rows = (which == block).nonzero()[:, 0]
            order.append(rows)
            parts.append(self._block(block, grid, device)[(chosen[rows] % self.model.block).to(device)])
        back = torch.cat(order).argsort().to(device)
        return CIR.cat(parts)[back].cfr(grid.frequencies().to(device))

    def _block(self, number: int, grid: Grid, device: torch.device) -> CIR:
        name = (number, grid, device)
        if name not in self._blocks:
            while len(self._blocks) >= self.blocks_kept:
                self._blocks.popitem(last=False)
            drawn = self.model.draw_block(number, self.seed, grid.num_symbols, grid.symbol_duration, device)
            self._blocks[name] = drawn
        self._blocks.move_to_end(name)
        return self._blocks[name]


def _row(links: Links, row: int) -> Links:
    """One user, with the axis kept."""
    at = slice(row, row + 1)
    return replace(links, paths=links.paths[at], **{name: getattr(links, name)[at] for name in _PER_USER})


def _paths_cfr(
    links: Links, start: Tensor, grid: Grid, tx_array: PlanarArray, rx_array: PlanarArray, device: torch.device
) -> Tensor:
    """Responses of paths from `start` on [s], `[batch]`."""
    line = torch.arange(links.num_users)[:, None]
    keep = anchors_around(links.times, start, grid.span)
    return cfr_along(
        links.paths[line, keep].trim().to(device),
        (links.times[line, keep] - start[:, None]).to(device),
        grid.times().to(device),
        tx_array,
        rx_array,
        grid.frequencies().to(device),
        links.tx_orientation.to(device, torch.float32),
        links.orientations[line, keep].to(device, torch.float32),
    ).to(torch.complex64)


def _taps_cfr(links: CIRLinks, share: Tensor, grid: Grid, device: torch.device) -> Tensor:
    """Responses of stored snapshots, from a `share` in [0, 1) of the time that is left, `[batch]`."""
    a, snapshots = links.cir.coefficients.to(device), links.snapshots[0]
    count = len(snapshots)
    frequencies = grid.frequencies().to(device)
    if count == 1:
        response = CIR(a, links.cir.delay.to(device), links.carrier).cfr(frequencies)
        return response.expand(*response.shape[:3], grid.num_symbols, -1)
    spacing = float(snapshots[-1]) / (count - 1)
    turn = float(links.velocities.norm(dim=-1).max()) / SPEED_OF_LIGHT * links.carrier * spacing
    if turn > _LARGEST_TURN:
        raise UsageError(
            f"between stored snapshots, {spacing:.4g} s apart, channels turn by up to {turn:.2g} cycles: too coarse to "
            f"interpolate. Generate with an interval of at most {spacing * _LARGEST_TURN / turn:.2g} s."
        )
    left = float(snapshots[-1]) - grid.span
    if left < -1e-9:
        raise UsageError(
            f"stored channels last {float(snapshots[-1]):.4g} s, the grid {grid.span:.4g} s: generate more snapshots, "
            "or take more subcarriers or a wider subcarrier spacing."
        )
    place = (share[:, None] * max(left, 0.0) + grid.times()) / spacing
    first = place.floor().long().clamp(max=count - 2)
    weight = (place - first).to(device, torch.complex64)[:, None, None, :, None]
    at = first.to(device)[:, None, None, :, None].expand(-1, *a.shape[1:3], -1, a.shape[-1])
    taps = torch.lerp(a.gather(3, at), a.gather(3, at + 1), weight)
    return CIR(taps, links.cir.delay.to(device), links.carrier).cfr(frequencies)
