"""The error for a user's mistake, which every module may raise."""

from __future__ import annotations


class Mistake(ValueError):
    """A user's mistake, in one sentence: the setting, the allowed values, the value given, the remedy.

    The command line prints the sentence and exits with status 2. Any other `ValueError` is a bug and keeps its
    traceback.
    """
