"""Pictures of any size in one array of bytes, from which crops are cut on the device that asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chanlab.errors import UsageError

Picture = npt.NDArray[np.uint8]
"""A decoded picture, `[height, width, 3]`."""


@dataclass(frozen=True)
class Pixels:
    """Decoded pictures, one behind the other, each `[3, height, width]`.

    Attributes:
        data: Values 0 to 255 of all pictures, uint8 `[sum of 3 height width]`.
        offset: Where each picture begins, int64 `[picture]`.
        height: Int64 `[picture]`.
        width: Int64 `[picture]`.
    """

    data: Tensor
    offset: Tensor
    height: Tensor
    width: Tensor

    def __len__(self) -> int:
        return len(self.offset)

    @classmethod
    def pack(cls, pictures: Sequence[Picture]) -> Pixels:
        """Put pictures behind each other.

        Args:
            pictures: Each uint8 `[height, width, 3]`.

        Raises:
            UsageError: If there are none.
        """
        if not pictures:
            raise UsageError("there are no pictures to pack.")
        height, width = (torch.tensor([p.shape[axis] for p in pictures]) for axis in (0, 1))
        count = 3 * height * width
        offset = count.cumsum(0) - count
        data = np.empty(int(count.sum()), np.uint8)
        for start, picture in zip(offset.tolist(), pictures, strict=True):
            data[start : start + picture.size].reshape(3, *picture.shape[:2])[:] = picture.transpose(2, 0, 1)
        return cls(torch.from_numpy(data), offset, height, width)

    def to(self, device: torch.device | str) -> Pixels:
        """The same on a device."""
        return Pixels(*(x.to(device) for x in (self.data, self.offset, self.height, self.width)))

    def picture(self, index: int) -> Tensor:
        """One picture, uint8 `[3, height, width]`, without a copy."""
        start, height, width = (int(x[index]) for x in (self.offset, self.height, self.width))
        return self.data[start : start + 3 * height * width].view(3, height, width)

    def crops(
        self, index: Tensor, top: Tensor, left: Tensor, size: tuple[int, int], flip: Tensor | None = None
    ) -> Tensor:
        """Cut rectangles of one size out of pictures.

        Args:
            index: Pictures, int64 `[batch]`, on the device of the pixels, as all arguments.
            top: Upper rows, int64 `[batch]`; rectangles lie within their pictures (not checked: that would
                synchronise).
            left: Left columns, int64 `[batch]`.
            size: Height and width.
            flip: Which to mirror left to right, bool `[batch]`.

        Returns:
            Uint8 `[batch, 3, height, width]`.
        """
        return (
            self._sliced(index, top, left, size, flip)
            if self.data.device.type == "cpu"
            else (self._gathered(index, top, left, size, flip))
        )

    def _sliced(self, index: Tensor, top: Tensor, left: Tensor, size: tuple[int, int], flip: Tensor | None) -> Tensor:
        """Row by row as memory lies: fastest where there are few cores."""
        out = torch.empty(len(index), 3, *size, dtype=torch.uint8)
        flat, cut = self.data.numpy(), out.numpy()
        start = self.offset[index]
        height, width = self.height[index], self.width[index]
        for n, (o, h, w, y, x) in enumerate(torch.stack([start, height, width, top, left], 1).tolist()):
            planes = flat[o : o + 3 * h * w].reshape(3, h, w)
            cut[n] = planes[:, y : y + size[0], x : x + size[1]]
        if flip is not None and flip.any():
            out[flip] = out[flip].flip(-1)
        return out

    def _gathered(self, index: Tensor, top: Tensor, left: Tensor, size: tuple[int, int], flip: Tensor | None) -> Tensor:
        """One gather for the whole batch: no copy to the device, no synchronisation."""
        device = self.data.device
        height, width, start = (x[index, None, None] for x in (self.height, self.width, self.offset))
        plane = torch.arange(3, device=device)[:, None]
        row = torch.arange(size[0], device=device)
        column = torch.arange(size[1], device=device).expand(len(index), -1)
        if flip is not None:
            column = torch.where(flip[:, None], size[1] - 1 - column, column)
        rows = start + (plane * height + top[:, None, None] + row) * width  # [batch, 3, rows]
        return self.data[rows[..., None] + (left[:, None] + column)[:, None, None, :]]
