"""Channels of 3GPP TR 38.901, drawn with Sionna PHY: a sample depends on (seed, sample id) alone."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from chanlab.channels.arrays import PlanarArray
from chanlab.channels.cir import CIR
from chanlab.channels.sionna_phy import device_name, panel_array, seeded, tr38901
from chanlab.errors import UsageError

CDLModel = Literal["A", "B", "C", "D", "E"]
"""Profiles of TR 38.901, tables 7.7.1-1 to 7.7.1-5; D and E have a line of sight."""

Speed = float | tuple[float, float]
"""Speed [m/s], or (lowest, highest) of which it is drawn uniformly."""


class ThreeGPP(ABC):
    """What the 3GPP models have in common: how samples are drawn by their ids.

    Sample id i lies in block i // `block`. A block is drawn whole, by a generator seeded from (seed, the model's
    arguments, block number): what a sample is depends neither on its batch nor on order or process. CPU and CUDA draw
    other numbers of one distribution, and so does another size of block.

    The base station's ports are on the axis tx, the user's on the axis rx. Sionna draws the uplink (the user moves);
    by reciprocity the downlink is its transpose.

    Attributes:
        carrier: [Hz].
        bs_array: The base station's array.
        ut_array: The user's array.
        block: Samples drawn together. On a GPU the time of a block hardly depends on its size up to some hundred; 512
            users with 32 ports and 20 snapshots take about 3 GB while they are drawn.
    """

    def __init__(self, carrier: float, bs_array: PlanarArray, ut_array: PlanarArray, block: int) -> None:
        if carrier <= 0 or block < 1:
            raise UsageError(f"need a carrier > 0 and a block >= 1, not {carrier} Hz and {block}.")
        self.carrier = float(carrier)
        self.bs_array = bs_array
        self.ut_array = ut_array
        self.block = block
        self._models: dict[str, Any] = {}

    @property
    @abstractmethod
    def name(self) -> str:
        """What tells these channels from others under one seed."""

    @abstractmethod
    def _build(self, device: str) -> Any:
        """Sionna's model on a device."""

    def _draw(self, model: Any, num: int, num_steps: int, interval: float) -> tuple[Tensor, Tensor]:
        """Sionna's coefficients `[num, 1, rx_ant, 1, tx_ant, tap, time]` and delays `[num, 1, 1, tap]`, uplink."""
        a, tau = model(num, num_steps, 1 / interval)
        return a, tau

    def draw(self, num: int, seed: int, num_steps: int, interval: float, device: torch.device | str = "cpu") -> CIR:
        """Draw channels together from one seed.

        Args:
            num: Number of channels.
            seed: 0 to 2**63 - 1; it decides all of them on a kind of device, together with `num` and `num_steps`.
            num_steps: Number of snapshots.
            interval: Time between snapshots [s].
            device: Where to draw.

        Returns:
            Coefficients `[num, rx_ant, tx_ant, num_steps, tap]`, delays `[num, tap]`.

        Raises:
            UsageError: If a number is out of range or Sionna lacks the device.
        """
        if num < 1 or num_steps < 1 or interval <= 0 or not 0 <= seed < 2**63:
            raise UsageError(
                f"need num >= 1, num_steps >= 1, interval > 0 and 0 <= seed < 2**63, not {num}, {num_steps}, "
                f"{interval} and {seed}."
            )
        where = device_name(device)
        if where not in self._models:
            self._models[where] = self._build(where)
        with seeded(seed, where), torch.no_grad():
            a, tau = self._draw(self._models[where], num, num_steps, interval)
        return CIR(a[:, 0, :, 0].permute(0, 2, 1, 4, 3).contiguous(), tau[:, 0, 0].contiguous(), self.carrier)

    def draw_block(
        self, number: int, seed: int, num_steps: int, interval: float, device: torch.device | str = "cpu"
    ) -> CIR:
        """All channels of a block, ids number · `block` to (number + 1) · `block` - 1; arguments as for `draw`."""
        key = repr((self.name, self.block, seed, number)).encode()
        hashed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
        return self.draw(self.block, hashed, num_steps, interval, device)

    def draw_samples(
        self,
        sample_ids: Sequence[int],
        seed: int,
        num_steps: int,
        interval: float,
        device: torch.device | str = "cpu",
    ) -> CIR:
        """The channels with these sample ids, in their order; arguments as for `draw`.

        Each block that holds one of them is drawn whole: ask for neighbours together.
        """
        ids = torch.as_tensor(sample_ids, dtype=torch.int64)
        if ids.ndim != 1 or len(ids) == 0 or int(ids.min()) < 0:
            raise UsageError("sample ids are a non-empty list of integers >= 0.")
        numbers, which = torch.unique(ids // self.block, return_inverse=True)
        parts = []
        for i, number in enumerate(numbers.tolist()):
            rows = (ids[which == i] % self.block).to(device)
            parts.append(self.draw_block(number, seed, num_steps, interval, device)[rows])
        back = which.argsort(stable=True).argsort().to(device)
        a, tau = torch.cat([p.coefficients for p in parts]), torch.cat([p.delay for p in parts])
        return CIR(a[back], tau[back], self.carrier)


class CDL(ThreeGPP):
    """Clustered delay lines (TR 38.901, section 7.7.1): fixed clusters, random ray couplings, phases and velocities.

    Args:
        model: Profile.
        delay_spread: RMS delay spread [s].
        speed: Of the user, in a direction that is random per sample [m/s]; azimuth and zenith angle are uniform, as
            Sionna draws them.
        carrier: [Hz].
        bs_array: The base station's array, boresight along x at orientation 0.
        ut_array: The user's array.
        bs_orientation: (α, β, γ) [rad].
        ut_orientation: (α, β, γ) [rad].
        block: See `ThreeGPP`.

    Raises:
        UsageError: If a name is unknown or a number out of range.
    """

    def __init__(
        self,
        model: CDLModel,
        delay_spread: float,
        speed: Speed,
        carrier: float,
        bs_array: PlanarArray,
        ut_array: PlanarArray,
        bs_orientation: tuple[float, float, float] = (0.0, 0.0, 0.0),
        ut_orientation: tuple[float, float, float] = (torch.pi, 0.0, 0.0),
        block: int = 512,
    ) -> None:
        super().__init__(carrier, bs_array, ut_array, block)
        if model not in get_args(CDLModel):
            raise UsageError(f"unknown CDL model {model!r}; models are {', '.join(get_args(CDLModel))}.")
        if delay_spread <= 0:
            raise UsageError(f"delay_spread must be > 0 s, not {delay_spread}.")
        self.model = model
        self.delay_spread = float(delay_spread)
        self.speed = speed_range(speed)
        self.bs_orientation = bs_orientation
        self.ut_orientation = ut_orientation

    @property
    def name(self) -> str:
        """Model, delay spread and speeds."""
        return f"CDL-{self.model} {self.delay_spread!r} {self.speed!r}"

    def _build(self, device: str) -> Any:
        low, high = self.speed
        return tr38901().CDL(
            model=self.model,
            delay_spread=self.delay_spread,
            carrier_frequency=self.carrier,
            ut_array=panel_array(self.ut_array, self.carrier, device),
            bs_array=panel_array(self.bs_array, self.carrier, device),
            direction="uplink",
            ut_orientation=torch.tensor(self.ut_orientation),
            bs_orientation=torch.tensor(self.bs_orientation),
            # Both: with `max_speed` left at its default, 0, Sionna draws speeds between 0 and `min_speed`.
            min_speed=low,
            max_speed=high,
            precision="single",
            device=device,
        )


def speed_range(speed: Speed) -> tuple[float, float]:
    """(lowest, highest) [m/s] of a speed or a range.

    Raises:
        UsageError: If it is negative or descending.
    """
    low, high = (speed, speed) if isinstance(speed, int | float) else speed
    if not 0 <= low <= high:
        raise UsageError(f"a speed is a number >= 0 or an ascending range [m/s], not {speed!r}.")
    return float(low), float(high)
