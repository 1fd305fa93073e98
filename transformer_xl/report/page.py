"""The page of one run, or of several side by side: one HTML file that fetches and executes nothing.

Here are the tables and texts as data; `page.html.jinja` makes HTML of them and escapes every text of a run.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from . import paper
from .graphs import curves
from .record import LENGTHS, PICTURES, Record, Sample, last_part, number
from .summary import UNKNOWN, description, exact, figure_of, line_class, main_figures, remarks, row_of

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""A browser may show the page's own pictures and style. No script runs, whatever a run's files hold."""
SAMPLES = 8
NO_LENGTH = {"attn_len": "all", "clamp_len": "none"}
SUMMARY = ["run", "corpus", "test", "best valid", "parameters", "tokens", "time", "tokens/s", "steps"]

_NO_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


class Row(NamedTuple):
    """A row of a table."""

    cells: Sequence[object]
    class_: str = ""


class Table(NamedTuple):
    """A table whose first `words` columns are words, and the rest figures, aligned to the right."""

    columns: Sequence[str]
    rows: Sequence[Row]
    words: int = 1


def page(records: Sequence[Record], title: str | None = None) -> str:
    """The whole page as text."""
    assert records, "a page is about at least one run"
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
    key = Markup('<i class="key {}"></i>{}')
    return templates.get_template("page.html.jinja").render(
        title=title or (one.name if one else f"{len(records)} runs side by side"),
        policy=POLICY,
        description=description(one) if one else "",
        figures=main_figures(one) if one else [],
        summary=Table(
            SUMMARY, [Row([key.format(line_class(i), r.name), *row_of(r)]) for i, r in enumerate(records)], words=2
        ),
        remarks=[("" if one else record.name, remark) for record in records for remark in remarks(record)],
        curves=curves(records),
        evaluations=evaluations(records),
        comparisons=comparisons(records),
        pictures=pictures(records),
        samples=samples(records),
        facts={
            "Configuration": facts([record.config for record in records], records),
            "Environment": facts([record.environment for record in records], records),
        },
    )


def _replace_control_characters(value: object) -> object:
    """`value` as text in which U+FFFD replaces what no page can hold; HTML stays as it is."""
    return value if isinstance(value, Markup) else _NO_TEXT.sub("\ufffd", str(value))


def evaluations(records: Sequence[Record]) -> dict[str, Any] | None:
    """Every figure of the held-out splits: a table of the final ones and the best of validation, and one of all."""
    entries = [(record, entry) for record in records for entry in record.evaluations]
    if not entries:
        return None
    shown = [(record, e) for record, e in entries if e.get("split") != "valid" or e is record.best_valid]
    best = [f"{record.name}: step {record.best_step:,}" for record in records if isinstance(record.best_step, int)]
    tables = (_evaluations(chosen, records) for chosen in (shown, entries))
    return {"tables": tuple(tables), "best": "; ".join(best)}


def _evaluations(entries: Sequence[tuple[Record, Any]], records: Sequence[Record]) -> Table:
    several, units = len(records) > 1, list(dict.fromkeys(record.figure for record in records))
    rows = []
    for record, entry in entries:
        lengths = [NO_LENGTH.get(n, UNKNOWN) if entry.get(n) is None else entry[n] for n in LENGTHS]
        figures = [figure_of(record, entry) if record.figure == unit else UNKNOWN for unit in units]
        costs = [_four_digits(entry.get("loss")), _four_digits(entry.get("bits_per_byte"))]
        counts = [exact(number(entry.get(name))) or UNKNOWN for name in ("targets", "tokens_per_second")]
        cells = [entry["split"], f"{entry['step']:,.0f}", *lengths, *figures, *costs, *counts]
        rows.append(Row([record.name, *cells] if several else cells))
    columns = ["split", "step", *LENGTHS, *units, "loss", "bits/byte", "targets", "tokens/s"]
    return Table(["run", *columns] if several else columns, rows, words=1 + several)


