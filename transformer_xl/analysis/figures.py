"""The curves of the analyses, each as PNG and SVG: gains and perplexity over context (Figures 3 and 4), perplexity over
attention length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from .heatmaps import load_matplotlib, save_figure
from .recl import Recl

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's colours, which colour-blind readers can distinguish; markers repeat the difference."""
MARKERS = "osD^vPX"


class Curve(NamedTuple):
    """One line, with an interval, a dotted line of the same colour, and words at some of its points (by index)."""

    x: Int[np.ndarray, " n"]
    y: Float[np.ndarray, " n"]
    interval: Float[np.ndarray, "2 n"] | None = None
    dotted: Float[np.ndarray, " n"] | None = None
    marks: Mapping[int, str] = {}


class Panel(NamedTuple):
    title: str
    curves: Mapping[str, Curve]
    level: float | None = None
    """The height of a horizontal line."""


def draw_gains(
    stem: Path, names: Sequence[str], contexts: Int[np.ndarray, " L"], shares: Sequence[Recl], threshold: float
) -> list[Path]:
    """Figure 3: the gain in perplexity from the next step of context, a panel for each share of positions, RECL marked.

    A second picture, `..._relative`, shows the relative gains, which decide RECL, with the threshold. Dotted lines
    are the gains of going back.
    """
    perplexity, relative = [], []
    for each in shares:
        title = f"hardest {each.r:.0%} of positions" if each.r < 1 else "all positions"
        tokens, reached, _ = each.length
        marks = [
            {int(np.searchsorted(contexts, n)): "RECL"} if known else {}
            for n, known in zip(tokens, reached, strict=True)
        ]
        curves = (
            {
                name: Curve(contexts[:-1], y[i], interval[:, i], dotted if dotted is None else dotted[i], marks[i])
                for i, name in enumerate(names)
            }
            for y, interval, dotted in (
                (each.perplexity, each.perplexity_interval, None),
                (each.relative, each.relative_interval, each.back),
            )
        )
        perplexity.append(Panel(title, next(curves)))
        relative.append(Panel(title, next(curves), threshold))
    x, beside = f"context c in tokens (c' = c + {contexts[1] - contexts[0]:,})", stem.with_name(f"{stem.name}_relative")
    paths = draw_curves(stem, perplexity, x, "exp f(c, c) - exp f(c, c')", log=True)
    return paths + draw_curves(beside, relative, x, "relative gain g(c, c')")


def draw_curves(stem: Path, panels: Sequence[Panel], x: str, y: str, *, log: bool = False) -> list[Path]:
    """Draw panels side by side. `log` makes the axis logarithmic, so small values stay visible."""
    matplotlib = load_matplotlib()
    figure = matplotlib.figure.Figure(figsize=(1.2 + 4.4 * len(panels), 3.8), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        for i, (name, curve) in enumerate(panel.curves.items()):
            _draw(axis, name, curve, COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)])
        if panel.level is not None:
            axis.axhline(panel.level, color="0.5", linewidth=0.8)
        axis.set_title(panel.title, fontsize=10)
        axis.set_xlabel(x)
        if log and any(np.any(curve.y > 0) for curve in panel.curves.values()):
            axis.set_yscale("log")
        axis.grid(color="0.9")
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(y)
    axes[-1].legend(fontsize=8, frameon=False)
    return save_figure(matplotlib, figure, stem)


def _draw(axis: Any, name: str, curve: Curve, colour: str, marker: str) -> None:
    axis.plot(curve.x, curve.y, marker=marker, markersize=4, linewidth=1.4, color=colour, label=name)
    if curve.interval is not None:
        axis.fill_between(curve.x, *curve.interval, color=colour, alpha=0.15, linewidth=0)
    if curve.dotted is not None:
        axis.plot(curve.x, curve.dotted, ":", linewidth=1.4, color=colour)
    for index, word in curve.marks.items():
        at = (curve.x[index], curve.y[index])
        axis.plot(*at, "o", markersize=10, markerfacecolor="none", markeredgecolor=colour)
        axis.annotate(word, at, xytext=(0, 8), textcoords="offset points", ha="center", fontsize=8, color=colour)
