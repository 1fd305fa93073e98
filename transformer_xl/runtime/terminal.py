"""Tables: drawn on a terminal, plain aligned columns in a pipe; and what happens where output cannot be written."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text under column names; every column but the first is aligned to the right."""
    if not sys.stdout.isatty():
        print("\n".join(plain_table(title, columns, rows)), flush=True)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table without any drawing."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = [title]
    for row in (columns, *rows):
        first, *rest = (
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]).rstrip())
    return lines


def show_pairs(title: str, pairs: Mapping[str, str]) -> None:
    """Print names and values, a line each."""
    width = max(map(len, pairs))
    print("\n".join([title, *(f"  {name.ljust(width)}  {value}" for name, value in pairs.items())]), flush=True)


class Output:
    """Standard output, for `redirect_stdout`: an error of writing names it."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[..., object], *arguments: str) -> None:
        try:
            call(*arguments)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.discard()
        raise OSError(error.errno, error.strerror, "standard output") from error

    def discard(self) -> None:
        """Send what the stream holds and will get to the null device, because the interpreter flushes it at the end."""
        with suppress(OSError):  # it may have no descriptor
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


class LastingOutput(Output):
    """A stream whose failure does not end the work: text that cannot be written is dropped, after one warning."""

    failed = False
    reader_left = False
    """Whether the stream is a pipe whose reader has ended."""

    def _fail(self, error: OSError) -> None:
        self.discard()
        first, self.failed = not self.failed, True
        self.reader_left |= isinstance(error, BrokenPipeError)
        if first and not self.reader_left:
            print(f"txl: standard output: {error.strerror}. The work goes on without it.", file=sys.stderr)


T = TypeVar("T")


ON_A_TERMINAL = 0.25


IN_A_PIPE = 4.0
"""Seconds between two reports of progress."""


def followed(
    items: Iterable[T],
    what: str,
    total: int | None = None,
    *,
    report: Callable[[str], None] | None = None,
    every: float = IN_A_PIPE,
) -> Iterator[T]:
    """Yield the items, and report every few seconds how far the work on them has come; short work is silent.

    Reports go to `report`, or to standard error: on a terminal as one line that is replaced, in a pipe as a line each.

    Args:
        total: how many items there are; None: their length.
        every: seconds between two calls of `report`.
    """
    terminal = report is None and sys.stderr is not None and sys.stderr.isatty()
    if terminal:
        report, every = (lambda line: print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)), ON_A_TERMINAL
    report = report or (lambda line: print(line, file=sys.stderr, flush=True))
    count = total if total is not None else len(items)  # type: ignore[arg-type]
    start = last = time.perf_counter()
    try:
        for done, item in enumerate(items):
            now = time.perf_counter()
            if done and now - last >= every:
                last, left = now, seconds_left(done, count, now - start)
                report(f"{what}: {done / count:4.0%} done, {clock(left)} left")
            yield item
    finally:
        if terminal and last > start:
            report("")


def seconds_left(done: int, total: int, seconds: float) -> float | None:
    """Time the rest takes at the pace of the `done` steps, which took `seconds`; None before the first step."""
    return (total - done) * seconds / done if done > 0 else None


def clock(seconds: float | None) -> str:
    """A duration as 0:07, 12:34, 3:25:45 or 2d 3:25:45; `-:--` when it is unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-:--"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour}:{minute:02d}:{second:02d}"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"
