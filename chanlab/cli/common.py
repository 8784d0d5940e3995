"""What the subcommands share: parsers that look alike, and small prints."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from chanlab.errors import ChanlabError


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps examples as written and shows defaults where there are any."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


def subparser(commands: Any, name: str, summary: str, examples: Sequence[str], details: str = "") -> Any:
    """A subcommand's parser with a summary, details and examples."""
    description = summary[0].upper() + summary[1:] + "."
    if details:
        description += "\n\n" + textwrap.fill(details, 110)
    return commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog="examples:\n" + "\n".join(f"  {e}" for e in examples),
        formatter_class=HelpFormatter,
    )


def script_parser(description: str | None, examples: str) -> argparse.ArgumentParser:
    """The parser of a script in `sims/`: its module's text, then examples as written."""
    return argparse.ArgumentParser(
        description=description, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def run_script(action: Callable[[argparse.Namespace], None], args: argparse.Namespace, name: str) -> int:
    """Run a script; a failure is one line on the standard error and the exit code that `ChanlabError` gives it."""
    try:
        action(args)
    except ChanlabError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def print_json(value: Any) -> None:
    """Print as JSON for people and machines alike."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A plain text table: the first column flush left, the others flush right."""
    lines = [list(map(str, header)), *[list(map(str, row)) for row in rows]]
    width = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def show(line: Sequence[str]) -> str:
        cells = [line[0].ljust(width[0]), *(cell.rjust(width[i]) for i, cell in enumerate(line) if i)]
        return "  ".join(cells).rstrip()

    rule = "  ".join("─" * w for w in width)
    return "\n".join([show(lines[0]), rule, *map(show, lines[1:])])


def bytes_text(count: float) -> str:
    """A size for people: 1.5 MB (powers of ten)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def time_text(seconds: float) -> str:
    """A duration for people: 45 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {seconds} s" if seconds else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
