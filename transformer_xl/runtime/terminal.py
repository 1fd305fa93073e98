"""Standard output and error: tables, the progress of long work, and what happens when output cannot be written."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from .files import explain_write_error


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text under column names: drawn on a terminal, plain in a pipe."""
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
    """Print each name and its value on a line."""
    width = max(map(len, pairs))
    print("\n".join([title, *(f"  {name.ljust(width)}  {value}" for name, value in pairs.items())]), flush=True)


class Output:
    """Standard output, for `redirect_stdout`: a write error names it."""

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
        """Redirect the stream to the null device, because the interpreter flushes it at the end."""
        with suppress(OSError):  # it may have no descriptor
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


class LastingOutput(Output):
    """A stream whose failure does not end the work: it drops text that it cannot write, after one warning."""

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

ON_A_TERMINAL, IN_A_PIPE = 0.25, 4.0
"""Seconds between two reports of progress."""


def report_progress(
    items: Iterable[T],
    what: str,
    total: int | None = None,
    *,
    report: Callable[[str], object] | None = None,
    every: float = IN_A_PIPE,
) -> Iterator[T]:
    """Yield the items, and report every few seconds how much of the work is done; short work prints nothing.

    Reports go to `report`, or to standard error: on a terminal one line that is replaced, in a pipe one line each.

    Args:
        total: the number of items; None: their length.
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


class ProgressPrinter:
    """Prints where a loop of steps stands: on a terminal a bar that stays in place, in a pipe a line each time.

    Use it in a `with`.

    Args:
        total: the number of steps.
        step: where a resumed run starts.
        stream: an open text file; None is standard output.
        log: a file that gets the plain lines too.
    """

    def __init__(self, total: int, *, step: int = 0, stream: Any = None, log: str | Path | None = None):
        self.stream = sys.stdout if stream is None else stream
        self._log = None if log is None else Path(log)
        self._bar = _bar(self.stream) if self.stream.isatty() else None
        self._task = self._bar.add_task("", total=total, completed=step) if self._bar else None

    @property
    def reader_left(self) -> bool:
        """Whether the stream is a pipe whose reader has ended."""
        return getattr(self.stream, "reader_left", False)

    def __enter__(self) -> ProgressPrinter:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, step: int) -> None:
        """Move the bar; cheap enough for every step."""
        self._update(completed=step)

    def show(self, text: str, step: int, total: int) -> None:
        """Print `text` beside the step; `total` may have changed."""
        line = f"step {step:>{len(str(total))}}/{total}  {text}"
        self._write_log(line)
        if not self._update(completed=step, total=total, description=text):
            self._write(line)

    def follow(self, items: Iterable[T], what: str) -> Iterator[T]:
        """`report_progress`, which reports in the bar, or in lines of its own."""
        if self._bar is None:
            return report_progress(items, what, report=self._write)
        return report_progress(items, what, report=lambda line: self._update(description=line), every=ON_A_TERMINAL)

    def note(self, text: str) -> None:
        """Print a text that stays: an evaluation, a warning, a sample."""
        self._write_log(text)
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            self._write(text)

    def _update(self, **changes: Any) -> bool:
        """Change the bar; False where there is none."""
        if self._bar and self._task is not None:
            self._bar.update(self._task, **changes)
        return self._bar is not None

    def _write(self, line: str) -> None:
        self.stream.write(line + "\n")
        self.stream.flush()

    def _write_log(self, line: str) -> None:
        if self._log is not None:
            with explain_write_error(self._log), self._log.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def _bar(stream: Any):
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    return Progress(*columns, console=Console(file=stream), refresh_per_second=4)


def seconds_left(done: int, total: int, seconds: float) -> float | None:
    """Seconds for the other steps, if `done` steps took `seconds`; None before the first step."""
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
