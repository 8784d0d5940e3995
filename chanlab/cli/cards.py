"""`make cards`: the tables and plots of the cards, made from the `results.json` beside them.

A card is a Markdown file. What stands between two markers is replaced:

    <!-- results: table rows=system columns=horizon metric=nmse_pooled snr_db=15 -->
    <!-- /results -->

`rows` and `columns` name fields of records or entries of their `condition`; everything else selects records, several
values joined by `|` (`system=ar|pad`), which are then shown in this order; patterns select too: `system=llm*`, and
`speed=*` whatever has a speed. With `columns=metric` each metric is a column, with `columns=metric,split` each pair of
both. `fields=value|peer|ratio` shows further fields of each record beside its value. `digits=2` sets the decimals,
`digits=nmse:4|latency:1` those of each metric. A plot draws one line per row over the columns,
`<!-- results: plot rows=system columns=link_snr_db metric=bler file=bler.png -->`, `log=true` with a logarithmic axis;
with `panels=duplex` there is a panel for each value. Intervals (`low`, `high`) are shaded where records have no
deviation.

Records of others' published figures stand in `published.json` beside `results.json`: they have a `source` in place of a
command.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chanlab.errors import ChanlabError, UsageError
from chanlab.records import Record, load_records, lookup

BLOCK = re.compile(r"(<!-- results: *(?P<what>[^>]*?) *-->\n)(?P<old>.*?)(<!-- /results -->)", re.DOTALL)
_OPTIONS = ("rows", "columns", "fields", "digits", "file", "log", "panels")
_NAMES = {
    "horizon": "steps ahead",
    "speed": "speed [m/s]",
    "snr_db": "SNR [dB]",
    "nmse": "NMSE per antenna",
    "tdd": "TDD",
    "fdd": "FDD",
}
"""What plots call fields, metrics and panels."""
_MARKERS = "ovsDP^X*<>hp"


def main(argv: Sequence[str] | None = None) -> int:
    """Renew the cards below the given files and folders (default: models, datasets, sims, benchmarks)."""
    parser = argparse.ArgumentParser(prog="python -m chanlab.cli.cards", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, help="cards, or folders that hold them")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a card is out of date")
    args = parser.parse_args(argv)
    paths = args.paths or [p for p in map(Path, ("models", "datasets", "sims", "benchmarks")) if p.is_dir()]
    stale = 0
    try:
        for card in [file for path in paths for file in (sorted(path.rglob("*.md")) if path.is_dir() else [path])]:
            before = card.read_text(encoding="utf-8")
            after = render(before, card, write=not args.check)
            if after != before:
                stale += 1
                print(card)
                if not args.check:
                    card.write_text(after, encoding="utf-8")
    except ChanlabError as error:
        print(f"cards: {error}", file=sys.stderr)
        return error.exit_code
    return 1 if args.check and stale else 0


def render(text: str, card: Path, write: bool = True) -> str:
    """The card's text with every block made anew.

    Args:
        text: Markdown.
        card: Its path: `results.json`, `published.json` and plots stand beside it.
        write: Write plots.

    Raises:
        UsageError: If a marker can't be understood, or no record fits it.
    """
    records = [r for name in ("results.json", "published.json") for r in load_records(card.parent / name)]

    def block(match: re.Match[str]) -> str:
        kind, *words = shlex.split(match["what"])
        options = dict(word.partition("=")[::2] for word in words)
        missing = {"rows", "columns"} - set(options)
        if kind not in ("table", "plot") or missing:
            raise UsageError(f"{card}: '{match['what']}' must be table or plot, with rows= and columns=.")
        chosen = [r for r in records if _fits(r, {k: v for k, v in options.items() if k not in _OPTIONS})]
        if not chosen:
            raise UsageError(f"{card}: no record beside it fits '{match['what']}'.")
        body = _table(chosen, options) if kind == "table" else _plot(chosen, options, card, write)
        return f"{match[1]}{body}\n\n{_origin(chosen)}\n{match[4]}"

    return BLOCK.sub(block, text)


def _table(records: Sequence[Record], options: dict[str, str]) -> str:
    rows, columns = (_values(records, options[name], options) for name in ("rows", "columns"))
    fields = options.get("fields", "value").split("|")
    head = [options["rows"].replace(",", ", ")]
    for column in columns:
        name, unit = _heading(records, options["columns"], column)
        whole = f"{name} [{unit}]" if unit else name
        head += [whole if field == "value" else f"{name}, {field}" for field in fields]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for row in rows:
        cells = []
        for column in columns:
            found = [
                r for r in records if _lookup(r, options["rows"]) == row and _lookup(r, options["columns"]) == column
            ]
            if len(found) > 1:
                raise UsageError(
                    f"{len(found)} records for {row}, {column}: narrow the marker ({found[0]['condition']})."
                )
            for field in fields:
                digits = _digits(found[0], options.get("digits", "1")) if found else 0
                cells.append(_cell(found[0], digits, field) if found else "–")
        lines.append([", ".join(map(str, row)) if isinstance(row, tuple) else str(row), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plot(records: Sequence[Record], options: dict[str, str], card: Path, write: bool) -> str:
    from matplotlib.ticker import MaxNLocator

    from chanlab.cli.figures import new_figure, save, tidy

    name = options.get("file") or f"{records[0]['metric']}.png"
    over = _NAMES.get(options["columns"], options["columns"])
    alternative = f"{records[0]['metric']} over {options['columns']}"
    if write:
        panels = _values(records, options["panels"], options) if "panels" in options else [None]
        figure = new_figure(7 if len(panels) == 1 else 4.4 * len(panels) + 1.6, 4)
        unit = records[0]["unit"]
        rows = _values(records, options["rows"], options)
        for axes, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
            shown = records if panel is None else [r for r in records if lookup(r, options["panels"]) == panel]
            for i, row in enumerate(rows):
                _line(axes, [r for r in shown if lookup(r, options["rows"]) == row], options["columns"], str(row), i)
            tidy(axes, "" if panel is None else _NAMES.get(panel, str(panel)), over, "")
            if all(isinstance(lookup(r, options["columns"]), int) for r in shown):
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            if options.get("log") == "true":
                axes.set_yscale("log")
        axes = figure.axes[0]
        metric = _NAMES.get(records[0]["metric"], str(records[0]["metric"]))
        axes.set_ylabel(f"{metric} [{unit}]" if unit else metric, fontsize=9)
        if len(panels) == 1:
            axes.legend(fontsize=8, frameon=False)
        else:
            lines = {t: h for a in figure.axes for h, t in zip(*a.get_legend_handles_labels(), strict=True)}
            figure.legend(lines.values(), lines.keys(), fontsize=8, frameon=False, loc="outside right center")
        save(figure, card.parent / name)
    return f"![{alternative}]({name})"


def _line(axes: Any, records: Sequence[Record], over: str, row: str, number: int) -> None:
    """A row's line, with deviations as bars or intervals as a shade."""
    from matplotlib import colormaps

    from chanlab.cli.demo.figures import STYLES

    points = sorted(
        (float(x), float(r["value"]), float(r.get("deviation") or 0), r.get("low"), r.get("high"))
        for r in records
        if isinstance(x := lookup(r, over), int | float) and r["value"] is not None
    )
    if not points:
        return
    own = (row, colormaps["tab20"](2 * number % 20 + number // 10 % 2), "-", _MARKERS[number % len(_MARKERS)])
    label, color, style, marker = STYLES.get(row, own)
    x, y, spread, low, high = zip(*points, strict=True)
    bars = axes.errorbar(x, y, spread, label=label, color=color, ls=style, marker=marker, ms=4, capsize=2)
    if not any(spread) and None not in low + high:
        axes.fill_between(x, low, high, color=bars[0].get_color(), alpha=0.12, linewidth=0)


def _origin(records: Sequence[Record]) -> str:
    """Where the figures come from, one line per way in which they were measured."""
    sources = dict.fromkeys(r["source"] for r in records if r.get("source"))
    lines = [f"<sub>{source}</sub>" for source in sources]
    measured = [r for r in records if not r.get("source")]
    seen = dict.fromkeys((r.get("command"), r.get("hardware"), r.get("commit"), r.get("date")) for r in measured)
    for command, hardware, commit, date in seen:
        where = ", ".join(str(part) for part in (hardware, f"commit {commit}" if commit else "", date) if part)
        lines.append(f"<sub>`{command}` ({where})</sub>")
    return "  \n".join(lines)


def _fits(item: Record, want: dict[str, str]) -> bool:
    return all(_place(lookup(item, name), text) is not None for name, text in want.items())


def _place(value: Any, text: str) -> int | None:
    """Where a value stands among those that a marker asks for."""
    for i, asked in enumerate(text.split("|")):
        pattern = "*" in asked and value is not None
        if str(value) == asked or value == _parse(asked) or (pattern and fnmatch.fnmatch(str(value), asked)):
            return i
    return None


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _lookup(item: Record, names: str) -> Any:
    """A field's value; of several fields a tuple."""
    values = tuple(lookup(item, name) for name in names.split(","))
    return values if len(values) > 1 else values[0]


def _values(records: Sequence[Record], names: str, options: dict[str, str]) -> list[Any]:
    """Distinct values of a field, or of several: as the marker lists them; else numbers ascending, words as met."""
    found = [v for v in dict.fromkeys(_lookup(r, names) for r in records) if v is not None]
    several = names.split(",")

    def places(value: Any) -> tuple[float, ...]:
        order: list[float] = []
        for name, part in zip(several, value if len(several) > 1 else (value,), strict=True):
            listed = _place(part, options[name]) if "|" in options.get(name, "") else None
            number = isinstance(part, int | float)
            order += [listed or 0, not number, part if number else 0]
        return tuple(order)

    return sorted(found, key=places)


def _heading(records: Sequence[Record], names: str, value: Any) -> tuple[str, str]:
    """A column's name and unit."""
    several = names.split(",")
    parts = []
    for name, part in zip(several, value if len(several) > 1 else (value,), strict=True):
        if part not in (None, ""):
            parts.append(f"{name} {part:g}" if isinstance(part, int | float) and name != "metric" else str(part))
    unit = ""
    if "metric" in several:
        unit = next(r["unit"] for r in records if _lookup(r, names) == value)
    return ", ".join(parts).removesuffix(f" {unit}"), unit


def _digits(item: Record, text: str) -> int:
    """Decimals of a record's figure."""
    if ":" not in text:
        return int(text)
    return int(dict(part.split(":") for part in text.split("|")).get(item["metric"], 1))


def _cell(item: Record, digits: int, field: str = "value") -> str:
    if item.get(field) is None:
        return "–"
    if field != "value":
        return f"{item[field]:.{digits}f}"
    if not item["unit"] and abs(item["value"]) >= 1e5:
        return f"{item['value'] / 1e6:.{digits}f} M"
    shown = f"{item['value']:.{digits}f}"
    return f"{shown} ± {item['deviation']:.{digits}f}" if item.get("deviation") is not None else shown


if __name__ == "__main__":
    sys.exit(main())
