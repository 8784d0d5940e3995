"""Windows of channel state information over a store: a noisy history, and the noiseless steps that follow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from chanlab.channels import PlanarArray
from chanlab.data import draws
from chanlab.data.coverage import anchors_around, usable_samples
from chanlab.data.impairments import Impairments
from chanlab.data.splits import SPLITS
from chanlab.data.store import Store
from chanlab.data.tap_windows import Snapshots, TapWindows, stored_interval, tap_channels
from chanlab.data.view_file import ViewFile, build_view_file, empty
from chanlab.data.views import CSIView, PathWindows, window_channels
from chanlab.errors import UsageError

Index = int | tuple[int, int]
"""Index of an item; with an epoch before it, (epoch, index), where random numbers change from epoch to epoch."""


class CSIBatch(NamedTuple):
    """A batch of windows; without the axis `batch` a single one.

    Attributes:
        history: Noisy past, complex64 `[batch, rx_ant, tx_ant, time, subcarrier]`.
        target: Noiseless channel at the steps asked for, complex64 `[batch, rx_ant, tx_ant, horizon, subcarrier]`.
        noise_variance: Variance of the complex noise on each entry of the history, `[batch]`.
        snr_db: Mean power of the window's noiseless history over the noise variance, `[batch]` [dB].
        sample_id: Sample the window was taken from, int64 `[batch]`.
        window: Index of the window within its sample, int64 `[batch]`.
        speed: Speed of the user at the anchor nearest to the window's middle, `[batch]` [m/s].
    """

    history: Tensor
    target: Tensor
    noise_variance: Tensor
    snr_db: Tensor
    sample_id: Tensor
    window: Tensor
    speed: Tensor


Fetched = CSIBatch | PathWindows | TapWindows
"""What a worker of a `DataLoader` hands over: a batch, or what its channels are computed from."""


class CSIWindows(Dataset[CSIBatch]):
    """Windows over the trajectories of one split of a store.

    A window starts at a random time of its trajectory. That time, the SNR and the noise depend on (seed, sample id,
    window index) alone, in training on the epoch as well: not on batch, worker, order or device. Samples too short for
    a window, or with an anchor that no path reaches, are skipped and counted in `skipped`. A store of single anchors
    (static users) has no end of time: its windows follow one another from 0, and the Doppler shifts make the fading.
    In a store of impulse responses windows start at any stored snapshot that leaves room, subcarriers are free, and the
    arrays are the stored ones.

    An item is a `CSIBatch` without batch axis. In a `DataLoader`, give `collate_fn=collate`: batches are fetched whole,
    in mode `paths` as `PathWindows` or `TapWindows` that `to_batch` turns into channels on the learner's device: see
    `CSIDataModule`.

    Args:
        store: A `Store` or its folder.
        split: `train`, `val` or `test`.
        history: As the following ones of `CSIView`; None takes the recipe's `view` section, then `CSIView`'s default.
        horizons: See `CSIView`.
        interval: See `CSIView` [s].
        windows_per_sample: See `CSIView`.
        tx_array: See `CSIView`.
        rx_array: See `CSIView`.
        num_subcarriers: See `CSIView`.
        subcarrier_spacing: See `CSIView` [Hz].
        band: See `CSIView`.
        fdd_offset: See `CSIView`.
        snr_db: SNR of the history [dB]: a tuple (low, high) is drawn from uniformly; a number is fixed; of a list, each
            window comes once with every value and the same noise but for its power. Infinity is no noise.
        seed: Seed of starts, SNR and noise; None takes the recipe's.
        mode: `paths`: channels are computed when they are read; `materialised`: once, into a file.
        by_epoch: Draw anew each epoch (in mode `materialised` the SNR and noise only); None: in split `train` only.
        view_dir: Folder of materialised views; None is the folder `STORE.views` beside the store.
        train_fraction: Share of the trajectories of split `train` that are kept, whole, for few-shot training; at least
            one is. Which ones depends on (seed, sample id) alone, and a larger share contains a smaller one. Other
            splits are not touched.
        impairments: What stands between the channel and the history beside Gaussian noise; None is nothing.

    Raises:
        UsageError: If an argument doesn't fit, or no sample of the split is long enough for a window.
        StoreError: If the store can't be read, or the view can't be written.
    """

    def __init__(
        self,
        store: Store | str | Path,
        split: str = "train",
        *,
        history: int | None = None,
        horizons: int | Sequence[float] | None = None,
        interval: float | None = None,
        windows_per_sample: int | None = None,
        tx_array: PlanarArray | Mapping[str, Any] | None = None,
        rx_array: PlanarArray | Mapping[str, Any] | None = None,
        num_subcarriers: int | None = None,
        subcarrier_spacing: float | None = None,
        band: Literal["tdd", "fdd"] | None = None,
        fdd_offset: int | None = None,
        snr_db: float | tuple[float, float] | Sequence[float] = 15.0,
        seed: int | None = None,
        mode: Literal["paths", "materialised"] = "paths",
        by_epoch: bool | None = None,
        view_dir: str | Path | None = None,
        train_fraction: float = 1.0,
        impairments: Impairments | None = None,
    ) -> None:
        self.store = store if isinstance(store, Store) else Store(store)
        if split not in SPLITS[1:] or split not in self.store.splits:
            raise UsageError(f"unknown split {split!r}; splits are {', '.join(SPLITS[1:])}.")
        if mode not in ("paths", "materialised"):
            raise UsageError(f"mode must be 'paths' or 'materialised', not {mode!r}.")
        self.split = split
        self.mode = mode
        section = self.store.recipe.view
        if self.store.payload == "cir":
            section = {"interval": stored_interval(self.store), **section}
        self.view = CSIView.parse(
            {k: v for k, v in section.items() if v is not None},
            history=history,
            horizons=horizons,
            interval=interval,
            windows_per_sample=windows_per_sample,
            tx_array=tx_array,
            rx_array=rx_array,
            num_subcarriers=num_subcarriers,
            subcarrier_spacing=subcarrier_spacing,
            band=band,
            fdd_offset=fdd_offset,
        )
        self.impairments = impairments or Impairments()
        if self.impairments.feedback_delay:
            late = tuple(h + self.impairments.feedback_delay for h in self.view.horizons)
            self.view = replace(self.view, horizons=late)
        self.seed = self.store.recipe.seed if seed is None else seed
        self.by_epoch = split == "train" if by_epoch is None else by_epoch
        self._range, self._levels = _snr(snr_db)
        self.carrier = self.store.carrier
        self._snapshots = Snapshots(self.store, self.view) if self.store.payload == "cir" else None
        ids, slack, self.skipped = usable_samples(self.store, split, self.view)
        if not 0 < train_fraction <= 1:
            raise UsageError(f"train_fraction must be above 0 and at most 1, not {train_fraction!r}.")
        if split == "train":
            kept = _few(ids, train_fraction, self.seed)
            ids, slack = ids[kept], slack[kept]
        self._fraction = train_fraction if split == "train" else 1.0
        per_sample = self.view.windows_per_sample
        self.sample_ids = np.repeat(ids, per_sample)
        self.window_ids = np.tile(np.arange(per_sample), len(ids))
        self._slack = np.repeat(slack, per_sample)
        self.tx_orientation = self.store.read(ids[:1]).tx_orientation
        self._file: ViewFile | None = None
        if mode == "materialised":
            folder = Path(view_dir) if view_dir else self.store.path.with_name(self.store.path.name + ".views")
            self._file = build_view_file(folder, self._key(), len(self.sample_ids), self.view, self._clean)

    def __len__(self) -> int:
        return len(self.sample_ids) * len(self._levels or (0,))

    def __getitem__(self, index: Index) -> CSIBatch:
        return CSIBatch(*(x[0] for x in self.batch([index])))

    def __getitems__(self, indices: Sequence[Index]) -> Fetched:
        """Fetch a batch as a worker of a `DataLoader` does: what is read and drawn, without computing channels."""
        epochs, items = self._unpack(indices)
        rows, level = np.divmod(items, len(self._levels or (0,)))
        snr = torch.tensor(
            [
                self._levels[b] if self._levels else self._draw_snr(r, e)
                for r, b, e in zip(rows, level, epochs, strict=True)
            ]
        )
        if self._file is None:
            return self._read(rows, epochs, snr)
        power, speed = self._file.power[rows], self._file.speed[rows]
        variance = power * 10 ** (-snr / 10)
        deviation = variance.sqrt().tolist()

        def draw(i: int, noise: Tensor) -> None:
            draws.fill_noise(noise, deviation[i], *self._name(rows[i]), epochs[i])

        history = self._file.noisy_histories(rows, draw)
        history = self._impair(history, variance, self._impairment_key(rows, epochs))
        return CSIBatch(history, self._file.target(rows), variance, snr, *self._labels(rows), speed)

    def batch(self, indices: Sequence[Index]) -> CSIBatch:
        """The windows with these indices, in their order."""
        return self.to_batch(self.__getitems__(indices))

    @torch.no_grad()
    def to_batch(self, fetched: Fetched) -> CSIBatch:
        """Compute the channels of what `__getitems__` fetched, on its device."""
        if isinstance(fetched, CSIBatch):
            return fetched
        history, target = self._channels(fetched)
        power = 2 * torch.view_as_real(history).square().mean((1, 2, 3, 4, 5))
        variance = power * 10 ** (-fetched.snr_db / 10)
        noisy = torch.addcmul(history, variance.sqrt().to(history)[:, None, None, None, None], fetched.noise)
        noisy = self._impair(noisy, variance, fetched.key)
        return CSIBatch(
            noisy, target.contiguous(), variance, fetched.snr_db, fetched.sample_id, fetched.window, fetched.speed
        )

    def starts(self, rows: npt.NDArray[np.int64], epochs: Sequence[int] | None = None) -> npt.NDArray[np.float64]:
        """Start times of windows on the clock of their trajectory [s].

        Args:
            rows: Indices into `sample_ids` and `window_ids`.
            epochs: Epoch of each; None: those of windows that don't change.
        """
        if self._snapshots is not None:
            return np.asarray(self._snapshots.spacing * self._first(rows, epochs), np.float64)
        if self.store.num_anchors == 1:
            return np.asarray(self.window_ids[rows] * (self.view.span + self.view.interval), np.float64)
        return np.asarray(self._slack[rows] * self._share(rows, epochs), np.float64)

    def _share(self, rows: npt.NDArray[np.int64], epochs: Sequence[int] | None) -> npt.NDArray[np.float64]:
        """A number in [0, 1) for each window, that says where it starts."""
        epochs = [draws.FIXED] * len(rows) if epochs is None else epochs
        return np.array([draws.uniform(*self._name(r), e, draws.START) for r, e in zip(rows, epochs, strict=True)])

    def _first(self, rows: npt.NDArray[np.int64], epochs: Sequence[int] | None) -> npt.NDArray[np.int64]:
        """First snapshot of windows of impulse responses."""
        assert self._snapshots is not None
        return np.floor(self._share(rows, epochs) * (self._snapshots.slack + 1)).astype(np.int64)

    def _unpack(self, indices: Sequence[Index]) -> tuple[list[int], npt.NDArray[np.int64]]:
        pairs = [i if isinstance(i, tuple) else (0, i) for i in indices]
        items = np.array([i for _, i in pairs], np.int64)
        items[items < 0] += len(self)
        if ((items < 0) | (items >= len(self))).any():
            raise IndexError(f"index out of range: there are {len(self)} windows.")
        return [e if self.by_epoch else draws.FIXED for e, _ in pairs], items

    def _name(self, row: np.int64) -> tuple[int, int, int]:
        """What the random numbers of a window depend on, beside the epoch."""
        return self.seed, int(self.sample_ids[row]), int(self.window_ids[row])

    def _draw_snr(self, row: np.int64, epoch: int) -> float:
        low, high = self._range
        return low + (high - low) * draws.uniform(*self._name(row), epoch, draws.SNR)

    def _labels(self, rows: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.sample_ids[rows]), torch.from_numpy(self.window_ids[rows])

    def _impair(self, history: Tensor, variance: Tensor, key: Tensor) -> Tensor:
        return self.impairments.apply(history, variance, key, self.view.interval, self.view.subcarrier_spacing)

    def _impairment_key(self, rows: npt.NDArray[np.int64], epochs: Sequence[int]) -> Tensor:
        keys = [draws.hashed(*self._name(r), e, draws.IMPAIRMENTS) >> 1 for r, e in zip(rows, epochs, strict=True)]
        return torch.tensor(keys, dtype=torch.int64)

    def _noise(self, rows: npt.NDArray[np.int64], epochs: Sequence[int]) -> Tensor:
        """Noise of unit variance for the histories of windows, `[batch, rx_ant, tx_ant, time, subcarrier]`."""
        noise = empty((len(rows), *self.view.shape(self.view.history)))
        for window, row, epoch in zip(noise, rows, epochs, strict=True):
            draws.fill_noise(window, 1.0, *self._name(row), epoch)
        return noise

    def _read(
        self, rows: npt.NDArray[np.int64], epochs: Sequence[int], snr: Tensor, noisy: bool = True
    ) -> PathWindows | TapWindows:
        """What is stored of windows, and their noise."""
        moving = None if self.mode == "materialised" else epochs
        noise = self._noise(rows, epochs) if noisy else torch.empty(len(rows), 0)
        if self._snapshots is None:
            return self._paths(rows, moving, noise, snr, self._impairment_key(rows, epochs))
        cir, speed = self._snapshots.fetch(self.store, self.sample_ids[rows], self._first(rows, moving))
        key = self._impairment_key(rows, epochs)
        return TapWindows(cir.coefficients, cir.delay, noise, snr, *self._labels(rows), speed, key)

    def _paths(
        self, rows: npt.NDArray[np.int64], moving: Sequence[int] | None, noise: Tensor, snr: Tensor, key: Tensor
    ) -> PathWindows:
        start = torch.from_numpy(self.starts(rows, moving))
        links = self.store.links(self.sample_ids[rows])
        keep = anchors_around(links.times, start, self.view.span)
        middle = (links.times - start[:, None] - self.view.span / 2).abs().argmin(1)
        line = torch.arange(len(rows))[:, None]
        paths = links.paths[line, keep].trim()
        return PathWindows(
            *(paths.transfer, paths.delay, paths.departure, paths.arrival, paths.doppler, paths.mask),
            anchor_times=links.times[line, keep] - start[:, None],
            rx_orientations=links.orientations[line, keep],
            noise=noise,
            snr_db=snr,
            sample_id=links.sample_ids,
            window=torch.from_numpy(self.window_ids[rows]),
            speed=links.velocities[line[:, 0], middle].norm(dim=-1),
            key=key,
        )

    def _clean(self, rows: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
        """Noiseless history and target and the speed of windows, for the materialised view."""
        windows = self._read(rows, [draws.FIXED] * len(rows), torch.zeros(len(rows)), noisy=False)
        with torch.no_grad():
            return *self._channels(windows), windows.speed

    def _channels(self, windows: PathWindows | TapWindows) -> tuple[Tensor, Tensor]:
        if isinstance(windows, TapWindows):
            return tap_channels(windows, self.view, self.carrier)
        return window_channels(windows, self.view, self.carrier, self.tx_orientation)

    def _key(self) -> dict[str, Any]:
        """Everything the content of a materialised view depends on."""
        return {
            "store": self.store.content_hash,
            "split": self.split,
            "seed": self.seed,
            "skipped": self.skipped,
            "view": self.view.to_dict(),
            **({"train_fraction": self._fraction} if self._fraction < 1 else {}),
        }


def collate(fetched: Fetched) -> Fetched:
    """The `collate_fn` of a `DataLoader` over `CSIWindows`: batches arrive whole."""
    return fetched


def _few(ids: npt.NDArray[np.int64], fraction: float, seed: int) -> npt.NDArray[np.int64]:
    """Rows of the samples that few-shot training keeps, ascending; a sample is one user on one trajectory."""
    count = max(1, round(fraction * len(ids)))
    order = np.argsort([draws.hashed(seed, int(i), draws.FEW) for i in ids], kind="stable")
    return np.sort(order[:count])


def _snr(snr_db: float | tuple[float, float] | Sequence[float]) -> tuple[tuple[float, float], tuple[float, ...]]:
    """A range (of a number: that number alone), and fixed levels if a list was given."""
    values = (snr_db,) if isinstance(snr_db, int | float) else tuple(snr_db)
    ranged = isinstance(snr_db, tuple)
    if not values or any(not isinstance(v, int | float) or math.isnan(v) or v == -math.inf for v in values):
        raise UsageError(f"snr_db must be numbers in dB, not {snr_db!r}.")
    if ranged and (len(values) != 2 or not values[0] <= values[1] < math.inf):
        raise UsageError(
            f"an SNR range is (low, high) in dB, finite and ascending, not {snr_db!r}; a list has fixed values."
        )
    return ((values[0], values[1]), ()) if ranged else ((0.0, 0.0), values)
