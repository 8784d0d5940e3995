"""Pictures of the demo's results, drawn from records alone, and of the channels they come from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from chanlab.cli import figures, quicklook
from chanlab.data.store import Store
from chanlab.records import Record, lookup, select

STYLES = {
    "perfect CSI": ("perfect CSI", "#24292F", "--", ""),
    "no prediction": ("no prediction", "#7A7A7A", "-", "s"),
    "ar": ("AR", "#E69F00", "-", "v"),
    "pad": ("PAD", "#56B4E9", "-", "^"),
    "ray_pursuit": ("ray pursuit", "#8B5A2B", "-", "X"),
    "gru": ("GRU", "#CC79A7", "-", "D"),
    "transformer": ("Transformer", "#009E73", "-", "P"),
    "llm": ("LLM", "#D55E00", "-", "o"),
    "LearnedWiener from scratch": ("LearnedWiener, from scratch", "#009E73", "-", "D"),
    "LearnedWiener zero-shot": ("LearnedWiener, zero-shot", "#0072B2", "-", "P"),
    "LearnedWiener fine-tuned": ("LearnedWiener, fine-tuned", "#D55E00", "-", "o"),
    "kalman": ("Kalman", "#8C6BB1", "-", "P"),
    "esprit": ("ESPRIT", "#8C564B", "-", "^"),
    "matrix pencil": ("matrix pencil", "#F7A6C4", "-", "X"),
    "rnn": ("RNN", "#9ECAE1", "-", "o"),
    "lstm": ("LSTM", "#C5B0D5", "-", "s"),
    "cnn": ("CNN", "#C49C94", "-", "D"),
    "softs": ("SOFTS", "#C7C7C7", "-", "v"),
    "wifo": ("WiFo", "#DBDB8D", "-", "P"),
    "llm4cp": ("LLM4CP", "#00796B", "-", "*"),
    "llm4cp_random": ("LLM4CP, random weights", "#26A69A", "--", "*"),
    "llm4cp_nollm": ("LLM4CP, no LLM", "#80CBC4", ":", "*"),
    "learned_wiener_llm": ("ours, trained briefly, LLM", "#FB8072", "-", "*"),
    "learned_wiener_llm_random": ("ours, trained briefly, random LLM", "#FB8072", "--", "*"),
    "learned_wiener_llm_nollm": ("ours, trained briefly, no LLM", "#FB8072", ":", "*"),
}
"""Label, colour, line and marker of each system."""


def label(system: str) -> str:
    """How a system is called in tables and legends."""
    return STYLES[system][0] if system in STYLES else system


def scene_figure(store: Store, sample: int) -> Figure:
    """The scene from above, everyone's trajectories, and the paths of one user."""
    seen = quicklook.survey(store)
    figure = figures.new_figure(8.6, 5.2)
    axes = figure.subplots()
    links = store.links([sample])
    middle = links.paths.batch_shape[1] // 2
    paths = links.paths[0, middle]
    keep = paths.mask.numpy()
    power = paths.transfer.abs().square().sum((0, 1)).numpy()[keep]
    figures.draw_rays(
        axes,
        links.tx_position.numpy(),
        links.positions[0, middle].numpy(),
        paths.vertices.numpy()[..., keep],
        (paths.interactions != 0).sum(0).numpy()[keep],
        10 * np.log10(np.maximum(power, 1e-30)),
    )
    figures.draw_scene(axes, quicklook.building_triangles(store.recipe), seen.transmitter, seen.tracks, "")
    return figure


def channel_figure(store: Store, sample: int) -> Figure:
    """One channel over time and frequency."""
    figure = figures.new_figure(8.6, 3.6)
    figures.draw_channel(figure.subplots(), *quicklook.user_channel(store, sample), title="")
    return figure


