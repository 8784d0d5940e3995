"""Entry of the `chanlab` command: one parser, one place where errors become exit codes."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence

from chanlab import __version__
from chanlab.errors import ChanlabError

COMMANDS = ("doctor", "generate", "info", "verify", "plot", "backbone", "demo")
"""Subcommands, one module of chanlab.cli each (`add_parser`, `run`), in the order of the help."""

LEARN = {
    "fit": "train a model",
    "validate": "evaluate a model on the validation split",
    "test": "evaluate a model on the test split",
    "predict": "write a model's predictions beside their targets",
}
"""Subcommands that Lightning's command line answers."""

LEARN_EPILOG = """\
examples:
  chanlab {command} --config gru{more}
  chanlab {command} --config models/csi/gru.yaml{more} --data.store data/mine --data.batch_size 64
  chanlab {command} --config gru --print_config
"""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line, without importing anything heavy."""
    parser = argparse.ArgumentParser(
        prog="chanlab",
        description="Learning on wireless channels: trace a channel once, then train, compare and judge every learner "
        "on the same link.",
        epilog="examples:\n"
        "  chanlab doctor                                      what works here, and the remedy for what does not\n"
        "  chanlab demo                                        the whole story in minutes\n"
        "  chanlab generate two_ray --out out/two_ray          a small data set in seconds\n"
        "  chanlab fit --config gru                            train a predictor\n\n"
        "Exit codes: 2 for a mistake in what was asked, 1 for a failure. `chanlab COMMAND --help` tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"chanlab {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks (as does CHANLAB_DEBUG=1)")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name in COMMANDS:
        importlib.import_module(f"chanlab.cli.{name}").add_parser(commands)
    for name, summary in LEARN.items():
        commands.add_parser(name, help=summary, add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name; `sys.argv[1:]` by default.

    Returns:
        0, 1 after a failure, 2 after a mistake in what was asked, 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = os.environ.get("CHANLAB_DEBUG", "") not in ("", "0")
    if arguments[:1] == ["--debug"]:
        arguments, debug = arguments[1:], True
    try:
        return _dispatch(arguments)
    except SystemExit as stop:  # argparse and jsonargparse: --help, or a mistake they have explained
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
            return 1
        return int(stop.code or 0)
    except KeyboardInterrupt as stop:
        print(f"\nchanlab: {str(stop) or 'interrupted'}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `chanlab info ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ChanlabError as error:
        if debug:
            traceback.print_exc()
        print(f"chanlab: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if debug:
            traceback.print_exc()
        print(f"chanlab: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        _unexpected(error, debug)
        return 1


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] and arguments[0] in LEARN:
        return _learn(arguments)
    parser = build_parser()
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return 2
    if args.command in LEARN:  # options before the command, e.g. `chanlab --debug fit`
        parser.error("options of chanlab itself other than --debug can't precede fit, validate, test and predict")
    return int(args.run(args) or 0)


def _learn(arguments: list[str]) -> int:
    command = arguments[0]
    if {"-h", "--help"} & set(arguments[1:]):
        more = "" if command == "fit" else " --ckpt_path best"
        print(LEARN_EPILOG.format(command=command, more=more))
    from chanlab.cli.lightning import main as learn

    learn(arguments)
    return 0


def _unexpected(error: Exception, debug: bool) -> None:
    """A bug: say so in two lines and keep the traceback where it can be reported from."""
    if debug:
        traceback.print_exc()
        return
    with tempfile.NamedTemporaryFile("w", prefix="chanlab-", suffix=".log", delete=False, encoding="utf-8") as file:
        file.write(f"chanlab {__version__}, python {sys.version}\n{' '.join(sys.argv)}\n\n")
        traceback.print_exc(file=file)
    summary = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    print(f"chanlab: unexpected {summary}", file=sys.stderr)
    print(
        f"This is a bug in chanlab or in a library it uses. The traceback is in {file.name} "
        "(CHANLAB_DEBUG=1 shows it here); please report it with the output of `chanlab doctor`.",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main())
