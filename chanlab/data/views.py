"""Views: which arrays, subcarriers and times a learner sees of the stored paths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from chanlab.channels import Paths, PlanarArray, cfr_along, subcarrier_frequencies
from chanlab.errors import UsageError


@dataclass(frozen=True)
class CSIView:
    """A window of channel state information: the history that is known and the steps that are asked for.

    Attributes:
        num_subcarriers: Number of subcarriers of a band.
        subcarrier_spacing: Their spacing [Hz].
        tx_array: Transmit array.
        rx_array: Receive array.
        history: Snapshots of the history.
        horizons: Steps asked for, counted from the last snapshot of the history in units of `interval`; fractions are
            allowed. A number H stands for 1, 2, ..., H.
        interval: Time between snapshots [s].
        windows_per_sample: Windows drawn from each trajectory.
        band: `tdd`: history and target on the same band around the carrier; `fdd`: the target on another band.
        fdd_offset: For `fdd`: distance of the target's band from the history's, in subcarriers (negative: below).
    """

    num_subcarriers: int
    subcarrier_spacing: float
    tx_array: PlanarArray = field(default_factory=PlanarArray)
    rx_array: PlanarArray = field(default_factory=PlanarArray)
    history: int = 16
    horizons: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0)
    interval: float = 2.5e-3
    windows_per_sample: int = 4
    band: Literal["tdd", "fdd"] = "tdd"
    fdd_offset: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_subcarriers", "history", "windows_per_sample"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"{name} must be a whole number >= 1, not {value!r}.")
        for name in ("subcarrier_spacing", "interval"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise UsageError(f"{name} must be a number > 0, not {value!r}.")
        steps = self.horizons
        if not steps or any(not 0 <= h < math.inf for h in steps) or any(a >= b for a, b in pairwise(steps)):
            raise UsageError(f"horizons must be ascending steps >= 0 after the history, not {list(steps)}.")
        if self.band not in ("tdd", "fdd"):
            raise UsageError(f"band must be 'tdd' or 'fdd', not {self.band!r}.")
        if (self.band == "fdd") != (self.fdd_offset is not None):
            raise UsageError(
                "band 'fdd' needs fdd_offset, the distance of the target's band in subcarriers; 'tdd' takes none "
                f"(band {self.band!r}, fdd_offset {self.fdd_offset})."
            )

    @classmethod
    def parse(cls, section: Mapping[str, Any], **overrides: Any) -> CSIView:
        """Read the `view` section of a recipe.

        Args:
            section: The mapping; arrays are mappings of `PlanarArray`'s arguments.
            **overrides: Values that replace the section's, unless they are None.

        Raises:
            UsageError: If a key is unknown (the message lists the known ones), missing, or a value is wrong.
        """
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(map(str, section)) - set(known))
        if unknown:
            raise UsageError(f"view: unknown key {', '.join(unknown)}; known keys are {', '.join(known)}.")
        values = {**section, **{k: v for k, v in overrides.items() if v is not None}}
        if values.get("band") == "tdd" and overrides.get("fdd_offset") is None:
            values.pop("fdd_offset", None)
        missing = [k for k in ("num_subcarriers", "subcarrier_spacing") if values.get(k) is None]
        if missing:
            raise UsageError(f"{' and '.join(missing)} missing: give it, or put it into the recipe's view section.")
        for name in ("tx_array", "rx_array"):
            if name in values:
                values[name] = _array(values[name], name)
        if "horizons" in values:
            values["horizons"] = _horizons(values["horizons"])
        return cls(**values)

    @property
    def horizon(self) -> int:
        """Number of steps asked for: the length of the target's axis of time."""
        return len(self.horizons)

    @property
    def span(self) -> float:
        """Time from the first snapshot of the history to the last step asked for, or to the history's end [s]."""
        return (self.history - 1 + self.horizons[-1]) * self.interval

    @property
    def band_offset(self) -> float:
        """Distance of the target's band from the history's [Hz]."""
        return (self.fdd_offset or 0) * self.subcarrier_spacing

    def times(self) -> Tensor:
        """Times of history and target after the window's start [s], float64 `[history + horizon]`."""
        steps = [*range(self.history), *(self.history - 1 + h for h in self.horizons)]
        return torch.tensor(steps, dtype=torch.float64) * self.interval

    def frequencies(self) -> Tensor:
        """Subcarriers of a band relative to its centre [Hz], float64 `[subcarrier]`."""
        return subcarrier_frequencies(self.num_subcarriers, self.subcarrier_spacing)

    def shape(self, steps: int) -> tuple[int, int, int, int]:
        """Shape of a channel, `[rx_ant, tx_ant, time, subcarrier]`, with `steps` times."""
        return self.rx_array.num_ports, self.tx_array.num_ports, steps, self.num_subcarriers

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a file's attributes and hash."""
        return asdict(self)


