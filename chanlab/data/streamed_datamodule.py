"""Streamed windows for Lightning: `chanlab fit` and any `Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule

from chanlab.data.draws import hashed
from chanlab.data.impairments import Impairments
from chanlab.data.progress import processes, seen_batches
from chanlab.data.protocol import Condition, Duplex
from chanlab.data.streamed import DRAWN, SampleRequest, StreamedCSI
from chanlab.errors import UsageError

Cells = Literal["regular", "generalization", "robustness"]
"""Sets of a protocol."""


class TrainingOrder:
    """Which samples the batches of training hold: none twice, and each batch a mixture of all cells.

    Samples come in rounds: a block of every cell, in an order that depends on (seed, round) alone. Processes take turns
    at rounds. Lightning may resume it within an epoch: its place comes from the trainer's own count of batches, so that
    its state is no more than the seed.

    Args:
        stream: What draws them.
        batch_size: Windows per batch and process.
        batches_per_epoch: Batches per epoch and process.
        rank: This process.
        world_size: Number of processes.
        clock: Tells the epoch when an iteration begins.
        seen: An epoch that was interrupted, and the batches of it that this process had seen by then.
    """

    def __init__(
        self,
        stream: StreamedCSI,
        batch_size: int,
        batches_per_epoch: int,
        rank: int = 0,
        world_size: int = 1,
        clock: Callable[[], int] = lambda: 0,
        seen: tuple[int, int] = (0, 0),
    ) -> None:
        self.stream = stream
        self.batch_size = batch_size
        self.batches_per_epoch = batches_per_epoch
        self.rank = rank
        self.world_size = world_size
        self.clock = clock
        self.seen = seen
        self._round = (-1, torch.empty(0, dtype=torch.int64))

    def __len__(self) -> int:
        return self.batches_per_epoch

    def __iter__(self) -> Iterator[SampleRequest]:
        epoch = self.clock()
        skipped = self.seen[1] if epoch == self.seen[0] else 0
        for batch in range(skipped, self.batches_per_epoch):
            yield self.request(epoch * self.batches_per_epoch + batch)

    def request(self, step: int) -> SampleRequest:
        """The batch of this process at a step of the whole run."""
        length = len(self.stream.cells) * self.stream.block_size
        first, stop = step * self.batch_size, (step + 1) * self.batch_size
        rounds = range(first // length, (stop - 1) // length + 1)
        parts = [self._ids(r)[max(0, first - r * length) : stop - r * length] for r in rounds]
        return SampleRequest(torch.cat(parts), DRAWN, self.stream.split)

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {"seed": self.stream.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on with the samples of the interrupted run."""
        self.stream.seed = state["seed"]

    def _ids(self, turn: int) -> torch.Tensor:
        """Ids of a round of this process, in the order in which they are seen."""
        if self._round[0] != turn:
            block = turn * self.world_size + self.rank
            ids = self.stream.ids(self.stream.block_size, block * self.stream.block_size)
            generator = torch.Generator().manual_seed(hashed(self.stream.seed, "order", block) >> 1)
            self._round = turn, ids[torch.randperm(len(ids), generator=generator)]
        return self._round[1]


class EvaluationOrder:
    """The same samples of every cell under every condition, cell by cell; processes take turns at them.

    Args:
        stream: What draws them.
        samples_per_cell: Number of samples.
        batch_size: Windows per batch and process.
        rank: This process.
        world_size: Number of processes.
    """

    def __init__(
        self, stream: StreamedCSI, samples_per_cell: int, batch_size: int, rank: int = 0, world_size: int = 1
    ) -> None:
        chunks = torch.split(stream.ids(samples_per_cell), batch_size)[rank::world_size]
        # Conditions change fastest: a batch's channels are drawn once for all of them.
        self.requests = [SampleRequest(*x, stream.split) for x in product(chunks, range(len(stream.conditions)))]

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[SampleRequest]:
        return iter(self.requests)


