"""Where a Lightning trainer stands: which process this is, and what a resumed run had seen."""

from __future__ import annotations

from lightning.pytorch import Trainer


def processes(trainer: Trainer | None) -> tuple[int, int]:
    """Rank and number of processes."""
    return (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)


def seen_batches(trainer: Trainer | None) -> tuple[int, int]:
    """Epoch in which a checkpoint was written, and the batches of it that this process had seen."""
    if trainer is None or not trainer.fit_loop.restarting:
        return 0, 0
    progress = trainer.fit_loop.epoch_loop.batch_progress.state_dict()["current"]
    return trainer.current_epoch, int(progress["processed"])
