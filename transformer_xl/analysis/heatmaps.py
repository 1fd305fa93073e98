"""The pictures of attention, each as PNG and SVG: heads over distance (Figures 5 and 7), and the text that one token
attends to (Figure 6)."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from ..mistake import Mistake
from ..runtime.files import write_whole

COLOURS = "magma_r"
"""Its lightness decreases monotonically, so darker is more in greyscale, too."""
TICKS = (0, 2, 5, *(step * 10**power for power in range(1, 5) for step in (1, 2, 5)))
LINE = 100
"""Characters of text in a line."""
CELL = (0.0627, 0.16)
"""Width and height of a character, inches; with `POINTS` they fit the monospaced font that matplotlib brings."""
POINTS = 7.5


def draw_by_distance(
    stem: Path,
    panels: Mapping[str, Float[np.ndarray, "N H S"]],
    title: str,
    mean_distance: Float[np.ndarray, "N H"] | None = None,
) -> list[Path]:
    """Draw a row for each head, the first layer on top, over the square root of distance.

    All panels share one logarithmic colour scale, which ends at a twentieth of uniform attention. `mean_distance` is a
    circle in each row.
    """
    matplotlib = load_matplotlib()
    layers, heads, columns = next(iter(panels.values())).shape
    rows = layers * heads
    norm = matplotlib.colors.LogNorm(1 / (20 * columns), max(float(panel.max()) for panel in panels.values()))
    size = (1.6 + max(6.4, 3.4 * len(panels)), 1.2 + min(max(0.28 * rows, 1.6), 9.0))
    figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (name, panel) in zip(axes, panels.items(), strict=True):
        edges, shown = np.arange(columns + 1), panel.reshape(rows, columns).clip(norm.vmin)
        mesh = axis.pcolormesh(edges, np.arange(rows + 1), shown, norm=norm, cmap=COLOURS, rasterized=True)
        axis.set_xscale("function", functions=(np.sqrt, np.square))
        ticks = [tick for tick in TICKS if tick < columns]
        axis.set_xticks(np.array(ticks) + 0.5, ticks, fontsize=8)
        axis.tick_params(axis="y", length=0)
        axis.set_xlabel("distance in tokens (0: itself)", fontsize=9)
        axis.set_title(name, fontsize=10)
        axis.hlines(np.arange(1, layers) * heads, 0, columns, color="white", linewidth=2)
    _name_heads(axes[0], layers, heads)
    if mean_distance is not None:
        axes[0].plot(mean_distance.reshape(rows) + 0.5, np.arange(rows) + 0.5, "o", mfc="white", mec="black", ms=5)
    figure.suptitle(title, fontsize=10)
    figure.colorbar(mesh, ax=list(axes), label="probability", extend="min", fraction=0.05, pad=0.02)
    return save_figure(matplotlib, figure, stem)


def _name_heads(axis: Any, layers: int, heads: int) -> None:
    rows = layers * heads
    axis.set_ylim(rows, 0)
    if rows <= 40:
        axis.set_yticks(
            np.arange(rows) + 0.5, [f"{row // heads + 1}.{row % heads + 1}" for row in range(rows)], fontsize=8
        )
        axis.set_ylabel("layer.head")
    else:
        axis.set_yticks((np.arange(layers) + 0.5) * heads, [str(layer + 1) for layer in range(layers)])
        axis.set_ylabel(f"layer ({heads} heads each)")


class Passage(NamedTuple):
    """A text with the attention of one head from its last token."""

    title: str
    tokens: Sequence[str]
    """Oldest first, with the white space between them; the last is the query's own."""
    probability: Float[np.ndarray, " S"]
    marked: Bool[np.ndarray, " S"]


def draw_passages(stem: Path, passages: Sequence[Passage], title: str) -> list[Path]:
    """Draw each text shaded by attention, the marked tokens bold, the query's own in a frame."""
    matplotlib = load_matplotlib()
    laid = [_lay_out(passage.tokens) for passage in passages]
    lines = [layout[-1][1] + 1 for layout in laid]
    height = CELL[1] * (sum(lines) + 3 * len(lines) + 3)
    figure = matplotlib.figure.Figure(figsize=(CELL[0] * (LINE + 4), height))
    figure.suptitle(title, fontsize=10, y=1 - CELL[1] / height)
    top = height - 3 * CELL[1]
    for passage, layout, rows in zip(passages, laid, lines, strict=True):
        top -= CELL[1] * (rows + 2)
        box = (2 / (LINE + 4), top / height, LINE / (LINE + 4), CELL[1] * rows / height)
        axis = figure.add_axes(box, xlim=(0, LINE), ylim=(rows, 0))
        axis.set_axis_off()
        axis.set_title(passage.title, fontsize=9, loc="left", pad=3)
        _write(matplotlib, axis, passage, layout)
        top -= CELL[1]
    return save_figure(matplotlib, figure, stem)


def _lay_out(tokens: Sequence[str]) -> list[tuple[int, int]]:
    """Column and row of each token in lines of `LINE` characters."""
    corners, column, row = [], 0, 0
    for token in tokens:
        if column + len(token.rstrip()) > LINE:
            column, row = 0, row + 1
        corners.append((column, row))
        column += len(token)
    return corners


def _write(matplotlib: ModuleType, axis: Any, passage: Passage, layout: Sequence[tuple[int, int]]) -> None:
    memory = passage.probability[:-1]
    colours = matplotlib.colormaps["Oranges"]
    most = max(float(memory.max(initial=0.0)), 1e-12)
    last = len(layout) - 1
    for i, (token, (column, row)) in enumerate(zip(passage.tokens, layout, strict=True)):
        shown = token.rstrip()[:LINE] or token
        own = i == last
        face = "white" if own else colours(0.75 * (passage.probability[i] / most) ** 0.5)
        edge = "black" if own else "none"
        axis.add_patch(matplotlib.patches.Rectangle((column, row + 0.05), len(shown), 0.9, fc=face, ec=edge, lw=0.8))
        weight, colour = ("bold", "black") if passage.marked[i] or own else ("normal", "0.35")
        style = {"family": "DejaVu Sans Mono", "size": POINTS, "weight": weight, "color": colour}
        axis.text(column, row + 0.5, shown, va="center_baseline", parse_math=False, clip_on=False, **style)


def load_matplotlib() -> ModuleType:
    """The module, with the parts that the pictures use.

    Raises:
        Mistake: it is not installed, or cannot be used.
    """
    try:
        import matplotlib
        import matplotlib.colors
        import matplotlib.figure
        import matplotlib.patches
    except ImportError as error:
        raise Mistake("Pictures need matplotlib, which is not installed. Run `pip install matplotlib`.") from error
    except ValueError as error:  # raised by the import for an MPLBACKEND that it does not know
        raise Mistake(f"MPLBACKEND must be unset or a backend of matplotlib: {error}.") from error
    return matplotlib


def save_figure(matplotlib: ModuleType, figure: Any, stem: Path) -> list[Path]:
    """Write PNG and SVG, the same bytes each time, and return both paths."""
    paths = []
    with matplotlib.rc_context({"svg.hashsalt": stem.name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the font shows a box for a character that it lacks
        for form, about in (("png", {}), ("svg", {"Date": None})):
            file = io.BytesIO()
            figure.savefig(file, format=form, dpi=160, metadata=about)
            paths.append(stem.with_name(f"{stem.name}.{form}"))
            write_whole(paths[-1], file.getvalue())
    return paths
