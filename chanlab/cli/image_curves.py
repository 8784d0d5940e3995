"""Tables and curves of image transmission: quality over SNR, a line per system, from records."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from chanlab.cli.common import table
from chanlab.cli.figures import new_figure, tidy

LABELS = {"psnr": "PSNR [dB]", "ms_ssim": "MS-SSIM x, as -10 log10(1 - x) [dB]", "outage": "images lost"}
SEPARATION_COLORS = {
    "JPEG": "#E69F00",
    "JPEG 2000": "#56B4E9",
    "WebP": "#009E73",
    "AVIF": "#0072B2",
    "BPG": "#CC79A7",
}
Style = dict[str, Any]
"""Arguments of `Axes.plot`."""


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


def panels(records: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(size, ratio) of all records, small images and wide bands first."""
    found = {(r["condition"]["size"], r["condition"]["ratio"]) for r in records}
    return sorted(found, key=lambda p: (int(p[0].split("x")[0]), -Fraction(p[1])))


def quality_tables(records: Sequence[Mapping[str, Any]]) -> str:
    """A table for each size and ratio: PSNR, MS-SSIM and, where images were lost, how many, over SNR."""
    texts = []
    for size, ratio in panels(records):
        of = {"size": size, "ratio": ratio}
        psnr, similar, outage = (lines(records, metric, of) for metric in ("psnr", "ms_ssim", "outage"))
        snrs = sorted({s for points in psnr.values() for s, _ in points})
        rows = []
        for system, points in psnr.items():
            cells, other, lost = dict(points), dict(similar.get(system, ())), dict(outage.get(system, ()))
            text = [
                f"{cells[s]:.1f}"
                + (f" {other[s]:.3f}" if s in other else "")
                + (f" ({lost[s]:.0%})" if lost.get(s, 0) >= 0.005 else "")
                if s in cells
                else ""
                for s in snrs
            ]
            rows.append([system, *text])
        counts = sorted({r["n"] for r in records if of.items() <= r["condition"].items()})
        title = f"{' or '.join(map(str, counts))} images of {size}, k/n = {ratio}: PSNR [dB], MS-SSIM"
        title += " (images lost)" if any(v >= 0.005 for points in outage.values() for _, v in points) else ""
        texts.append(f"{title}\n{table(['SNR [dB]', *(f'{s:g}' for s in snrs)], rows)}")
    return "\n\n".join(texts)


def separation_styles(names: Iterable[str]) -> dict[str, Style]:
    """Line styles of separation: a colour for each codec, bounds thin, the cliff dotted."""
    held: dict[str, Style] = {}
    markers = itertools.cycle("v^<>")
    for name in names:
        color = next(
            (c for codec, c in SEPARATION_COLORS.items() if name in (f"{codec} + LDPC", f"{codec} files + LDPC")), None
        )
        if "sent for" in name:
            held[name] = {"color": "#D55E00", "linestyle": ":", "marker": next(markers), "linewidth": 1.2}
        elif "files" in name:
            held[name] = {"color": color, "linestyle": "--", "marker": "x", "linewidth": 1.2}
        elif color is None:
            held[name] = {"color": "#666666", "linestyle": "--" if "capacity" in name else "-.", "linewidth": 1}
        else:
            held[name] = {"color": color, "marker": "o", "linewidth": 1.6}
    return held


def quality_curves(records: Sequence[Mapping[str, Any]], styles: Mapping[str, Mapping[str, Any]]) -> Figure:
    """PSNR above, MS-SSIM below, a column for each size and ratio.

    Args:
        records: See `draw_curves`.
        styles: See `draw_curves`.
    """
    columns = panels(records)
    figure = new_figure(max(6.5, 4.2 * len(columns) + 0.5), 7.5)
    grid = figure.subplots(2, len(columns), squeeze=False, sharex=True)
    for column, (size, ratio) in enumerate(columns):
        for row, metric in enumerate(("psnr", "ms_ssim")):
            title = f"{size}, k/n = {ratio}" if row == 0 else ""
            draw_curves(grid[row][column], records, metric, {"size": size, "ratio": ratio}, styles, title)
    labelled = {t: h for axes in grid[0] for h, t in zip(*axes.get_legend_handles_labels(), strict=True)}
    shown = [styles[name].get("label", name) for name in styles]
    order = sorted(labelled, key=shown.index)
    figure.legend(
        [labelled[t] for t in order],
        order,
        loc="outside lower center",
        ncols=min(4, 2 * len(columns)),
        fontsize=8,
        frameon=False,
        handlelength=3.2,
    )
    return figure
