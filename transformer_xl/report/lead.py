"""What a page shows first: cost by memory length, and texts coloured by nats."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .curves import Chart, Series, chart
from .figures import Figures, Passage
from .record import Record
from .summary import UNKNOWN, Table, line_class, loss_text

NATS = (0.1, 0.5, 1.0, 2.0, 4.0, 7.0)
"""The edges of the colours of tokens. The probabilities are the same for every vocabulary."""

Known = Sequence[tuple[int, Record, Figures]]
"""The runs that have figures, with their numbers on the page."""


class Piece(NamedTuple):
    """A part of a text with one colour."""

    text: str
    class_: str
    title: str


def known(records: Sequence[Record]) -> Known:
    return [(index, record, record.figures) for index, record in enumerate(records) if record.figures]


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
