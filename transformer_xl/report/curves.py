"""Line charts as geometry: thinned without losing an extreme, ticks at round numbers, a name at the end of each line.

The template draws a `Chart`. Colours are classes of the page's style: `c0` to `c5` for the runs, `thin` for training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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


class Chart(NamedTuple):
    """Everything the template draws of one chart, in coordinates from the upper left corner."""

    caption: str
    summary: str
    """The lines in words, for readers who do not see the chart."""
    log: bool
    size: tuple[int, int]
    x: Axis
    y: Axis
    x_ticks: list[tuple[str, float]]
    y_ticks: list[tuple[str, float]]
    level: tuple[str, float] | None
    """The name of a marked height, and that height."""
    lines: list[tuple[str, str]]
    """The path of each line, and its class."""
    dots: list[tuple[float, float, str]]
    labels: list[tuple[float, float, str, str]]
    """Coordinates, text and class of the names at the ends of lines."""
    lost: str
    """The path of the crosses that mark figures which are not finite."""
    hover: list[tuple[float, str]]
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
    return Chart(
        caption=caption or name,
        summary=f"{name}: {_summary(lines, y_text)}",
        log=log,
        size=size,
        x=x,
        y=y,
        x_ticks=_positions(ticks(x.low, x.high, most=5), x),
        y_ticks=_positions(marks, y),
        level=(level[1], float(y(np.array([level[0]]))[0])) if level and low <= level[0] <= high else None,
        lines=[(_path(each, kept, x, y), each.class_) for each, kept in lines],
        dots=[dot for each, kept in lines if each.dots and len(kept) <= HOVER for dot in _dots(each, kept, x, y)],
        labels=_labels(lines, x, y),
        lost=_crosses(series, x, y),
        hover=_hover(lines, x, y_text, x_text),
    )


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


def _positions(marks: Sequence[float], axis: Axis) -> list[tuple[str, float]]:
    return [(short(mark), at) for mark, at in zip(marks, axis(np.array(marks)).tolist(), strict=True)]


def _path(series: Series, kept: Int[np.ndarray, " k"], x: Axis, y: Axis) -> str:
    """The path of the kept points; it breaks where a figure between two of them is missing."""
    lost = np.cumsum(~np.isfinite(series.y))[kept]
    breaks = np.flatnonzero(np.diff(lost)) + 1
    points = [f"{across:.1f},{up:.1f}" for across, up, _ in _dots(series, kept, x, y)]
    parts = [points[first:last] for first, last in pairwise([0, *breaks.tolist(), len(kept)])]
    return "".join("M" + " ".join(part) + ("h0" if len(part) == 1 else "") for part in parts)


def _dots(series: Series, kept: Int[np.ndarray, " k"], x: Axis, y: Axis) -> list[tuple[float, float, str]]:
    across, up = x(series.x[kept]).tolist(), y(series.y[kept]).tolist()
    return [(*point, series.class_) for point in zip(across, up, strict=True)]


def _crosses(series: Sequence[Series], x: Axis, y: Axis) -> str:
    """A cross above the x axis wherever there is no finite figure to draw."""
    lost = [each.x[~np.isfinite(each.y) & np.isfinite(each.x)] for each in series]
    across = x(np.concatenate([np.clip(each, x.low, x.high) for each in lost]))
    return "".join(f"M{at - 3:.0f} {y.start - 7:.0f}l6 6m0 -6l-6 6" for at in np.unique(np.round(across / 4) * 4))


def _labels(lines: Lines, x: Axis, y: Axis) -> list[tuple[float, float, str, str]]:
    """Names at the ends of lines, moved apart where they would touch."""
    placed: list[tuple[float, float, str, str]] = []
    ends = [_dots(each, kept[-1:], x, y)[0] + (each.label,) for each, kept in lines if each.label]
    for across, up, class_, label in sorted(ends, key=lambda end: end[1]):
        above = [lower for beside, lower, *_ in placed if abs(beside - across) < 90]
        placed.append((across, max([up, *(lower + LINE for lower in above)]), label, class_))
    over = max([0.0, *(up - y.start for _, up, *_ in placed)])
    return [(across + 7, up - over + 4, label, class_) for across, up, label, class_ in placed]


def _hover(
    lines: Lines, x: Axis, y_text: Callable[[float], str], x_text: Callable[[float], str]
) -> list[tuple[float, str]]:
    """Columns with the figures nearest to their middle."""
    columns, half = [], (x.end - x.start) / HOVER / 2
    across = [x(each.x[kept]) for each, kept in lines]
    for left in x.start + 2 * half * np.arange(HOVER):
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
