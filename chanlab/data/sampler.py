"""The order in which windows are read: seeded, spread over processes, and resumable within an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler

from chanlab.data.views import PathWindows
from chanlab.data.windows import CSIBatch, CSIWindows


class WindowSampler(DistributedSampler[CSIBatch]):
    """Yields (epoch, index), so that workers know the epoch without being told.

    Lightning sets the epoch, and leaves a `DistributedSampler` as it is.

    Args:
        windows: The data.
        shuffle: In an order that depends on (seed, epoch) alone.
        seed: Of the order.
        rank: This process.
        world_size: Number of processes.
        even: Repeat a few windows so that all processes get as many (training needs it, in evaluation it would count
            them twice).
        epoch: Epoch to begin with.
        skip: Windows of that epoch, of this process, which were seen before an interruption.
    """

    def __init__(
        self,
        windows: CSIWindows,
        shuffle: bool,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        even: bool = True,
        epoch: int = 0,
        skip: int = 0,
    ) -> None:
        super().__init__(windows, num_replicas=world_size, rank=rank, shuffle=shuffle, seed=seed)
        self.count = len(windows)
        self.even = even
        self.epoch = epoch
        self._skip = (epoch, skip)

    def __len__(self) -> int:
        if self.even:
            return -(-self.count // self.num_replicas)
        return len(range(self.rank, self.count, self.num_replicas))

    def __iter__(self) -> Iterator[Any]:
        order = np.arange(self.count)
        if self.shuffle:
            state = np.random.SeedSequence([self.seed, self.epoch, 0], spawn_key=(self.count,)).generate_state(2)
            generator = torch.Generator().manual_seed(int(state[0]) << 31 ^ int(state[1]))
            order = torch.randperm(self.count, generator=generator).numpy()
        if self.even:
            order = np.resize(order, len(self) * self.num_replicas)
        epoch, skip = self._skip
        first = skip if self.epoch == epoch else 0
        return iter([(self.epoch, int(i)) for i in order[self.rank :: self.num_replicas][first:]])


class WindowLoader(DataLoader[CSIBatch | PathWindows]):
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
