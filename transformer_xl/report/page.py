"""The page of one run, or of several side by side, from their records: one HTML file, nothing to fetch or execute."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import paper
from .graphs import curves
from .markup import Markup, Own, join, table, tag
from .record import LENGTHS, PICTURES, Record, number, place
from .summary import UNKNOWN, exact, figure_of, opening

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""What a browser may do for the page: show its own pictures and style. No script runs, whatever a run's files hold."""
SAMPLES = 8
NO_LENGTH = {"attn_len": "all", "clamp_len": "none"}


def page(records: Sequence[Record], title: str | None = None) -> str:
    """The whole page as text."""
    assert records, "a page is about one run at least"
    title = title or (records[0].name if len(records) == 1 else f"{len(records)} runs side by side")
    style = Markup(Path(__file__).with_name("style.css").read_text("utf-8"))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", style),
    )
    parts = (opening, curves, evaluations, beside_the_paper, maps, samples, configuration, environment)
    body = tag("body", tag("header", tag("h1", title)), *(part(records) for part in parts), closing())
    return "<!DOCTYPE html>\n" + tag("html", head, body, lang="en") + "\n"


def evaluations(records: Sequence[Record]) -> Markup | None:
    """Every figure of the splits held out: those at the end, the best of validation, and all behind a fold."""
    entries = [(record, entry) for record in records for entry in record.evaluations]
    if not entries:
        return None
    shown = [(record, e) for record, e in entries if e.get("split") != "valid" or e is record.best_valid]
    fold = tag("details", tag("summary", f"All {len(entries)} evaluations"), _evaluations(entries, records))
    best = [f"{record.name}: step {record.best_step:,}" for record in records if isinstance(record.best_step, int)]
    note = "Of validation, the best. At the end the best checkpoint is scored" + (
        f" ({'; '.join(best)})." if best else "."
    )
    parts = [_evaluations(shown, records), fold if len(entries) > len(shown) else None]
    return join([tag("h2", "Evaluation"), *parts, tag("p", note, class_="soft small")])


def _evaluations(entries: Sequence[tuple[Record, Any]], records: Sequence[Record]) -> Markup:
    several, units = len(records) > 1, list(dict.fromkeys(record.figure for record in records))
    rows = []
    for record, entry in entries:
        lengths = [NO_LENGTH.get(n, UNKNOWN) if entry.get(n) is None else entry[n] for n in LENGTHS]
        figures = [figure_of(record, entry) if record.figure == unit else UNKNOWN for unit in units]
        costs = [_four(entry.get("loss")), _four(entry.get("bits_per_byte"))]
        counts = [exact(number(entry.get(name))) or UNKNOWN for name in ("targets", "tokens_per_second")]
        told = [entry.get("split", UNKNOWN), f"{entry['step']:,.0f}", *lengths, *figures, *costs, *counts]
        rows.append([record.name, *told] if several else told)
    columns = ["split", "step", *LENGTHS, *units, "loss", "bits/byte", "targets", "tokens/s"]
    return table(["run", *columns] if several else columns, rows, words=1 + several)


def _four(value: object) -> str:
    return f"{number(value):.4f}" if math.isfinite(number(value)) else UNKNOWN


def beside_the_paper(records: Sequence[Record]) -> Markup | None:
    """The paper's test figures on the same corpus, with the parameters of both; or that it has none."""
    parts: list[Markup] = []
    for corpus in dict.fromkeys(paper.corpus_name(record.config) for record in records):
        of_corpus = [record for record in records if paper.corpus_name(record.config) == corpus]
        if corpus not in paper.TABLES:
            continue
        rows: list[list[object]] = [
            [Own(record.name), exact(record.parameters) or UNKNOWN, figure_of(record, record.tested), record.figure]
            for record in of_corpus
        ]
        theirs = paper.TABLES[corpus]
        rows += [[f"paper, {row.name} ({row.where})", row.parameters, row.test, row.unit] for row in theirs]
        parts.append(tag("h3", corpus))
        parts.append(table(["", "parameters", "test", ""], rows))
        parts += [tag("p", _verdict(record), class_="soft small") for record in of_corpus]
    return join([tag("h2", "Beside the paper"), *parts]) if parts else None


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


