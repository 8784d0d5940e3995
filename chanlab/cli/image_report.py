"""What a simulation of image transmission reports beside its curves: others' records, channel uses, losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from chanlab.cli.common import table
from chanlab.cli.figures import new_figure, tidy
from chanlab.cli.image_curves import LABELS, Style, lines, panels, separation_styles
from chanlab.errors import UsageError
from chanlab.records import Record, load_records

COLORS = ("#D62728", "#7B3FA0", "#1A1A1A", "#8C564B", "#2CA02C", "#E377C2")
RECEIVERS = {"perfect": "perfect CSI", "lmmse": "LMMSE CSI", "ls": "LS CSI", "phase": "phase alone", "none": "no CSI"}
"""What tables call what a receiver knows."""
_LOOKS: Mapping[str, Style] = {
    "perfect CSI": {"linestyle": "-", "marker": "s"},
    "LMMSE CSI": {"linestyle": "--", "marker": "o"},
    "LS CSI": {"linestyle": ":", "marker": "^"},
    "phase alone": {"linestyle": (0, (5, 1, 1, 1)), "marker": "d"},
    "no CSI": {"linestyle": "-.", "marker": "x"},
}


def with_receivers(records: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Records whose systems tell what the receiver knows, where that differs."""
    several = len({r["condition"]["csi"] for r in records if "csi" in r["condition"]}) > 1
    return [{**r, "system": _with_receiver(r)} if several else dict(r) for r in records]


def beside(paths: Sequence[Path], records: Sequence[Mapping[str, Any]], channel: str) -> list[Record]:
    """Others' records of the same sizes and ratios; where channel or images differ, their systems' names tell.

    Args:
        paths: Files of records, such as those of `sims/image_separation.py`.
        records: What they stand beside; if there are none, all are taken.
        channel: Name of its channel; records that name none are of AWGN.

    Raises:
        UsageError: A file is not there, or none of the records fits.
    """
    found: list[Record] = []
    for path in paths:
        if not path.is_file():
            raise UsageError(f"--beside: there is no file {path}.")
        asked = {"size", "ratio", "snr_db"}
        found += [r for r in load_records(path) if r["metric"] in LABELS and asked <= set(r["condition"])]
    if records:
        found = [r for r in found if _panel(r) in {_panel(mine) for mine in records}]
    if paths and not found:
        raise UsageError(f"--beside: no record of {', '.join(map(str, paths))} has a size and ratio of these images.")
    alike = {(r["condition"]["size"], r["data"], r["split"], r["n"]) for r in records}
    made = []
    for r in found:
        other = r["condition"].get("channel", "awgn")
        notes = [other] if other != channel else []
        if records and (r["condition"]["size"], r["data"], r["split"], r["n"]) not in alike:
            notes.append(f"{r['n']} images of {r['data']}, {r['split']}")
        made.append({**r, "system": f"{r['system']} ({'; '.join(notes)})" if notes else r["system"]})
    return made


def transmission_styles(shown: Sequence[Mapping[str, Any]]) -> dict[str, Style]:
    """Trained codecs in strong colours, receivers by their dashes, separation as in its own plot.

    Args:
        shown: Records, after `with_receivers` and `beside`; those of trained codecs tell their `parameters`.
    """
    held: dict[str, Style] = {}
    colors: dict[str, str] = {}
    for r in shown:
        if "parameters" not in r:
            continue
        plain, receiver = _apart(r["system"])
        color = colors.setdefault(plain, COLORS[len(colors) % len(COLORS)])
        look = _LOOKS[receiver or "perfect CSI"]
        held[r["system"]] = {"color": color, "markersize": 4.5, "linewidth": 1.8, **look}
    others = [name for name in dict.fromkeys(r["system"] for r in shown) if name not in held]
    plain_styles = separation_styles(dict.fromkeys(_apart(name)[0] for name in others))
    for name in others:
        plain, receiver = _apart(name)
        held[name] = {**plain_styles[plain], **_LOOKS.get(receiver, {})}
    return held