def nmse_figure(records: Sequence[Record], snr_db: float) -> Figure:
    """NMSE over horizon, one line per system, shaded by bootstrap intervals."""
    figure = figures.new_figure(9.2, 4.2)
    axes = figure.subplots()
    items = [r for r in select(records, metric="nmse_pooled", snr_db=snr_db) if isinstance(lookup(r, "horizon"), int)]
    for system in _systems(items):
        mine = sorted(select(items, system=system), key=lambda r: lookup(r, "horizon"))
        ahead = [lookup(r, "ahead_ms") for r in mine]
        name, color, line, marker = STYLES.get(system, (system, None, "-", "."))
        axes.plot(ahead, [r["value"] for r in mine], line, marker=marker, color=color, label=name, linewidth=1.8, ms=5)
        low, high = _ends(mine, "low"), _ends(mine, "high")
        axes.fill_between(ahead, low, high, color=color, alpha=0.13, linewidth=0)
    axes.set_xticks(sorted({lookup(r, "ahead_ms") for r in items}))
    figures.tidy(axes, "", "time ahead of the last snapshot [ms]", "NMSE, pooled [dB]")
    figure.legend(fontsize=8, frameon=False, loc="outside right center")
    return figure


def learning_figure(records: Sequence[Record]) -> Figure:
    """NMSE on the validation split over steps of training, one line per run."""
    figure = figures.new_figure(7.4, 3.8)
    axes = figure.subplots()
    items = [r for r in select(records, metric="nmse_per_sample", split="val") if r["value"] is not None]
    for system in _systems(items):
        mine = sorted(select(items, system=system), key=lambda r: lookup(r, "step"))
        name, color, line, marker = STYLES.get(system, (system, None, "-", "."))
        steps, value = [lookup(r, "step") for r in mine], [r["value"] for r in mine]
        axes.plot(steps, value, line, marker=marker, color=color, label=name, linewidth=1.8, ms=5)
    figures.tidy(axes, "", "steps of training", "NMSE, per sample [dB]")
    if items:
        axes.legend(fontsize=8, frameon=False)
    return figure


def link_figure(records: Sequence[Record], step: int) -> Figure:
    """Spectral efficiency and coded BLER over SNR at one step of the horizon, by what feeds the precoder."""
    figure = figures.new_figure(9.6, 4.6)
    rate, errors = figure.subplots(1, 2)
    _curves(
        rate, select(records, metric="spectral_efficiency", horizon=step), "spectral efficiency [bit/s/Hz per user]"
    )
    _curves(errors, select(records, metric="bler", horizon=step), "block error rate, 5G LDPC")
    errors.set_yscale("log")
    errors.yaxis.set_major_formatter("{x:g}")
    errors.yaxis.set_minor_formatter("")
    figure.legend(*rate.get_legend_handles_labels(), fontsize=8, frameon=False, ncols=4, loc="outside lower center")
    return figure


def _curves(axes: Axes, items: Sequence[Record], ylabel: str) -> None:
    for system in _systems(items):
        mine = sorted(select(items, system=system), key=lambda r: lookup(r, "link_snr_db"))
        name, color, line, marker = STYLES.get(system, (system, None, "-", "."))
        snr = [lookup(r, "link_snr_db") for r in mine]
        value = [r["value"] if r["value"] > 0 else np.nan for r in mine]  # no errors seen: below what can be drawn
        axes.plot(snr, value, line, marker=marker, color=color, label=name, linewidth=1.8, ms=4.5)
    figures.tidy(axes, "", "SNR of the link [dB]", ylabel)


def _systems(items: Sequence[Record]) -> list[str]:
    """Systems among the records, in the order of `STYLES`, unknown ones last."""
    found = {r["system"] for r in items}
    return [s for s in STYLES if s in found] + sorted(found - set(STYLES))


def _ends(items: Sequence[Record], end: str) -> list[float]:
    """One end of each record's interval; its value where it has none."""
    return [float(r[end] if end in r else r["value"]) for r in items]
