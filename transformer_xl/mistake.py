"""The error for a user's mistake, which every module may raise, and words for its sentence."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class Mistake(ValueError):
    """A user's mistake, in one sentence: the setting, the allowed values, the value given, the remedy.

    The command line prints the sentence and exits with status 2. Any other `ValueError` is a bug and keeps its
    traceback.
    """


def shortened(text: str) -> str:
    """Text from a file, safe and short enough for a sentence: what is long or unprintable is cut and escaped."""
    return text if text.isprintable() and len(text) <= 100 else ascii(text[:100])


def printable(text: str) -> str:
    """Text that may quote a file or a name, with what a terminal would obey escaped. Lines stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question with the most similar of the known names; "" if none is similar."""
    close = get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]}?" if close else ""


def join_words(words: Iterable[str], conjunction: str = "and") -> str:
    """Words as a list in a sentence: a, b and c."""
    *first, last = words
    return f"{', '.join(first)} {conjunction} {last}" if first else last


def listing(names: Iterable[str], most: int = 8) -> str:
    """At most `most` names, and the number of the others: a, b and 97 more."""
    names = [shortened(name) if len(name) > 100 or "\n" in name else name for name in names]
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")
