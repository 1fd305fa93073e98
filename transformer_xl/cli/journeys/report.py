"""`txl report`: one self-contained HTML page about a run, or several side by side, from what their folders hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...mistake import Mistake
from ...report.page import page
from ...report.record import read_run
from ...runtime.files import write_whole
from .texts import writable

PAGE = "report.html"


def report(runs: Sequence[Path], out: Path | None = None, *, title: str | None = None) -> Path:
    """Write the page of `runs` to `out`, print where it is, and return that.

    Args:
        out: RUN/report.html if None for one run, and report.html here for several.
        title: of the page; the name of the run if None, or how many there are.

    Raises:
        FileNotFoundError, ValueError: a sentence for a folder that is no run, or no run at all.
        OSError: the page could not be written.
    """
    if not runs:
        raise Mistake("report must be given at least one run, got none. Name a folder that `txl train` wrote.")
    runs = [Path(run) for run in runs]
    page_of = page([read_run(run, name) for run, name in zip(runs, names(runs), strict=True)], title)
    to = (out and writable(out, "--out")) or (runs[0] / PAGE if len(runs) == 1 else Path(PAGE))
    write_whole(to, page_of)
    print(f"Report: {to}", flush=True)
    return to


def names(runs: Sequence[Path]) -> list[str]:
    """The last component of each path, or the fewest that make all names differ; a run given twice is numbered."""
    parts = [run.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        found = ["/".join(each[-depth:]) for each in parts]
        if len(set(found)) == len(set(parts)):
            break
    return [name if found.count(name) == 1 else f"{name} #{index}" for index, name in enumerate(found, start=1)]
