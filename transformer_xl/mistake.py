"""What a user did wrong, in one sentence; every room may raise it."""

from __future__ import annotations


class Mistake(ValueError):
    """A user's mistake: which setting it is, what it must be, what it is, what to do. The command line prints the
    sentence and exits with status 2; any other `ValueError` is a bug and keeps its traceback."""