class StreamedCSIDataModule(LightningDataModule):
    """Windows of a protocol's 3GPP channels, drawn on the learner's device, as `CSIBatch`.

    In training every sample is new: each step's are named by the step, so that a resumed run goes on with those that it
    would have seen. In validation and test samples are the same whenever, and wherever, they are asked for (on the same
    kind of device). See `StreamedCSI` for what a sample depends on.

    On a GPU drawing a block takes about as long for 512 samples as for 64: there choose `block_size: 512`, which keeps
    27 blocks of 64 MB; on a CPU, where the time goes with the number of samples, keep it small.

    Args:
        protocol: Short name of the protocol.
        duplex: Band of the targets: `tdd`, `fdd`, or `both` side by side on the axis of subcarriers.
        batch_size: Windows per batch and process.
        eval_batch_size: The same for validation, test and prediction; None is `batch_size`.
        batches_per_epoch: Batches per epoch of training and process.
        cells: Set of cells that training draws from.
        snr_db: SNR in training, drawn uniformly from [low, high] [dB]; None is the protocol's.
        eval_cells: Set of cells and conditions of test and prediction.
        val_cells: The same for validation.
        samples_per_cell: Samples of each cell in test and prediction, under each condition.
        val_samples_per_cell: The same for validation.
        eval_snr_db: In place of the set's conditions: Gaussian noise at each of these SNRs [dB].
        block_size: Samples of a cell that are drawn at once in training.
        eval_block_size: The same in validation, test and prediction; it is part of what names the samples.
        seed: Seed of everything that is random.
        impairments: What stands between the channel and the history.

    Raises:
        UsageError: If an argument doesn't fit.
    """

    def __init__(
        self,
        protocol: str = "csi4cast",
        duplex: Duplex = "tdd",
        batch_size: int = 64,
        eval_batch_size: int | None = None,
        batches_per_epoch: int = 1000,
        cells: Literal["regular", "generalization"] = "regular",
        snr_db: tuple[float, float] | None = None,
        eval_cells: Cells = "regular",
        val_cells: Cells = "regular",
        samples_per_cell: int = 100,
        val_samples_per_cell: int = 16,
        eval_snr_db: float | list[float] | None = None,
        block_size: int = 64,
        eval_block_size: int = 16,
        seed: int = 1,
        impairments: Impairments | None = None,
    ) -> None:
        super().__init__()
        counts = {
            "batch_size": batch_size,
            "eval_batch_size": eval_batch_size or 1,
            "batches_per_epoch": batches_per_epoch,
            "samples_per_cell": samples_per_cell,
            "val_samples_per_cell": val_samples_per_cell,
        }
        for name, count in counts.items():
            if count < 1:
                raise UsageError(f"{name} must be >= 1, not {count}.")
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size or batch_size
        self.batches_per_epoch = batches_per_epoch
        self.samples_per_cell = {"val": val_samples_per_cell, "test": samples_per_cell}
        common: dict[str, Any] = {"duplex": duplex, "seed": seed, "impairments": impairments}
        snrs = [eval_snr_db] if isinstance(eval_snr_db, int | float) else eval_snr_db
        conditions = None if snrs is None else tuple(Condition("gaussian", float(s), float(s)) for s in snrs)
        train = StreamedCSI(protocol, "train", cells=cells, snr_db=snr_db, block_size=block_size, **common)
        train.max_blocks = len(train.cells)
        self.streams = {"train": train}
        for split, chosen in (("val", val_cells), ("test", eval_cells)):
            self.streams[split] = StreamedCSI(
                protocol, split, cells=chosen, conditions=conditions, block_size=eval_block_size, max_blocks=1, **common
            )

    def train_dataloader(self) -> TrainingOrder:
        """Samples that no step has seen before; after an interruption those that would have come."""
        trainer = self.trainer
        return TrainingOrder(
            self.streams["train"],
            self.batch_size,
            self.batches_per_epoch,
            *processes(self.trainer),
            clock=(lambda: 0) if trainer is None else (lambda: trainer.current_epoch),
            seen=seen_batches(trainer),
        )

    def val_dataloader(self) -> EvaluationOrder:
        """Samples of the validation set under each of its conditions."""
        return self._evaluate("val")

    def test_dataloader(self) -> EvaluationOrder:
        """Samples of the test set under each of its conditions."""
        return self._evaluate("test")

    def predict_dataloader(self) -> EvaluationOrder:
        """As `test_dataloader`."""
        return self._evaluate("test")

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Draw the channels, on the device that the batch is asked for."""
        if not isinstance(batch, SampleRequest):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        return self.streams[batch.split].batch(batch, device)

    def _evaluate(self, split: Literal["val", "test"]) -> EvaluationOrder:
        return EvaluationOrder(
            self.streams[split], self.samples_per_cell[split], self.eval_batch_size, *processes(self.trainer)
        )
