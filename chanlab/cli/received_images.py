"""Received images side by side: a row per system, a column per SNR."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from chanlab.cli.figures import COLORS, new_figure

DETAIL = 160
"""Side of the part of a photograph that is shown [pixel]."""


@dataclass(frozen=True)
class Shown:
    """An image as it was received.

    Attributes:
        image: `[3, height, width]`, in [0, 1].
        text: What is written below it.
    """

    image: Tensor
    text: str


def received_picture(
    sent: Tensor, rows: Mapping[str, Sequence[Shown]], columns: Sequence[str], title: str = "", detail: int = DETAIL
) -> Figure:
    """Images side by side, pixel by pixel; of images larger than `detail` that part which has most detail.

    Args:
        sent: The image that was sent, `[3, height, width]`, in [0, 1]; it stands at the left, a larger one whole in the
            first row, with a frame around the part.
        rows: For each system what was received, column by column.
        columns: Headings.
        title: Above all.
        detail: Side of the part that is shown [pixel].
    """
    top, left, height, width = most_detailed(sent, detail)
    whole = (height, width) == tuple(sent.shape[1:])
    part = (slice(None), slice(top, top + height), slice(left, left + width))
    cell = 1.75
    figure = new_figure(cell * (len(columns) + 1) + 0.4, (0.93 * cell * height / width + 0.24) * len(rows) + 0.5)
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(w_pad=0.02, h_pad=0.02, wspace=0.01, hspace=0.01)
    grid = figure.subplots(len(rows), len(columns) + 1, squeeze=False)
    for i, (system, received) in enumerate(rows.items()):
        first = grid[i][0]
        if i == 0 and not whole:
            _show(first, sent, "", "sent")
            frame = (left - 0.5, top - 0.5)
            first.add_patch(Rectangle(frame, width, height, fill=False, edgecolor="white", linewidth=2.2))
            first.add_patch(Rectangle(frame, width, height, fill=False, edgecolor="#D55E00", linewidth=1.1))
        else:
            _show(first, sent[part], "", "sent" if i == 0 else "")
        first.set_ylabel(system, fontsize=8, color=COLORS["ink"])
        for j, shown in enumerate(received):
            _show(grid[i][j + 1], shown.image[part], shown.text, columns[j] if i == 0 else "")
    if title:
        figure.suptitle(title, fontsize=9, color=COLORS["ink"], x=0.01, ha="left")
    return figure


def most_detailed(image: Tensor, side: int) -> tuple[int, int, int, int]:
    """Top, left, height and width of the part of an image with the steepest edges; all of it if it is no larger.

    Args:
        image: `[3, height, width]`.
        side: Side of the part [pixel].
    """
    height, width = min(side, image.shape[1]), min(side, image.shape[2])
    grey = image.mean(0)
    edges = (grey[1:, :-1] - grey[:-1, :-1]).square() + (grey[:-1, 1:] - grey[:-1, :-1]).square()
    window = (min(height, edges.shape[0]), min(width, edges.shape[1]))
    sums = nn.functional.avg_pool2d(edges.double()[None], window, stride=1)[0]
    row, column = divmod(int(sums.argmax()), sums.shape[1])
    return row, column, height, width


def _show(axes: Axes, image: Tensor, text: str, heading: str) -> None:
    axes.imshow((image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy(), interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_xlabel(text, fontsize=7.5, labelpad=2, color=COLORS["ink"])
    if heading:
        axes.set_title(heading, fontsize=8.5, color=COLORS["ink"], fontweight="bold", pad=4)
