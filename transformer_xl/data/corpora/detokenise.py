"""Tokenised text to text for people to read, as it comes: WikiText, Penn Treebank, One Billion Word.

    He said , " It 's a well @-@ known 1 @,@ 000 – 2 @,@ 000 . "    He said, "It's a well-known 1,000–2,000."

Only spaces go, and the `@` marks of WikiText; where the text does not say which of two readings was meant, it gets the
commoner one.
"""

from __future__ import annotations

import re

# ruff: noqa: RUF001 - signs that look alike are what the tables are about.

MARKS = {"@-@": "-", "@,@": ",", "@.@": "."}
"""WikiText's words for signs that stood within a word."""

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
"""Words that end a line so far, and the next word: between the two there is no space. Quotes read as brackets."""

BETWEEN = {
    "–": r"\d – (?:\d|<unk>)|<unk> – \d",
    ":": r"\d : \d",
    "&": r"\b[A-Z]{1,2} & [A-Z]{1,2}\b",
}
"""Signs that stand without spaces between some words: the end of the word before, the sign, the start of the next."""

_WHITE = re.compile("([ \n])")
_JOINED = re.compile("|".join(rf" (?:{before}) (?:{word})\Z" for before, word in JOINTS))
_POSSESSIVE = re.compile(r"[sS\d>]\Z")


class Detokeniser:
    """Turns tokenised text into readable text as it comes."""

    def __init__(self) -> None:
        self._rest = ""
        self._start_line()

    def feed(self, text: str) -> str:
        """What is certain after `text`, any piece of words parted by single spaces and lines by newlines.

        A word is certain when the white space behind it has come, a sign of `BETWEEN` when the next word is.
        """
        *parts, self._rest = _WHITE.split(self._rest + text)
        return "".join(map(self._add, parts[::2], parts[1::2]))

    def close(self) -> str:
        """What is left, now that the text has ended; another may follow."""
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
        """The sign that waited for the word `after` it."""
        sign, self._waiting = self._waiting, ""
        if sign and re.search(BETWEEN[sign], f"{self._before[-1][-3:]} {sign} {after}"):
            self._before = ["("]
            return sign
        return self._put(sign) if sign else ""

    def _put(self, word: str, last: bool = False) -> str:
        role = self._quote(word, last) if word in ('"', "'") else word
        line = " ".join(["", *self._before, role])
        space = " " if self._before and not _JOINED.search(line) else ""
        self._before = [*self._before[-1:], role]
        return space + MARKS.get(word, word)

    def _quote(self, sign: str, last: bool) -> str:
        """The bracket a straight quote stands for: it closes what is open, ends a line, or is a plural's possessive."""
        plural = sign == "'" and self._before and _POSSESSIVE.search(self._before[-1])
        if sign in self._open or last or plural:
            self._open.discard(sign)
            return ")"
        self._open.add(sign)
        return "("


def readable(text: str) -> str:
    """The whole of a tokenised text, for people to read."""
    detokeniser = Detokeniser()
    return detokeniser.feed(text) + detokeniser.close()
