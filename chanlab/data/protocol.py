"""The protocol of CSI-4CAST (arXiv 2510.12996, github.com/AI4OPT/CSI-4CAST), so that published figures compare.

A cell is a CDL model of 3GPP TR 38.901 with a delay spread and a speed. A sample is named by its cell and a number
within the cell, packed into one id; its channel, SNR and noise depend on (seed, split, id) alone.

The published data were drawn with a Sionna before version 2, whose uplink has Doppler shifts from the angles at the
base station: `csi4cast` does the same, `csi4cast_sionna2` doesn't.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from chanlab.data import counter, impairments
from chanlab.errors import UsageError

Duplex = Literal["tdd", "fdd", "both"]
"""Targets on the history's band, on the other one, or on both: first the history's, then the other's subcarriers."""

Disturbance = Literal["gaussian", "phase", "drop", "burst"]
"""Kinds of disturbance of a history: Gaussian noise, or one of the robustness sets."""

_STRIDE = 2**32


class Cell(NamedTuple):
    """Channels of one kind.

    Attributes:
        model: CDL model, `A` to `E`.
        delay_spread: RMS delay spread [s].
        speed: Of the user, in a random direction [m/s].
    """

    model: str
    delay_spread: float
    speed: float

    def __str__(self) -> str:
        return f"{self.model}/{self.delay_spread * 1e9:g} ns/{self.speed:g} m/s"


