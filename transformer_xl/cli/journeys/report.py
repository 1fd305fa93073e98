"""`txl report`: write a self-contained HTML page about one run, or several side by side, from their folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...mistake import Mistake
from ...report.page import page
from ...report.record import read_run
from ...runtime.files import write_whole
from ..options.analyse import Report
from .texts import writable

PAGE = "report.html"


def report(options: Report) -> Path:
    """Write the page, print its path, and return it."""
    runs = options.runs
    if not runs:
        raise Mistake("report must be given at least one run, got none. Name a folder that `txl train` wrote.")
    text = page([read_run(run, name) for run, name in zip(runs, names(runs), strict=True)], options.title)
    to = (options.out and writable(options.out, "--out")) or (runs[0] / PAGE if len(runs) == 1 else Path(PAGE))
    write_whole(to, text)
    print(f"Report: {to}", flush=True)
    return to


def names(runs: Sequence[Path]) -> list[str]:
    """Short names: the fewest last components of the paths that make all names differ. A repeated run is numbered."""
    parts = [run.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        found = ["/".join(each[-depth:]) for each in parts]
        if len(set(found)) == len(set(parts)):
            break
    return [name if found.count(name) == 1 else f"{name} #{index}" for index, name in enumerate(found, start=1)]
