"""What a page shows first: cost by memory length, texts coloured by nats, and the attention of one layer."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from .curves import Chart, Series, chart
from .figures import LayerAttention, Passage
from .record import Record, number
from .summary import UNKNOWN, WORDS, figure_of, line_class, loss_figures
from .tables import Row, Table

NATS = (0.1, 0.5, 1.0, 2.0, 4.0, 7.0)
"""The edges of the colours of tokens. The probabilities are the same for every vocabulary."""
SHARES = (0.01, 0.03, 0.08, 0.2, 0.4)
"""The edges of the colours of attention."""


class Piece(NamedTuple):
    """A part of a text with one colour."""

    text: str
    class_: str
    title: str


class ColouredText(NamedTuple):
    """A passage for the template."""

    run: str
    heading: str
    pieces: Sequence[Piece]
    legend: Sequence[Piece]


class Look(NamedTuple):
    """The attention of one layer for the template."""

    run: str
    words: str
    chart: Chart | None
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Piece]]]


class Costs(NamedTuple):
    """The costs by memory length for the template."""

    notes: Sequence[str]
    charts: Sequence[Chart]
    table: Table
    commands: Sequence[str]


def costs(records: Sequence[Record]) -> Costs | None:
    """Charts and a table of all runs; None if no run has figures."""
    known = [(index, record) for index, record in enumerate(records) if record.figures]
    if not known:
        return None
    charts = []
    for name in dict.fromkeys(record.figure for _, record in known):
        lines = [_cost_line(index, record) for index, record in known if record.figure == name]
        if any(len(line.x) > 1 for line in lines):
            trained = {number(record.setting("train", "mem_len")) for _, record in known}
            marks = [(length, "as in training") for length in trained if len(trained) == 1]
            charts.append(chart(lines, f"{WORDS[name].capitalize()} by memory length in tokens", marks=marks))
    commands = dict.fromkeys(record.figures.command for _, record in known if record.figures and record.figures.command)
    return Costs(
        notes=list(dict.fromkeys(_cost_note(record) for _, record in known)),
        charts=[drawn for drawn in charts if drawn is not None],
        table=_cost_table([record for _, record in known], several=len(records) > 1),
        commands=list(commands),
    )


def _cost_line(index: int, record: Record) -> Series:
    entries = record.figures.costs if record.figures else ()
    x, loss = (np.array([number(entry.get(name)) for entry in entries]) for name in ("mem_len", "loss"))
    return Series(record.name, x, loss_figures(record.figure, loss), line_class(index), dots=True)


def _cost_note(record: Record) -> str:
    assert record.figures is not None, "only runs with figures have costs"
    first, split = record.figures.costs[0], record.figures.split
    lengths = len(record.figures.costs)
    every = f"the same {number(first.get('targets')):,.0f} targets of {split} at each memory length"
    return f"The model scored {every if lengths > 1 else every.removesuffix(' at each memory length')}."


def _cost_table(records: Sequence[Record], *, several: bool) -> Table:
    rows = []
    for record in records:
        first: float | None = None
        for entry in record.figures.costs if record.figures else ():
            loss = number(entry.get("loss"))
            less = UNKNOWN if first is None or not math.isfinite(first - loss) else f"{first - loss:.4f}"
            first = loss if first is None else first
            head = [record.name] if several else []
            rows.append(Row([*head, _memory(record, entry.get("mem_len")), figure_of(record, entry), less]))
    names = list(dict.fromkeys(record.figure for record in records))
    columns = [*(["run"] if several else []), "memory", " or ".join(names), "nats saved"]
    return Table(columns, rows, words=2 if several else 1)


def _memory(record: Record, size: Any) -> str:
    """A memory length, and where the run uses it."""
    uses = (("training", record.setting("train", "mem_len")), (tested_as(record), record.lengths["mem_len"]))
    used = ", ".join(word for word, own in uses if own == size)
    name = "none" if size == 0 else f"{number(size):,.0f}"
    return f"{name} ({used})" if used else name


def tested_as(record: Record) -> str:
    return str(record.setting("eval", "split") or "test")


def texts(records: Sequence[Record]) -> list[ColouredText]:
    """The passages of all runs."""
    return [
        ColouredText(
            "" if len(records) == 1 else record.name,
            _heading(record, passage),
            list(_pieces(passage)),
            legend(),
        )
        for record in records
        for passage in (record.figures.passages if record.figures else ())
        if passage.tokens
    ]


def _heading(record: Record, passage: Passage) -> str:
    nats = [token.nats for token in passage.tokens if token.nats is not None]
    cost = figure_of(record, {"loss": sum(nats) / len(nats)}) if nats else UNKNOWN
    split = record.figures.split if record.figures else ""
    last = passage.start + len(passage.tokens)
    read = f"The model reads: tokens {passage.start + 1:,} to {last:,} of {split}"
    written = f"The model goes on by itself: {len(passage.tokens):,} tokens after this text"
    return f"{written if passage.kind == 'written' else read}, {cost} {record.figure}"


def _pieces(passage: Passage) -> Iterator[Piece]:
    """The tokens to show. A token without text belongs to the character that a later token completes."""
    held: list[float] = []
    for text, nats in passage.tokens:
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
    return Piece(shown, f"n{level(nats, NATS)}", f"{nats:.3f} nats{tokens}, probability {_probability(nats)}")


def _probability(nats: float) -> str:
    return f"{math.exp(-nats):.2g}" if math.isfinite(nats) else UNKNOWN


def level(value: float, edges: Sequence[float]) -> int:
    """The number of the colour; what is not finite has the last one."""
    return bisect_right(edges, value) if math.isfinite(value) else len(edges)


def legend() -> list[Piece]:
    """The colours of tokens."""
    names = [f"below {NATS[0]:g}", *(f"{low:g} to {high:g}" for low, high in pairwise(NATS)), f"{NATS[-1]:g} and more"]
    chances = [*(f"p above {_probability(edge)}" for edge in NATS), f"p up to {_probability(NATS[-1])}"]
    words = enumerate(zip(names, chances, strict=True))
    return [Piece(name if at else f"{name} nats", f"n{at}", chance) for at, (name, chance) in words]


def looks(records: Sequence[Record]) -> list[Look]:
    """The attention of all runs that have one."""
    return [
        _look(index, record, record.figures.attention, several=len(records) > 1)
        for index, record in enumerate(records)
        if record.figures and record.figures.attention
    ]


def _look(index: int, record: Record, found: LayerAttention, *, several: bool) -> Look:
    layers = len(found.beyond_segment)
    own = found.beyond_segment[found.layer - 1]
    words = f"Layer {found.layer} of {layers}, the mean over {found.queries:,} tokens. "
    if found.mem_len:
        every = ", ".join(f"{number}: {share:.0%}" for number, share in enumerate(found.beyond_segment, start=1))
        words += f"It gives {own:.0%} of its attention to memory, more than any other layer ({every}). "
        words += f"A segment has {found.tgt_len:,} tokens, and the memory {found.mem_len:,}."
    else:
        words += f"There is no memory: a token sees at most the {found.tgt_len:,} tokens of its segment."
    mean = np.array(found.by_distance, dtype=float)
    line = Series("all heads", np.arange(len(mean), dtype=float), mean, line_class(index))
    marks = [(float(found.tgt_len), "memory only")] if found.mem_len else []
    drawn = chart([line], "Mean attention to one token, by its distance in tokens", log=True, marks=marks)
    heads = np.array(found.shares, dtype=float)
    rows = []
    for (first, last), shares in zip(found.ranges, heads.T, strict=True):
        name = "itself" if last == 0 else f"{first:,}" if first == last else f"{first:,} to {last:,}"
        rows.append((name, [_share(f"all heads, {name}", shares.mean()), *_by_head(name, shares.tolist())]))
    columns = ["distance", "all", *map(str, range(1, len(heads) + 1))]
    return Look(record.name if several else "", words, drawn, columns, rows)


def _by_head(distance: str, shares: Sequence[float]) -> list[Piece]:
    return [_share(f"head {head}, {distance}", share) for head, share in enumerate(shares, start=1)]


def _share(name: str, share: Any) -> Piece:
    text = "<1" if 0.0005 <= share < 0.01 else f"{share:.0%}".removesuffix("%")
    return Piece(text, f"a{level(share, SHARES)}", f"{name}: {share:.2%}")
