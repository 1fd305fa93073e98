"""What a command reports while it runs: metrics as JSON lines, and one line of progress for a terminal or a pipe."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..evaluation.measures import figure
from ..mistake import Mistake
from ..runtime.files import explained, plain_file, sync, write_whole
from ..runtime.terminal import ON_A_TERMINAL, clock, followed

T = TypeVar("T")


class MetricLog:
    """`metrics.jsonl`: one JSON object a line, appended; it can be read while the run goes on."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def log(self, entry: Mapping[str, Any]) -> None:
        """Append an entry. What JSON has no number for (nan, inf) becomes null.

        Raises:
            OSError: one sentence with the reason, for instance a full disk.
        """
        line = json.dumps({name: _finite(value) for name, value in entry.items()}, allow_nan=False)
        with explained(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def sync(self) -> None:
        """Wait until the disk holds all entries."""
        if self.path.exists():
            with explained(self.path):
                sync(self.path)

    def truncate(self, step: int) -> None:
        """Drop what resuming from `step` repeats: entries past it, the final one of a finished run, which names the
        checkpoint it scored, and a last line that a killed run left unfinished."""
        entries = read_metrics(self.path, step)
        kept = [entry for entry in entries if entry.get("step", 0) <= step and "checkpoint" not in entry]
        if self.path.exists():
            write_whole(self.path, "".join(json.dumps(entry) + "\n" for entry in kept))


def read_metrics(path: str | Path, step: int | None = None) -> list[dict[str, Any]]:
    """The entries of a metrics file, none if it does not exist; an unfinished last line is left out. Where no more is
    asked for than up to a `step`, so is all behind a line without sense, which a power loss may leave.

    Raises:
        ValueError: a line before the last is no JSON object.
    """
    path = Path(path)
    if not path.exists():
        return []
    lines = plain_file(path).read_text(encoding="utf-8", errors="replace").splitlines()
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            entry = None
        if isinstance(entry, dict):
            entries.append(entry)
        elif step is not None and not any(_told(line) <= step for line in lines[number:]):
            return entries
        elif number < len(lines):
            raise Mistake(f"{path}, line {number} is not a JSON object: {line[:60]!r}. Remove the line.")
    return entries


def _told(line: str) -> float:
    """The step that a line tells of; beyond all steps where it tells none."""
    found = re.search(r'"step": (\d+)', line)
    return int(found[1]) if found else math.inf


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where training stands."""

    step: int
    max_steps: int
    loss: float
    """Mean nats per target since the last line."""
    lr: float
    tokens_per_second: float
    seconds_left: float | None = None

    def line(self, unit: str) -> str:
        """The line for people; the unit of the corpus decides between bpc and ppl."""
        return f"step {self.step:>{len(str(self.max_steps))}}/{self.max_steps}  {self.figures(unit)}"

    def figures(self, unit: str) -> str:
        name, value = figure(unit, self.loss)
        shown = f"{value:8.2f}" if name == "ppl" else f"{value:.4f}"
        speed = f"{self.tokens_per_second:,.0f} tokens/s"
        return f"loss {self.loss:.4f}  {name} {shown}  lr {self.lr:.2e}  {speed}  {clock(self.seconds_left)} left"


class ProgressPrinter:
    """A bar that stays in place on a terminal; in a pipe one plain line each time. Use it in a `with`.

    Args:
        unit: of the corpus: "byte", "char", "word" or "bpe".
        step: where a resumed run starts.
        stream: an open text file; None is standard output.
        log: a file that gets the plain lines too.
    """

    def __init__(
        self,
        max_steps: int,
        unit: str,
        *,
        step: int = 0,
        stream: Any = None,
        log: str | Path | None = None,
    ):
        self.unit = unit
        self.stream = sys.stdout if stream is None else stream
        self._log = None if log is None else Path(log)
        self._bar = _bar(self.stream) if self.stream.isatty() else None
        self._task = self._bar.add_task("", total=max_steps, completed=step) if self._bar else None

    @property
    def reader_left(self) -> bool:
        """Whether the lines go into a pipe that nobody reads any more."""
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
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=step)

    def show(self, progress: Progress) -> None:
        """Show where training stands."""
        self._write_log(progress.line(self.unit))
        if self._bar and self._task is not None:
            text, total = progress.figures(self.unit), progress.max_steps
            self._bar.update(self._task, completed=progress.step, total=total, description=text)
        else:
            self._write(progress.line(self.unit))

    def follow(self, items: Iterable[T], what: str) -> Iterator[T]:
        """`followed`, which reports in the bar, or in lines of its own."""
        if self._bar is None or self._task is None:
            return followed(items, what, report=self._write)
        task, bar = self._task, self._bar
        return followed(items, what, report=lambda line: bar.update(task, description=line), every=ON_A_TERMINAL)

    def note(self, text: str) -> None:
        """Say something that stays: an evaluation, a checkpoint, a sample of text."""
        self._write_log(text)
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            self._write(text)

    def _write(self, line: str) -> None:
        self.stream.write(line + "\n")
        self.stream.flush()

    def _write_log(self, line: str) -> None:
        if self._log is not None:
            with explained(self._log), self._log.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def _bar(stream: Any):
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    return Bar(*columns, console=Console(file=stream), refresh_per_second=4)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
