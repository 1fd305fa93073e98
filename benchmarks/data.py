"""`python -m benchmarks data`: from text to ids, compared with a plain Python loop and with reading and splitting.

Words are drawn by their frequencies, from a file of counts or by Zipf's law, in lines as long as WikiText's, so the
vocabulary is as large and its rare words are as rare as in a real text. Characters and bytes come from the same text.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from transformer_xl.data.corpus import Corpus
from transformer_xl.data.reading import read_file
from transformer_xl.data.vocab import EOS, id_type
from transformer_xl.mistake import Mistake
from transformer_xl.runtime.terminal import show_table

from .bound import zipf
from .measure import measure_call

_PIECE = 1 << 22
_TYPES = 267_733
_LINE = 57
"""The mean number of words in a line of WikiText-103."""


class Contender(NamedTuple):
    """One way to do one part of the work."""

    name: str
    unit: str
    run: Callable[[Path], Any]
    """Returns the SHA-256 of the ids, or None if it makes none."""
    is_bound: bool = False


def bench_data(
    *, megabytes: int = 540, counts: Path | None = None, repeats: int = 1, seed: int = 1111
) -> dict[str, Any]:
    """Time every contender `repeats` times in turn, print a table of medians and a line of JSON, and return the result.

    Raises:
        Mistake: `counts` is not a file of words and counts.
        AssertionError: two contenders made different ids of the same text.
    """
    if megabytes < 1 or repeats < 1:
        raise Mistake(f"--megabytes and --repeats must be at least 1, got {megabytes} and {repeats}.")
    words, weights = read_counts(counts) if counts else ([f"w{rank:x}" for rank in range(_TYPES)], zipf(_TYPES))
    contenders = (
        Contender("read the file", "word", _read, is_bound=True),
        Contender("read, decode and split it", "word", _split, is_bound=True),
        Contender("plain Python loop", "word", _plain_loop),
        Contender("transformer_xl", "word", _words),
        Contender("transformer_xl", "char", _characters),
        Contender("transformer_xl", "byte", _bytes),
    )
    with tempfile.TemporaryDirectory(prefix="txl-bench-") as folder:
        text = Path(folder) / "text"
        tokens = write_text(text, words, weights, megabytes * 10**6, seed)
        size = text.stat().st_size
        runs = [[measure_call(contender.run, text) for contender in contenders] for _ in range(repeats)]
    ids = {
        run.value for turn in runs for run, contender in zip(turn, contenders, strict=True) if contender.unit == "word"
    }
    assert len(ids - {None}) == 1, "the plain loop and transformer_xl made different ids of the same text"
    rows = []
    for contender, results in zip(contenders, zip(*runs, strict=True), strict=True):
        seconds = statistics.median(result.seconds for result in results)
        peak = max(result.peak_bytes for result in results)
        rows.append(
            {
                "contender": contender.name,
                "unit": contender.unit,
                "is_bound": contender.is_bound,
                "seconds": seconds,
                "megabytes_per_second": size / seconds / 1e6,
                "peak_megabytes": peak / 1e6,
            }
        )
    result = {"bytes": size, "words": tokens, "types": len(words), "repeats": repeats, "rows": rows}
    _show(result)
    return result


def read_counts(file: Path) -> tuple[list[str], np.ndarray]:
    """Words and their counts, from a file with both on each line."""
    lines = [line.rsplit(maxsplit=1) for line in read_file(file).decode("utf-8", "replace").splitlines()]
    lines = [line for line in lines if line[:1] != [EOS]]
    if not lines or not all(len(line) == 2 and line[1].isdecimal() for line in lines):
        raise Mistake(f"--counts must be a file with a word and its count on each line, and {file} is not.")
    return [word for word, _ in lines], np.array([int(count) for _, count in lines], np.float64)


def write_text(file: Path, words: list[str], weights: np.ndarray, size: int, seed: int) -> int:
    """Write lines of words drawn by their weights until the file has `size` bytes; returns the number of words."""
    random, table = np.random.default_rng(seed), np.array(words, object)
    cumulative = np.cumsum(weights) / np.sum(weights)
    written = drawn = 0
    with file.open("wb") as out:
        while written < size:
            ids = np.searchsorted(cumulative, random.random(_LINE * 4096), side="right")
            lines = table[np.minimum(ids, len(words) - 1)].reshape(-1, _LINE)
            piece = "".join(f" {' '.join(line)} \n" for line in lines).encode()
            out.write(piece)
            written, drawn = written + len(piece), drawn + ids.size
    return drawn


def _read(text: Path) -> None:
    with text.open("rb") as file:
        while file.read(_PIECE):
            pass


def _split(text: Path) -> None:
    with text.open("rb") as file:
        while piece := file.read(_PIECE):
            piece.decode("utf-8", "replace").split()


def _plain_loop(text: Path) -> str:
    """Read every line twice, as most implementations do: once to count, once to look up."""
    counts: Counter[str] = Counter()
    with text.open(encoding="utf-8") as file:
        for line in file:
            for word in line.split():
                counts[word] += 1
    ids = {"<eos>": 0} | {word: rank for rank, (word, _) in enumerate(counts.most_common(), start=1)}
    found = array("i")
    with text.open(encoding="utf-8") as file:
        for line in file:
            for word in line.split():
                found.append(ids[word])
            found.append(0)
    return hashlib.sha256(np.frombuffer(found, np.int32).astype(id_type(len(ids))).data).hexdigest()


def _words(text: Path) -> str:
    return _store(text, "word").header.splits["train"].sha256


def _characters(text: Path) -> None:
    _store(text, "char")


def _bytes(text: Path) -> None:
    _store(text, "byte")


def _store(text: Path, unit: Any) -> Corpus:
    with tempfile.TemporaryDirectory(dir=text.parent) as folder:
        return Corpus.build(Path(folder) / "store", {"train": text}, unit=unit, closed=True)


def _show(result: dict[str, Any]) -> None:
    rows = [
        [
            f"{row['contender']}{' (bound)' if row['is_bound'] else ''}",
            row["unit"],
            f"{row['seconds']:.2f}",
            f"{row['megabytes_per_second']:.1f}",
            f"{row['peak_megabytes']:.0f}",
        ]
        for row in result["rows"]
    ]
    size, words = result["bytes"] / 1e6, result["words"]
    title = f"{size:.0f} MB, {words:,} words drawn from {result['types']:,}; median of {result['repeats']}"
    show_table(title, ["contender", "unit", "seconds", "MB/s", "peak MB"], rows)
    print(json.dumps(result))
