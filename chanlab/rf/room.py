"""How much room lists of tiles get: learnt from the counts that earlier calls of the CUDA kernels send back."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chanlab.errors import ChanlabError


@dataclass(slots=True)
class _Demand:
    """What calls of a kind needed."""

    rate: float | None = None
    """Pairs for each item that there is room for."""
    idle: int = 0
    """Calls in a row that needed less than a quarter of it."""
    largest: float = 0.0
    """The most that one of these needed."""


class Room:
    """How many pairs of tile and Gaussian CUDA calls get room for: a quarter more than earlier calls needed.

    A call's count comes back without waiting for it: the device writes it into a slot of pinned memory, which is looked
    at when a later call is made. What was learnt is kept per item (Gaussian and receiver), for scenes grow while they
    are trained; it shrinks only after many calls that needed far less, for large and small scenes may take turns.
    """

    SLOTS = 64
    EMPTY = -1
    PATIENCE = 100
    """Calls in a row that must need less than a quarter of the room before it shrinks."""

    def __init__(self) -> None:
        self._demands: dict[Hashable, _Demand] = {}
        self._given: dict[int, tuple[_Demand, int, int, int | None]] = {}
        self._pending: dict[int, tuple[_Demand, int, int, int | None]] = {}
        self._free: list[int] = []
        self._calls = 0
        self._slots: Any = None
        self._pinned: Tensor | None = None
        self._lock = threading.Lock()

    def before(
        self, kind: Hashable, items: int, most: int, asked: int | None = None, device: int | None = None
    ) -> tuple[int, int]:
        """Room for a call, and the slot for its count, numbered anew for every call; -1: none. `after` must follow.

        Args:
            kind: Calls of one kind learn from each other.
            items: Gaussians times receivers.
            most: Pairs that there can be.
            asked: What the caller gives room for.
            device: Number of the CUDA device.
        """
        guess = max(1 << 16, 24 * items)
        if torch.compiler.is_compiling():
            return min(most, asked or guess), -1
        capturing = torch.cuda.is_current_stream_capturing()
        with self._lock:
            if self._pending and not capturing:
                self._collect()
            demand = self._demands.get(kind)
            if demand is None:
                demand = self._demands[kind] = _Demand()
            learnt = guess if demand.rate is None else max(1 << 12, math.ceil(demand.rate * items))
            room = min(most, asked or learnt)
            if capturing or not items:
                return room, -1
            if self._pinned is None:
                self._pinned = torch.full((self.SLOTS,), self.EMPTY, dtype=torch.int64).pin_memory()
                self._slots = (ctypes.c_int64 * self.SLOTS).from_address(self._pinned.data_ptr())
                self._free = list(range(self.SLOTS))
            if not self._free:
                return room, -1
            self._calls += 1
            slot = self._free.pop() + self.SLOTS * self._calls
            self._given[slot] = (demand, items, room, device)
            return room, slot

    def address(self, slot: int) -> int:
        """Of a slot, which the device will fill from now on; 0: there is none, or not any more.

        A traced graph holds its slot's number as a constant, and may run many times, or after the slot was taken back.
        """
        if slot < 0 or self._pinned is None:
            return 0
        with self._lock:
            given = self._given.pop(slot, None)
            if given is None:
                return 0
            self._pending[slot % self.SLOTS] = given
        return self._pinned.data_ptr() + 8 * (slot % self.SLOTS)

    def after(self, slot: int) -> None:
        """Take the slot of a call back if nothing will fill it: it failed before the launch, or was traced only.

        A launch that fails keeps its slot: what it has queued already may yet write there.
        """
        if slot >= 0:
            with self._lock:
                if self._given.pop(slot, None):
                    self._free.append(slot % self.SLOTS)

    def check(self) -> None:
        """Look at all counts, waiting for them.

        Raises:
            ChanlabError: If a call had too little room.
        """
        with self._lock:
            devices = {device for *_, device in self._pending.values()}
        for device in devices:
            torch.cuda.synchronize(device)
        with self._lock:
            self._collect()

    def _collect(self) -> None:
        short = None
        for slot in [slot for slot in self._pending if self._slots[slot] != self.EMPTY]:
            demand, items, room, _ = self._pending.pop(slot)
            need = self._slots[slot]
            self._slots[slot] = self.EMPTY
            self._free.append(slot)
            self._learn(demand, 1.25 * need / items)
            if need > room:
                short = (need, room)
        if short:
            raise ChanlabError(
                f"rasterize_sphere: an earlier call needed room for {short[0]} pairs of tile and Gaussian and had "
                f"{short[1]}; its image is NaN. Repeat it (room is larger now), or pass capacity={short[0]}."
            )

    def _learn(self, demand: _Demand, wanted: float) -> None:
        held = demand.rate or 0.0
        if 4 * wanted >= held:
            demand.rate = max(wanted, held)
            demand.idle, demand.largest = 0, 0.0
            return
        demand.idle, demand.largest = demand.idle + 1, max(demand.largest, wanted)
        if demand.idle >= self.PATIENCE:
            demand.rate = demand.largest
            demand.idle, demand.largest = 0, 0.0


ROOM = Room()
"""Of this process."""
