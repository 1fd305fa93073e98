"""The page of one run, or of several side by side: one HTML file that fetches and executes nothing.

This module makes the tables and texts as data. `page.html.jinja` renders them and escapes every text of a run.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ..run import short_names
from ..runtime.files import write_whole
from . import paper
from .curves import HEIGHT, WIDTH
from .graphs import curves
from .lead import costs, looks, texts
from .record import LENGTHS, Record, number, read_run
from .settings import compare, environments
from .summary import UNKNOWN, corpus_of, description, exact, figure_of, line_class, main_figures, remarks
from .tables import Row, Table

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""A browser may show the page's own pictures and style. No script runs, whatever a run's files hold."""
NO_LENGTH = {"attn_len": "all", "clamp_len": "none"}
CAPTIONS = {
    "recl_gains_relative": "Relative gain of more context; dotted: the gain of going back",
    "recl_gains": "Gain of more context, as in the paper's Figure 3",
    "recl_context": "Loss by context length, as in the paper's Figure 4",
    "length": "Loss by attention length",
    "average": "Average attention by relative distance, a row for each head, as in the paper's Figure 5",
    "terms": "The terms of attention, each through its own softmax, as in the paper's Figure 7",
    "position-": "Chosen heads from one position, the top 20 % of memory marked, as in the paper's Figure 6",
}

_NO_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


PAGE = "report.html"


def write_page(runs: Sequence[Path], to: Path | None = None, title: str | None = None) -> None:
    """Write the page of some runs from what their folders hold, and print its path.

    By default it is `report.html` in the folder of a single run, or in the current folder.
    """
    to = to or (runs[0] / PAGE if len(runs) == 1 else Path(PAGE))
    records = [read_run(run, name) for run, name in zip(runs, short_names(runs), strict=True)]
    write_whole(to, page(records, title))
    print(f"Report: {to}", flush=True)


def page(records: Sequence[Record], title: str | None = None) -> str:
    """The whole page as text."""
    assert records, "a page needs at least one run"
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_replace_control_characters,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["at"] = "{:.1f}".format
    one = records[0] if len(records) == 1 else None
    return templates.get_template("page.html.jinja").render(
        title=title or (one.name if one else f"{len(records)} runs side by side"),
        policy=POLICY,
        width=WIDTH,
        height=HEIGHT,
        description=description(one) if one else "",
        figures=main_figures(one) if one else {},
        summary=_summary(records),
        remarks=[("" if one else record.name, remark) for record in records for remark in remarks(record)],
        costs=costs(records),
        texts=texts(records),
        looks=looks(records),
        curves=curves(records),
        evaluations=evaluations(records),
        comparisons=comparisons(records),
        pictures=[(record.name, _caption(path), _url(path)) for record in records for path in record.pictures],
        samples=[("" if one else record.name, record.samples) for record in records if record.samples],
        settings=compare(records),
        environment=environments(records),
    )


def _summary(records: Sequence[Record]) -> Table:
    """The main figures of several runs, with the colour of each run's curves."""
    key = Markup('<i class="key {}"></i>{}')
    runs = [key.format(line_class(index), record.name) for index, record in enumerate(records)]
    texts = [f"{corpus_of(record)}, {record.unit}s" for record in records]
    rows = [Row([*head, *main_figures(each).values()]) for *head, each in zip(runs, texts, records, strict=True)]
    return Table(["run", "corpus", *main_figures(records[0])], rows, words=2)


def _replace_control_characters(value: object) -> object:
    """`value` as text, with U+FFFD for each character that HTML cannot hold; `Markup` stays unchanged."""
    return value if isinstance(value, Markup) else _NO_TEXT.sub("\ufffd", str(value))


def evaluations(records: Sequence[Record]) -> Table | None:
    """Every evaluation of the held-out splits, except that validation has only its best one."""
    units = list(dict.fromkeys(record.figure for record in records))
    rows = []
    for record in records:
        for entry in record.evaluations:
            if entry["split"] == "valid" and entry is not record.best_valid:
                continue
            lengths = [NO_LENGTH.get(n, UNKNOWN) if entry.get(n) is None else entry[n] for n in LENGTHS]
            figures = [figure_of(record, entry) if record.figure == unit else UNKNOWN for unit in units]
            costs = [f"{number(entry.get(name)):.4f}".replace("nan", UNKNOWN) for name in ("loss", "bits_per_byte")]
            counts = [exact(number(entry.get(name))) for name in ("targets", "tokens_per_second")]
            step = f"{entry['step']:,.0f}"
            rows.append(Row([record.name, entry["split"], step, *lengths, *figures, *costs, *counts]))
    columns = ["run", "split", "step", *LENGTHS, *units, "loss", "bits/byte", "targets", "tokens/s"]
    return Table(columns, rows, words=2) if rows else None


def comparisons(records: Sequence[Record]) -> list[tuple[str, Table]]:
    """For each corpus of the paper that a run used: its name, and the test figures of the runs and the paper."""
    found = []
    for corpus, published in paper.TABLES.items():
        ours = [record for record in records if paper.corpus_name(record.config) == corpus]
        rows = [Row([r.name, exact(r.parameters), figure_of(r, r.test_entry), r.figure], class_="own") for r in ours]
        rows += [Row([f"paper, {name}", *figures]) for name, *figures in published]
        if ours:
            found.append((corpus, Table(["", "parameters", "test", ""], rows)))
    return found


def _caption(picture: Path) -> str:
    known = (words for begin, words in CAPTIONS.items() if picture.stem.startswith(begin))
    return next(known, picture.stem.replace("_", " "))


def _url(picture: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
