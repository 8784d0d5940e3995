"""Curves of image transmission: quality over SNR, a line per system, from records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from chanlab.cli.figures import tidy

LABELS = {"psnr": "PSNR [dB]", "ms_ssim": "MS-SSIM x, as -10 log10(1 - x) [dB]", "outage": "images lost"}


def lines(
    records: Iterable[Mapping[str, Any]], metric: str, condition: Mapping[str, Any]
) -> dict[str, list[tuple[float, float]]]:
    """(SNR [dB], value) of each system, by SNR.

    Args:
        records: Records with `snr_db` in their condition.
        metric: `psnr`, `ms_ssim`, ...
        condition: What records must have, such as `{"ratio": "1/6", "size": "96x96"}`.
    """
    found: dict[str, dict[float, float]] = {}
    for r in records:
        held = r["condition"]
        if r["metric"] == metric and r["value"] is not None and condition.items() <= held.items():
            found.setdefault(r["system"], {})[float(held["snr_db"])] = r["value"]
    return {system: sorted(points.items()) for system, points in found.items()}


def draw_curves(
    axes: Axes,
    records: Sequence[Mapping[str, Any]],
    metric: str,
    condition: Mapping[str, Any],
    styles: Mapping[str, Mapping[str, Any]],
    title: str = "",
) -> None:
    """Draw quality over SNR.

    Args:
        axes: Where.
        records: From `chanlab.jscc.separation.sweep`, or any with the same conditions.
        metric: What is drawn.
        condition: Which records; see `lines`.
        styles: Line style of each system (arguments of `Axes.plot`), drawn in this order; others are left out.
        title: Title.
    """
    held = lines(records, metric, condition)
    for system, style in styles.items():
        if system in held:
            snr, value = zip(*held[system], strict=True)
            if metric == "ms_ssim":  # differences near 1 are the ones that are seen
                value = tuple(-10 * math.log10(max(1 - v, 1e-6)) for v in value)
            axes.plot(snr, value, **{"label": system, "markersize": 4, **style})
    tidy(axes, title, "SNR [dB]", LABELS.get(metric, metric))
