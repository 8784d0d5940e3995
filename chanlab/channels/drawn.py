"""Sources of impulse responses: snapshots of 3GPP models, one or several in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, product
from typing import Literal

import torch
from torch import Tensor

from chanlab.channels.arrays import PlanarArray
from chanlab.channels.cir import CIR
from chanlab.channels.delay_lines import CDL, CDLModel
from chanlab.channels.sionna1 import UplinkOfSionna1
from chanlab.channels.source import CIRLinks, Motion
from chanlab.channels.threegpp import Speed, ThreeGPP
from chanlab.errors import UsageError


class DrawnChannels:
    """Channels of 3GPP models as a source for a store: a user is a sample with a few snapshots.

    Blocks of samples go to the models in turn: sample i lies in block b = i // block; block b is block b // M of model
    b mod M, of M models. What is drawn depends on the kind of device (CPU or CUDA), which the store's versions name.

    Args:
        models: The models; carrier, arrays and block are the same for all.
        num_steps: Snapshots of each sample.
        interval: Time between them [s].
        device: Where channels are drawn, `cpu` or `cuda`.

    Raises:
        UsageError: If there is no model, or they don't fit together.
    """

    payload = "cir"

    def __init__(self, models: list[ThreeGPP], num_steps: int, interval: float, device: str = "cpu") -> None:
        if not models or num_steps < 1 or interval <= 0:
            raise UsageError(f"need a model, num_steps >= 1 and interval > 0, not {num_steps} and {interval} s.")
        first = models[0]
        for name in ("carrier", "block", "bs_array", "ut_array"):
            if any(getattr(model, name) != getattr(first, name) for model in models):
                raise UsageError(f"the models of one store have the same {name}; here they differ.")
        self.models = models
        self.num_steps = num_steps
        self.interval = float(interval)
        self.device = device
        self.carrier = first.carrier
        self.group = first.block
        self.together = max(model.together for model in models)

    def motion(self, ids: Sequence[int], seed: int) -> Motion:
        """Where the users with these ids are at the first snapshot, `[user, 1, ...]`."""
        parts = []
        for model, block, rows in self._blocks(ids):
            drawn = self.models[model].motion(self.group, self.models[model].block_seed(block, seed), self.device)
            parts.append([x[rows].cpu() for x in (drawn.times, drawn.positions, drawn.velocities, drawn.orientations)])
        return Motion(*(torch.cat(x) for x in zip(*parts, strict=True)))

    def links(self, ids: Sequence[int], seed: int) -> CIRLinks:
        """Impulse responses of the users with these ids."""
        cirs, models = [], []
        for model, block, rows in self._blocks(ids):
            drawn = self.models[model].draw_block(block, seed, self.num_steps, self.interval, self.device)
            cirs.append(drawn[rows.to(drawn.delay.device)].to("cpu"))
            models.append(torch.full((len(rows),), model, dtype=torch.int16))
        motion = self.motion(ids, seed)
        place, orientation = self.models[0].base_station()
        return CIRLinks(
            cir=CIR.cat(cirs),
            snapshots=(torch.arange(self.num_steps, dtype=torch.float64) * self.interval).repeat(len(ids), 1),
            model=torch.cat(models),
            times=motion.times,
            positions=motion.positions,
            velocities=motion.velocities,
            orientations=motion.orientations,
            tx_position=place,
            tx_orientation=orientation,
            sample_ids=torch.as_tensor(ids, dtype=torch.int64),
        )

    def versions(self) -> dict[str, str]:
        """The kind of device, and PyTorch, whose random numbers they are."""
        return {"drawn on": self.device.partition(":")[0], "torch": torch.__version__.partition("+")[0]}

    def _blocks(self, ids: Sequence[int]) -> Iterator[tuple[int, int, Tensor]]:
        """Runs of ids of one block, in order: model, number of the block within the model, rows of the block."""
        for number, run in groupby(ids, key=lambda i: i // self.group):
            rows = torch.tensor([i % self.group for i in run])
            yield number % len(self.models), number // len(self.models), rows


class CDLGrid(DrawnChannels):
    """Every combination of CDL profiles, delay spreads and speeds, in turn (profile slowest, speed fastest).

    Args:
        models: Profiles.
        delay_spreads: RMS delay spreads [s].
        speeds: Speeds of users [m/s], each a number or (lowest, highest).
        carrier: [Hz].
        bs_array: The base station's array.
        ut_array: The user's array.
        num_steps: Snapshots of each sample.
        interval: Time between them [s].
        block: Samples drawn together, see `ThreeGPP`.
        device: See `DrawnChannels`.
        doppler: End whose angles give the Doppler shifts: `user`, who moves, or `base station`, as Sionna had it in the
            uplink before version 2 (`UplinkOfSionna1`).

    Raises:
        UsageError: If a value doesn't fit.
    """

    def __init__(
        self,
        models: list[CDLModel],
        delay_spreads: list[float],
        speeds: list[Speed],
        carrier: float,
        bs_array: PlanarArray,
        ut_array: PlanarArray,
        num_steps: int,
        interval: float,
        block: int = 64,
        device: str = "cpu",
        doppler: Literal["user", "base station"] = "user",
    ) -> None:
        kind = CDL if doppler == "user" else UplinkOfSionna1
        cells: list[ThreeGPP] = [
            kind(model, spread, speed, carrier, bs_array, ut_array, block=block)
            for model, spread, speed in product(models, delay_spreads, speeds)
        ]
        super().__init__(cells, num_steps, interval, device)