def maps(records: Sequence[Record]) -> Markup | None:
    """What `txl analyse` left in the run folders."""
    shown = []
    for record in records:
        for picture in record.pictures:
            data = base64.b64encode(picture.path.read_bytes()).decode()
            source = f"data:{PICTURES[picture.path.suffix.lower()]};base64,{data}"
            name = picture.caption if len(records) == 1 else f"{record.name}: {picture.caption}"
            shown.append(tag("figure", tag("figcaption", name), tag("img", src=source, alt=name)))
    return join([tag("h2", "Analyses"), tag("div", *shown, class_="maps")]) if shown else None


def samples(records: Sequence[Record]) -> Markup | None:
    """What the models wrote while they learned: the last text in full, earlier ones behind a fold."""
    parts: list[Markup] = []
    for record in records:
        if not record.samples:
            continue
        *earlier, last = record.samples
        kept = [earlier[i] for i in np.unique(np.linspace(0, len(earlier) - 1, SAMPLES).astype(int))] if earlier else []
        parts.append(tag("h3", _when(record, last, len(records) > 1)))
        parts.append(tag("pre", last.text))
        if kept:
            words = f"{len(kept)} of {len(earlier)} earlier ones" if len(kept) < len(earlier) else "Earlier ones"
            texts = [part for sample in kept for part in (tag("h3", _when(record, sample)), tag("pre", sample.text))]
            parts.append(tag("details", tag("summary", words), *texts))
    note = "Drawn without a prompt and not picked."
    return join([tag("h2", "Samples"), tag("p", note, class_="soft small"), *parts]) if parts else None


def _when(record: Record, sample: Any, named: bool = False) -> str:
    when = "before the first line of progress" if sample.step is None else f"after step {sample.step:,}"
    return f"{record.name}, {when}" if named else when.capitalize()


def configuration(records: Sequence[Record]) -> Markup | None:
    """Every setting; of several runs first those that differ."""
    flat = [_flat(record.config) for record in records]
    return _facts("Configuration", records, flat) if any(flat) else None


def environment(records: Sequence[Record]) -> Markup | None:
    """Versions, hardware, and what "auto" became."""
    flat = [_flat(record.environment) for record in records]
    return _facts("Environment", records, flat) if any(flat) else None


def _facts(title: str, records: Sequence[Record], flat: Sequence[dict[str, str]]) -> Markup:
    names = list(dict.fromkeys(name for facts in flat for name in facts))
    if len(records) == 1:
        sections: dict[str, list[list[object]]] = {}
        for name in names:
            section, _, key = name.rpartition(".")
            sections.setdefault(section, []).append([key, flat[0][name]])
        parts = [tag("section", tag("h3", key) if key else None, _pairs(rows)) for key, rows in sections.items()]
        return join([tag("h2", title), tag("div", *parts, class_="settings")])
    rows = {name: [facts.get(name, UNKNOWN) for facts in flat] for name in names}
    differing = {name: values for name, values in rows.items() if len(set(values)) > 1}
    columns = ["", *(record.name for record in records)]
    parts = [tag("p", "No difference.", class_="soft small")]
    if differing:
        parts = [tag("h3", "What differs"), table(columns, [[name, *values] for name, values in differing.items()])]
    whole = [
        tag("tr", tag("td", name), *(tag("td", v, class_="n") for v in values), class_=_differs(name in differing))
        for name, values in rows.items()
    ]
    head = tag("tr", *(tag("th", name, class_="n" if index else None) for index, name in enumerate(columns)))
    every = tag("div", tag("table", tag("thead", head), tag("tbody", *whole)), class_="wide")
    return join([tag("h2", title), *parts, tag("details", tag("summary", f"All {len(rows)}"), every)])


def _differs(does: bool) -> str | None:
    return "differs" if does else None


def _pairs(rows: Sequence[Sequence[object]]) -> Markup:
    return tag("table", *(tag("tr", *(tag("td", cell) for cell in row)) for row in rows))


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
    return str(value).lower() if isinstance(value, bool) else place(str(value))


def closing() -> Markup:
    return tag("footer", "Made by ", tag("span", "txl report", class_="mono"), " from the files of the run alone.")
