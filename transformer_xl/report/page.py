"""The page of one run, or of several side by side: one HTML file that fetches and executes nothing.

This module makes the tables and texts as data: first cost by memory length, and texts coloured by nats.
`page.html.jinja` renders them and escapes every text of a run.
"""

from __future__ import annotations

import base64
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ..config.settings import LENGTHS
from ..data.vocab import units_of
from ..run.folder import short_names
from ..runtime.files import write_whole
from . import summary
from .curves import HEIGHT, WIDTH, Chart, Series, chart, training_curves
from .figures import Figures, Passage
from .record import Record, number, read_run
from .summary import UNKNOWN, Table, line_class, loss_text, main_figures

PAGE = "report.html"
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""A browser may show the page's own pictures and style. No script runs, whatever a run's files hold."""
NO_LENGTH = {"attn_len": "all", "clamp_len": "none"}
NATS = (0.1, 0.5, 1.0, 2.0, 4.0, 7.0)
"""The edges of the colours of tokens. The probabilities are the same for every vocabulary."""

Known = Sequence[tuple[int, Record, Figures]]
"""The runs that have figures, with their numbers on the page."""


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
    one = len(records) == 1
    figured = [(index, record, record.figures) for index, record in enumerate(records) if record.figures]
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
    splits, rows = dict.fromkeys(record.config.eval.split for record in records), []
    for index, record in enumerate(records):
        scored, *others = main_figures(record).values()
        scored += f" ({record.config.eval.split})" if len(splits) > 1 else ""
        text = f"{record.corpus}, {units_of(record.config.corpus.unit)}"
        rows.append([key.format(line_class(index), record.name), text, scored, *others])
    return Table(["run", "corpus", " or ".join(splits), *[*main_figures(records[0])][1:]], rows, words=2)


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


class Piece(NamedTuple):
    """A part of a text with one colour."""

    text: str
    class_: str
    title: str


def memory_chart(runs: Known) -> Chart | None:
    """The cost of all runs by memory length; None without figures."""
    lines = []
    for index, record, figures in runs:
        x, y = (np.array([cost[name] for cost in figures["costs"]], float) for name in ("mem_len", "loss"))
        lines.append(Series(record.name, x, y, line_class(index), dots=True))
    return chart(lines, "Nats per target by memory length in tokens")


def memory_table(runs: Known) -> Table:
    """The cost of all runs by memory length, and what a run uses each length for."""
    rows = []
    for _, record, figures in runs:
        config, first = record.config, figures["costs"][0]
        uses = {"training": config.train.mem_len, config.eval.split: config.eval_lengths.mem_len}
        for cost in figures["costs"]:
            name = f"{cost['mem_len']:,}" if cost["mem_len"] else "none"
            if used := ", ".join(word for word, size in uses.items() if size == cost["mem_len"]):
                name = f"{name} ({used})"
            saved = UNKNOWN if cost is first else f"{first['loss'] - cost['loss']:.4f}"
            rows.append([record.name, name, loss_text(record, cost["loss"]), saved, f"{cost['targets']:,}"])
    return Table(["run", "memory", "cost", "nats saved", "targets"], rows, words=2)


def heading(record: Record, split: str, passage: Passage) -> str:
    """What the passage is, and what it costs."""
    nats = [cost for cost in passage["nats"] if cost is not None]
    first, count = passage["start"], len(passage["texts"])
    cost = loss_text(record, sum(nats) / len(nats))
    return f"{record.name} reads tokens {first + 1:,} to {first + count:,} of {split}: {cost}"


def pieces(passage: Passage) -> Iterator[Piece]:
    """The tokens to show. A token without text belongs to the character that a later token completes."""
    held: list[float] = []
    for text, nats in zip(passage["texts"], passage["nats"], strict=True):
        held += [] if nats is None else [nats]
        if text:
            yield _piece(text, held)
            held = []


def _piece(text: str, costs: Sequence[float]) -> Piece:
    shown = text.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}\n")
    if not costs:
        return Piece(shown, "", "not scored: the first token of a document")
    nats = sum(costs)
    tokens = f" in {len(costs)} tokens" if len(costs) > 1 else ""
    return Piece(shown, f"n{level(nats)}", f"{nats:.3f} nats{tokens}, probability {math.exp(-nats):.2g}")


def level(nats: float) -> int:
    """The number of the colour; what is not finite has the last one."""
    return bisect_right(NATS, nats) if math.isfinite(nats) else len(NATS)


def legend() -> list[Piece]:
    """The colours of tokens."""
    return [
        Piece(f"from {edge:g} nats", f"n{at}", f"p up to {math.exp(-edge):.2g}") for at, edge in enumerate((0.0, *NATS))
    ]
