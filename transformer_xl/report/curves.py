"""Line charts as geometry: thinned without losing an extreme, ticks at round numbers, a name at the end of each line.

The template draws a `Chart`. Colours are classes of the page's style: `c0` to `c5` for the runs, `thin` for training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

COLUMNS = 240
"""Thinning keeps the first, last, lowest and highest point of each of this many columns of the plot."""
HOVER = 60
"""Columns that show their figures when the reader points at them."""
LINE = 15
"""Height of a line of text."""

_LARGEST = 1e250


class Series(NamedTuple):
    """A line: one figure of one run."""

    name: str
    x: Float[np.ndarray, " n"]
    y: Float[np.ndarray, " n"]
    class_: str
    label: str = ""
    """The text at its end."""
    dots: bool = False


Lines = Sequence[tuple[Series, np.ndarray]]
"""Series, each with the indices of the points to draw."""


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


class Text(NamedTuple):
    """A text in a chart."""

    text: str
    x: float
    y: float
    anchor: str = "start"
    class_: str = ""


@dataclass
class Chart:
    """Everything the template draws of one chart, in coordinates from the upper left corner."""

    caption: str
    summary: str
    """The lines in words, for readers who do not see the chart."""
    log: bool
    size: tuple[int, int]
    x: Axis
    y: Axis
    paths: list[tuple[str, str]] = field(default_factory=list)
    """Each path and its class."""
    dots: list[tuple[float, float, str]] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)
    lost: str = ""
    """The path of the crosses that mark figures which are not finite."""
    hover: list[tuple[float, str]] = field(default_factory=list)
    """The left edge of each column that has figures, and those figures."""

    @property
    def column(self) -> float:
        """Width of a column of `hover`."""
        return (self.x.end - self.x.start) / HOVER


def thin(x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"], columns: int = COLUMNS) -> Int[np.ndarray, " k"]:
    """The points to draw: the first, last, lowest and highest of each of `columns` equal ranges of x, without nan."""
    kept = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    if len(kept) <= 4 * columns:
        return kept
    low, high = x[kept].min(), x[kept].max()
    column = np.minimum((x[kept] - low) / ((high - low) or 1) * columns, columns - 1).astype(int)
    chosen = []
    for order in (np.lexsort((kept, column)), np.lexsort((y[kept], column))):
        edges = np.flatnonzero(np.diff(column[order]))
        chosen += [order[np.append(0, edges + 1)], order[np.append(edges, len(order) - 1)]]
    return kept[np.unique(np.concatenate(chosen))]


def ticks(low: float, high: float, *, most: int = 6, log: bool = False) -> list[float]:
    """Round numbers from `low` to `high`: at most `most`, except on a log scale of less than a decade."""
    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for digits in ((1, 2, 5), (1, 3), (1,)):
            found = [d * 10.0**e for e in decades for d in digits if low <= d * 10.0**e <= high]
            if 3 <= len(found) <= most + 1:
                return found
        if len(found) > most:
            return found[:: -(-len(found) // most)]
    rough = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(size for factor in (1, 2, 5, 10) if (size := factor * unit) >= rough * (1 - 1e-9))
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A number for a tick: 0.25, 2.5e-4, 400, 2.5k, 10M."""
    size = abs(value)
    if size >= 1000:
        for scale, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
            if size >= scale * 0.9995:
                return f"{value / scale:.3g}{suffix}"
    shown = f"{value:.3g}"
    return shown if size >= 1e-3 or not value else f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e")


def chart(
    series: Sequence[Series],
    *,
    name: str,
    caption: str = "",
    y_text: Callable[[float], str] = short,
    x_text: Callable[[float], str] = short,
    log: bool = False,
    zero: bool = False,
    level: tuple[float, str] | None = None,
    size: tuple[int, int] = (460, 300),
) -> Chart | None:
    """The series in one frame; None if there is no point to draw.

    Args:
        name: begins the summary, and is the caption unless that is given.
        y_text, x_text: format a figure for the hover columns and the summary.
        zero: the scale begins at 0.
        level: a height to mark, with its name.
    """
    series = [_within_scale(each, log) for each in series]
    lines = [(each, kept) for each in series if len(kept := thin(each.x, each.y))]
    if not lines:
        return None
    xs = np.concatenate([each.x[kept] for each, kept in lines])
    low, high = _y_range(np.concatenate([each.y[kept] for each, kept in lines]), log, zero, level)
    marks = ticks(low, high, log=log)
    left = 10 + 7.2 * max(len(short(mark)) for mark in marks)
    right = size[0] - 12 - 7.2 * max(len(each.label) for each, _ in lines)
    x, y = Axis(min(0.0, xs.min()), _x_end(xs), left, right), Axis(low, high, size[1] - 26, 10, log)
    drawn = Chart(caption or name, f"{name}: {_summary(lines, y_text)}", log, size, x, y)
    _add_grid(drawn, marks)
    if level and low <= level[0] <= high:
        _add_level(drawn, *level)
    for each, kept in lines:
        _add_line(drawn, each, kept)
    _add_labels(drawn, lines)
    drawn.lost = _crosses(drawn, series)
    drawn.hover = _hover(drawn, lines, y_text, x_text)
    return drawn


def _x_end(xs: Float[np.ndarray, " n"]) -> float:
    """The x at which the axis ends: the last point, but never where the axis begins."""
    low, high = min(0.0, float(xs.min())), float(xs.max())
    return high if high - low > 1 / _LARGEST else low + max(1.0, abs(low))


