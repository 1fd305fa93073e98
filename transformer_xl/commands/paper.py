"""`txl paper`: every table and figure of the paper; each is made by one command."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from ..config.problems import Problems
from ..mistake import Mistake
from ..runtime.terminal import show_table
from .shared import Sizes

if TYPE_CHECKING:
    from ..paper.exhibits import Exhibit


@dataclass(frozen=True)
class Paper:
    """List the paper's tables and figures, or make one: train what is missing, and print its figures beside ours."""

    exhibit: Annotated[Positional[str | None], arg(metavar="EXHIBIT")] = None
    """table-1 to table-10, figure-1 to figure-7, appendix-a to appendix-e. Without it, all are listed."""
    size: Literal["toy", "small", "paper"] = "toy"
    """toy: at most 3 minutes on 2 cores, shows the way; small: hours, shows most results; paper: the paper's sizes."""
    seeds: Sizes = (1,)
    """Seeds of the models. With several, figures are means with standard errors."""
    rows: Annotated[tuple[str, ...], arg(metavar="ROW ...")] = ()
    """Only these models of the table; by default all."""
    out: Annotated[Path, arg(metavar="DIR")] = Path("runs/paper")
    """The folder of the models, tables and pictures."""
    again: bool = False
    """Train models again that are there."""
    jobs: int = 1
    """Trainings side by side."""
    launch: Annotated[str, arg(metavar="COMMAND")] = ""
    """What starts a training, for example "torchrun --nproc-per-node 8"; it must take -m and a module."""

    def run(self) -> None:
        """List everything, or make one exhibit. What was trained before is used."""
        from ..paper.exhibits import exhibits

        known = exhibits()
        if self.exhibit is None:
            show_list(known)
            return
        if self.exhibit not in known:
            near = "".join(f" Did you mean {name}?" for name in get_close_matches(self.exhibit, known, n=1))
            raise Mistake(f"EXHIBIT must be one of {', '.join(known)}, got {self.exhibit!r}.{near}")
        exhibit = known[self.exhibit]
        problems = Problems()
        problems.bound(self, "jobs", least=1)
        problems.bound(self, "seeds", least=0)
        if not self.seeds:
            problems.append("--seeds must be at least one seed, got none.")
        problems.refuse()
        if exhibit.page:
            print(f"{exhibit.name}: {exhibit.title}. {exhibit.page} has it.")
            return
        self.make(exhibit)

    def make(self, exhibit: Exhibit) -> None:
        """Train the models of an exhibit that are missing, measure, and write the table and the pictures."""
        from ..paper import show
        from ..paper.exhibits import training
        from ..paper.measures import MEASURES
        from ..paper.study import Study
        from ..runtime.files import write_whole

        study = Study(self.size, self.out, shlex.split(self.launch) or [sys.executable], self.jobs)
        rows = [row for row in exhibit.rows(self.rows) if training(row, self.size)]
        if exhibit.rows() and not rows:
            raise Mistake(f"{exhibit.name} has no models of size {self.size}. Give --size toy or paper.")
        study.train(rows, self.seeds, again=self.again)
        folder = self.out / self.size / exhibit.name
        measured = MEASURES[exhibit.measure](study, exhibit, self.seeds, folder)
        if measured.columns:
            head, *body = cells = show.table(exhibit, measured)
            show_table(f"\n{exhibit.name}, {self.size}: {exhibit.title}", head, body)
            write_whole(folder / "table.csv", show.as_csv(cells))
            write_whole(folder / "table.tex", show.as_latex(f"{exhibit.name}: {exhibit.title}", cells))
        if exhibit.claims:
            best = {
                row: {s: show.best_of(r) for s in self.seeds if (r := study.result(row, s))} for row in exhibit.rows()
            }
            head, *body = cells = show.claims(exhibit, best)
            show_table("", head, body)
            write_whole(folder / "claims.csv", show.as_csv(cells))
        print(f"\nIn {folder}: {', '.join(sorted(file.name for file in folder.glob('*.*'))) or 'nothing'}")


def show_list(known: dict[str, Exhibit]) -> None:
    """Print every exhibit: what it shows, the paper's first figures, and ours where they were measured."""
    from ..paper import show

    rows = []
    for name, exhibit in known.items():
        paper = ", ".join(str(line.paper[0]) for line in exhibit.lines if line.paper) or exhibit.page
        rows.append([name, exhibit.title, paper, show.summary(exhibit, "small")])
    show_table("`txl paper NAME --size toy|small|paper` makes one.", ["name", "title", "paper", "ours, small"], rows)
