"""Which base layer an image is sent with: a compressed image over 5G LDPC and QAM, in a share of the channel uses."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from chanlab.data import counter
from chanlab.errors import UsageError
from chanlab.jscc.bases import Base, BaseCodec
from chanlab.jscc.channels import AWGN
from chanlab.jscc.codec import Ratio
from chanlab.jscc.contract import side_information_uses
from chanlab.jscc.separation.channel_codes import LdpcQam
from chanlab.jscc.separation.image_codecs import ImageCodec
from chanlab.jscc.separation.payload import ERROR

if TYPE_CHECKING:
    from chanlab.jscc.adaptive import AdaptiveJSCC


class BaseLayer:
    """Finds the base layer with which a codec sends an image best over AWGN, no base included.

    For each share of the channel uses, the modulation and coding scheme that carries most bits at the error rate is
    filled with the best file that fits. The encoder then sends and receives the image itself, over noise that it draws,
    and takes what came out best: encoding takes as many encodings and decodings as there are candidates.

    Args:
        codec: Name of an image codec, or one set up; see `chanlab.jscc.separation.find_codec`.
        shares: Shares tried, above 0 and up to 1, of the channel uses that the codec's `side_bits` and a told rate
            leave. A base of all of them is sent alone, see `AdaptiveJSCC`.
        error: Probability that a base is lost, at most; losses aren't simulated, an image without its base is lost.
    """

    def __init__(
        self,
        codec: str | ImageCodec = "avif",
        shares: Sequence[float] = (0.3, 0.5, 0.7, 0.85, 0.95, 1.0),
        error: float = ERROR,
    ) -> None:
        if not shares or not all(0 < share <= 1 for share in shares):
            raise UsageError(f"shares lie above 0 and not above 1, not {list(shares)}.")
        self.codec, self.shares, self.error = BaseCodec(codec), tuple(shares), error
        self.code = LdpcQam()

    @functools.lru_cache(1 << 14)  # noqa: B019
    def _bytes(self, symbols: int, snr_db: float) -> int:
        offers = self.code.offers(symbols, np.array([[snr_db]])) if symbols > 0 else []
        return max((offer.num_bytes for offer in offers if offer.error <= self.error), default=0)

    def candidates(self, images: Tensor, snr_db: Tensor, uses: Sequence[int]) -> list[Base]:
        """A base for each share, where a file fits it; elsewhere mean colours, which take no channel use.

        Args:
            images: `[batch, 3, height, width]` in [0, 1].
            snr_db: SNR per complex symbol [dB], `[batch]`.
            uses: Channel uses that each image has for a base and symbols.
        """
        snrs = [round(snr, 3) for snr in snr_db.tolist()]
        index = side_information_uses(torch.full((len(images),), float(self.code.side_bits)), snr_db.cpu()).tolist()
        found = []
        for share in self.shares:
            symbols = [int(share * most) for most in uses]
            rooms = [self._bytes(s - told, snr) for s, told, snr in zip(symbols, index, snrs, strict=True)]
            base = self.codec.fitting(images, rooms)
            taken = torch.tensor(symbols, device=images.device).where(base.num_bytes > 0, 0)
            found.append(Base(base.image, base.num_bytes, taken))
        return found

    @torch.no_grad()
    def best(self, codec: AdaptiveJSCC, images: Tensor, snr_db: Tensor, ratio: Ratio | None) -> Base:
        """The base of each image; its mean colour where it is better off without."""
        shape = (images.shape[1], images.shape[2], images.shape[3])
        _, uses, _ = codec.budget(images, snr_db, ratio)
        channel = AWGN(codec.convention).eval()
        # An image is sent alike in any company: noise of its own, the same for all.
        keys = counter.keys(torch.zeros(len(images), dtype=torch.int64, device=images.device), 0, "base")

        def error(base: Base) -> Tensor:
            sent = codec.encode(images, snr_db, ratio, base)
            found = (codec.decode(channel(sent, snr_db, keys), shape) - images).square().mean((1, 2, 3))
            # Without a symbol, base and side information take more channel uses than there are, or the base takes all.
            return found.where(sent.used.any(1) | (base.taken == uses), math.inf)

        none = Base.none(images)
        best = Base(none.image, none.num_bytes, none.num_bytes)
        least = error(best)
        for base in self.candidates(images, snr_db + codec.convention.offset_db, uses.tolist()):
            if not bool((base.num_bytes > 0).any()):
                continue
            with _unchecked(codec):
                found = error(base)
            better = found < least
            least = torch.where(better, found, least)
            best = Base(
                torch.where(better[:, None, None, None], base.image, best.image),
                torch.where(better, base.num_bytes, best.num_bytes),
                torch.where(better, base.taken, best.taken),
            )
        return best


@contextlib.contextmanager
def _unchecked(codec: AdaptiveJSCC) -> Iterator[None]:
    """A base that doesn't fit is no error, but not taken."""
    checks, codec.checks_budget = codec.checks_budget, False
    try:
        yield
    finally:
        codec.checks_budget = checks