def uses_table(shown: Sequence[Mapping[str, Any]]) -> str:
    """Channel uses of an image: all, pilots and side information; a range where they vary with the SNR."""
    rows = []
    for size, ratio in panels(shown):
        metrics = ("uses", "pilot_uses", "side_uses")
        values = {metric: lines(shown, metric, {"size": size, "ratio": ratio}) for metric in metrics}
        height, width = map(int, size.split("x"))
        for system, points in values["uses"].items():
            cells = []
            for metric in metrics:
                found = sorted({round(v) for _, v in values[metric].get(system, [])})
                cells.append("-".join(map(str, dict.fromkeys((found[0], found[-1])))) if found else "")
            rows.append([f"{size}, {ratio}", system, *cells, f"{max(v for _, v in points) / (3 * height * width):.4f}"])
    return table(["channel uses of an image", "system", "all", "pilots", "side information", "k/n"], rows)


def loss_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Loss of PSNR against perfect CSI, and of SNR in brackets.

    Args:
        records: From `chanlab.jscc.evaluation.loss_records`.
    """
    snrs = sorted({r["condition"]["snr_db"] for r in records})
    rows: dict[tuple[str, ...], dict[tuple[str, float], float]] = {}
    for r in records:
        held = r["condition"]
        key: tuple[str, ...] = (
            f"{held['size']}, {held['ratio']}",
            r["system"],
            RECEIVERS.get(held["csi"], held["csi"]),
        )
        rows.setdefault(key, {})[r["metric"], held["snr_db"]] = r["value"]
    body = []
    for key, values in rows.items():
        cells = []
        for snr in snrs:
            lost, equal = values.get(("psnr_loss", snr)), values.get(("snr_loss", snr))
            cells.append(("" if lost is None else f"{lost:.2f}") + ("" if equal is None else f" [{equal:.2f}]"))
        body.append([*key, *cells])
    return table(["loss of PSNR [of SNR], dB", "system", "receiver", *(f"{s:g} dB" for s in snrs)], body)


def loss_curves(records: Sequence[Mapping[str, Any]], styles: Mapping[str, Style], title: str = "") -> Figure:
    """Loss of PSNR over SNR, a panel for each size and ratio; receivers that estimate, where there are any.

    Args:
        records: From `chanlab.jscc.evaluation.loss_records`, after `with_receivers`.
        styles: From `transmission_styles`.
        title: Above all.
    """
    lost = [r for r in records if r["metric"] == "psnr_loss"]
    lost = [r for r in lost if r["condition"]["csi"] in ("lmmse", "ls")] or lost
    columns = panels(lost)
    figure = new_figure(max(5.5, 4.2 * len(columns) + 0.5), 4)
    every = figure.subplots(1, len(columns), squeeze=False, sharey=True)[0]
    for axes, (size, ratio) in zip(every, columns, strict=True):
        for system, points in lines(lost, "psnr_loss", {"size": size, "ratio": ratio}).items():
            axes.plot(*zip(*points, strict=True), **{"label": system, **styles.get(system, {})})
        axes.axhline(0, color="#24292F", linewidth=0.8)
        tidy(axes, f"{size}, k/n = {ratio}", "SNR [dB]", "PSNR lost against perfect CSI [dB]")
    if title:
        figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    handles, labels = every[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False, handlelength=3.2)
    return figure


def _panel(r: Mapping[str, Any]) -> tuple[str, str]:
    return r["condition"]["size"], r["condition"]["ratio"]


def _with_receiver(r: Mapping[str, Any]) -> str:
    csi = r["condition"].get("csi")
    return f"{r['system']}, {RECEIVERS.get(csi, csi)}" if csi else str(r["system"])


def _apart(system: str) -> tuple[str, str]:
    """Name of a system without notes, and what its receiver knows if the name tells."""
    plain = system.partition(" (")[0]
    name, _, receiver = plain.rpartition(", ")
    return (name, receiver) if receiver in _LOOKS else (plain, "")
