"""The arrays and facts of the analyses, and their pictures, each as PNG and SVG: gains and perplexity over context
(Figures 3 and 4), perplexity over attention length, heads over distance (Figures 5 and 7), and the memory that some
tokens attend to (Figure 6)."""

from __future__ import annotations

import io
import json
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from ..data.vocab import Vocab
from ..run.checkpoint import LoadedModel
from ..runtime.files import write_whole
from .attention import KINDS, TERMS, TOP, AverageAttention, Head, PositionAttention, most_attended
from .recl import ReclResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = "magma_r"
"""A colour map whose lightness only decreases, so it also works in greyscale."""
TICKS = (0, 2, 5, *(step * 10**power for power in range(1, 5) for step in (1, 2, 5)))
RINGS = ("o", "s", "D")
"""The shapes around marked points, one for each mark."""
PANELS = {"a": "(a) content, q·k", "b": "(b) position by content, q·r", "d": "(d) position for all, v·r"}
"""The panels of Figure 7. The arrays also have (c), u·k."""


class Curve(NamedTuple):
    """A line of a chart, with an interval, and what marks some points (by their x)."""

    x: Int[np.ndarray, " n"]
    y: Float[np.ndarray, " n"]
    interval: Float[np.ndarray, "2 n"] | None = None
    marks: Mapping[int, str] = {}


def draw_gains(
    stem: Path, names: Sequence[str], contexts: Int[np.ndarray, " L"], shares: Sequence[ReclResult]
) -> list[Path]:
    """Draw Figure 3: the gain in perplexity from the next step of context, with RECL marked; a panel for each share."""
    panels: dict[str, dict[str, Curve]] = {}
    for each in shares:
        gains = panels.setdefault(f"hardest {100 * each.r:g} % of positions" if each.r < 1 else "all positions", {})
        for i, name in enumerate(names):
            marks = {int(each.length.tokens[i]): "RECL"} if each.length.reached[i] else {}
            gains[name] = Curve(contexts[:-1], each.perplexity[i], each.perplexity_interval[:, i], marks)
    x = f"context c in tokens (c' = c + {contexts[1] - contexts[0]:,})"
    return draw_curves(stem, panels, x, "exp f(c, c) - exp f(c, c')", log=True)


