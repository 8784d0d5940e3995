"""What `chanlab plot` and the demo's report show of a store: read once, in bounded memory."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.figure import Figure

from chanlab.channels import PlanarArray, cfr_along, subcarrier_frequencies
from chanlab.channels.power import path_gain, rms_delay_spread
from chanlab.cli import figures
from chanlab.data.recipe import Recipe
from chanlab.data.store import Store
from chanlab.errors import ChanlabError, UsageError

Array = npt.NDArray[Any]

MAX_USERS = 3000
"""Users that the statistics are taken from, spread evenly over the store."""

_BATCH = 200


@dataclass(frozen=True)
class Survey:
    """Statistics of some users of a store, at each user's middle anchor.

    Attributes:
        tracks: Positions of the users of each split [m], each `[anchor, 3]`.
        transmitter: [m], `[3]`.
        delay_spread: RMS delay spread [s], `[user]`; 0 without paths.
        gain: Path gain, linear, `[user]`; 0 without paths.
        distance: From the transmitter [m], `[user]`.
        line_of_sight: Whether there is a path without interactions, bool `[user]`.
        sample_ids: `[user]`.
    """

    tracks: dict[str, list[Array]]
    transmitter: Array
    delay_spread: Array
    gain: Array
    distance: Array
    line_of_sight: Array
    sample_ids: Array


def survey(store: Store, max_users: int = MAX_USERS) -> Survey:
    """Read up to `max_users` users, a batch at a time."""
    ids = store.sample_ids
    if len(ids) > max_users:
        ids = ids[np.linspace(0, len(ids) - 1, max_users).round().astype(int)]
    split_of = {int(i): name for name, members in store.splits.items() for i in members}
    tracks: dict[str, list[Array]] = {}
    columns: list[tuple[Array, ...]] = []
    for start in range(0, len(ids), _BATCH):
        links = store.links(ids[start : start + _BATCH])
        for sample, track in zip(links.sample_ids.tolist(), links.positions.numpy(), strict=True):
            tracks.setdefault(split_of[sample], []).append(track)
        middle = links.paths.batch_shape[1] // 2
        paths = links.paths[:, middle]
        direct = (paths.mask & (paths.interactions == 0).all(-2)).any(-1)
        distance = (links.positions[:, middle] - links.tx_position).norm(dim=-1)
        columns.append(tuple(x.numpy() for x in (rms_delay_spread(paths), path_gain(paths), distance, direct)))
    spread, gain, distance_, sight = (np.concatenate(column) for column in zip(*columns, strict=True))
    return Survey(tracks, links.tx_position.numpy(), spread, gain, distance_, sight, ids)


def building_triangles(recipe: Recipe) -> Array | None:
    """Surfaces of a Sionna RT scene seen from above [m], `[triangle, 3, 2]`; None for other sources."""
    scene_name = (recipe.source.get("init_args") or {}).get("scene")
    if not recipe.source["class_path"].endswith("SceneSource"):
        return None
    from chanlab.channels.llvm import import_sionna_rt

    try:
        rt = import_sionna_rt()
        path = getattr(rt.scene, scene_name or "simple_street_canyon", scene_name)
        scene = rt.load_scene(path)
    except (ChanlabError, OSError, RuntimeError) as error:
        print(f"buildings are not drawn: {error}", file=sys.stderr)
        return None
    parts = []
    for item in scene.objects.values():
        mesh = item.mi_mesh
        vertices = np.array(mesh.vertex_positions_buffer()).reshape(-1, 3)
        if np.ptp(vertices[:, 2]) > 0.5:  # floors are not buildings
            parts.append(vertices[np.array(mesh.faces_buffer()).reshape(-1, 3)][..., :2])
    if not parts:
        return None
    triangles: Array = np.concatenate(parts)
    (ax, ay), (bx, by) = (triangles[:, 1] - triangles[:, 0]).T, (triangles[:, 2] - triangles[:, 0]).T
    seen = np.abs(ax * by - ay * bx) > 1e-6  # walls vanish from above
    return np.asarray(triangles[seen])


def user_channel(store: Store, sample: int, duration: float = 0.1) -> tuple[Array, Array, Array]:
    """The response between the first antennas of the recipe's view, around the middle of a trajectory.

    Args:
        store: The store.
        sample: Sample id.
        duration: Stretch of time [s], shortened to the trajectory.

    Returns:
        Complex CFR `[time, subcarrier]`, times [s] from the stretch's start, frequencies [Hz] from the carrier.
    """
    links, view = store.links([sample]), store.recipe.view
    tx = PlanarArray(**view["tx_array"]) if "tx_array" in view else PlanarArray(1, 1)
    rx = PlanarArray(**view["rx_array"]) if "rx_array" in view else PlanarArray(1, 1)
    frequencies = subcarrier_frequencies(
        int(view.get("num_subcarriers", 64)), float(view.get("subcarrier_spacing", 3e5))
    )
    total = float(links.times[0, -1])
    length = min(duration, total)
    times = torch.linspace((total - length) / 2, (total + length) / 2, 200 if length else 1, dtype=torch.float64)
    response = cfr_along(links.paths, links.times, times, tx, rx, frequencies, links.tx_orientation, links.orientations)
    return response[0, 0, 0].numpy(), (times - times[0]).numpy(), frequencies.numpy()


def quicklook(store: Store, sample: int | None = None) -> Figure:
    """One figure of four panels.

    Args:
        store: The store.
        sample: Whose channel to draw; the strongest of the surveyed links by default.

    Raises:
        UsageError: If the sample is not in the store.
    """
    if sample is not None and sample not in store.sample_ids:
        raise UsageError(f"{store.path} has no sample {sample}; it holds {store.num_samples}.")
    if store.payload == "cir":
        from chanlab.cli.quicklook_cir import cir_quicklook

        return cir_quicklook(store, sample)
    seen = survey(store)
    chosen = int(seen.sample_ids[seen.gain.argmax()]) if sample is None else sample
    figure = figures.new_figure(11.5, 8)
    figure.suptitle(
        f"{store.recipe.name}: {store.num_samples} users at {store.carrier / 1e9:g} GHz", fontsize=12, fontweight="bold"
    )
    axes = figure.subplots(2, 2)
    figures.draw_scene(axes[0, 0], building_triangles(store.recipe), seen.transmitter, seen.tracks)
    figures.draw_channel(axes[0, 1], *user_channel(store, chosen), title=f"Channel of user {chosen}")
    figures.draw_cdf(axes[1, 0], seen.delay_spread[seen.gain > 0] * 1e9, "RMS delay spread", "delay spread [ns]")
    figures.draw_path_gain(axes[1, 1], seen.distance, seen.gain, seen.line_of_sight, store.carrier)
    return figure
