"""`txl paper`: every table and figure of the paper; each is made by one command."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from ..config.problems import Problems
from ..mistake import Mistake, did_you_mean
from ..paper.exhibits import SIZES, Exhibit, exhibits
from ..runtime.terminal import show_table
from .shared import Sizes

if TYPE_CHECKING:
    from ..paper.measures import Results


SHOWN = (".csv", ".tex", ".png", ".txt")
"""Suffixes of the files that are listed at the end."""


@dataclass(frozen=True)
class Paper:
    """List the paper's tables and figures, or make one: train what is missing, and print its figures beside ours."""

    exhibit: Annotated[Positional[str | None], arg(metavar="EXHIBIT")] = None
    """table-1 to table-10, figure-1 to figure-7, appendix-a to appendix-e. Without it, all are listed."""
    size: Literal["toy", "small", "paper"] | None = None
    """Make it. toy: at most 3 minutes on 2 cores, shows the way; small: minutes to an hour per model; paper: the
    paper's sizes, for a cluster. Without a size, the command prints the paper's figures beside the ones measured
    here."""
    seeds: Sizes = (1,)
    """Seeds of the models. With several, figures are means with standard errors."""
    rows: Annotated[tuple[str, ...], arg(metavar="ROW ...")] = ()
    """Train only these models of the exhibit; by default all."""
    out: Annotated[Path, arg(metavar="DIR")] = Path("runs/paper")
    """The folder of the models, tables and pictures."""
    again: bool = False
    """Train models again that are there."""
    jobs: int = 1
    """Number of models to train side by side."""
    launch: Annotated[str, arg(metavar="COMMAND")] = ""
    """What starts a training, for example "torchrun --standalone --nproc-per-node 8"; it must take -m and a module."""

    def run(self) -> None:
        from ..paper import show

        known = exhibits()
        asked = [each.name for each in fields(self) if each.name not in ("exhibit", "size")]
        asked = [f"--{name}" for name in asked if getattr(self, name) != getattr(Paper, name)]
        if self.size is None and asked:
            raise Mistake(f"{', '.join(asked)}: only for models to train. Give --size too, or leave it out.")
        if self.exhibit is None:
            if self.size is not None:
                raise Mistake(f"EXHIBIT must be named for --size {self.size}. `txl paper` lists them.")
            rows = []
            for name, exhibit in known.items():
                paper = show.few([str(line.paper[0]) for line in exhibit.lines if line.paper])
                ours = show.few(show.first_column(exhibit, show.of_rows(exhibit, "small", show.measured("small"))))
                rows.append([f"{name:10}  {exhibit.title}", exhibit.page or paper, ours])
            show_table(
                "`txl paper NAME --size toy|small|paper` makes one.", ["what it shows", "paper", "ours, small"], rows
            )
            return
        if self.exhibit not in known:
            near = did_you_mean(self.exhibit, known)
            raise Mistake(f"EXHIBIT must be one of {', '.join(known)}, got {self.exhibit!r}.{near}")
        exhibit = known[self.exhibit]
        problems = Problems()
        problems.bound(self, "jobs", least=1)
        problems.bound(self, "seeds", least=0)
        if not self.seeds:
            problems.append("--seeds must be at least one seed, got none.")
        problems.refuse()
        exhibit.rows(self.rows)  # refuses other names
        print(f"{exhibit.name}: {exhibit.title}")
        if exhibit.page:
            print(f"{exhibit.page} has it.")
        elif self.size is not None:
            make(exhibit, self, self.size)
        else:
            sizes = [size for size in SIZES if not exhibit.rows() or exhibit.rows(size=size)]
            models = ", ".join(exhibit.rows(self.rows)) or "none"
            print(f"Models: {models}. `txl paper {exhibit.name} --size {'|'.join(sizes)}` makes it.\n")
            found = show.of_rows(exhibit, "small", show.measured("small"))
            show_tables(exhibit, found, "small" if any(found.values()) else "not measured here")


def make(exhibit: Exhibit, options: Paper, size: Literal["toy", "small", "paper"]) -> None:
    """Train the models of an exhibit that are missing, measure, and write the table."""
    from ..paper import show
    from ..paper.measures import MEASURES
    from ..paper.study import Study
    from ..runtime.files import remove_folder, write_whole

    seeds = list(dict.fromkeys(options.seeds))
    try:
        launch = shlex.split(options.launch) or [sys.executable]
    except ValueError as error:
        raise Mistake(f"--launch must be a command, got {options.launch!r}: {error}.") from error
    study = Study(size, options.out, launch, options.jobs)
    rows = exhibit.rows(options.rows, size)
    if exhibit.rows() and not rows:
        others = [other for other in SIZES if exhibit.rows(options.rows, other)]
        models = ", ".join(options.rows) or exhibit.name
        raise Mistake(f"{models} has no models of size {size}. Give --size {' or '.join(others)}.")
    again = {study.folder(row, seed) for seed in seeds for row in rows} if options.again else set()
    shown = [*exhibit.rows(), exhibit.home]
    study.results(shown, without=again)  # models with other settings are refused before anything is removed or trained
    for folder in filter(Path.exists, again):
        remove_folder(folder)
    study.train(rows, seeds)
    folder = options.out / size / exhibit.home
    measure = MEASURES[exhibit.measure]
    if measure.make is not None:
        for seed in seeds:
            measure.make(study, exhibit, seed, folder)
    found = show.of_rows(exhibit, size, study.results(shown))
    known = sorted({result["seed"] for each in found.values() for result in each})
    how = f"{size}, seeds {', '.join(map(str, known))}"
    for name, cells in show_tables(exhibit, found, how).items():
        write_whole(folder / f"{name}.csv", show.as_csv(cells))
        write_whole(folder / f"{name}.tex", show.as_latex(f"{exhibit.home}, {how}: {exhibit.title}", cells))
    files = [str(file.relative_to(folder)) for file in sorted(folder.rglob("*")) if file.suffix in SHOWN]
    print(f"\nIn {folder}: {', '.join(files)}")


def show_tables(exhibit: Exhibit, results: Results, how: str) -> Mapping[str, Sequence[Sequence[str]]]:
    """Print and return the tables of an exhibit: its figures, and the paper's conclusions."""
    from ..paper import show

    tables = {}
    if exhibit.columns:
        tables["table"] = show.table(exhibit, results)
        show_table(f"{exhibit.home}, {how}", tables["table"][0], tables["table"][1:])
    if exhibit.claims:
        tables["claims"] = show.claims(exhibit, results)
        show_table("", tables["claims"][0], tables["claims"][1:])
        print(
            "A difference is significant (5 %, two-sided) from 12.7 standard errors on with 2 seeds, 4.3 with 3, 3.2 "
            "with 4."
        )
    return tables