def draw_curves(
    stem: Path,
    panels: Mapping[str, Mapping[str, Curve]],
    x: str,
    y: str,
    *,
    log: bool = False,
) -> list[Path]:
    """Draw panels side by side, each with curves by their names.

    `log` makes the axis logarithmic, so small values stay visible; others than positive ones are left out.
    """
    figure = _figure(3.2 + 4.4 * len(panels), 3.8)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    marks = [word for curves in panels.values() for curve in curves.values() for word in curve.marks.values()]
    rings = dict(zip(dict.fromkeys(marks), RINGS, strict=False))
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for name, curve in curves.items():
            _draw(axis, name, curve._replace(y=np.where(curve.y > 0, curve.y, np.nan)) if log else curve, rings)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(x)
        if log and any(np.any(curve.y > 0) for curve in curves.values()):
            axis.set_yscale("log")
        axis.grid(color="0.9")
    axes[0].set_ylabel(y)
    for word, ring in rings.items():
        axes[-1].plot([], [], ring, color="0.3", mfc="none", ms=10, label=word)
    axes[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return save_figure(figure, stem)


def _draw(axis: Axes, name: str, curve: Curve, rings: Mapping[str, str]) -> None:
    [line] = axis.plot(curve.x, curve.y, marker="o", markersize=4, label=name)
    colour = line.get_color()
    if curve.interval is not None:
        axis.fill_between(curve.x, *curve.interval, color=colour, alpha=0.15, linewidth=0)
    for x, word in curve.marks.items():
        axis.plot(x, curve.y[curve.x == x], rings[word], color=colour, mfc="none", ms=10)


def draw_by_distance(
    stem: Path,
    panels: Mapping[str, Float[np.ndarray, "N H S"]],
    title: str,
    mean_distance: Float[np.ndarray, "N H"] | None = None,
) -> list[Path]:
    """Draw a row for each head, the first layer on top, over the square root of distance.

    All panels share one logarithmic colour scale, which ends at a twentieth of uniform attention. A circle in each row
    marks `mean_distance`.
    """
    layers, heads, columns = next(iter(panels.values())).shape
    rows = layers * heads
    figure = _figure(1.6 + max(6.4, 3.4 * len(panels)), 1.2 + min(max(0.28 * rows, 1.6), 9.0))
    least, most = 1 / (20 * columns), max(float(panel.max()) for panel in panels.values())
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (name, panel) in zip(axes, panels.items(), strict=True):
        edges, shown = np.arange(columns + 1), panel.reshape(rows, columns).clip(least)
        how = {"norm": "log", "vmin": least, "vmax": most, "cmap": COLOURS, "rasterized": True}
        mesh = axis.pcolormesh(edges, np.arange(rows + 1), shown, **how)
        axis.set_xscale("function", functions=(np.sqrt, np.square))
        ticks = [tick for tick in TICKS if tick < columns]
        axis.set_xticks(np.array(ticks) + 0.5, ticks, fontsize=8)
        axis.set_xlabel("distance in tokens (0: itself)", fontsize=9)
        axis.set_title(name, fontsize=10)
        axis.hlines(np.arange(1, layers) * heads, 0, columns, color="white", linewidth=2)
    axes[0].set_ylim(rows, 0)
    axes[0].set_yticks((np.arange(layers) + 0.5) * heads, [str(layer + 1) for layer in range(layers)])
    axes[0].set_ylabel(f"layer ({heads} heads each)")
    if mean_distance is not None:
        axes[0].plot(mean_distance.reshape(rows) + 0.5, np.arange(rows) + 0.5, "o", mfc="white", mec="black", ms=5)
    figure.suptitle(title, fontsize=10)
    figure.colorbar(mesh, ax=list(axes), label="probability", extend="min", fraction=0.05, pad=0.02)
    return save_figure(figure, stem)


def draw_targets(
    stem: Path,
    targets: Sequence[str],
    context: Sequence[str],
    panels: Mapping[str, Float[np.ndarray, "T M"]],
    marked: Sequence[Bool[np.ndarray, "T M"]],
    title: str,
) -> list[Path]:
    """Draw Figure 6: for each head a panel with a row for each target token and a column for each context token.

    Each row has its own scale; a dot is on each `marked` token. Of a long context only some tokens are named.
    """
    width, rows, columns = min(0.14 * len(context), 24.0), len(targets), len(context)
    figure = _figure(2 + max(width, 4.0), 0.8 + (0.13 * rows + 0.8) * len(panels))
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    named = range(0, columns, max(1, math.ceil(columns * 0.14 / width)))
    for axis, (name, panel), dots in zip(axes, panels.items(), marked, strict=True):
        shades = panel / np.maximum(panel.max(axis=1, keepdims=True), 1e-12)
        axis.pcolormesh(
            np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5, shades, cmap="Oranges", rasterized=True
        )
        y, x = np.nonzero(dots)
        axis.plot(x, y, ".", color="black", markersize=2)
        axis.set_ylim(rows - 0.5, -0.5)
        axis.set_title(name, fontsize=9)
        style = {"family": "DejaVu Sans Mono", "fontsize": 6, "parse_math": False}
        axis.set_yticks(range(rows), targets, **style)
        axis.set_xticks(list(named), [context[i] for i in named], rotation=90, **style)
        axis.set_ylabel("token", fontsize=8)
        axis.set_xlabel("memory, oldest first; each row has its own scale", fontsize=8)
    figure.suptitle(title, fontsize=10)
    return save_figure(figure, stem)


def head_facts(average: AverageAttention) -> dict[str, object]:
    """The statistics of each head, and the axes of the arrays."""
    by_distance = ["kind", "layer", "head", "distance"]
    axes = {"probability": by_distance, "sums": by_distance, "counts": ["distance"]}
    _, layers, heads, _ = average.sums.shape
    each = [
        {
            "head": f"{layer + 1}.{head + 1}",
            "mean_distance_tokens": average.mean_distance[layer, head],
            "beyond_segment": average.beyond_segment[layer, head],
            "entropy_nats": average.entropy[layer, head],
        }
        for layer, head in product(range(layers), range(heads))
    ]
    return {"axes": axes, "kinds": list(KINDS), "heads": each}


def passage_facts(looks: Sequence[PositionAttention], chosen: Sequence[Head], vocab: Vocab) -> list[dict[str, object]]:
    """For each position: the tokens it sees, those with the most attention per chosen head, and its array's name."""
    return [
        {
            "position": look.position,
            "array": f"position_{look.position}",
            "axes": ["layer", "head", "token"],
            "tokens": _tokens(vocab, look.ids),
            "top": {f"{n + 1}.{h + 1}": np.flatnonzero(look.top()[n, h]).tolist() for n, h in chosen},
        }
        for look in looks
    ]


def _tokens(vocab: Vocab, ids: np.ndarray) -> list[str]:
    """Each token as text, a line end as ¶."""
    return ["¶" if i == vocab.line_end else vocab.decode([i]) for i in ids.tolist()]


def draw_heads(
    folder: Path,
    average: AverageAttention,
    chosen: Sequence[Head],
    looks: Sequence[PositionAttention],
    loaded: LoadedModel,
    text: str,
) -> list[Path]:
    """Draw the average attention, its terms and the attention of the chosen heads; return the files."""
    for old in (*folder.glob("terms.[ps][nv]g"), *folder.glob("targets-[0-9]*.[ps][nv]g")):
        old.unlink()  # of an earlier call, whose arrays are replaced
    whole, *terms = average.probability
    queries = f"{average.queries:,} queries"
    title = f"{text}: average attention of {queries}; circles are mean distances"
    paths = draw_by_distance(folder / "average", {"": whole}, title, average.mean_distance)
    had = TERMS[loaded.config.model.kind]
    panels = {PANELS[kind]: term for kind, term in zip(KINDS[1:], terms, strict=True) if kind in had and kind in PANELS}
    if len(panels) > 1:
        title = f"{text}: average of each term through its own softmax, {queries}"
        paths += draw_by_distance(folder / "terms", panels, title)
    for look in looks:
        if look.to_memory.size:
            texts = (_tokens(loaded.vocab, ids) for ids in (look.targets, look.ids[:-1]))
            rows, columns = ([text.replace(" ", "\N{OPEN BOX}") for text in each] for each in texts)  # alone on a tick
            panels = {f"layer {n + 1}, head {h + 1}": look.to_memory[n, h] for n, h in chosen}
            dots = [most_attended(panel) for panel in panels.values()]
            title = f"{text}, from token {look.position:,}: attention to the memory, each row's top {TOP:.0%} marked"
            paths += draw_targets(folder / f"targets-{look.position}", rows, columns, panels, dots, title)
    return paths


def if_possible(draw: Callable[[], list[Path]]) -> list[Path]:
    """The files that `draw` writes; without matplotlib none, and a sentence on standard error, because the numbers do
    not need it."""
    try:
        import_module("matplotlib")
    except (ImportError, ValueError) as error:  # ValueError: an unknown MPLBACKEND
        failed = f"Pictures need matplotlib; its import failed: {error}. Run `pip install matplotlib`."
        print(f"txl: {failed}", file=sys.stderr)
        return []
    return draw()


def save_arrays(stem: Path, facts: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> None:
    """Write `facts` to `stem`.json and `arrays` to `stem`.npz."""
    write_whole(stem.with_suffix(".json"), json.dumps(facts, indent=1) + "\n")
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # before NumPy 2.1, allow_pickle were an array
    write_whole(stem.with_suffix(".npz"), file.getvalue())


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """Write PNG and SVG, and return both paths."""
    paths = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the font shows a box for a missing character
        for form in ("png", "svg"):
            file = io.BytesIO()
            figure.savefig(file, format=form, dpi=160)
            paths.append(stem.with_name(f"{stem.name}.{form}"))
            write_whole(paths[-1], file.getvalue())
    return paths
