"""The order in which windows are read: seeded, spread over processes, and resumable within an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler

from chanlab.data.draws import hashed
from chanlab.data.windows import CSIBatch, CSIWindows, Fetched


class WindowSampler(DistributedSampler[CSIBatch]):
    """Yields (epoch, index), so that workers know the epoch without being told.

    Lightning leaves a `DistributedSampler` as it is. Its count of epochs is asked through `clock`: what it passes to
    `set_epoch` is one too high after a run was resumed from the end of an epoch.

    Args:
        windows: The data.
        shuffle: In an order that depends on (seed, epoch) alone.
        seed: Of the order.
        rank: This process.
        world_size: Number of processes.
        even: Repeat a few windows so that all processes get as many (training needs it, in evaluation it would count
            them twice).
        clock: Tells the epoch when an iteration begins; None: what `set_epoch` said.
        seen: An epoch that was interrupted, and how many windows of it this process had seen by then.
    """

    def __init__(
        self,
        windows: CSIWindows,
        shuffle: bool,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        even: bool = True,
        clock: Callable[[], int] | None = None,
        seen: tuple[int, int] = (0, 0),
    ) -> None:
        super().__init__(windows, num_replicas=world_size, rank=rank, shuffle=shuffle, seed=seed)
        self.count = len(windows)
        self.even = even
        self.clock = clock
        self.seen = seen

    def __len__(self) -> int:
        if self.even:
            return -(-self.count // self.num_replicas)
        return len(range(self.rank, self.count, self.num_replicas))

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch if self.clock is None else self.clock()
        order = np.arange(self.count)
        if self.shuffle:
            generator = torch.Generator().manual_seed(hashed(self.seed, epoch, self.count) >> 1)
            order = torch.randperm(self.count, generator=generator).numpy()
        if self.even:
            order = np.resize(order, len(self) * self.num_replicas)
        mine = order[self.rank :: self.num_replicas]
        return iter([(epoch, int(i)) for i in mine[self.seen[1] if epoch == self.seen[0] else 0 :]])


class WindowLoader(DataLoader[Fetched]):
    """A `DataLoader` that Lightning may resume within an epoch.

    Its place comes from the trainer's own count of batches (`CSIDataModule.train_dataloader`), so that its state is no
    more than the seed that fixes the order.
    """

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        assert isinstance(self.sampler, WindowSampler)
        return {"seed": self.sampler.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on in the order of the interrupted run."""
        assert isinstance(self.sampler, WindowSampler)
        self.sampler.seed = state["seed"]
