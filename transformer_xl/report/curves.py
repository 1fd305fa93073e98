"""Line charts as geometry: thinned without losing an extreme, with ticks at round numbers; and the curves of training.

The template draws a `Chart`. Colours are classes of the page's style: `c0` to `c5` for the runs, `thin` for training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from .record import Record
from .summary import line_class

COLUMNS = 240
"""A line is drawn with the first, last, lowest and highest point of each of this many groups of neighbours."""
WIDTH, HEIGHT = 460, 280

_LARGEST, _SMALLEST = 1e100, 1e-9
"""Figures beyond `_LARGEST` are not drawn; no axis is shorter than `_SMALLEST`."""


class Series(NamedTuple):
    """A line: one figure of one run."""

    name: str
    x: Float[np.ndarray, " n"]
    y: Float[np.ndarray, " n"]
    class_: str
    dots: bool = False


class Axis(NamedTuple):
    """Maps a figure to a coordinate of the chart."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        distance = (np.log(value) if self.log else value) - low
        return self.start + (self.end - self.start) * distance / (high - low)

    def ticks(self, most: int) -> list[tuple[str, float]]:
        """The labels of round numbers, with enough digits to differ, and their coordinates."""
        marks = ticks(self.low, self.high, most=most, log=self.log)
        every = ([short(mark, digits) for mark in marks] for digits in range(3, 13))
        labels = next((each for each in every if len(set(each)) == len(marks)), [short(mark) for mark in marks])
        return list(zip(labels, self(np.array(marks)).tolist(), strict=True))


class Chart(NamedTuple):
    """One chart for the template, in coordinates from the upper left corner."""

    caption: str
    summary: str
    """The lines in words, for readers who do not see the chart."""
    x: Axis
    y: Axis
    lines: list[tuple[str, str]]
    """The path of each line, and its class."""
    dots: list[tuple[float, float, str, str]]
    """Coordinates, class and figures of each marked point."""


def thin(y: Float[np.ndarray, " n"], columns: int = COLUMNS) -> Int[np.ndarray, " k"]:
    """Indices of the points to draw, without nan; see `COLUMNS`."""
    groups = [group for group in np.array_split(np.flatnonzero(np.isfinite(y)), columns) if len(group)]
    chosen = [(group[0], group[-1], group[y[group].argmin()], group[y[group].argmax()]) for group in groups]
    return np.unique(np.array(chosen, dtype=int))


def ticks(low: float, high: float, *, most: int = 6, log: bool = False) -> list[float]:
    """Round numbers from `low` to `high`, at most about `most`."""
    if log and high > 10 * low:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [d * 10.0**e for e in decades for d in (1, 2, 5) if low <= d * 10.0**e <= high]
        return found[:: math.ceil(len(found) / most)]
    rough = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough * (1 - 1e-9))
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def short(value: float, digits: int = 3) -> str:
    """A number for a tick: 0.25, 2.5e-04, 400, 2.5k, 10M."""
    for scale, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale * 0.9995:
            return f"{value / scale:.{digits}g}{suffix}"
    return f"{value:.{digits}g}"


def chart(series: Sequence[Series], caption: str, *, log: bool = False, zero: bool = False) -> Chart | None:
    """A chart of all series; its scale begins at 0 if `zero`. None if there is no point to draw."""
    least = 1 / _LARGEST if log else -_LARGEST
    series = [each._replace(y=np.where((each.y > least) & (each.y < _LARGEST), each.y, math.nan)) for each in series]
    lines = [(each, kept) for each in series if len(kept := thin(each.y))]
    if not lines:
        return None
    low, high = _y_range(np.concatenate([each.y[kept] for each, kept in lines]), log)
    y = Axis(0.0 if zero else low, high, HEIGHT - 26, 10, log)
    left = 10 + 7.2 * max(len(label) for label, _ in y.ticks(6))
    x = Axis(0.0, max(_SMALLEST, *(each.x[kept].max() for each, kept in lines)), left, WIDTH - 12)
    return Chart(
        caption=caption + (", logarithmic" if log else ""),
        summary="; ".join(f"{each.name} from {each.y[k[0]]:.5g} to {each.y[k[-1]]:.5g}" for each, k in lines),
        x=x,
        y=y,
        lines=[(_path(each, kept, x, y), each.class_) for each, kept in lines],
        dots=[dot for each, kept in lines if each.dots for dot in _dots(each, kept, x, y)],
    )


def _y_range(ys: Float[np.ndarray, " n"], log: bool) -> tuple[float, float]:
    """The two ends of the scale, with a margin around all points."""
    low, high = float(ys.min()), float(ys.max())
    if log:
        margin = max(high / low, 1.01) ** 0.04
        return low / margin, high * margin
    margin = max(0.04 * (high - low), 1e-4 * abs(high), _SMALLEST)
    return low - margin, high + margin


def _path(series: Series, kept: Int[np.ndarray, " k"], x: Axis, y: Axis) -> str:
    """The path of the kept points, with a break wherever a figure between two of them is missing."""
    missing = np.cumsum(~np.isfinite(series.y))[kept]
    breaks = np.flatnonzero(np.diff(missing)) + 1
    points = [f"{across:.1f},{up:.1f}" for across, up, *_ in _dots(series, kept, x, y)]
    parts = [points[first:last] for first, last in pairwise([0, *breaks.tolist(), len(kept)])]
    return "".join("M" + " ".join(part) + ("h0" if len(part) == 1 else "") for part in parts)


def _dots(series: Series, kept: Int[np.ndarray, " k"], x: Axis, y: Axis) -> list[tuple[float, float, str, str]]:
    """Coordinates, class and figures of the kept points."""
    across, up = x(series.x[kept]).tolist(), y(series.y[kept]).tolist()
    words = [f"{series.name} {series.y[k]:.5g} at {short(float(series.x[k]))}" for k in kept]
    return [(*point, series.class_, text) for *point, text in zip(across, up, words, strict=True)]


def training_curves(records: Sequence[Record]) -> list[Chart]:
    """The charts of training: losses over tokens and over time, learning rate, gradient norm and speed."""
    most = max(float(record.train["seconds"].max(initial=0)) for record in records)
    time, unit = ("hours", 3600) if most >= 7200 else ("minutes", 60)
    charts = [
        chart(_losses(records, Record.tokens), "Nats per target over tokens trained on"),
        chart(_losses(records, lambda record, steps: record.seconds(steps) / unit), f"Nats per target over {time}"),
        chart(_tracked(records, "lr"), "Learning rate", zero=True),
        chart(_tracked(records, "grad_norm"), "Gradient norm", log=True),
        chart(_tracked(records, "tokens_per_second"), "Tokens per second", zero=True),
    ]
    return [drawn for drawn in charts if drawn is not None]


def _losses(
    records: Sequence[Record], x: Callable[[Record, Float[np.ndarray, " n"]], Float[np.ndarray, " n"]]
) -> list[Series]:
    """Training and validation losses of the runs."""
    series = []
    for index, record in enumerate(records):
        for name, track, style in (("train", record.train, " thin"), ("valid", record.valid, "")):
            class_ = line_class(index) + style
            series.append(Series(f"{record.name} {name}", x(record, track["step"]), track["loss"], class_, not style))
    return series


def _tracked(records: Sequence[Record], name: str) -> list[Series]:
    return [
        Series(record.name, record.tokens(record.train["step"]), record.train[name], line_class(index))
        for index, record in enumerate(records)
    ]