class Condition(NamedTuple):
    """One disturbance of the history at one strength.

    Attributes:
        kind: `gaussian`: noise at an SNR; `phase`, `drop` and `burst`: see `chanlab.data.impairments`, without noise.
        level: SNR [dB], deviation [rad], probability, degree.
        snr_db: Nominal SNR of a level that is known by one [dB]; None for `drop`.
        offset: What is subtracted from the history before its power is taken for the SNR; see `Protocol.offset`.
    """

    kind: Disturbance
    level: float
    snr_db: float | None
    offset: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} {self.level:g}" if self.snr_db is None else f"{self.kind} {self.snr_db:g} dB"

    def disturb(self, history: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """The disturbed history, and the variance of its Gaussian noise (0 where that is not what disturbs it).

        Args:
            history: Noiseless, of unit mean energy, complex64 `[batch, rx_ant, tx_ant, time, subcarrier]`.
            key: Int64 `[batch]`.
        """
        if self.kind == "gaussian":
            snr = torch.full((len(history),), self.level, device=history.device)
            return add_noise(history, snr, key, self.offset)
        function = {
            "phase": impairments.phase_noise,
            "drop": impairments.drop_packets,
            "burst": impairments.burst_noise,
        }[self.kind]
        return function(history, self.level, key), torch.zeros(len(history), device=history.device)


@dataclass(frozen=True)
class Protocol:
    """Numerology and cells.

    Attributes:
        name: Short name.
        carrier: [Hz].
        subcarrier_spacing: [Hz].
        num_subcarriers: Of a band.
        gap: Subcarriers between the history's band and the other one above it.
        cyclic_prefix: Samples of the prefix of an OFDM symbol.
        symbols_per_snapshot: OFDM symbols from one snapshot to the next.
        history: Snapshots of the history.
        horizons: Steps asked for.
        rows: Of the base station's cross-polarised 38.901 array (on the axis tx, by reciprocity).
        columns: Of that array.
        snr_db: SNR in training: uniform between the two [dB].
        cells: Cells by the name of the set: `regular` (the training's), `generalization`.
        conditions: Conditions under which a set is tested, by its name; `robustness` is on the cells of `regular`.
        doppler: End whose angles give the Doppler shifts: `user`, who moves, or `base station`, as in data drawn with
            Sionna before version 2 (`chanlab.channels.sionna1`).
        offset: Mean of the training set's channels, which the protocol's authors subtract before they add noise. It is
            no zero because the line of sight of CDL-D always starts with phase 0. So their noise has 0.86 of the power
            that their SNR says in cells of CDL-D at 1 m/s (0.97 at 10 m/s, 1 elsewhere). chanlab's noise has the power
            that the SNR says, in all cells; conditions with this offset make it theirs.
    """

    name: str
    carrier: float
    subcarrier_spacing: float
    num_subcarriers: int
    gap: int
    cyclic_prefix: int
    symbols_per_snapshot: int
    history: int
    horizons: int
    rows: int
    columns: int
    snr_db: tuple[float, float]
    cells: dict[str, tuple[Cell, ...]] = field(hash=False)
    conditions: dict[str, tuple[Condition, ...]] = field(hash=False)
    doppler: Literal["user", "base station"] = "user"
    offset: float = 0.0

    @property
    def fft_size(self) -> int:
        """Subcarriers of both bands and the gap."""
        return 2 * self.num_subcarriers + self.gap

    @property
    def band_distance(self) -> int:
        """Distance of the bands in subcarriers."""
        return self.num_subcarriers + self.gap

    @property
    def interval(self) -> float:
        """Time between snapshots [s]."""
        symbol = (self.fft_size + self.cyclic_prefix) / (self.fft_size * self.subcarrier_spacing)
        return self.symbols_per_snapshot * symbol

    @property
    def ports(self) -> int:
        """Ports of the base station."""
        return 2 * self.rows * self.columns

    def set_cells(self, name: str) -> tuple[Cell, ...]:
        """Cells of a set.

        Raises:
            UsageError: There is no such set.
        """
        if name not in self.conditions:
            raise UsageError(f"unknown set of cells {name!r} in {self.name}; there are {', '.join(self.conditions)}.")
        return self.cells["regular" if name == "robustness" else name]

    def cell_numbers(self, cells: tuple[Cell, ...]) -> list[int]:
        """Numbers of cells among all of the protocol, which sample ids hold."""
        return [self._numbers[cell] for cell in cells]

    def cell(self, number: int) -> Cell:
        """The cell with this number."""
        return self.all_cells[number]

    @property
    def all_cells(self) -> tuple[Cell, ...]:
        """Cells in the order of their numbers; made anew each time: ask once for many."""
        return tuple(self._numbers)

    @property
    def _numbers(self) -> dict[Cell, int]:
        # The regular cells come first, whatever other sets hold.
        return {cell: i for i, cell in enumerate(dict.fromkeys(c for cells in self.cells.values() for c in cells))}


def sample_ids(cell_number: int, number: Tensor) -> Tensor:
    """Ids of samples of a cell: the cell's number, then 32 bits of the sample's number within it."""
    return cell_number * _STRIDE + number


def cell_number(sample_id: Tensor) -> Tensor:
    """Numbers of the cells that samples belong to."""
    return sample_id // _STRIDE


def number_in_cell(sample_id: Tensor) -> Tensor:
    """Numbers of samples within their cells."""
    return sample_id % _STRIDE


def add_noise(history: Tensor, snr_db: Tensor, key: Tensor, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Add Gaussian noise to each sample at an SNR relative to its own history's mean power.

    Args:
        history: Complex64 `[batch, rx_ant, tx_ant, time, subcarrier]`.
        snr_db: `[batch]` [dB]; infinity is no noise.
        key: Int64 `[batch]`.
        offset: Subtracted from the history before its power is taken.

    Returns:
        The noisy history, and the noise variance `[batch]`.
    """
    centred = history - offset if offset else history
    power = 2 * torch.view_as_real(centred).square().mean((1, 2, 3, 4, 5))
    variance = power * 10 ** (-snr_db / 10)
    noise = counter.complex_normal(key, history.shape[1:])
    return torch.addcmul(history, variance.sqrt().to(history.dtype)[:, None, None, None, None], noise), variance


def _cells(models: str, delay_spreads: tuple[float, ...], speeds: tuple[float, ...]) -> tuple[Cell, ...]:
    return tuple(Cell(*c) for c in product(models, (d / 1e9 for d in delay_spreads), speeds))


def _at_snr(kind: Disturbance, levels: dict[float, float]) -> tuple[Condition, ...]:
    return tuple(Condition(kind, level, snr) for snr, level in levels.items())


_GAUSSIAN = _at_snr("gaussian", {float(snr): float(snr) for snr in range(0, 30, 5)})

CSI4CAST = Protocol(
    name="csi4cast",
    carrier=2.4e9,
    subcarrier_spacing=30e3,
    num_subcarriers=300,
    gap=150,
    cyclic_prefix=6,
    symbols_per_snapshot=70,
    history=16,
    horizons=4,
    rows=4,
    columns=4,
    snr_db=(0.0, 25.0),
    cells={
        "regular": _cells("ACD", (30, 100, 300), (1.0, 10.0, 30.0)),
        "generalization": _cells(
            "ABCDE", (30, 50, 100, 200, 300, 400), tuple(map(float, sorted([1, 10, *range(3, 46, 3)])))
        ),
    },
    conditions={
        "regular": _GAUSSIAN,
        "generalization": _GAUSSIAN,
        "robustness": (
            *_at_snr("phase", {10.0: 0.32, 15.0: 0.18, 20.0: 0.10, 25.0: 0.056}),
            *(Condition("drop", percent / 100, None) for percent in range(1, 11)),
            *_at_snr("burst", {10.0: 0.29, 15.0: 0.16, 20.0: 0.09, 25.0: 0.054}),
        ),
    },
    doppler="base station",
    offset=0.10,
)
"""Test conditions: SNR 0, 5, ..., 25 dB; robustness: one kind of disturbance at a time, without Gaussian noise."""

CSI4CAST_SIONNA2 = replace(CSI4CAST, name="csi4cast_sionna2", doppler="user")
"""The same cells with the Doppler shifts of TR 38.901: harder, and not to be compared with published figures."""

PROTOCOLS = {p.name: p for p in (CSI4CAST, CSI4CAST_SIONNA2)}


def find_protocol(name: str) -> Protocol:
    """The protocol of this name.

    Raises:
        UsageError: There is none.
    """
    if name not in PROTOCOLS:
        raise UsageError(f"unknown protocol {name!r}; there is {', '.join(PROTOCOLS)}.")
    return PROTOCOLS[name]
