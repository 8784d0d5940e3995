"""`chanlab generate`: a recipe's channels into a store."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from chanlab.cli.common import bytes_text, subparser, time_text
from chanlab.errors import UsageError

if TYPE_CHECKING:
    from chanlab.data.recipe import Recipe


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    parser = subparser(
        commands,
        "generate",
        "make the channels of a recipe and store them",
        [
            "chanlab generate two_ray --out out/two_ray",
            "chanlab generate street_canyon --out out/street --workers 2",
            "chanlab generate street_canyon --out out/street --dry-run",
            "chanlab generate my/recipe.yaml --out out/mine --samples 100 --seed 7",
        ],
        "A recipe is a YAML file, or the short name of one that comes with chanlab. Run the same command again after "
        "an interruption: complete shards are kept, and the store ends up the same.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a short name such as two_ray, or a path to a YAML file")
    parser.add_argument("--out", required=True, metavar="PATH", help="folder of the store")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes that make shards")
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="where the workers run")
    parser.add_argument("--samples", type=int, metavar="N", help="users to make, instead of the recipe's number")
    parser.add_argument("--seed", type=int, metavar="S", help="seed, instead of the recipe's")
    parser.add_argument("--dry-run", action="store_true", help="tell samples, size and time expected, and make nothing")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make the store, or tell what it would take."""
    if args.workers < 1:
        raise UsageError(f"--workers must be at least 1, not {args.workers}.")
    if args.engine == "ray":
        raise UsageError("--engine ray is not available yet; use --engine local (with --workers N).")
    recipe = load(args.recipe, args.samples, args.seed)
    if args.dry_run:
        from chanlab.data.generate import plan

        print(plan_text(plan(recipe, args.workers), args.workers))
        return 0
    from chanlab.data.generate import generate

    store = generate(recipe, args.out, workers=args.workers, progress=not args.quiet)
    print(f"{store.path} holds {store.num_samples} samples of {recipe.name}: chanlab info {store.path}")
    return 0


def plan_text(expected: dict[str, Any], workers: int) -> str:
    """What a dry run tells people."""
    measured = "1 user" if expected["measured_samples"] == 1 else f"{expected['measured_samples']} users"
    lines = {
        "recipe": expected["name"],
        "samples": f"{expected['samples']} users with {expected['anchors']} anchors each",
        "splits": ", ".join(f"{name} {count}" for name, count in expected["splits"].items()),
        "shards": f"{expected['shards']} of up to {expected['shard_size']} users",
        "size": f"about {bytes_text(expected['bytes'])}",
        "time": f"about {time_text(expected['seconds'])} with {workers} worker{'s' if workers > 1 else ''}",
        "measured": f"on {measured}; nothing was written",
    }
    return "\n".join(f"{name:<9} {value}" for name, value in lines.items())


def load(name: str, samples: int | None = None, seed: int | None = None) -> Recipe:
    """The recipe, with overrides of the command line.

    Raises:
        UsageError: If there is no such recipe, or an override makes no sense.
    """
    from chanlab.data.recipe import load_recipe

    recipe = load_recipe(name)
    if samples is not None and samples < 1:
        raise UsageError(f"--samples must be at least 1, not {samples}.")
    if seed is not None and seed < 0:
        raise UsageError(f"--seed must be at least 0, not {seed}.")
    return dataclasses.replace(
        recipe,
        samples=recipe.samples if samples is None else samples,
        seed=recipe.seed if seed is None else seed,
    )
