"""The curves of the page: losses over tokens and over time, learning rate, gradient norm and speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..runtime.terminal import clock
from .curves import Chart, Series, chart
from .record import Record, number
from .summary import WORDS, corpus_of, figure_text, line_class, scaled, tokens_of


def curves(records: Sequence[Record]) -> tuple[str, list[Chart], list[Chart]] | None:
    """A note, charts of the losses, one unit at a time, and charts of the other figures; None if there are none."""
    losses = []
    for figure in dict.fromkeys(record.figure for record in records):
        alike = [(index, record) for index, record in enumerate(records) if record.figure == figure]
        axes = (axis([record for _, record in alike]) for axis in (_tokens_axis, _time_axis))
        losses += [_losses(alike, figure, axis, named=len(records) > 1) for axis in axes if axis is not None]
    others = [_other(records, name, _tokens_axis(records)) for name in ("lr", "grad_norm", "tokens_per_second")]
    losses, others = ([drawn for drawn in charts if drawn is not None] for charts in (losses, others))
    if not losses and not others:
        return None
    note = "Thin lines: training, as it went; dots: validation. The gradient's norm is a mean, before clipping."
    if len({(corpus_of(record), record.unit, record.setting("model", "vocab_size")) for record in records}) > 1:
        note += " Losses over different texts or tokens do not compare."
    return note, losses, others


class XAxis(NamedTuple):
    """What curves are drawn over."""

    name: str
    x: Callable[[Record, np.ndarray], np.ndarray]
    """Maps steps of a run to figures on the axis."""
    text: Callable[[float], str]


def _tokens_axis(records: Sequence[Record]) -> XAxis:
    if all(math.isfinite(tokens_of(record)) for record in records):
        return XAxis("tokens trained on", lambda record, steps: record.tokens(steps), lambda x: f"{x:,.0f} tokens")
    return XAxis("steps", lambda record, steps: steps, lambda x: f"step {x:,.0f}")


def _time_axis(records: Sequence[Record]) -> XAxis | None:
    most = max((float(np.nanmax(r.train["seconds"], initial=0)) for r in records), default=0)
    if not most > 0:
        return None
    name, unit = next((n, u) for n, u in (("hours", 3600), ("minutes", 60), ("seconds", 1)) if most >= 2 * u or u == 1)
    return XAxis(f"{name} of training", lambda record, steps: record.seconds(steps) / unit, lambda x: clock(x * unit))


def _losses(records: Sequence[tuple[int, Record]], figure: str, axis: XAxis, *, named: bool) -> Chart | None:
    series = []
    for index, record in records:
        own, labels = "", {"train": "train", "valid": "valid"}
        if named:  # one of the run's two lines bears its name
            validated = np.isfinite(record.valid["loss"]).any()
            own, labels = f"{record.name} ", {"valid" if validated else "train": _brief(record.name)}
        for split, track in (("train", record.train), ("valid", record.valid)):
            style = line_class(index) + (" thin" if split == "train" else "")
            x, y = axis.x(record, track["step"]), scaled(figure, track["loss"])
            series.append(Series(f"{own}{split}", x, y, style, labels.get(split, ""), split == "valid"))
    name = f"{WORDS[figure].capitalize()} over {axis.name}"
    return chart(series, name=name, y_text=lambda y: figure_text(figure, y), x_text=axis.text, log=figure == "ppl")


def _brief(name: str, most: int = 16) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _other(records: Sequence[Record], name: str, axis: XAxis) -> Chart | None:
    caption = {"lr": "Learning rate", "grad_norm": "Gradient norm", "tokens_per_second": "Tokens a second"}[name]
    series = [
        Series(record.name, axis.x(record, record.train["step"]), record.train[name], f"{line_class(index)} narrow")
        for index, record in enumerate(records)
    ]
    if len(records) > 1:
        series = [each._replace(label=_brief(each.name)) for each in series]
    known = np.concatenate([each.y for each in series])
    known = known[np.isfinite(known) & (known > 0)]
    log = name == "grad_norm" and len(known) > 0 and bool(known.max() > 30 * known.min())
    clips = {number(record.setting("train", "clip")) for record in records}
    level = (clip, f"clip {clip:g}") if name == "grad_norm" and len(clips) == 1 and (clip := clips.pop()) > 0 else None
    return chart(
        series,
        name=f"{caption} over {axis.name}",
        caption=caption,
        y_text=lambda value: f"{value:,.0f}" if value >= 100 else f"{value:.4g}",
        x_text=axis.text,
        log=log,
        zero=not log,
        level=level,
        size=(320, 200) if len(records) == 1 else (460, 250),
    )