def _within_scale(series: Series, log: bool) -> Series:
    """The series with nan for every figure that the scale cannot show."""
    fits = (np.abs(series.y) < _LARGEST) & ((series.y > 1 / _LARGEST) | (not log))
    x = np.where(np.abs(series.x) < _LARGEST, series.x, math.nan)
    return series._replace(x=x, y=np.where(fits, series.y, math.nan))


def _y_range(
    ys: Float[np.ndarray, " n"], log: bool, zero: bool, level: tuple[float, str] | None
) -> tuple[float, float]:
    """The two ends of the scale: all points, a margin, and the marked level unless that is far away."""
    low, high = float(ys.min()), float(ys.max())
    if level and low / 2 <= level[0] <= 2 * high:
        low, high = min(low, level[0]), max(high, level[0])
    if log:
        margin = math.exp(0.04 * max(math.log(high) - math.log(low), 0.05))
        return low / margin, high * margin
    low = min(low, 0.0) if zero else low
    margin = next(size for size in (0.04 * (high - low), 0.05 * abs(high), 1.0) if size > 1 / _LARGEST)
    return low - (0 if zero and low >= 0 else margin), high + margin


def _add_grid(chart: Chart, marks: Sequence[float]) -> None:
    x, y = chart.x, chart.y
    for mark, up in zip(marks, y(np.array(marks)), strict=True):
        chart.paths.append((f"M{x.start:.1f} {up:.1f}H{x.end:.1f}", "grid"))
        chart.texts.append(Text(short(mark), x.start - 6, up + 4, "end"))
    below = ticks(x.low, x.high, most=5)
    for mark, across in zip(below, x(np.array(below)), strict=True):
        chart.paths.append((f"M{across:.1f} {y.start:.1f}v4", "tick"))
        chart.texts.append(Text(short(mark), across, y.start + 18, "middle"))
    chart.paths.append((f"M{x.start:.1f} {y.start:.1f}H{x.end:.1f}", "tick"))


def _add_level(chart: Chart, height: float, name: str) -> None:
    [up] = chart.y(np.array([height]))
    chart.paths.append((f"M{chart.x.start:.1f} {up:.1f}H{chart.x.end:.1f}", "level"))
    chart.texts.append(Text(name, chart.x.end, up - 5, "end", "halo"))


def _add_line(chart: Chart, series: Series, kept: Int[np.ndarray, " k"]) -> None:
    """The path of the kept points; it breaks where a figure between two of them is missing."""
    lost = np.cumsum(~np.isfinite(series.y))[kept]
    breaks = np.flatnonzero(np.diff(lost)) + 1
    points = list(zip(chart.x(series.x[kept]).tolist(), chart.y(series.y[kept]).tolist(), strict=True))
    path = ""
    for first, last in pairwise([0, *breaks.tolist(), len(kept)]):
        path += "M" + " ".join(f"{a:.1f},{b:.1f}" for a, b in points[first:last]) + ("h0" if last - first == 1 else "")
    chart.paths.append((path, f"line {series.class_}"))
    if series.dots and len(kept) <= HOVER:
        chart.dots += [(across, up, series.class_) for across, up in points]


def _crosses(chart: Chart, series: Sequence[Series]) -> str:
    """A cross above the x axis wherever there is no finite figure to draw."""
    lost = [each.x[~np.isfinite(each.y) & np.isfinite(each.x)] for each in series]
    across = chart.x(np.concatenate([np.clip(each, chart.x.low, chart.x.high) for each in lost]))
    return "".join(f"M{at - 3:.0f} {chart.y.start - 7:.0f}l6 6m0 -6l-6 6" for at in np.unique(np.round(across / 4) * 4))


def _add_labels(chart: Chart, lines: Lines) -> None:
    """Names at the ends of lines, moved apart where they would touch."""
    ends = [(float(chart.x(s.x[kept[-1:]])[0]), float(chart.y(s.y[kept[-1:]])[0]), s) for s, kept in lines if s.label]
    placed: list[tuple[float, float, Series]] = []
    for across, up, each in sorted(ends, key=lambda end: end[1]):
        above = [lower for beside, lower, _ in placed if abs(beside - across) < 90]
        placed.append((across, max([up, *(lower + LINE for lower in above)]), each))
    over = max([0.0, *(up - chart.y.start for _, up, _ in placed)])
    for across, up, each in placed:
        chart.texts.append(Text(each.label, across + 7, up - over + 4, "start", f"halo name {each.class_}"))


def _hover(
    chart: Chart, lines: Lines, y_text: Callable[[float], str], x_text: Callable[[float], str]
) -> list[tuple[float, str]]:
    """Columns with the figures nearest to their middle."""
    columns, half = [], chart.column / 2
    across = [chart.x(each.x[kept]) for each, kept in lines]
    for left in chart.x.start + chart.column * np.arange(HOVER):
        found, where = [], math.nan
        for (each, kept), points in zip(lines, across, strict=True):
            nearest = int(np.abs(points - (left + half)).argmin())
            if abs(points[nearest] - (left + half)) <= half + 0.01:
                where = float(each.x[kept[nearest]])
                found.append(f"{each.name} {y_text(float(each.y[kept[nearest]]))}")
        if found:
            columns.append((left, "\n".join([x_text(where), *found])))
    return columns


def _summary(lines: Lines, text: Callable[[float], str]) -> str:
    words = []
    for each, kept in lines:
        y = each.y[kept]
        first, last, least, most = (text(float(value)) for value in (y[0], y[-1], y.min(), y.max()))
        words.append(f"{each.name} from {first} to {last}, least {least}, most {most}")
    return "; ".join(words)
