"""Separation systems measured over SNRs and bandwidth ratios: records of PSNR, MS-SSIM and outage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from chanlab.jscc.separation.baseline import Separated, Separation
from chanlab.records import Record, record


@dataclass(frozen=True)
class System:
    """A line of a plot.

    Attributes:
        name: `avif + LDPC`.
        separation: The system.
        simulate: Really send the images; otherwise figures are expectations over the table of block errors.
        assumed_snr_db: SNR that the operating point is chosen for, whatever the channel's; None: the channel's.
    """

    name: str
    separation: Separation
    simulate: bool = True
    assumed_snr_db: float | None = None


def sweep(
    systems: Sequence[System],
    batches: Iterable[Mapping[str, Tensor]],
    ratios: Sequence[Fraction],
    snrs_db: Sequence[float],
    data: str,
    split: str = "test",
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> list[Record]:
    """Mean PSNR, MS-SSIM and share of lost images of systems.

    Args:
        systems: Systems; each keeps its searches over SNRs and ratios.
        batches: `{"image": [batch, 3, height, width], "id": [batch]}`, all of one size (portrait format counts alike).
        ratios: Bandwidth ratios k/n.
        snrs_db: SNRs [dB].
        data: Name of the images.
        split: Their split.
        seed: Of noise.
        progress: Told what is done.

    Returns:
        Records with the condition `{"snr_db", "ratio", "size"}` (and `sent_for_db`), metrics `psnr` [dB],
        `ms_ssim`, `outage` and channel `uses`; their `deviation` is that over images, divided by the root of their
        number.
    """
    values: dict[tuple[System, Fraction, float], list[tuple[float, float, float, float]]] = defaultdict(list)
    size, seeds = "", [seed]
    for batch in batches:
        images = batch["image"]
        size = "x".join(str(s) for s in sorted(images.shape[2:]))
        for system in systems:
            for ratio in ratios:
                for snr in snrs_db:
                    out = system.separation(
                        images,
                        ratio,
                        snr,
                        assumed_snr_db=system.assumed_snr_db,
                        simulate=system.simulate,
                        ids=batch["id"].tolist(),
                        seed=seed,
                    )
                    values[system, ratio, snr] += _figures(out, images, system.separation)
            if progress is not None:
                progress(f"{system.name}, {len(images)} images of {size}")
    records = []
    for (system, ratio, snr), rows in values.items():
        condition: dict[str, str | float] = {"snr_db": float(snr), "ratio": str(ratio), "size": size}
        if system.assumed_snr_db is not None:
            condition["sent_for_db"] = system.assumed_snr_db
        for i, (metric, unit) in enumerate((("psnr", "dB"), ("ms_ssim", ""), ("outage", ""), ("uses", ""))):
            column = torch.tensor([row[i] for row in rows], dtype=torch.float64)
            finite = column.clamp(max=100.0) if metric == "psnr" else column  # an image without any error
            records.append(
                record(
                    system=system.name,
                    data=data,
                    split=split,
                    condition=condition,
                    metric=metric,
                    value=float(finite.mean()),
                    deviation=float(finite.std() / len(rows) ** 0.5) if len(rows) > 1 else None,
                    n=len(rows),
                    seeds=seeds,
                    unit=unit,
                    simulated=system.simulate,
                )
            )
    return records


def _figures(out: Separated, images: Tensor, separation: Separation) -> list[tuple[float, float, float, float]]:
    """PSNR, MS-SSIM, outage and channel uses of each image; expectations where nothing was sent."""
    from chanlab.metrics.images import fitting_scales, ms_ssim

    sent = (images.double() * 255).round() / 255
    scales = max(1, fitting_scales(min(images.shape[2:])))
    similar = ms_ssim(out.images.double(), sent, scales, reduction="none")
    uses = out.uses.double().tolist()
    if out.simulated:
        return list(zip(out.psnr_db.tolist(), similar.tolist(), out.outage.double().tolist(), uses, strict=True))
    lost = ms_ssim(separation.lost_images(images).double(), sent, scales, reduction="none")
    errors = [1.0 if p.offer is None else p.offer.error for p in out.points]
    return [
        (psnr, (1 - e) * a + e * b, e, u)
        for psnr, a, b, e, u in zip(
            out.expected_db.tolist(), similar.tolist(), lost.tolist(), errors, uses, strict=True
        )
    ]
