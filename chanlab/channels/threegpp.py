"""Channels of 3GPP TR 38.901, drawn with Sionna PHY: a sample depends on (seed, sample id) alone."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from chanlab.channels.arrays import PlanarArray
from chanlab.channels.cir import CIR
from chanlab.channels.sionna_phy import device_name, seeded
from chanlab.channels.source import Motion
from chanlab.errors import UsageError

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

    @property
    def together(self) -> int:
        """Consecutive samples, from a multiple of it on, that depend on one another: a split takes all or none."""
        return 1

    @property
    @abstractmethod
    def name(self) -> str:
        """What tells these channels from others under one seed."""

    @abstractmethod
    def _users(self, num: int, device: str) -> tuple[Motion, Any]:
        """Draw where users are and how they move, and whatever else `_channels` takes of them."""

    @abstractmethod
    def _channels(
        self, users: tuple[Motion, Any], num_steps: int, interval: float, device: str
    ) -> tuple[Tensor, Tensor]:
        """Draw Sionna's uplink: `[batch, 1, rx_ant, user, tx_ant, tap, time]`, delays `[batch, 1, user, tap]`."""

    def draw(self, num: int, seed: int, num_steps: int, interval: float, device: torch.device | str = "cpu") -> CIR:
        """Draw channels together from one seed.

        Args:
            num: Number of channels.
            seed: 0 to 2**63 - 1; it decides all of them on a kind of device, together with `num`.
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
        with seeded(seed, where), torch.no_grad():
            a, tau = self._channels(self._users(num, where), num_steps, interval, where)
        a = a[:, 0].permute(0, 2, 3, 1, 5, 4).flatten(0, 1)
        return CIR(a.contiguous(), tau[:, 0].flatten(0, 1).contiguous(), self.carrier)

    def motion(self, num: int, seed: int, device: torch.device | str = "cpu") -> Motion:
        """Where the users of `draw` with the same `num` and `seed` are and how they move, at the first snapshot.

        Returns:
            `[num, 1, ...]`; positions are NaN in models without places.
        """
        where = device_name(device)
        with seeded(seed, where), torch.no_grad():
            return self._users(num, where)[0]

    def base_station(self) -> tuple[Tensor, Tensor]:
        """Position [m] and orientation (α, β, γ) [rad] of the base station, each `[3]`; 0 in models without places."""
        return torch.zeros(3), torch.zeros(3)

    def block_seed(self, number: int, seed: int) -> int:
        """The seed from which block `number` is drawn."""
        key = repr((self.name, self.block, seed, number)).encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1

    def draw_block(
        self, number: int, seed: int, num_steps: int, interval: float, device: torch.device | str = "cpu"
    ) -> CIR:
        """All channels of a block, ids number · `block` to (number + 1) · `block` - 1; arguments as for `draw`."""
        return self.draw(self.block, self.block_seed(number, seed), num_steps, interval, device)

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
        return CIR.cat(parts)[back]


def speed_range(speed: Speed) -> tuple[float, float]:
    """(lowest, highest) [m/s] of a speed or a range.

    Raises:
        UsageError: If it is negative or descending.
    """
    low, high = (speed, speed) if isinstance(speed, int | float) else speed
    if not 0 <= low <= high:
        raise UsageError(f"a speed is a number >= 0 or an ascending range [m/s], not {speed!r}.")
    return float(low), float(high)
