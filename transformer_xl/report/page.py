"""The page of one run, or of several side by side: one HTML file that fetches and executes nothing.

This module makes the tables and texts as data. `page.html.jinja` renders them and escapes every text of a run.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ..config.settings import LENGTHS
from ..run.folder import short_names
from ..runtime.files import write_whole
from . import summary
from .curves import HEIGHT, WIDTH, training_curves
from .lead import heading, known, legend, memory_chart, memory_table, pieces
from .record import Record, number, read_run
from .summary import UNKNOWN, Table, line_class, main_figures

PAGE = "report.html"
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""A browser may show the page's own pictures and style. No script runs, whatever a run's files hold."""
NO_LENGTH = {"attn_len": "all", "clamp_len": "none"}


def write_page(runs: Sequence[Path], to: Path | None = None) -> None:
    """Write the page of some runs from what their folders hold, and print its path.

    By default it is `report.html` in the folder of a single run, or in the current folder.
    """
    to = to or (runs[0] / PAGE if len(runs) == 1 else Path(PAGE))
    write_whole(to, page([read_run(run, name) for run, name in zip(runs, short_names(runs), strict=True)]))
    print(f"Report: {to}", flush=True)


def page(records: Sequence[Record]) -> str:
    """The whole page as text."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["at"] = "{:.1f}".format
    one, figured = len(records) == 1, known(records)
    return templates.get_template("page.html.jinja").render(
        title=records[0].name if one else f"{len(records)} runs side by side",
        policy=POLICY,
        width=WIDTH,
        height=HEIGHT,
        description=summary.description(records[0]) if one else "",
        figures=main_figures(records[0]) if one else {},
        summary=_summary(records),
        remarks=[f"{record.name}: {remark}" for record in records for remark in summary.remarks(record)],
        memory_chart=memory_chart(figured),
        memory_table=memory_table(figured),
        texts=[(heading(run, found["split"], found["passage"]), pieces(found["passage"])) for _, run, found in figured],
        legend=legend(),
        curves=training_curves(records),
        evaluations=evaluations(records),
        paper=summary.beside_paper(records),
        pictures=[
            (f"{record.name}: {path.parent.name}/{path.stem}", base64.b64encode(path.read_bytes()).decode())
            for record in records
            for path in record.pictures
        ],
        samples=[(run.name, found) for run in records if (found := [e for e in run.entries if "sample" in e])],
        settings=summary.settings(records),
        environment=summary.compare({record.name: summary.flat(record.environment) for record in records}),
    )


def _summary(records: Sequence[Record]) -> Table:
    """The main figures of several runs, with the colour of each run's curves."""
    key = Markup('<i class="key {}"></i>{}')
    rows = [
        [key.format(line_class(index), record.name), f"{record.corpus}, {record.unit}s", *main_figures(record).values()]
        for index, record in enumerate(records)
    ]
    return Table(["run", "corpus", *main_figures(records[0])], rows, words=2)


def evaluations(records: Sequence[Record]) -> Table:
    """Every evaluation of the held-out splits, except that validation has only its best one."""
    rows = []
    for record in records:
        for entry in record.evaluations:
            validation = entry["split"] in ("valid", "valid-average") and "checkpoint" not in entry
            if validation and entry is not record.best_valid:
                continue
            lengths = [NO_LENGTH.get(n, UNKNOWN) if entry.get(n) is None else entry[n] for n in LENGTHS]
            costs = [f"{number(entry.get(name)):.4f}".replace("nan", UNKNOWN) for name in ("loss", "bits_per_byte")]
            counts = [summary.exact(number(entry.get(name))) for name in ("targets", "tokens_per_second")]
            figures = [summary.figure_of(record, entry), *costs, *counts]
            rows.append([record.name, entry["split"], entry.get("step", UNKNOWN), *lengths, *figures])
    columns = ["run", "split", "step", *LENGTHS, "result", "loss", "bits/byte", "targets", "tokens/s"]
    return Table(columns, rows, words=2)
