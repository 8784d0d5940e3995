"""`chanlab verify`: is a store what it claims to be."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from chanlab.cli.common import subparser


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    parser = subparser(
        commands,
        "verify",
        "check a store's checksums and schema",
        ["chanlab verify out/street"],
        "Reads every byte. Exits with 1 if a file is missing, truncated, changed or foreign, and says what to do about "
        "each; sound shards stay usable.",
    )
    parser.add_argument("path", metavar="PATH", help="folder of the store")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check the store; 1 if something is wrong with it."""
    from chanlab.data.verify import verify

    report = verify(args.path, progress=not args.quiet)
    if report.ok:
        print(f"{report.path}: {report.shards} shards with {report.samples} samples are sound, {report.content_hash}")
        return 0
    for problem in report.problems:
        print(f"{report.path / problem.file}: {problem.message}; {problem.remedy}", file=sys.stderr)
    print(f"{report.path}: {report.shards} shards with {report.samples} samples are sound.", file=sys.stderr)
    return 1
