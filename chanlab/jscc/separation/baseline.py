"""Separate source and channel coding of images in one call: the baseline of DeepJSCC."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from chanlab.channels.sionna_phy import device_name
from chanlab.data import counter
from chanlab.errors import UsageError
from chanlab.jscc.channels import AWGN, SymbolChannel
from chanlab.jscc.contract import channel_uses, normalise_power, side_information_uses
from chanlab.jscc.separation.channel_codes import ChannelCode, LdpcQam, Offer, symbol_snr_db, useful_offers
from chanlab.jscc.separation.image_codecs import CodecError, ImageCodec, Picture, find_codec
from chanlab.jscc.separation.mcs import TransportFormat
from chanlab.jscc.separation.rate_search import Compressed, RateSearch, psnr_db
from chanlab.jscc.separation.transport import TransportChannel, bits_to_bytes, bytes_to_bits

Outage = Literal["grey", "mean"]
_SURE_LOSS = 0.999


@dataclass(frozen=True)
class OperatingPoint:
    """How one image is sent.

    Attributes:
        offer: Bits, error probability and transport format of the channel code; None if nothing is worth sending.
        source: The compressed image; None if nothing is sent.
        psnr_db: PSNR if it arrives [dB].
        lost_db: PSNR if it doesn't [dB].
        expected_db: Expected PSNR, by the error probability at the channel's SNR [dB].
        side_symbols: Symbols that tell the receiver the scheme, in the same frame.
    """

    offer: Offer | None
    source: Compressed | None
    psnr_db: float
    lost_db: float
    expected_db: float
    side_symbols: int


@dataclass(frozen=True)
class Separated:
    """Images after separate source and channel coding.

    Attributes:
        images: Received images, float32 `[batch, 3, height, width]` in [0, 1]: simulated, or (without a simulation)
            what arrives if nothing is lost.
        psnr_db: Of `images`; of lost ones too [dB], float64 `[batch]`.
        expected_db: Expected PSNR at the operating point [dB], float64 `[batch]`.
        outage: Which images were lost or not sent, bool `[batch]`.
        uses: Channel uses that each image takes, side information and pilots included, int64 `[batch]`.
        limit: Channel uses that the bandwidth ratio allows.
        points: The operating points.
        simulated: Whether the images were really sent.
    """

    images: Tensor
    psnr_db: Tensor
    expected_db: Tensor
    outage: Tensor
    uses: Tensor
    limit: int
    points: tuple[OperatingPoint, ...]
    simulated: bool


class Separation:
    """Separate source and channel coding of images: the best operating point of each image, then the transmission.

    For each image and SNR, the codec's quality is searched for each modulation and coding scheme so that the
    stream fills the channel uses, and the scheme of highest expected PSNR is taken:
    (1 - BLER) PSNR(bits) + BLER PSNR(lost). Counted in the k uses: the stream with all of its headers that the receiver
    can't write itself, the mark of its end, CRC bits of transport and code blocks, the index of the scheme (as side
    information, `side_information_uses`), pilots of the channel. Not counted: the image's size, the codec's name and
    the SNR, which both ends know.

    An image is lost if a code block is: its stream can't be decoded. The receiver then shows a constant picture:

    - `outage="grey"`: mid-grey, which needs no bit;
    - `outage="mean"`: the image's own mean colour, told for nothing: a bound on what constant pictures can do.

    Searches are kept for images given again, so that a sweep over SNRs encodes each image a few dozen times in all;
    `with_code` shares them.

    Args:
        codec: Name of a codec (`jpeg`, `jpeg2000`, `webp`, `avif`, `bpg`), or an `ImageCodec` such as a learned one.
        code: Channel code: 5G LDPC with QAM by default; ideal ones give bounds.
        channel: Channel with its receiver; AWGN by default. The transmitter knows its statistics and the mean SNR.
        outage: See above.
        device: Device of the link's simulation.
    """

    def __init__(
        self,
        codec: str | ImageCodec = "avif",
        code: ChannelCode | None = None,
        channel: SymbolChannel | None = None,
        outage: Outage = "grey",
        device: str = "cpu",
    ) -> None:
        if outage not in ("grey", "mean"):
            raise UsageError(f"outage must be 'grey' or 'mean', not {outage!r}.")
        self.codec = find_codec(codec)
        self.code = LdpcQam() if code is None else code
        self.channel = (AWGN() if channel is None else channel).eval()
        self.outage, self.device = outage, device if device == "cpu" else device_name(device)
        self._searches: dict[bytes, RateSearch] = {}
        self._offers: dict[tuple[int, float], list[Offer]] = {}

    def __call__(
        self,
        images: Tensor,
        ratio: float | Fraction,
        snr_db: float,
        *,
        assumed_snr_db: float | None = None,
        simulate: bool = True,
        ids: Sequence[int] | None = None,
        seed: int = 0,
    ) -> Separated:
        """Send images.

        Args:
            images: Float `[batch, 3, height, width]` in [0, 1]; compressed with 8 bits per value.
            ratio: Bandwidth ratio k/n.
            snr_db: Nominal SNR of the channel [dB].
            assumed_snr_db: SNR that the operating point is chosen for [dB]; that of the channel by default. Above it,
                images are lost: the cliff.
            simulate: Really send the bits (ideal codes can't be). Otherwise `expected_db` alone counts losses.
            ids: Ids of the images; noise and fading of an image depend on (seed, id) alone. 0, 1, ... by default.
            seed: Of noise and fading.

        Raises:
            UsageError: If shapes don't fit.
        """
        if images.ndim != 4 or images.shape[1] != 3:
            raise UsageError(f"images must be [batch, 3, height, width], not {list(images.shape)}.")
        shape = (int(images.shape[1]), int(images.shape[2]), int(images.shape[3]))
        limit = channel_uses(shape, ratio, self.channel.convention)
        assumed = float(snr_db if assumed_snr_db is None else assumed_snr_db)
        pictures = [self._picture(image) for image in images]
        points = tuple(self.operating_point(picture, limit, assumed) for picture in pictures)
        if assumed != float(snr_db):
            points = tuple(self._reckoned(point, float(snr_db)) for point in points)
        lost = [self._lost_picture(picture) for picture in pictures]
        outcome: list[Picture | None] = [p.source.image if p.source is not None else None for p in points]
        simulate = simulate and all(p.offer is None or p.offer.format is not None for p in points)
        uses = [0] * len(points)
        if simulate:
            keys = counter.keys(torch.tensor(list(range(len(points)) if ids is None else ids)), seed, "separation")
            for format, rows in _by_format(points).items():
                for row, data, used in self._send(format, rows, points, keys, float(snr_db)):
                    uses[row] = used
                    outcome[row] = self._decode(data, (shape[1], shape[2]))
        else:
            uses = [0 if p.offer is None else limit for p in points]
        if max(uses) > limit:
            raise AssertionError(f"{max(uses)} channel uses of {limit}")
        shown = [o if o is not None else m for o, m in zip(outcome, lost, strict=True)]
        psnr = [psnr_db(a, b) for a, b in zip(pictures, shown, strict=True)]
        return Separated(
            images=torch.from_numpy(np.stack(shown)).permute(0, 3, 1, 2).float() / 255,
            psnr_db=torch.tensor(psnr, dtype=torch.float64),
            expected_db=torch.tensor([p.expected_db for p in points], dtype=torch.float64),
            outage=torch.tensor([o is None for o in outcome]),
            uses=torch.tensor(uses),
            limit=limit,
            points=points,
            simulated=simulate,
        )

    def with_code(self, code: ChannelCode) -> Separation:
        """The same codec and channel with another channel code; what was encoded is shared."""
        other = Separation(self.codec, code, self.channel, self.outage, self.device)
        other._searches = self._searches
        return other

    def operating_point(self, image: Picture, uses: int, snr_db: float) -> OperatingPoint:
        """The best operating point of an image for a number of channel uses at an SNR [dB].

        Args:
            image: uint8 `[height, width, 3]`.
            uses: Channel uses.
            snr_db: SNR that the transmitter reckons with [dB].
        """
        lost_db = psnr_db(image, self._lost_picture(image))
        bits = torch.tensor([float(self.code.side_bits)])
        side = int(side_information_uses(bits, torch.tensor([snr_db + self.channel.convention.offset_db])))
        symbols = self.channel.symbols_within(uses) - side
        best = self._search(image).expected_best(self._useful_offers(symbols, snr_db) if symbols > 0 else [], lost_db)
        if best is None:
            return OperatingPoint(None, None, lost_db, lost_db, lost_db, 0)
        found, offer, expected = best
        return OperatingPoint(offer, found, found.psnr_db, lost_db, expected, side)

    def _reckoned(self, point: OperatingPoint, snr_db: float) -> OperatingPoint:
        """An operating point with the error probability that it has at another SNR [dB]."""
        if point.offer is None:
            return point
        if point.offer.format is None:
            raise UsageError(f"assumed_snr_db: an ideal code ({self.code.name}) has no error rate at another SNR.")
        symbols = point.offer.format.uses
        offers = self.code.offers(symbols, symbol_snr_db(self.channel, snr_db, symbols))
        offer = next(o for o in offers if o.format == point.offer.format)
        expected = (1 - offer.error) * point.psnr_db + offer.error * point.lost_db
        return replace(point, offer=offer, expected_db=expected)

    def _useful_offers(self, symbols: int, snr_db: float) -> list[Offer]:
        if (symbols, snr_db) not in self._offers:
            reckoned = symbol_snr_db(self.channel, snr_db, symbols)
            self._offers[symbols, snr_db] = useful_offers(self.code.offers(symbols, reckoned), _SURE_LOSS)
        return self._offers[symbols, snr_db]

    def _send(
        self,
        format: TransportFormat,
        rows: Sequence[int],
        points: Sequence[OperatingPoint],
        keys: Tensor,
        snr_db: float,
    ) -> list[tuple[int, bytes | None, int]]:
        """Images of one format over the link: (row, payload or None, channel uses)."""
        link = TransportChannel(format, device=self.device)
        power = self.channel.convention.power
        out: list[tuple[int, bytes | None, int]] = []
        for row in rows:  # one at a time: a photo's code bits fill the memory that a batch would need
            source = points[row].source
            assert source is not None
            bits = bytes_to_bits(source.data, format.size)[None]
            symbols, code_bits = link.encode(bits)
            # The index of the scheme takes its symbols as the transmitter reckons them; it is not decoded here.
            index = symbols.new_ones(1, points[row].side_symbols)
            sent = normalise_power(torch.cat([symbols, index], 1), convention=self.channel.convention)
            with torch.inference_mode():
                received = self.channel(sent, snr_db, keys[row : row + 1])
            decoded, right = link.decode(
                received.unbiased[:, : format.uses] / math.sqrt(power),
                received.noise_variance[:, : format.uses] / power,
                code_bits,
            )
            uses = int(received.uses[0])
            out.append((row, bits_to_bytes(decoded[0].cpu()) if bool(right[0]) else None, uses))
        return out

    def _decode(self, data: bytes | None, shape: tuple[int, int]) -> Picture | None:
        if data is None:
            return None
        try:
            return self.codec.decode(data, shape)
        except CodecError:  # a CRC that was right by chance
            return None

    def lost_images(self, images: Tensor) -> Tensor:
        """What a receiver shows of lost images, as `images`."""
        lost = np.stack([self._lost_picture(self._picture(image)) for image in images])
        return torch.from_numpy(lost).permute(0, 3, 1, 2).float() / 255

    def _search(self, image: Picture) -> RateSearch:
        key = image.tobytes() + repr(image.shape).encode()
        if key not in self._searches:
            self._searches[key] = RateSearch(self.codec, image)
        return self._searches[key]

    def _lost_picture(self, image: Picture) -> Picture:
        if self.outage == "grey":
            return np.full_like(image, 128)
        mean = image.reshape(-1, 3).mean(0).round().astype(np.uint8)
        return np.broadcast_to(mean, image.shape).copy()

    @staticmethod
    def _picture(image: Tensor) -> Picture:
        pixels = (image.detach().cpu().double().clamp(0, 1) * 255).round().to(torch.uint8)
        return np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())


def _by_format(points: Sequence[OperatingPoint]) -> dict[TransportFormat, list[int]]:
    groups: dict[TransportFormat, list[int]] = defaultdict(list)
    for row, point in enumerate(points):
        if point.offer is not None and point.offer.format is not None:
            groups[point.offer.format].append(row)
    return groups


def separation(
    images: Tensor, ratio: float | Fraction, snr_db: float, codec: str | ImageCodec = "avif", seed: int = 0
) -> Separated:
    """Separate source and channel coding over AWGN in one call; see `Separation` for other channels and bounds.

    Args:
        images: Float `[batch, 3, height, width]` in [0, 1].
        ratio: Bandwidth ratio k/n.
        snr_db: SNR [dB].
        codec: Name of a codec, or an `ImageCodec`.
        seed: Of the noise.
    """
    return Separation(codec)(images, ratio, snr_db, seed=seed)
