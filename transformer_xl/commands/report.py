"""`txl report`: write a self-contained HTML page about one run, or several side by side, from their folders.

Figures that need the model are computed once and stored in the run.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from ..mistake import Mistake, printable


@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML page about a run, or about several runs side by side."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN ...", help="Folders that `txl train` wrote.")]
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """By default report.html in the run's folder; for several runs, report.html in the current folder."""
    model: bool = True
    """Whether to run the model for figures that are not stored yet."""
    device: str = "auto"

    def run(self) -> None:
        if not self.runs:
            raise Mistake("report must be given at least one run, got none. Name a folder that `txl train` wrote.")
        if self.out is not None and self.out.exists() and not self.out.is_file():
            raise Mistake(
                f"--out must be a file to write, and {self.out} is a folder, a pipe or a device. Name another."
            )
        from ..report.figures import complete_figures
        from ..report.record import read_run
        from ..runtime.device import resolve_device

        resolve_device(self.device)
        from ..report.page import write_page

        for run in self.runs if self.model else ():
            read_run(run, run.name)  # refuse a folder that is no run before a model runs
        for run in self.runs if self.model else ():
            try:  # if the text is missing, the page has the other parts
                if (run / "checkpoints").is_dir():
                    complete_figures(run, self.device)
            except (Mistake, OSError, FloatingPointError) as error:
                lacks = f"The page of {run} lacks the figures that need the model: {printable(str(error))}"
                print(f"txl: {lacks}", file=sys.stderr)
        write_page(self.runs, self.out)