def _four_digits(value: object) -> str:
    return f"{number(value):.4f}" if math.isfinite(number(value)) else UNKNOWN


def comparisons(records: Sequence[Record]) -> list[tuple[str, Table, list[str]]]:
    """For each corpus of the paper: its name, its test figures beside the runs' own, and what a comparison is worth."""
    found = []
    for corpus in dict.fromkeys(paper.corpus_name(record.config) for record in records):
        if corpus not in paper.TABLES:
            continue
        ours = [record for record in records if paper.corpus_name(record.config) == corpus]
        rows = [
            Row([r.name, exact(r.parameters) or UNKNOWN, figure_of(r, r.tested), r.figure], class_="own") for r in ours
        ]
        for row in paper.TABLES[corpus]:
            rows.append(Row([f"paper, {row.name} ({row.where})", row.parameters, row.test, row.unit]))
        found.append((corpus, Table(["", "parameters", "test", ""], rows), [_verdict(record) for record in ours]))
    return found


def _verdict(record: Record) -> str:
    """What the comparison is worth."""
    same, other = paper.of_shape(record.config), paper.differences(record.config, record.partial)
    if same is None:
        size = f"{record.parameters:,}" if record.parameters else "an unknown number of"
        first = f"{record.name} has {size} parameters and another shape than the paper's: no reproduction."
    else:
        first = (
            f"{record.name} has the shape of the paper's {same.name} model ({same.parameters} parameters); it is a "
            "reproduction only if data, training and test lengths were the paper's too."
        )
    return first + (f" Also, {', and '.join(other)}." if other else "")


def pictures(records: Sequence[Record]) -> list[tuple[str, str]]:
    """The caption of each picture that `txl analyse` left in the run folders, and the picture as a data URL."""
    return [
        (
            picture.caption if len(records) == 1 else f"{record.name}: {picture.caption}",
            f"data:{PICTURES[picture.path.suffix.lower()]};base64,"
            + base64.b64encode(picture.path.read_bytes()).decode(),
        )
        for record in records
        for picture in record.pictures
    ]


def samples(records: Sequence[Record]) -> list[tuple[str, Sample, list[Sample], int]]:
    """For each run with samples: its name (empty if alone), the last sample, some earlier ones, and their number."""
    found = []
    for record in records:
        if record.samples:
            *earlier, last = record.samples
            kept = np.unique(np.linspace(0, len(earlier) - 1, SAMPLES).astype(int)) if earlier else []
            name = record.name if len(records) > 1 else ""
            found.append((name, last, [earlier[i] for i in kept], len(earlier)))
    return found


def facts(tables: Sequence[Any], records: Sequence[Record]) -> dict[str, Any] | None:
    """Settings or environments: of one run by section, of several a table of those that differ and one of all."""
    flat = [_flat(table) for table in tables]
    names = list(dict.fromkeys(name for values in flat for name in values))
    if not names:
        return None
    sections: dict[str, list[tuple[str, str]]] = {}
    if len(records) == 1:
        for name in names:
            section, _, key = name.rpartition(".")
            sections.setdefault(section, []).append((key, flat[0][name]))
        return {"sections": sections}
    rows = [Row([name, *(values.get(name, UNKNOWN) for values in flat)]) for name in names]
    rows = [row._replace(class_="differs") if len(set(row.cells[1:])) > 1 else row for row in rows]
    columns = ["", *(record.name for record in records)]
    differing = [row._replace(class_="") for row in rows if row.class_]
    return {"sections": {}, "differing": Table(columns, differing), "all": Table(columns, rows)}


def _flat(facts: Any, prefix: str = "") -> dict[str, str]:
    """Nested settings by dotted name, as people write them."""
    found: dict[str, str] = {}
    for name, value in facts.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = _word(value)
    return found


def _word(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_word, value)) or "none"
    if value is None or value == "":
        return "none"
    return str(value).lower() if isinstance(value, bool) else last_part(str(value))
