"""`txl report`: write a self-contained HTML page about one run, or several side by side, from their folders.

Figures that need the model are computed once, after training or here, and stored in the run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...mistake import Mistake
from ...report.figures import save_figures
from ...report.page import page
from ...report.record import read_run
from ...run import LoadedModel, Run, find_checkpoint
from ...runtime.files import write_whole
from ..options.analyse import Report
from .figures import FAILURES, figures_of, model_figures
from .texts import writable
from .trained import Text

PAGE = "report.html"


def report(options: Report) -> Path:
    """Write the page, print its path, and return it."""
    runs = options.runs
    if not runs:
        raise Mistake("report must be given at least one run, got none. Name a folder that `txl train` wrote.")
    to = (options.out and writable(options.out, "--out")) or (runs[0] / PAGE if len(runs) == 1 else Path(PAGE))
    for run in runs if options.model else ():
        if (run / "checkpoints").is_dir():
            complete(run, options.device)
    text = page([read_run(run, name) for run, name in zip(runs, names(runs), strict=True)], options.title)
    write_whole(to, text)
    print(f"Report: {to}", flush=True)
    return to


def finish_page(run: Run, loaded: LoadedModel, text: Text, **options: Any) -> None:
    """Compute the figures of a finished run that need the model, and write its page; `model_figures` has the options.

    The run is saved, so a failure costs only these figures, which a line of the log reports.
    """
    try:
        figures = model_figures(
            loaded, text, find_checkpoint(run.path), precision=loaded.config.train.precision, **options
        )
        save_figures(run.path, figures)
    except FAILURES as error:
        run.say(f"The page lacks the figures that need the model: {str(error) or type(error).__name__}")
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(f"{run.path} is trained and scored: txl report {run.path} writes its page.")
        raise
    report(Report((run.path,), model=False))


def complete(run: Path, device: str) -> None:
    """Compute the figures of a run that need its model, if they are missing. A failure is printed: the page has other
    parts."""
    try:
        figures_of(run, device=device)
    except FAILURES as error:
        reason = str(error) or type(error).__name__
        print(f"txl: The page of {run} lacks the figures that need the model: {reason}", file=sys.stderr)


def names(runs: Sequence[Path]) -> list[str]:
    """Short names: the fewest last components of the paths that make all names differ. A repeated run is numbered."""
    parts = [run.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        found = ["/".join(each[-depth:]) for each in parts]
        if len(set(found)) == len(set(parts)):
            break
    return [name if found.count(name) == 1 else f"{name} #{index}" for index, name in enumerate(found, start=1)]
