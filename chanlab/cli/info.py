"""`chanlab info`: the card of a store."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

from chanlab.cli.common import bytes_text, print_json, subparser


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    parser = subparser(
        commands,
        "info",
        "show the card of a store",
        ["chanlab info out/street", "chanlab info out/street --json | jq .content_hash"],
        "The content hash covers channels and labels, not timestamps or layout: two stores with the same hash hold the "
        "same data.",
    )
    parser.add_argument("path", metavar="PATH", help="folder of the store")
    parser.add_argument("--json", action="store_true", help="print the card as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the card."""
    from chanlab.data.verify import info

    card = info(args.path)
    if args.json:
        print_json(card)
    else:
        print(card_text(card))
    return 0


def card_text(card: dict[str, Any]) -> str:
    """The card for people."""
    state = "" if card["complete"] else f" of {card['samples_expected']}: run the same `chanlab generate` again"
    moving = f"{card['anchors']} anchors each, {card['duration']:.3g} s the first" if card["anchors"] > 1 else "static"
    what = "paths"
    if card["payload"] == "cir":
        moving, what = f"{card['snapshots']} snapshots each, {card['duration'] * 1e3:.3g} ms", "taps"
    lines = {
        "store": f"{card['path']}  ({card['name']}, schema version {card['schema_version']})",
        "what": card["description"],
        "samples": f"{card['samples']} users{state}; {moving}",
        "splits": ", ".join(f"{name} {count}" for name, count in card["splits"].items()),
        "carrier": f"{card['carrier'] / 1e9:g} GHz",
        "payload": f"{card['payload']}, up to {card['max_paths']} {what} per link",
        "size": f"{bytes_text(card['size'])} in {card['shards']} shards",
        "seed": card["seed"],
        "content": card["content_hash"] or "not complete",
        "versions": ", ".join(f"{name} {version}" for name, version in card["versions"].items()),
    }
    text = [f"{name:<9} {value}" for name, value in lines.items() if value not in ("", None)]
    recipe = textwrap.indent(card["recipe"].strip(), "  ")
    return "\n".join([*text, "recipe", recipe])
