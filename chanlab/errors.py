"""Errors that name the remedy."""


class ChanlabError(Exception):
    """Something failed that chanlab foresees; the message says what to do about it.

    The command line prints the message without a traceback and exits with `exit_code`.
    """

    exit_code = 1


class UsageError(ChanlabError, ValueError):
    """The caller asked for something that can't be: a wrong shape, option, file or combination."""

    exit_code = 2


class MissingDependencyError(ChanlabError, ImportError):
    """An optional package or a system library is missing; the message holds the command that installs it."""


class StoreError(ChanlabError):
    """A store on disk can't be read or written: truncated, foreign, newer schema, locked, read-only or disk full."""
