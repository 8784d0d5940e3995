"""What sends images in a simulation, measured point by point: trained codecs, and separation over the same channel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from chanlab.cli.image_systems import IMAGE_CODECS, channel_name
from chanlab.errors import UsageError
from chanlab.jscc.channels import SymbolChannel
from chanlab.jscc.codec import Codec
from chanlab.jscc.evaluation import Link, digest, measured_records, most_scales, size_of, stated_ratio
from chanlab.jscc.separation import Avif, Separation, System, find_codec, sweep
from chanlab.metrics.images import ms_ssim
from chanlab.records import Record, load_records, save_records

Ratio = Fraction | None
"""A bandwidth ratio k/n, pilots included; None: the codec's highest, and pilots on top."""


@dataclass(frozen=True, eq=False)
class Images:
    """Images of one size.

    Attributes:
        batches: From `chanlab.cli.image_systems.image_batches`.
        data: Name of their collection.
        split: Their split.
    """

    batches: Sequence[Mapping[str, Any]]
    data: str
    split: str

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of the first; others may be turned."""
        first: Tensor = self.batches[0]["image"]
        return (first.shape[1], first.shape[2], first.shape[3])

    @property
    def size(self) -> str:
        """Name of their size."""
        return size_of(self.shape)

    def __len__(self) -> int:
        return sum(len(batch["id"]) for batch in self.batches)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, str]:
        """Image, id, and name of the photograph."""
        for batch in self.batches:
            if index < len(batch["id"]):
                return batch["image"][index], batch["id"][index], batch["name"][index]
            index -= len(batch["id"])
        raise IndexError(index)


class Arrived(NamedTuple):
    """An image as it was received.

    Attributes:
        image: `[3, height, width]`.
        psnr: [dB].
        ms_ssim: MS-SSIM.
        lost: Whether nothing of it arrived.
    """

    image: Tensor
    psnr: float
    ms_ssim: float
    lost: bool


class Sender(ABC):
    """A system that sends images of one size through one channel with one receiver.

    Args:
        name: As records call the system.
        images: The images.
        channel: As it was asked for; see `make_channel`.
        csi: What the receiver knows; empty if the channel has no such choice.
        ratios: Bandwidth ratios that it keeps to.
        seed: Of noise and fading.
    """

    inputs: str
    """Checksum of what its figures are computed from, apart from ratio and SNR."""

    def __init__(self, name: str, images: Images, channel: str, csi: str, ratios: Sequence[Ratio], seed: int) -> None:
        self.name, self.images, self.channel, self.csi = name, images, channel, csi
        self.ratios, self.seed = tuple(ratios), seed

    @abstractmethod
    def measure(self, ratio: Ratio, snr_db: float) -> list[Record]:
        """Records of all images at a ratio and an SNR [dB]."""

    @abstractmethod
    def receive(self, index: int, ratio: Ratio, snr_db: float) -> Arrived:
        """One image at a ratio and an SNR [dB]: the same noise as in `measure`."""

    @property
    def where(self) -> dict[str, str]:
        """Of the condition of its records: the channel, and what the receiver knows."""
        return {"channel": channel_name(self.channel), **({"csi": self.csi} if self.csi else {})}

    def _digest(self, *parts: Codec | str) -> str:
        path = Path(self.channel.partition(",")[0])
        described = path.read_text(encoding="utf-8") if path.suffix in (".yaml", ".yml") and path.is_file() else ""
        pictures = [batch["image"] for batch in self.images.batches]
        return digest(*parts, *pictures, self.channel, described, self.csi, str(self.seed))


class CodecSender(Sender):
    """A trained codec.

    Args:
        name: See `Sender`.
        codec: The codec.
        images: See `Sender`.
        channel: See `Sender`.
        csi: See `Sender`.
        built: The channel itself.
        ratios: Those of them that the codec can't keep to on this channel are left out.
        seed: See `Sender`.
        device: Where images are sent.
    """

    def __init__(
        self,
        name: str,
        codec: Codec,
        images: Images,
        channel: str,
        csi: str,
        built: SymbolChannel,
        ratios: Sequence[Ratio],
        seed: int = 1,
        device: str = "cpu",
    ) -> None:
        self.link = Link(codec, built, seed, device)
        super().__init__(name, images, channel, csi, [r for r in ratios if self.link.fits(images.shape, r)], seed)
        self.parameters = sum(p.numel() for p in codec.parameters())
        self.inputs = self._digest(codec)

    def measure(self, ratio: Ratio, snr_db: float) -> list[Record]:
        """See `Sender.measure`."""
        got, images = self.link.measure(self.images.batches, snr_db, ratio), self.images
        stated = stated_ratio(got, images.shape) if ratio is None else str(ratio)
        condition: dict[str, str | float] = {
            "snr_db": float(snr_db),
            "ratio": stated,
            "size": images.size,
            **self.where,
        }
        return measured_records(
            got,
            self.name,
            condition,
            data=images.data,
            split=images.split,
            seeds=[self.seed],
            parameters=self.parameters,
            pilots="within" if ratio else "on top",
        )

    def receive(self, index: int, ratio: Ratio, snr_db: float) -> Arrived:
        """See `Sender.receive`."""
        image, sample, _ = self.images[index]
        received, got = self.link.send(image[None], sample[None], snr_db, ratio)
        return Arrived(received[0], float(got.psnr), float(got.ms_ssim), bool(got.outage))


class SeparationSender(Sender):
    """Separate source and channel coding over the same channel, each image at its best operating point.

    Args:
        codec: Image codec, a key of `IMAGE_CODECS`.
        images: See `Sender`.
        channel: See `Sender`.
        csi: See `Sender`.
        built: The channel itself.
        ratios: See `Sender`.
        seed: See `Sender`.
        device: Where blocks are decoded.
    """

    def __init__(
        self,
        codec: str,
        images: Images,
        channel: str,
        csi: str,
        built: SymbolChannel,
        ratios: Sequence[Fraction],
        seed: int = 1,
        device: str = "cpu",
    ) -> None:
        super().__init__(f"{IMAGE_CODECS[codec]} + LDPC", images, channel, csi, ratios, seed)
        small = min(images.shape[1:]) < 256  # thoroughness is cheap
        source = Avif(True, 4 if small else 6) if codec == "avif" else find_codec(codec)
        self.separation = Separation(source, channel=built, device=device)
        self.inputs = self._digest(codec)

    def measure(self, ratio: Ratio, snr_db: float) -> list[Record]:
        """See `Sender.measure`."""
        assert ratio is not None
        system, images = System(self.name, self.separation), self.images
        made = sweep([system], images.batches, [ratio], [snr_db], images.data, images.split, self.seed)
        return [r | {"condition": r["condition"] | self.where} for r in made]

    def receive(self, index: int, ratio: Ratio, snr_db: float) -> Arrived:
        """See `Sender.receive`."""
        assert ratio is not None
        image, sample, _ = self.images[index]
        out = self.separation(image[None], ratio, snr_db, ids=[int(sample)], seed=self.seed)
        similar = ms_ssim(out.images.double(), image[None].double(), most_scales(image))
        return Arrived(out.images[0], float(out.psnr_db), float(similar), bool(out.outage[0]))


def codec_senders(
    codecs: Mapping[str, Codec],
    images: Sequence[Images],
    channel: str,
    receivers: Mapping[str, SymbolChannel],
    ratios: Sequence[Ratio],
    seed: int = 1,
    device: str = "cpu",
) -> list[Sender]:
    """Each codec with each receiver and each size of images.

    Args:
        codecs: Trained codecs by name.
        images: Of several sizes.
        channel: See `Sender`.
        receivers: From `make_receivers`.
        ratios: Bandwidth ratios, each for those codecs that can keep to it.
        seed: Of noise and fading.
        device: Where images are sent.

    Raises:
        UsageError: A codec can keep to none of the ratios.
    """
    found: list[Sender] = []
    for name, codec in codecs.items():
        for csi, built in receivers.items():
            made = [CodecSender(name, codec, i, channel, csi, built, ratios, seed, device) for i in images]
            fitting = [sender for sender in made if sender.ratios]
            if not fitting:
                asked = [made[0].link.module.asked_ratio(images[0].shape, r) for r in ratios if r is not None]
                raise UsageError(
                    f"{name} was built to send at k/n {codec.max_ratio}, not {' or '.join(map(str, ratios))}, which "
                    f"over {channel} asks it for {' or '.join(f'{float(r):.4f}' for r in asked)} symbols per source "
                    "value: take other --ratios, or `--ratios own`, with pilots on top."
                )
            found += fitting
    return found


def measure_all(senders: Sequence[Sender], snrs_db: Sequence[float], path: Path) -> list[Record]:
    """Records of all senders, written point by point; those that are there already are not measured again.

    Args:
        senders: The systems.
        snrs_db: [dB].
        path: The file of records. A point is known by its `inputs`: weights, images, channel, seed, ratio and SNR.
    """
    known: dict[str, list[Record]] = {}
    for r in load_records(path):
        known.setdefault(str(r.get("inputs", "")), []).append(r)
    points = [(sender, ratio, snr) for sender in senders for ratio in sender.ratios for snr in snrs_db]
    records: list[Record] = []
    with tqdm(points, unit="point", disable=not points) as bar:
        for sender, ratio, snr in bar:
            bar.set_description(f"{sender.name} {sender.csi} {sender.images.size}".replace("  ", " "))
            inputs = f"{sender.inputs} {ratio or 'own'} {float(snr):g}"
            if inputs not in known:
                with torch.inference_mode():
                    known[inputs] = [r | {"inputs": inputs} for r in sender.measure(ratio, snr)]
                save_records(path, known[inputs])
            records += [r | {"system": sender.name} for r in known[inputs]]
    return records
