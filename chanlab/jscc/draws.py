"""Random numbers of a batch of images: of a generator in training, of each image's own key in evaluation."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from chanlab.data import counter
from chanlab.errors import UsageError

Randomness: TypeAlias = "torch.Generator | Tensor | None"
"""A generator; or a key per image, int64 `[batch]`, of `chanlab.data.counter.keys(image_id, seed, ...)`, so that what
an image meets depends on (seed, image id) alone; or None, PyTorch's default generator."""


HIGHEST_PART = 0.25
"""Part of a range of SNRs that its highest ones are."""


def training_snr(
    count: int, snr_db: tuple[float, float], high_share: float = 0.0, device: torch.device | str = "cpu"
) -> Tensor:
    """SNRs of training images, of PyTorch's generator.

    Args:
        count: How many.
        snr_db: Lowest and highest [dB].
        high_share: Share of them that is drawn from the highest `HIGHEST_PART` of the range, the rest from all of it.
        device: Where they are wanted.

    Returns:
        Float32 `[count]` [dB].
    """
    low, high = snr_db
    place = torch.rand(count, device=device)
    if high_share:
        among_highest = torch.rand(count, device=device) < high_share
        place = torch.where(among_highest, 1 - HIGHEST_PART * place, place)
    return low + (high - low) * place


class Draws:
    """Random numbers for a batch.

    Args:
        randomness: See `Randomness`.
        batch: Number of images.
        device: Where the numbers are wanted; a generator draws on its own device.

    Raises:
        UsageError: If there is not one key per image.
    """

    def __init__(self, randomness: Randomness, batch: int, device: torch.device) -> None:
        if isinstance(randomness, Tensor):
            if randomness.shape != (batch,) or randomness.dtype != torch.int64:
                raise UsageError(
                    f"keys are int64 [{batch}], one per image (chanlab.data.counter.keys), not "
                    f"{list(randomness.shape)} ({randomness.dtype})."
                )
            randomness = randomness.to(device)
        self.randomness = randomness
        self.batch = batch
        self.device = device

    def rows(self, rows: Tensor) -> Draws:
        """The draws of some of the images, `rows` int64 `[fewer]`."""
        randomness = self.randomness[rows] if isinstance(self.randomness, Tensor) else self.randomness
        return Draws(randomness, len(rows), self.device)

    def complex_normal(self, use: str, *shape: int) -> Tensor:
        """Complex Gaussian numbers of variance 1, complex64 `[batch, *shape]`; `use` keeps independent uses apart."""
        if isinstance(self.randomness, Tensor):
            return counter.complex_normal(counter.keys(self.randomness, use), shape)
        where = self.randomness.device if self.randomness is not None else self.device
        numbers = torch.randn(self.batch, *shape, dtype=torch.complex64, device=where, generator=self.randomness)
        return numbers.to(self.device)

    def uniform(self, use: str) -> Tensor:
        """A number in [0, 1) for each image, float32 `[batch]`."""
        if isinstance(self.randomness, Tensor):
            return counter.uniform(counter.keys(self.randomness, use))
        where = self.randomness.device if self.randomness is not None else self.device
        return torch.rand(self.batch, device=where, generator=self.randomness).to(self.device)
