"""The curves of the HTML report: losses over tokens and over time, learning rate, gradient norm and speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .curves import Chart, Series, chart
from .record import Record
from .summary import WORDS, corpus_of, line_class, loss_figures

NOTE = "Thin lines show training; dots show validation. The gradient norm is a mean, before clipping."
FIGURES = {"lr": "Learning rate", "grad_norm": "Gradient norm", "tokens_per_second": "Tokens a second"}


def curves(records: Sequence[Record]) -> tuple[str, list[Chart]] | None:
    """A note and the charts: losses of each unit, then the other figures. None if there are no charts."""
    most = max(float(record.train["seconds"].max(initial=0)) for record in records)
    time, unit = ("hours", 3600) if most >= 7200 else ("minutes", 60)
    charts = []
    for figure in dict.fromkeys(record.figure for record in records):
        name = WORDS[figure].capitalize()
        for axis, x in (
            ("tokens trained on", Record.tokens),
            (f"{time} of training", lambda run, steps: run.seconds(steps) / unit),
        ):
            lines = [line for index, record in enumerate(records) for line in _losses(index, record, figure, x)]
            charts.append(chart(lines, f"{name} over {axis}", log=figure == "ppl"))
    for name, words in FIGURES.items():
        lines = [_figure(index, record, name) for index, record in enumerate(records)]
        charts.append(chart(lines, words, log=name == "grad_norm", zero=name != "grad_norm"))
    charts = [drawn for drawn in charts if drawn is not None]
    compare = len({(corpus_of(record), record.unit, record.setting("model", "vocab_size")) for record in records}) == 1
    note = NOTE if compare else f"{NOTE} Losses over different texts or tokens cannot be compared."
    return (note, charts) if charts else None


def _losses(index: int, record: Record, figure: str, x: Callable[[Record, np.ndarray], np.ndarray]) -> list[Series]:
    """Training and validation losses of a run; empty if the run shows its losses as another figure."""
    if record.figure != figure:
        return []
    series = []
    for name, track, style in ((" train", record.train, " thin"), (" valid", record.valid, "")):
        losses, class_ = loss_figures(figure, track["loss"]), line_class(index) + style
        series.append(Series(record.name + name, x(record, track["step"]), losses, class_, dots=not style))
    return series


def _figure(index: int, record: Record, name: str) -> Series:
    train = record.train
    return Series(record.name, record.tokens(train["step"]), train[name], line_class(index))
