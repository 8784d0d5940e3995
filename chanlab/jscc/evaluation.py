"""Codecs measured over SNRs, bandwidth ratios and receivers: records of quality and channel uses, and losses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from chanlab.errors import UsageError
from chanlab.jscc.channels import SymbolChannel
from chanlab.jscc.codec import Codec
from chanlab.jscc.contract import BEST_DB, source_values
from chanlab.jscc.module import JSCCModule
from chanlab.metrics.images import fitting_scales, ms_ssim, psnr
from chanlab.records import Record, record


class Measured(NamedTuple):
    """What images became, one value for each, float64 `[image]`.

    Attributes:
        psnr: [dB].
        ms_ssim: With as many scales as the images have room for, see `most_scales`.
        uses: Channel uses, side information, a base layer and pilots included.
        pilot_uses: Those of the pilots.
        side_uses: Those of side information and of a base layer.
        outage: 1 where a base layer was lost, so that mid-grey is shown, else 0.
    """

    psnr: Tensor
    ms_ssim: Tensor
    uses: Tensor
    pilot_uses: Tensor
    side_uses: Tensor
    outage: Tensor


class Link:
    """A codec and a channel with its receiver.

    An image's channel depends on (seed, image id) alone: the same one at each SNR and ratio, with each codec and (where
    receivers alone differ) with each receiver.

    Args:
        codec: The codec; it is set to evaluation, on the device, and to the channel's convention.
        channel: The channel.
        seed: Of noise and fading.
        device: Where images are sent.
    """

    def __init__(self, codec: Codec, channel: SymbolChannel, seed: int = 1, device: str = "cpu") -> None:
        self.codec, self.channel, self.seed, self.device = codec, channel, seed, device
        self.module = JSCCModule(codec, channel, seed=seed).eval().to(device)

    def fits(self, image_shape: tuple[int, int, int], ratio: Fraction | None) -> bool:
        """Whether the codec can keep to a bandwidth ratio on this channel."""
        return ratio is None or self.codec.sends_at(self.module.asked_ratio(image_shape, ratio))

    @torch.inference_mode()
    def send(
        self, images: Tensor, ids: Tensor, snr_db: float, ratio: Fraction | None = None
    ) -> tuple[Tensor, Measured]:
        """Send images.

        Args:
            images: `[batch, 3, height, width]`, in [0, 1].
            ids: Int64 `[batch]`.
            snr_db: SNR per complex symbol [dB].
            ratio: Channel uses over source values, pilots included; None: the codec's highest, and pilots on top.

        Returns:
            Received images `[batch, 3, height, width]`, and what became of each, on the CPU.
        """
        images, ids = images.to(self.device), ids.to(self.device)
        shown, received = self.module.receive(images, ids, snr_db, ratio)
        values = (
            psnr(shown, images, "none").clamp(max=BEST_DB),
            ms_ssim(shown, images, most_scales(images), "none"),
            received.uses,
            received.pilot_uses,
            received.data_uses - -(-received.used.sum(1) // self.channel.symbols_per_use),
            torch.zeros_like(received.uses) if received.base_lost is None else received.base_lost,
        )
        return shown.cpu(), Measured(*(v.double().cpu() for v in values))

    def measure(
        self,
        batches: Iterable[Mapping[str, Tensor]],
        snr_db: float,
        ratio: Fraction | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Measured:
        """Send batches of `{"image", "id"}`; `progress` is told how many images have been sent."""
        parts = []
        for batch in batches:
            parts.append(self.send(batch["image"], batch["id"], snr_db, ratio)[1])
            if progress is not None:
                progress(len(batch["id"]))
        return Measured(*(torch.cat(values) for values in zip(*parts, strict=True)))


def most_scales(images: Tensor) -> int:
    """Scales of MS-SSIM that images `[..., height, width]` have room for, at most 5: those of 96 x 96 pixels have 4.

    Raises:
        UsageError: If they have room for none.
    """
    found = fitting_scales(min(images.shape[-2:]))
    if not found:
        raise UsageError(f"MS-SSIM needs images from 11x11 pixels on, not {images.shape[-2]}x{images.shape[-1]}.")
    return found


def size_of(image_shape: Sequence[int]) -> str:
    """Name of a size, the shorter side first: portrait format counts alike."""
    return "x".join(str(side) for side in sorted(image_shape[-2:]))


def stated_ratio(measured: Measured, image_shape: tuple[int, int, int]) -> str:
    """k/n of what images took, as a fraction where it is a plain one."""
    k_over_n = float(measured.uses.mean()) / source_values(image_shape)
    fraction = Fraction(k_over_n).limit_denominator(100)
    return str(fraction) if abs(float(fraction) - k_over_n) < 1e-9 else f"{k_over_n:.4f}"


def measured_records(
    measured: Measured, system: str, condition: Mapping[str, str | int | float | bool], **fields: object
) -> list[Record]:
    """Records of means: `psnr` [dB], `ms_ssim`, `uses`, `pilot_uses`, `side_uses`, `outage` (share of images).

    Args:
        measured: Of some images.
        system: Name of the codec.
        condition: `snr_db`, `ratio`, `size`, `channel`, `csi`: what is needed to tell records apart.
        **fields: More fields of `chanlab.records.record`.

    Returns:
        Records; `deviation` is that over images, divided by the root of their number.
    """
    made = []
    for metric, values in measured._asdict().items():
        deviation = float(values.std() / len(values) ** 0.5) if len(values) > 1 else None
        made.append(
            record(
                system=system,
                metric=metric,
                value=float(values.mean()),
                deviation=deviation,
                condition=condition,
                n=len(values),
                unit="dB" if metric == "psnr" else "",
                **fields,  # type: ignore[arg-type]
            )
        )
    return made


@dataclass(frozen=True)
class Loss:
    """What a receiver loses against a better one at an SNR.

    Attributes:
        psnr_db: PSNR lost [dB].
        snr_db: Additional SNR that it needs for the PSNR that it has [dB]; None outside of what was measured.
    """

    psnr_db: float
    snr_db: float | None


def loss(points: Mapping[float, float], reference: Mapping[float, float]) -> dict[float, Loss]:
    """Losses of a curve against another.

    Args:
        points: PSNR over SNR [dB].
        reference: The same of the better receiver, interpolated linearly between its SNRs.

    Returns:
        A loss for each SNR that both have.
    """
    ordered = sorted(reference.items())
    found = {}
    for snr, value in points.items():
        if snr not in reference:
            continue
        equal = None
        for (low, a), (high, b) in pairwise(ordered):
            if min(a, b) <= value <= max(a, b) and a != b:
                equal = low + (high - low) * (value - a) / (b - a)
                break
        found[snr] = Loss(reference[snr] - value, None if equal is None else snr - equal)
    return found


def loss_records(records: Iterable[Mapping[str, Any]]) -> list[Record]:
    """What receivers that estimate the channel, or ignore it, lose against one that knows it.

    Args:
        records: Of `psnr`, with `csi` and `snr_db` in their conditions; `perfect` is the reference.

    Returns:
        Records of `psnr_loss` at the same SNR, and of `snr_loss` at the same PSNR where the reference has it, [dB]; see
        `loss`.
    """
    curves: dict[tuple[Any, ...], dict[float, Mapping[str, Any]]] = {}
    for r in records:
        if r["metric"] == "psnr" and "csi" in r["condition"]:
            kept = tuple((k, v) for k, v in r["condition"].items() if k not in ("csi", "snr_db"))
            curves.setdefault((r["system"], r["data"], kept, r["condition"]["csi"]), {})[r["condition"]["snr_db"]] = r
    made = []
    for (*rest, csi), points in curves.items():
        reference = curves.get((*rest, "perfect"))
        if csi == "perfect" or reference is None:
            continue
        values = [{snr: r["value"] for snr, r in curve.items()} for curve in (points, reference)]
        for snr, lost in loss(*values).items():
            shared = {k: points[snr][k] for k in ("system", "data", "split", "condition", "n", "seeds")}
            found = {"psnr_loss": lost.psnr_db, "snr_loss": lost.snr_db}
            made += [record(**shared, metric=m, value=v, unit="dB") for m, v in found.items() if v is not None]
    return made


def digest(*parts: nn.Module | Tensor | str) -> str:
    """Checksum of what a figure is computed from: weights, images, words."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            found.update(part.encode() + b"\0")
            continue
        if isinstance(part, nn.Module):  # what it does with its weights: a base layer, for example
            found.update(f"{type(part).__name__}({part.extra_repr()})".encode())
        tensors = [part] if isinstance(part, Tensor) else [t for _, t in sorted(part.state_dict().items())]
        for tensor in tensors:
            found.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
