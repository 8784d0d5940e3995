"""`make cards`: the tables and plots of the cards, made from the `results.json` beside them.

A card is a Markdown file. What stands between two markers is replaced:

    <!-- results: table rows=system columns=horizon metric=nmse_pooled snr_db=15 -->
    <!-- /results -->

`rows` and `columns` name fields of records or entries of their `condition`; everything else selects records, several
values joined by `|` (`system=ar|pad`). With `columns=metric` each metric is a column. `digits=2` sets the decimals. A
plot draws one line per row over the columns, `<!-- results: plot rows=system columns=link_snr_db metric=bler
file=bler.png -->`, `log=true` with a logarithmic axis.
"""

from __future__ import annotations

import argparse
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
_OPTIONS = ("rows", "columns", "digits", "file", "log")


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
        card: Its path: `results.json` and plots stand beside it.
        write: Write plots.

    Raises:
        UsageError: If a marker can't be understood, or no record fits it.
    """
    records = load_records(card.parent / "results.json")

    def block(match: re.Match[str]) -> str:
        kind, *words = shlex.split(match["what"])
        options = dict(word.partition("=")[::2] for word in words)
        missing = {"rows", "columns"} - set(options)
        if kind not in ("table", "plot") or missing:
            raise UsageError(f"{card}: '{match['what']}' must be table or plot, with rows= and columns=.")
        chosen = [r for r in records if _fits(r, {k: v for k, v in options.items() if k not in _OPTIONS})]
        if not chosen:
            raise UsageError(f"{card}: no record of {card.parent / 'results.json'} fits '{match['what']}'.")
        body = _table(chosen, options) if kind == "table" else _plot(chosen, options, card, write)
        return f"{match[1]}{body}\n\n{_origin(chosen)}\n{match[4]}"

    return BLOCK.sub(block, text)


def _table(records: Sequence[Record], options: dict[str, str]) -> str:
    rows, columns = (_values(records, options[name]) for name in ("rows", "columns"))
    digits = int(options.get("digits", 1))
    head = [options["rows"], *(_heading(records, options["columns"], c) for c in columns)]
    lines = [head, ["---", *["---:"] * len(columns)]]
    for row in rows:
        cells = []
        for column in columns:
            found = [
                r for r in records if lookup(r, options["rows"]) == row and lookup(r, options["columns"]) == column
            ]
            if len(found) > 1:
                raise UsageError(
                    f"{len(found)} records for {row}, {column}: narrow the marker ({found[0]['condition']})."
                )
            cells.append(_cell(found[0], digits) if found else "–")
        lines.append([str(row), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plot(records: Sequence[Record], options: dict[str, str], card: Path, write: bool) -> str:
    from matplotlib.ticker import MaxNLocator

    from chanlab.cli.demo.figures import STYLES
    from chanlab.cli.figures import new_figure, save, tidy

    name = options.get("file") or f"{records[0]['metric']}.png"
    alternative = f"{records[0]['metric']} over {options['columns']}"
    if write:
        figure = new_figure(7, 4)
        axes = figure.subplots()
        for row in _values(records, options["rows"]):
            points = sorted(
                (float(x), float(r["value"]), float(r["deviation"] or 0))
                for r in records
                if lookup(r, options["rows"]) == row
                and isinstance(x := lookup(r, options["columns"]), int | float)
                and r["value"] is not None
            )
            if points:
                label, color, line, marker = STYLES.get(str(row), (str(row), None, "-", "."))
                x, y, spread = zip(*points, strict=True)
                axes.errorbar(x, y, spread, label=label, color=color, ls=line, marker=marker, capsize=2)
        unit = records[0]["unit"]
        tidy(axes, "", options["columns"], f"{records[0]['metric']} [{unit}]" if unit else str(records[0]["metric"]))
        if all(isinstance(lookup(r, options["columns"]), int) for r in records):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if options.get("log") == "true":
            axes.set_yscale("log")
        axes.legend(fontsize=8, frameon=False)
        save(figure, card.parent / name)
    return f"![{alternative}]({name})"


def _origin(records: Sequence[Record]) -> str:
    """Where the figures come from, one line per way in which they were measured."""
    seen = dict.fromkeys((r.get("command"), r.get("hardware"), r.get("commit"), r.get("date")) for r in records)
    lines = []
    for command, hardware, commit, date in seen:
        where = ", ".join(str(part) for part in (hardware, f"commit {commit}" if commit else "", date) if part)
        lines.append(f"<sub>`{command}` ({where})</sub>")
    return "  \n".join(lines)


def _fits(item: Record, want: dict[str, str]) -> bool:
    for name, text in want.items():
        if str(lookup(item, name)) not in text.split("|") and lookup(item, name) not in map(_parse, text.split("|")):
            return False
    return True


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _values(records: Sequence[Record], name: str) -> list[Any]:
    """Distinct values of a field: numbers ascending, then words as they come."""
    found = list(dict.fromkeys(lookup(r, name) for r in records))
    numbers = sorted(v for v in found if isinstance(v, int | float))
    return [*numbers, *(v for v in found if v is not None and not isinstance(v, int | float))]


def _heading(records: Sequence[Record], name: str, value: Any) -> str:
    if name != "metric":
        return f"{name} {value:g}" if isinstance(value, int | float) else str(value)
    unit = next(r["unit"] for r in records if r["metric"] == value)
    return f"{value} [{unit}]" if unit else str(value)


def _cell(item: Record, digits: int) -> str:
    if item["value"] is None:
        return "–"
    shown = f"{item['value']:.{digits}f}"
    return f"{shown} ± {item['deviation']:.{digits}f}" if item.get("deviation") is not None else shown


if __name__ == "__main__":
    sys.exit(main())
