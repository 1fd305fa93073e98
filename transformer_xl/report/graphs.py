"""The curves of the page: losses over tokens and over time, learning rate, gradient norm and speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ..runtime.terminal import clock
from .curves import Series, chart
from .markup import Markup, join, tag
from .record import Record, number
from .summary import WORDS, corpus_of, line_class, scaled, tell, tokens_of


def curves(records: Sequence[Record]) -> Markup | None:
    """Losses, those of each unit together, then what else was measured on the way."""
    losses = []
    for figure in dict.fromkeys(record.figure for record in records):
        alike = [(index, record) for index, record in enumerate(records) if record.figure == figure]
        axes = (axis([record for _, record in alike]) for axis in (_tokens_axis, _time_axis))
        losses += [_losses(alike, figure, axis, named=len(records) > 1) for axis in axes if axis is not None]
    others = [_other(records, name, _tokens_axis(records)) for name in ("lr", "grad_norm", "tokens_per_second")]
    if not any([*losses, *others]):
        return None
    note = "Thin lines: training, as it went; dots: validation. The gradient's norm is a mean, before clipping."
    if len({(corpus_of(record), record.unit, record.setting("model", "vocab_size")) for record in records}) > 1:
        note += " Losses over different texts or symbols do not compare."
    three = "charts three" if len(records) == 1 else "charts below"
    charts = [tag("div", *losses, class_="charts"), tag("div", *others, class_=three)]
    return join([tag("h2", "Curves"), tag("p", note, class_="soft small"), *charts])


class _X:
    """What curves are over."""

    def __init__(self, words: str, place: Callable[[Record, np.ndarray], np.ndarray], tell: Callable[[float], str]):
        self.words, self.place, self.tell = words, place, tell


def _tokens_axis(records: Sequence[Record]) -> _X:
    if all(math.isfinite(tokens_of(record)) for record in records):
        return _X("tokens trained on", lambda record, steps: record.tokens(steps), lambda x: f"{x:,.0f} tokens")
    return _X("steps", lambda record, steps: steps, lambda x: f"step {x:,.0f}")


def _time_axis(records: Sequence[Record]) -> _X | None:
    most = max((float(np.nanmax(r.train["seconds"], initial=0)) for r in records), default=0)
    if not most > 0:
        return None
    name, unit = next((n, u) for n, u in (("hours", 3600), ("minutes", 60), ("seconds", 1)) if most >= 2 * u or u == 1)
    return _X(f"{name} of training", lambda record, steps: record.seconds(steps) / unit, lambda x: clock(x * unit))


def _losses(records: Sequence[tuple[int, Record]], figure: str, axis: _X, *, named: bool) -> Markup | None:
    series = []
    for index, record in records:
        own = f"{record.name} " if named else ""
        ends = _ends(record) if named else {"train": "train", "valid": "valid"}
        for split, track in (("train", record.train), ("valid", record.valid)):
            x, y = axis.place(record, track["step"]), scaled(figure, track["loss"])
            style = line_class(index) + (" thin" if split == "train" else "")
            series.append(Series(f"{own}{split}", x, y, style, ends.get(split, ""), split == "valid"))
    name, log = f"{WORDS[figure].capitalize()} over {axis.words}", figure == "ppl"
    return _picture(chart(series, name=name, tell=lambda y: tell(figure, y), tell_x=axis.tell, log=log), name, log)


def _ends(record: Record) -> dict[str, str]:
    """Which of a run's two lines bears its name."""
    return {"valid" if np.isfinite(record.valid["loss"]).any() else "train": _brief(record.name)}


def _brief(name: str, most: int = 16) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _other(records: Sequence[Record], name: str, axis: _X) -> Markup | None:
    words = {"lr": "Learning rate", "grad_norm": "Gradient norm", "tokens_per_second": "Tokens a second"}[name]
    tracks = [record.train[name] for record in records]
    known = np.concatenate(tracks)
    known = known[np.isfinite(known) & (known > 0)]
    log = name == "grad_norm" and len(known) > 0 and bool(known.max() > 30 * known.min())
    ends = [_brief(record.name) if len(records) > 1 else "" for record in records]
    series = [
        Series(record.name, axis.place(record, record.train["step"]), track, f"{line_class(index)} narrow", ends[index])
        for index, (record, track) in enumerate(zip(records, tracks, strict=True))
    ]
    clips = {number(record.setting("train", "clip")) for record in records}
    level = (clip, f"clip {clip:g}") if name == "grad_norm" and len(clips) == 1 and (clip := clips.pop()) > 0 else None
    size = (320, 200) if len(records) == 1 else (460, 250)
    told = {"name": f"{words} over {axis.words}", "tell": _plain, "tell_x": axis.tell}
    return _picture(chart(series, **told, log=log, zero=not log, level=level, size=size), words, log)


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"


def _picture(drawn: Markup | None, name: str, log: bool) -> Markup | None:
    caption = tag("figcaption", tag("b", name), ", logarithmic" if log else None)
    return tag("figure", caption, drawn) if drawn is not None else None
