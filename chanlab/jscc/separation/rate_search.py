"""The best picture of a codec within a number of bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from chanlab.jscc.contract import BEST_DB
from chanlab.jscc.separation.channel_codes import Offer
from chanlab.jscc.separation.image_codecs import ImageCodec, Picture


def psnr_db(image: Picture, other: Picture) -> float:
    """10 log10(255² / MSE) over all values of an image [dB]; infinite for equal ones."""
    error = float(np.square(image.astype(np.float64) - other).mean())
    return 10 * math.log10(255**2 / error) if error else math.inf


@dataclass(frozen=True)
class Compressed:
    """An image in bytes.

    Attributes:
        data: The bytes to send.
        image: What they decode to.
        psnr_db: Its PSNR [dB].
        variant: The codec's variant.
        level: The codec's quality level.
    """

    data: bytes
    image: Picture
    psnr_db: float
    variant: str
    level: int


class RateSearch:
    """Finds the highest quality of one image that fits a budget; what was encoded is kept for the next budget.

    Args:
        codec: The codec.
        image: uint8 `[height, width, 3]`.
    """

    def __init__(self, codec: ImageCodec, image: Picture) -> None:
        self.codec, self.image = codec, image
        self._data: dict[tuple[str, int], bytes] = {}
        self._decoded: dict[tuple[str, int], Compressed] = {}

    def best(self, num_bytes: int) -> Compressed | None:
        """The picture of highest PSNR, over all variants, in at most so many bytes; None if none fits."""
        fitting = [(v, level) for v in self.codec.variants if (level := self.level(num_bytes, v)) is not None]
        return max((self._picture(*f) for f in fitting), key=lambda c: c.psnr_db, default=None)

    def expected_best(self, offers: Iterable[Offer], lost_db: float) -> tuple[Compressed, Offer, float] | None:
        """What is best sent over a link: (1 - error) PSNR + error `lost_db` is highest.

        Args:
            offers: What the link carries; see `useful_offers`.
            lost_db: PSNR of what is shown of a lost image [dB].

        Returns:
            The picture, the offer and the expected PSNR [dB]; None if nothing is better than losing the image. Equal
            images count as `BEST_DB`.
        """
        lost_db = min(lost_db, BEST_DB)
        best, most = None, lost_db
        for offer in offers:
            found = self.best(offer.num_bytes) if offer.num_bytes else None
            if found is None:
                break
            arrived_db = min(found.psnr_db, BEST_DB)
            expected = (1 - offer.error) * arrived_db + offer.error * lost_db
            if expected > most:
                best, most = (found, offer, expected), expected
            if arrived_db <= most:  # fewer bytes can't be better
                break
        return best

    def level(self, num_bytes: int, variant: str) -> int | None:
        """The highest level of a variant that fits, by bisection: sizes grow with the level.

        They do not quite everywhere: from the level found, the search goes on as long as the next one fits.
        """
        low, high = -1, self.codec.levels
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._size(variant, middle) <= num_bytes else (low, middle)
        while low >= 0 and low + 1 < self.codec.levels and self._size(variant, low + 1) <= num_bytes:
            low += 1
        return low if low >= 0 else None

    def _size(self, variant: str, level: int) -> int:
        if (variant, level) not in self._data:
            self._data[variant, level] = self.codec.encode(self.image, level, variant)
        return len(self._data[variant, level])

    def _picture(self, variant: str, level: int) -> Compressed:
        if (variant, level) not in self._decoded:
            self._size(variant, level)
            data = self._data[variant, level]
            image = self.codec.decode(data, (self.image.shape[0], self.image.shape[1]))
            self._decoded[variant, level] = Compressed(data, image, psnr_db(self.image, image), variant, level)
        return self._decoded[variant, level]
