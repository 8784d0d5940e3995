"""Which base layer an image is sent with: a compressed image over 5G LDPC and QAM, in a share of the channel uses."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from chanlab.data import counter
from chanlab.errors import UsageError
from chanlab.jscc.bases import Base, BaseCodec
from chanlab.jscc.channels import AWGN
from chanlab.jscc.codec import Ratio
from chanlab.jscc.contract import BEST_DB, LEAST_BOOST, side_information_uses
from chanlab.jscc.separation.channel_codes import LdpcQam, Offer, useful_offers
from chanlab.jscc.separation.image_codecs import ImageCodec
from chanlab.jscc.separation.mcs import nr_mcs, transport_format
from chanlab.jscc.separation.payload import ERROR
from chanlab.metrics import psnr

if TYPE_CHECKING:
    from chanlab.jscc.adaptive import AdaptiveJSCC

SHORTER = 6
"""Steps of a codec's search for symbols over those of a trial."""
MOST_POWER_DB = 2.0
"""Power of a base's symbols over the mean of all, at most [dB]."""


class BaseLayer:
    """Finds the base layer with which a codec sends an image best over AWGN, no base included.

    For each share of the channel uses, two modulation and coding schemes are filled with the best file that fits: the
    fastest one whose losses are rare enough, and the next. The base is sent with just the power that this takes, which
    leaves more or less to the symbols (`Transmission.boost`); the receiver knows it from the scheme. A base that takes
    all channel uses has the scheme of highest expected PSNR. The encoder then sends and receives the image itself, over
    noise that it draws, and takes what came out best, losses counted: encoding takes as many encodings and decodings as
    there are candidates.

    Args:
        codec: Name of an image codec, or one set up; see `chanlab.jscc.separation.find_codec`.
        shares: Shares tried, above 0 and up to 1, of the channel uses that the codec's `side_bits` and a told rate
            leave. A base of all of them is sent alone, see `AdaptiveJSCC`.
        error: Probability that a base of all channel uses is lost, at most; others are lost at `ERROR`, whatever the
            power. Channels draw losses (`Transmission.base_loss`); an image without its base is shown in mid-grey. The
            shipped table of block errors was measured down to about 1 %, and is extrapolated from there.
    """

    def __init__(
        self,
        codec: str | ImageCodec = "avif",
        shares: Sequence[float] = (0.3, 0.5, 0.7, 0.85, 0.95, 1.0),
        error: float = 0.1,
    ) -> None:
        if not shares or not all(0 < share <= 1 for share in shares):
            raise UsageError(f"shares lie above 0 and not above 1, not {list(shares)}.")
        if not 0 <= error < 1:
            raise UsageError(f"error is a probability below 1, not {error}.")
        self.codec, self.shares, self.error = BaseCodec(codec), tuple(shares), error
        self.code = LdpcQam()

    @functools.lru_cache(1 << 14)  # noqa: B019
    def _offers(self, symbols: int, snr_db: float) -> tuple[Offer, ...]:
        """What a base carries that takes all channel uses, at the power of all."""
        offers = self.code.offers(symbols, np.array([[snr_db]])) if symbols > 0 else []
        return tuple(useful_offers(offers, self.error))

    @functools.lru_cache(1 << 14)  # noqa: B019
    def _powers(self, symbols: int, snr_db: float) -> tuple[tuple[Offer | None, float], ...]:
        """What it carries at other powers: the fastest scheme that needs no more than 1, and the next one, if any."""
        formats = [transport_format(mcs, symbols) for mcs in nr_mcs()] if symbols > 0 else []
        known = [(f.size, self.code.needed_snr_db(f, ERROR) - snr_db, f) for f in formats if f is not None]
        less = max((x for x in known if x[1] <= 0), key=lambda x: (x[0], -x[1]), default=None)
        bits = 0 if less is None else less[0]
        more = min((x for x in known if x[0] > bits and 0 < x[1] <= MOST_POWER_DB), key=lambda x: x[1], default=None)
        return tuple(
            (None, 1.0) if found is None else (Offer(found[0], ERROR, found[2]), 10 ** (found[1] / 10))
            for found in (less, more)
        )

    def candidates(self, images: Tensor, snr_db: Tensor, uses: Sequence[int], unequal: bool = True) -> list[Base]:
        """Bases for each share; where no file fits mean colours, which take no channel use.

        Args:
            images: `[batch, 3, height, width]` in [0, 1].
            snr_db: SNR per complex symbol [dB], `[batch]`.
            uses: Channel uses that each image has for a base and symbols.
            unequal: Whether bases may have a power of their own; without it they have the scheme of highest expected
                PSNR.
        """
        snrs = [round(snr, 3) for snr in snr_db.tolist()]
        index = side_information_uses(torch.full((len(images),), float(self.code.side_bits)), snr_db.cpu()).tolist()
        found = []
        for share in self.shares:
            symbols = [int(share * most) for most in uses]
            taken = torch.tensor(symbols, device=images.device)
            rooms = [(s - told, snr) for s, told, snr in zip(symbols, index, snrs, strict=True)]
            if share == 1 or not unequal:
                base = self.codec.fitting(images, [self._offers(*room) for room in rooms])
                found.append(replace(base, uses=taken.where(base.num_bytes > 0, 0)))
                continue
            for kind in zip(*(self._powers(*room) for room in rooms), strict=True):
                offers, powers = [], []
                for (offer, p), most, s, told in zip(kind, uses, symbols, index, strict=True):
                    # What tells the scheme has the power of all: it is read first.
                    powers.append((told + (s - told) * p) / max(s, 1))
                    offers.append((offer,) if offer and s * powers[-1] < most else ())
                base = self.codec.fitting(images, offers)
                power = torch.tensor(powers, dtype=torch.float32, device=images.device)
                has = base.num_bytes > 0
                found.append(replace(base, uses=taken.where(has, 0), power=power.where(has, 1.0)))
        return found

    @torch.no_grad()
    def best(self, codec: AdaptiveJSCC, images: Tensor, snr_db: Tensor, ratio: Ratio | None) -> Base:
        """The base of each image; its mean colour where it is better off without."""
        shape = (images.shape[1], images.shape[2], images.shape[3])
        _, uses, _ = codec.budget(images, snr_db, ratio)
        channel = AWGN(codec.convention).train()  # which doesn't refuse what doesn't fit
        # An image is sent alike in any company: noise of its own, the same for all.
        keys = counter.keys(torch.zeros(len(images), dtype=torch.int64, device=images.device), 0, "base")

        def shown_db(found: Tensor) -> Tensor:
            return psnr(found, images, "none", validate=False).clamp(max=BEST_DB)

        lost_db = shown_db(torch.full_like(images, 0.5))

        def expected_db(base: Base) -> Tensor:
            sent = replace(codec.encode(images, snr_db, ratio, base), base_loss=None)
            found_db = shown_db(codec.decode(channel(sent, snr_db, keys), shape))
            # Without a symbol, base and side information take more channel uses than there are, or the base takes all.
            fits = sent.used.any(1) | (base.taken == uses)
            if (boost := sent.boost) is not None:
                fits &= boost > LEAST_BOOST
            return (found_db + _loss(base) * (lost_db - found_db)).where(fits, -math.inf)

        none = Base.none(images)
        best = replace(none, uses=none.num_bytes)
        with _trying(codec, codec.checks_budget):
            most_db = expected_db(best)
        unequal = codec.convention.power_over == "image"
        for base in self.candidates(images, snr_db + codec.convention.offset_db, uses.tolist(), unequal):
            if not bool((base.num_bytes > 0).any()):
                continue
            with _trying(codec, False):  # a base that doesn't fit is no error, but not taken
                found_db = expected_db(base)
            better = found_db > most_db
            most_db = torch.where(better, found_db, most_db)
            best = Base(
                torch.where(better[:, None, None, None], base.image, best.image),
                torch.where(better, base.num_bytes, best.num_bytes),
                torch.where(better, base.taken, best.taken),
                torch.where(better, _loss(base), _loss(best)),
                torch.where(better, _power(base), _power(best)) if unequal else None,
            )
        return best


def _loss(base: Base) -> Tensor:
    """Probability that each is lost, float32 `[batch]`."""
    return base.image.new_zeros(len(base.image), dtype=torch.float32) if base.loss is None else base.loss


def _power(base: Base) -> Tensor:
    """Power of the symbols of each, over the mean of all, float32 `[batch]`."""
    return base.image.new_ones(len(base.image), dtype=torch.float32) if base.power is None else base.power


@contextlib.contextmanager
def _trying(codec: AdaptiveJSCC, checks: bool) -> Iterator[None]:
    """Budgets checked or not, and a shorter search for symbols."""
    had = codec.checks_budget, codec.search
    codec.checks_budget, codec.search = checks, -(-codec.search // SHORTER)
    try:
        yield
    finally:
        codec.checks_budget, codec.search = had
