"""Files that list the words of a vocabulary, one per line, with or without a count after each."""

from __future__ import annotations

from ..mistake import Mistake


def listed_words(text: str, file: str) -> list[str]:
    """The words of a vocabulary file, in order; raise `ValueError` if it is not a list of different words."""
    numbered = enumerate(text.replace("\r", "").replace("\t", " ").split("\n"), start=1)  # words may hold other spaces
    lines = [(number, words) for number, line in numbered if (words := [word for word in line.split(" ") if word])]
    counted = bool(lines) and len(lines[0][1]) == 2
    seen: set[str] = set()
    for number, line in lines:
        if len(line) != 1 + counted or (counted and not line[1].isdecimal()) or line[0] in seen:
            raise Mistake(
                f"{file} must list each word once, one per line, with a count after all words or none; line {number} "
                f"is {' '.join(line)[:60]!r}."
            )
        seen.add(line[0])
    if not lines:
        raise Mistake(f"{file} must list words, one per line, and is empty.")
    return [line[0] for _, line in lines]
