"""What `chanlab plot` shows of a store of impulse responses."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from chanlab.channels import CIR, subcarrier_frequencies
from chanlab.cli import figures
from chanlab.data.store import Store

Array = npt.NDArray[Any]

MAX_USERS = 1000
"""Users that the statistics are taken from, spread evenly over the store."""

_BATCH = 100


def delay_spread(cir: CIR) -> torch.Tensor:
    """RMS delay spread of each channel, weighted by power over antennas and snapshots, `[...]` [s]."""
    power = tap_power(cir)
    share = power / power.sum(-1, keepdim=True).clamp(min=1e-45)
    mean = (share * cir.delay).sum(-1, keepdim=True)
    return (share * (cir.delay - mean).square()).sum(-1).sqrt()


def tap_power(cir: CIR) -> torch.Tensor:
    """Mean power of each tap over antennas and snapshots, `[..., tap]`."""
    return cir.coefficients.abs().square().mean((-4, -3, -2))


def temporal_correlation(cir: CIR) -> torch.Tensor:
    """Magnitude of the correlation of snapshots by their lag, over antennas and taps, 1 at lag 0, `[..., time]`."""
    a = cir.coefficients
    count = a.shape[-2]
    lags = [(a[..., lag:, :] * a[..., : count - lag, :].conj()).mean((-4, -3, -2)).sum(-1) for lag in range(count)]
    found = torch.stack(lags, -1)
    return (found / found[..., :1].real.clamp(min=1e-45)).abs()


def cir_quicklook(store: Store, sample: int | None = None) -> Figure:
    """One figure of four panels: a channel, its taps, the delay spreads and how fast channels change.

    Args:
        store: A store of impulse responses.
        sample: Whose channel to draw; the first one by default.
    """
    ids = store.sample_ids
    if len(ids) > MAX_USERS:
        ids = ids[np.linspace(0, len(ids) - 1, MAX_USERS).round().astype(int)]
    spreads, correlations = [], []
    for start in range(0, len(ids), _BATCH):
        cir = store.cir_links(ids[start : start + _BATCH]).cir
        spreads.append(delay_spread(cir).numpy())
        correlations.append(temporal_correlation(cir).numpy())
    chosen = int(ids[0]) if sample is None else sample
    links, view = store.cir_links([chosen]), store.recipe.view
    times = links.snapshots[0].numpy()
    frequencies = subcarrier_frequencies(
        int(view.get("num_subcarriers", 64)), float(view.get("subcarrier_spacing", 3e5))
    )
    figure = figures.new_figure(11.5, 8)
    figure.suptitle(
        f"{store.recipe.name}: {store.num_samples} channels at {store.carrier / 1e9:g} GHz",
        fontsize=12,
        fontweight="bold",
    )
    axes = figure.subplots(2, 2)
    response = links.cir.cfr(frequencies)[0, 0, 0].numpy()
    speed = float(links.velocities[0, 0].norm())
    title = f"Channel of sample {chosen}, {speed:.3g} m/s"
    figures.draw_channel(axes[0, 0], response, times, frequencies.numpy(), title=title)
    _draw_taps(axes[0, 1], links.cir.trim()[0:1])
    figures.draw_cdf(axes[1, 0], np.concatenate(spreads) * 1e9, "RMS delay spread", "delay spread [ns]")
    _draw_correlation(axes[1, 1], times, np.concatenate(correlations))
    return figure


def _draw_taps(axes: Axes, cir: CIR) -> None:
    """Power of each tap over its delay, relative to the strongest."""
    power = tap_power(cir)[0].numpy()
    there = power > 0
    level = 10 * np.log10(power[there] / power[there].max()) if there.any() else power[there]
    floor = float(level.min(initial=0.0)) - 3
    delay = cir.delay[0].numpy()[there] * 1e9
    axes.vlines(delay, floor, level, color=figures.COLORS["train"], linewidth=1.6)
    axes.scatter(delay, level, s=18, color=figures.COLORS["train"], zorder=3)
    axes.set_ylim(bottom=floor)
    figures.tidy(axes, "Its taps, mean over antennas and snapshots", "delay [ns]", "power over the strongest [dB]")


def _draw_correlation(axes: Axes, times: Array, correlation: Array) -> None:
    """Median and quartiles of the temporal correlation over the lag."""
    low, median, high = np.quantile(correlation, [0.25, 0.5, 0.75], axis=0)
    axes.fill_between(times * 1e3, low, high, color=figures.COLORS["train"], alpha=0.2, linewidth=0, label="quartiles")
    axes.plot(times * 1e3, median, color=figures.COLORS["train"], linewidth=1.6, marker=".", label="median")
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=8, frameon=False)
    figures.tidy(axes, "Correlation of snapshots", "lag [ms]", "magnitude")
