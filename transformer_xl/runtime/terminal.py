"""Printing to standard output and error: tables, the progress of long work, and one sentence if a stream fails."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TextIO, TypeVar

from ..mistake import printable


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text under column names. The first column is aligned to the left, the others to the right."""
    first, *rest = (max(map(len, column)) for column in zip(columns, *rows, strict=True))
    lines = [title]
    for name, *cells in (columns, *rows):
        aligned = [name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, rest, strict=True))]
        lines.append("  ".join(aligned).rstrip())
    print("\n".join(map(printable, lines)), flush=True)


def show_pairs(title: str, pairs: Mapping[str, str]) -> None:
    """Print each name and its value on a line."""
    width = max(map(len, pairs))
    lines = [title, *(f"  {name.ljust(width)}  {value}" for name, value in pairs.items())]
    print(printable("\n".join(lines)), flush=True)


class Output:
    """A stream for `redirect_stdout`. A write error names standard output; if the stream is `lasting`, it does not end
    the work: text that cannot be written is dropped, after one warning."""

    def __init__(self, stream: TextIO, *, lasting: bool = False):
        self._stream = stream
        self._lasting = lasting
        self._failed = False
        self.reader_left: bool = False
        """Whether a lasting stream is a pipe whose reader has ended."""

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str | bytes) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[..., object], *arguments: str | bytes) -> None:
        try:
            call(*arguments)
        except OSError as error:
            with suppress(OSError):  # the interpreter flushes the stream at the end, if it has a descriptor
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)
            if not self._lasting:
                raise OSError(error.errno, error.strerror, "standard output") from error
            first, self._failed = not self._failed, True
            self.reader_left |= isinstance(error, BrokenPipeError)
            if first and not self.reader_left:
                print(f"txl: standard output: {error.strerror}. The work continues without it.", file=sys.stderr)


T = TypeVar("T")

ON_A_TERMINAL, IN_A_PIPE = 0.25, 4.0
"""Seconds between two reports of progress."""


def report_progress(items: Iterable[T], what: str) -> Iterator[T]:
    """Yield the items, and report every few seconds how much of the work is done; short work prints nothing.

    The reports go to standard error: on a terminal one line is replaced, otherwise each report is a line. The items
    have a length.
    """
    every = ON_A_TERMINAL if sys.stderr.isatty() else IN_A_PIPE
    count = len(items)  # type: ignore[arg-type]
    start = last = time.perf_counter()
    try:
        for done, item in enumerate(items):
            now = time.perf_counter()
            if done and now - last >= every:
                last, left = now, (count - done) * (now - start) / done
                _report(f"{what}: {done / count:4.0%} done, {clock(left)} left")
            yield item
    finally:
        if last > start:
            _report("")


def _report(line: str) -> None:
    """Write a line. On a terminal it replaces the last line, and an empty line erases it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K")
    elif line:
        sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def clock(seconds: float | None) -> str:
    """A duration as 0:07, 12:34 or 51:25:45; `-:--` when it is unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-:--"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
