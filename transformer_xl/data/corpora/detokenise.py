"""Convert tokenised text of WikiText, Penn Treebank and One Billion Word to readable text, in pieces.

    He said , " It 's a well @-@ known 1 @,@ 000 – 2 @,@ 000 . "    He said, "It's a well-known 1,000–2,000."

Only spaces and the `@` marks of WikiText are removed. If a text is ambiguous, the more frequent reading is taken.
"""

from __future__ import annotations

import re

# ruff: noqa: RUF001 - the tables contain characters that look alike.

MARKS = {"@-@": "-", "@,@": ",", "@.@": "."}
"""WikiText's tokens for punctuation inside a word."""

_WORD = "[^ ]+"
_NUMBER = r"(?:[\d.]|N\Z|<unk>)[^ ]*"
JOINTS = (
    (r"[([‘“¡¿]", _WORD),
    (_WORD, r"[)\],.;:!?%’”]"),
    (_WORD, r"n't|'[^\W\d][^ ]*"),
    (_WORD, "@.@|‑"),
    ("@.@|‑", _WORD),
    ("=", "="),
    (r"(?:[a-z]*\$|[£€¥₹₤#])", _NUMBER),
    ("US|AU?|CA?|HK|NZ", r"\$"),
    (r"[^ ]*[^\d ] −", _NUMBER),
    (r"[^ ]*[\w>]", "[/°′″]"),
    ("°", "[CF]"),
    (r"[^ ]*[\w>] /", r"[\w<][^ ]*"),
    (r"[^ ]+ ’", "s|t|m|d|re|ve|ll"),
    ("[OdlDL] ’", _WORD),
)
"""Pairs of words without a space between them: the last words so far, and the next word. Quotes are brackets."""

BETWEEN = {
    "–": r"\d – (?:\d|<unk>)|<unk> – \d",
    ":": r"\d : \d",
    "&": r"\b[A-Z]{1,2} & [A-Z]{1,2}\b",
}
"""Marks without spaces between some words: the end of the word before, the mark, the start of the next word."""

_WHITE = re.compile("([ \n])")
_JOINED = re.compile("|".join(rf" (?:{before}) (?:{word})\Z" for before, word in JOINTS))
_POSSESSIVE = re.compile(r"[sS\d>]\Z")


class Detokeniser:
    """Converts tokenised text to readable text, in pieces."""

    def __init__(self) -> None:
        self._rest = ""
        self._start_line()

    def feed(self, text: str) -> str:
        """Read `text`, words between single spaces and newlines, and return the readable text that is certain now.

        A word is certain when the white space after it is known. A mark of `BETWEEN` is certain when the next word is.
        """
        *parts, self._rest = _WHITE.split(self._rest + text)
        return "".join(map(self._add, parts[::2], parts[1::2]))

    def close(self) -> str:
        """End the text, and return the rest of the readable text. Another text may follow."""
        return self.feed("\n")[:-1]

    def _start_line(self) -> None:
        self._before: list[str] = []
        self._open: set[str] = set()
        self._waiting = ""

    def _add(self, word: str, white: str) -> str:
        text = ""
        if word:
            text = self._settle(word)
            if word in BETWEEN and self._before:
                self._waiting = word
            else:
                text += self._put(word, last=white == "\n")
        if white == "\n":
            text += self._settle("") + "\n"
            self._start_line()
        return text

    def _settle(self, after: str) -> str:
        """The readable text of the mark that waited for the next word, `after`; "" if none waited."""
        mark, self._waiting = self._waiting, ""
        if mark and re.search(BETWEEN[mark], f"{self._before[-1][-3:]} {mark} {after}"):
            self._before = ["("]
            return mark
        return self._put(mark) if mark else ""

    def _put(self, word: str, last: bool = False) -> str:
        role = self._quote(word, last) if word in ('"', "'") else word
        line = " ".join(["", *self._before, role])
        space = " " if self._before and not _JOINED.search(line) else ""
        self._before = [*self._before[-1:], role]
        return space + MARKS.get(word, word)

    def _quote(self, quote: str, last: bool) -> str:
        """The bracket for a straight quote: closing if a quote is open, at the end of a line, or after a plural."""
        plural = quote == "'" and self._before and _POSSESSIVE.search(self._before[-1])
        if quote in self._open or last or plural:
            self._open.discard(quote)
            return ")"
        self._open.add(quote)
        return "("


def readable(text: str) -> str:
    """The readable form of a whole tokenised text."""
    detokeniser = Detokeniser()
    return detokeniser.feed(text) + detokeniser.close()
