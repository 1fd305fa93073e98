"""Curves as SVG: thinned without losing an extreme, ticks at round numbers, names at the end of each line.

Colours and fonts are those of the page, by class: `c0` to `c5` of the runs, `thin` for what is told while training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from .markup import Markup, join, tag

COLUMNS = 240
"""How finely a line is thinned: the first, last, least and most of each column of the plot stay."""
HOVER = 60
"""Columns that tell their figures when pointed at."""
LINE = 15
"""Height of a line of text."""

_MOST = 1e250


class Series(NamedTuple):
    """A line: one figure of one run."""

    name: str
    x: Float[np.ndarray, " n"]
    y: Float[np.ndarray, " n"]
    class_: str
    label: str = ""
    """What stands at its end."""
    dots: bool = False


Points = Sequence[tuple[Series, np.ndarray]]
"""Lines, and which of their points are drawn."""


class Axis(NamedTuple):
    """From a figure to a place on the page."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        place = (np.log(value) if self.log else value) - low
        return self.start + (self.end - self.start) * place / (high - low)


def thin(x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"], columns: int = COLUMNS) -> Int[np.ndarray, " k"]:
    """Which points to draw: of each of `columns` equal parts of x the first, last, least and most; nan is left out."""
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
    """Round numbers from `low` to `high`, no more than `most` but for a log scale of less than a decade."""
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
    tell: Callable[[float], str] = short,
    tell_x: Callable[[float], str] = short,
    log: bool = False,
    zero: bool = False,
    level: tuple[float, str] | None = None,
    size: tuple[int, int] = (460, 300),
) -> Markup | None:
    """The series in one frame; None if there is not a point to draw.

    Args:
        name: what the picture shows, for those who do not see it.
        tell, tell_x: how a figure is written when it is pointed at.
        zero: the scale begins at 0.
        level: a height to mark, with its name.
    """
    series = [_drawable(each, log) for each in series]
    points = [(each, kept) for each in series if len(kept := thin(each.x, each.y))]
    if not points:
        return None
    xs = np.concatenate([each.x[kept] for each, kept in points])
    ys = np.concatenate([each.y[kept] for each, kept in points])
    low, high = _span(ys, log=log, zero=zero, level=level[0] if level else None)
    marks = ticks(low, high, log=log)
    left = 10 + 7.2 * max(len(short(mark)) for mark in marks)
    right = size[0] - 12 - 7.2 * max(len(each.label) for each, _ in points)
    x_axis = Axis(min(0.0, xs.min()), _far(xs), left, right)
    y_axis = Axis(low, high, size[1] - 26, 10, log)
    return tag(
        "svg",
        _grid(x_axis, y_axis, marks),
        _level(level, x_axis, y_axis) if level and low <= level[0] <= high else None,
        *(_line(each, kept, x_axis, y_axis) for each, kept in points),
        _gaps(series, x_axis, y_axis),
        _labels(points, x_axis, y_axis),
        _hover(points, x_axis, y_axis, tell, tell_x),
        viewBox=f"0 0 {size[0]} {size[1]}",
        role="img",
        aria_label=f"{name}: " + "; ".join(_told(each, kept, tell) for each, kept in points),
    )


def _far(xs: Float[np.ndarray, " n"]) -> float:
    """Where the line of x ends: at the last point, but never where it begins."""
    low, high = min(0.0, float(xs.min())), float(xs.max())
    return high if high - low > 1 / _MOST else low + max(1.0, abs(low))


def _drawable(series: Series, log: bool) -> Series:
    """nan for what has no place on the scale."""
    fits = (np.abs(series.y) < _MOST) & ((series.y > 1 / _MOST) | (not log))
    return series._replace(
        x=np.where(np.abs(series.x) < _MOST, series.x, math.nan), y=np.where(fits, series.y, math.nan)
    )


def _span(ys: Float[np.ndarray, " n"], *, log: bool, zero: bool, level: float | None) -> tuple[float, float]:
    """The least and the most of the scale: all points, a little air, and a marked level unless it is far off."""
    low, high = float(ys.min()), float(ys.max())
    if level is not None and low / 2 <= level <= 2 * high:
        low, high = min(low, level), max(high, level)
    if log:
        air = math.exp(0.04 * max(math.log(high) - math.log(low), 0.05))
        return low / air, high * air
    low = min(low, 0.0) if zero else low
    air = next(size for size in (0.04 * (high - low), 0.05 * abs(high), 1.0) if size > 1 / _MOST)
    return low - (0 if zero and low >= 0 else air), high + air


