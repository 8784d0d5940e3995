"""Pictures of stored channels: the scene with its users, one channel, and what the statistics look like.

Every function draws into axes that it is given, so that `chanlab plot` and the demo's report compose them freely.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure

from chanlab.channels.paths import SPEED_OF_LIGHT

Array = npt.NDArray[Any]

COLORS = {
    "train": "#0072B2",
    "val": "#E69F00",
    "test": "#D55E00",
    "guard": "#A0A0A0",
    "ink": "#24292F",
    "building": "#D9DCE0",
    "transmitter": "#B2182B",
}
SPLIT_LABELS = {"train": "training", "val": "validation", "test": "test", "guard": "guard (not used)"}


def new_figure(width: float = 7.0, height: float = 4.0) -> Figure:
    """A figure [inches] with the house's look, drawn without any display."""
    figure = Figure(figsize=(width, height), layout="constrained", dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: Axes, title: str = "", xlabel: str = "", ylabel: str = "") -> None:
    """Labels, a light grid and no needless frame."""
    axes.set_title(title, loc="left", fontsize=10, color=COLORS["ink"], fontweight="bold")
    axes.set_xlabel(xlabel, fontsize=9)
    axes.set_ylabel(ylabel, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(True, color="#E6E8EB", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def png(figure: Figure) -> bytes:
    """The figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def save(figure: Figure, path: str | Path) -> Path:
    """Write the figure in the format that the name's ending asks for; the folder is created."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def draw_scene(
    axes: Axes,
    triangles: Array | None,
    transmitter: Array,
    tracks: Mapping[str, Sequence[Array]],
    title: str = "Scene from above",
) -> None:
    """Buildings, the transmitter and where users move, split by split.

    Args:
        axes: Where to draw.
        triangles: Building surfaces seen from above [m], `[triangle, 3, 2]`, or None if the scene is not known.
        transmitter: Position [m], `[3]`.
        tracks: For each split, positions of its users [m], each `[anchor, 3]` (one anchor for static users).
        title: Title of the axes.
    """
    if triangles is not None and len(triangles):
        buildings = PolyCollection(list(triangles), facecolor=COLORS["building"], edgecolor="none", zorder=1)
        axes.add_collection(buildings, autolim=False)  # in a whole city a few streets of users would be too small
    for split in ("guard", "train", "val", "test"):
        users = [np.asarray(user)[:, :2] for user in tracks.get(split, ())]
        if not users:
            continue
        color, label = COLORS[split], f"{SPLIT_LABELS[split]}: {len(users)}"
        moving = [user for user in users if len(user) > 1]
        if moving:
            axes.add_collection(LineCollection(moving, colors=color, linewidths=1.1, zorder=3, alpha=0.8))
        start = np.array([user[len(user) // 2] for user in users])
        axes.scatter(start[:, 0], start[:, 1], s=5 if moving else 4, color=color, zorder=3, label=label, linewidths=0)
    axes.scatter(
        transmitter[0], transmitter[1], marker="^", s=70, color=COLORS["transmitter"], zorder=5, label="transmitter"
    )
    axes.margins(0.15)
    axes.autoscale_view()
    axes.set_aspect("equal", adjustable="datalim")
    tidy(axes, title, "x [m]", "y [m]")
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, markerscale=0.9, frameon=False)


def draw_rays(axes: Axes, transmitter: Array, receiver: Array, vertices: Array, depth: Array, power_db: Array) -> None:
    """Rays of one link from above; dotted where a ray has vertices that the store does not keep.

    Args:
        axes: Where to draw.
        transmitter: Position [m], `[3]`.
        receiver: Position [m], `[3]`.
        vertices: First and last interaction point of each path [m], `[2, 3, path]`.
        depth: Number of interactions of each path, `[path]`.
        power_db: Power of each path [dB], `[path]`: stronger paths are drawn stronger.
    """
    if not len(depth):
        return
    strength = np.clip((power_db - power_db.max() + 40) / 40, 0.08, 1.0)
    for i in np.argsort(power_db):
        style: dict[str, Any] = {"color": "#009E73", "alpha": float(strength[i]), "linewidth": 1.3, "zorder": 4}
        first, last = vertices[0, :2, i], vertices[1, :2, i]
        stops = [transmitter[:2], receiver[:2]] if depth[i] == 0 else [transmitter[:2], first]
        axes.plot(*np.array(stops).T, **style)
        if depth[i] > 0:
            axes.plot(*np.array([first, last]).T, **style | {"linestyle": "-" if depth[i] <= 2 else ":"})
            axes.plot(*np.array([last, receiver[:2]]).T, **style)
    axes.plot([], [], color="#009E73", label="paths of one user")
    axes.scatter(
        receiver[0], receiver[1], marker="o", s=36, color="white", edgecolor="#009E73", linewidths=1.6, zorder=6
    )


def draw_channel(axes: Axes, response: Array, times: Array, frequencies: Array, title: str = "One channel") -> None:
    """Magnitude of a frequency response over time, relative to its mean power.

    Args:
        axes: Where to draw.
        response: Complex CFR of one antenna pair, `[time, subcarrier]`.
        times: [s], `[time]`.
        frequencies: Offsets from the carrier [Hz], `[subcarrier]`.
        title: Title of the axes.
    """
    power = np.abs(response) ** 2
    level = 10 * np.log10(np.maximum(power / max(power.mean(), 1e-300), 1e-4))
    mhz, ms = frequencies / 1e6, times * 1e3
    high = float(level.max())
    low = min(max(-25.0, float(level.min())), high - 6)  # what hardly fades shall look so
    image = axes.pcolormesh(ms, mhz, level.T, cmap="viridis", vmin=low, vmax=high, shading="nearest")
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02)
    bar.set_label("|H|² over its mean [dB]", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    tidy(axes, title, "time [ms]", "frequency from the carrier [MHz]")
    axes.grid(False)


def draw_cdf(axes: Axes, values: Array, title: str, xlabel: str) -> None:
    """Empirical distribution function, its median marked."""
    values = np.sort(values[np.isfinite(values)])
    tidy(axes, title, xlabel, "share of links at or below")
    axes.set_ylim(0, 1)
    if not len(values):
        return
    axes.step(values, np.arange(1, len(values) + 1) / len(values), where="post", color=COLORS["train"], linewidth=1.6)
    median = float(np.median(values))
    axes.axvline(median, color=COLORS["ink"], linewidth=0.8, linestyle="--")
    axes.annotate(f"median {median:.3g}", (median, 0.04), xytext=(4, 0), textcoords="offset points", fontsize=8)


def draw_path_gain(axes: Axes, distance: Array, gain: Array, line_of_sight: Array, carrier: float) -> None:
    """Path gain over distance, free space beside it.

    Args:
        axes: Where to draw.
        distance: Between transmitter and receiver [m], `[link]`.
        gain: Sum of the powers of a link's paths, linear, `[link]`; zero where there is no path.
        line_of_sight: Whether a link has a path without interactions, `[link]`.
        carrier: [Hz].
    """
    there = gain > 0
    for sight, color, label in ((True, "#0072B2", "line of sight"), (False, "#D55E00", "no line of sight")):
        pick = there & (line_of_sight == sight)
        if pick.any():
            axes.scatter(
                distance[pick], 10 * np.log10(gain[pick]), s=6, alpha=0.5, linewidths=0, color=color, label=label
            )
    if there.any():
        reach = np.geomspace(max(distance[there].min(), 1e-3), distance[there].max(), 100)
        friis = 20 * np.log10(SPEED_OF_LIGHT / carrier / (4 * np.pi * reach))
        axes.plot(reach, friis, color=COLORS["ink"], linewidth=1.0, linestyle="--", label="free space")
        axes.set_xscale("log")
        axes.legend(fontsize=7, markerscale=2)
    tidy(axes, "Path gain over distance", "distance [m]", "path gain [dB]")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="x", which="minor", labelsize=7)