class PathWindows(NamedTuple):
    """A batch of windows before their channels are computed: the anchors around each window.

    Attributes:
        transfer: As in `Paths`, `[batch, anchor, 2, 2, path]`; likewise the next five.
        delay: `[batch, anchor, path]` [s].
        departure: `[batch, anchor, 3, path]`.
        arrival: `[batch, anchor, 3, path]`.
        doppler: `[batch, anchor, path]` [Hz].
        mask: `[batch, anchor, path]`.
        anchor_times: Times of the anchors after the window's start [s], float64 `[batch, anchor]`.
        rx_orientations: `[batch, anchor, 3]` [rad].
        noise: Complex noise of unit variance for the history, `[batch, rx_ant, tx_ant, time, subcarrier]`.
        snr_db: `[batch]` [dB].
        sample_id: int64 `[batch]`.
        window: int64 `[batch]`.
        speed: `[batch]` [m/s].
        key: What random impairments depend on, int64 `[batch]`.
    """

    transfer: Tensor
    delay: Tensor
    departure: Tensor
    arrival: Tensor
    doppler: Tensor
    mask: Tensor
    anchor_times: Tensor
    rx_orientations: Tensor
    noise: Tensor
    snr_db: Tensor
    sample_id: Tensor
    window: Tensor
    speed: Tensor
    key: Tensor


def window_channels(
    windows: PathWindows, view: CSIView, carrier: float, tx_orientation: Tensor
) -> tuple[Tensor, Tensor]:
    """Noiseless channels of windows, computed on the device that holds them.

    Args:
        windows: The anchors around the windows.
        view: What is seen of them.
        carrier: Carrier frequency of the paths [Hz].
        tx_orientation: `[3]` [rad].

    Returns:
        History and target, complex64 `[batch, rx_ant, tx_ant, time, subcarrier]`.

    Raises:
        UsageError: If the paths were cast to a precision that can't hold their phases.
    """
    delay = windows.delay
    if delay.dtype not in (torch.float32, torch.float64):
        raise UsageError(
            f"paths arrived as {delay.dtype}, too coarse for their phases: use mixed precision (16-mixed, bf16-mixed) "
            "or mode='materialised'."
        )
    lead = delay.shape[:-1]
    paths = Paths(
        transfer=windows.transfer,
        delay=delay,
        departure=windows.departure,
        arrival=windows.arrival,
        doppler=windows.doppler,
        interactions=torch.zeros(*lead, 0, delay.shape[-1], dtype=torch.int8, device=delay.device),
        vertices=delay.new_zeros(()).expand(*lead, 2, 3, delay.shape[-1]),
        mask=windows.mask,
        carrier=carrier,
    )

    def channel(times: Tensor, offset: float) -> Tensor:
        return cfr_along(
            paths,
            windows.anchor_times,
            times.to(windows.anchor_times),
            view.tx_array,
            view.rx_array,
            view.frequencies().to(delay.device),
            tx_orientation.to(delay),
            windows.rx_orientations,
            band_offset=offset,
        )

    times = view.times()
    if view.band == "tdd":
        whole = channel(times, 0.0)
        return whole[..., : view.history, :], whole[..., view.history :, :]
    return channel(times[: view.history], 0.0), channel(times[view.history :], view.band_offset)


def _array(value: Any, name: str) -> PlanarArray:
    if isinstance(value, PlanarArray):
        return value
    known = [f.name for f in fields(PlanarArray)]
    if not isinstance(value, Mapping) or set(value) - set(known):
        raise UsageError(f"view.{name} must be a mapping of {', '.join(known)}, not {value!r}.")
    return PlanarArray(**value)


def _horizons(value: Any) -> tuple[float, ...]:
    if isinstance(value, int) and not isinstance(value, bool):
        return tuple(float(h) for h in range(1, value + 1))
    if isinstance(value, Sequence) and all(isinstance(h, int | float) for h in value):
        return tuple(float(h) for h in value)
    raise UsageError(f"horizons must be a number of steps or a list of them, not {value!r}.")