def _grid(x: Axis, y: Axis, marks: Sequence[float]) -> Markup:
    parts = []
    for mark, place in zip(marks, y(np.array(marks)), strict=True):
        parts.append(tag("path", d=f"M{x.start:.1f} {place:.1f}H{x.end:.1f}", class_="grid"))
        parts.append(tag("text", short(mark), x=f"{x.start - 6:.1f}", y=f"{place + 4:.1f}", text_anchor="end"))
    below = ticks(x.low, x.high, most=5)
    for mark, place in zip(below, x(np.array(below)), strict=True):
        parts.append(tag("path", d=f"M{place:.1f} {y.start:.1f}v4", class_="tick"))
        parts.append(tag("text", short(mark), x=f"{place:.1f}", y=f"{y.start + 18:.1f}", text_anchor="middle"))
    return join([*parts, tag("path", d=f"M{x.start:.1f} {y.start:.1f}H{x.end:.1f}", class_="tick")])


def _level(level: tuple[float, str], x: Axis, y: Axis) -> Markup:
    [place] = y(np.array([level[0]]))
    line = tag("path", d=f"M{x.start:.1f} {place:.1f}H{x.end:.1f}", class_="level")
    return join([line, tag("text", level[1], x=f"{x.end:.1f}", y=f"{place - 5:.1f}", text_anchor="end", class_="halo")])


def _line(series: Series, kept: Int[np.ndarray, " k"], x: Axis, y: Axis) -> Markup:
    """The path of the kept points; it breaks where a figure between two of them is missing."""
    lost = np.cumsum(~np.isfinite(series.y))[kept]
    breaks = np.flatnonzero(np.diff(lost)) + 1
    across, up = x(series.x[kept]), y(series.y[kept])
    path = ""
    for first, last in pairwise([0, *breaks.tolist(), len(kept)]):
        steps = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(across[first:last], up[first:last], strict=True))
        path += f"M{steps}" + ("h0" if last - first == 1 else "")
    drawn = [tag("path", d=path, class_=f"line {series.class_}")]
    if series.dots and len(kept) <= HOVER:
        places = zip(across, up, strict=True)
        drawn += [tag("circle", cx=f"{a:.1f}", cy=f"{b:.1f}", r=3, class_=series.class_) for a, b in places]
    return join(drawn)


def _gaps(series: Sequence[Series], x: Axis, y: Axis) -> Markup:
    """A cross on the floor for each place where there is no figure to draw."""
    lost = [each.x[~np.isfinite(each.y) & np.isfinite(each.x)] for each in series]
    places = np.unique(np.round(x(np.concatenate([np.clip(each, x.low, x.high) for each in lost])) / 4) * 4)
    cross = "".join(f"M{place - 3:.0f} {y.start - 7:.0f}l6 6m0 -6l-6 6" for place in places)
    return tag("path", tag("title", "no figure here to draw"), d=cross, class_="lost") if cross else Markup()


def _labels(points: Points, x: Axis, y: Axis) -> Markup:
    """Names at the ends of lines, moved apart where they would touch."""
    ends = [(float(x(each.x[kept[-1:]])[0]), float(y(each.y[kept[-1:]])[0]), each) for each, kept in points]
    placed: list[tuple[float, float, Series]] = []
    for across, up, each in sorted(ends, key=lambda end: end[1]):
        if not each.label:
            continue
        above = [lower for beside, lower, _ in placed if abs(beside - across) < 90]
        placed.append((across, max([up, *(lower + LINE for lower in above)]), each))
    over = max([0.0, *(up - y.start for _, up, _ in placed)])
    return join(
        tag("text", each.label, x=f"{across + 7:.1f}", y=f"{up - over + 4:.1f}", class_=f"halo name {each.class_}")
        for across, up, each in placed
    )


def _hover(points: Points, x: Axis, y: Axis, tell, tell_x) -> Markup:
    """Columns without a colour whose title tells the figures nearest to their middle."""
    width = (x.end - x.start) / HOVER

    def columns() -> Iterator[Markup]:
        places = [x(each.x[kept]) for each, kept in points]
        for left in x.start + width * np.arange(HOVER):
            lines, where = [], math.nan
            for (each, kept), across in zip(points, places, strict=True):
                nearest = int(np.abs(across - (left + width / 2)).argmin())
                if abs(across[nearest] - (left + width / 2)) <= width / 2 + 0.01:
                    where = each.x[kept[nearest]]
                    lines.append(f"{each.name} {tell(float(each.y[kept[nearest]]))}")
            if lines:
                title = tag("title", "\n".join([tell_x(where), *lines]))
                size = {"width": f"{width:.1f}", "height": f"{y.start - y.end:.1f}"}
                yield tag("rect", title, x=f"{left:.1f}", y=f"{y.end:.1f}", class_="hover", **size)

    return join(columns())


def _told(series: Series, kept: Int[np.ndarray, " k"], tell: Callable[[float], str]) -> str:
    values = series.y[kept]
    first, last = tell(float(values[0])), tell(float(values[-1]))
    return f"{series.name} from {first} to {last}, least {tell(float(values.min()))}, most {tell(float(values.max()))}"
