"""Draw the pictures of docs/concepts.md into docs/figures: recurrence.svg, reach.svg and shift.svg.

    python docs/pictures.py

Every arrow and number is computed from the rules of the model. Each picture has a light ground of its own, so it can
be read on a dark page too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

FIGURES = Path(__file__).parent / "figures"
LAYERS, SEGMENT, MEMORY = 3, 4, 4
"""N, T and M of the pictures of recurrence."""
STEP, RISE, LEFT, TOP = 36, 70, 96, 60
INK, FAINT, OWN, PAST = "#1f2a3a", "#c3ccd8", "#35507a", "#c2570c"

Node = tuple[int, int]
"""A layer (0: the embedding) and a position."""


def seen(node: Node) -> Iterable[Node]:
    """The states one layer below that a state is computed from: at most MEMORY positions before its segment."""
    layer, position = node
    start = position - position % SEGMENT
    return [(layer - 1, j) for j in range(max(start - MEMORY, 0), position + 1)] if layer else []


def reached(node: Node) -> set[Node]:
    """All states that a state depends on, itself included."""
    found, left = {node}, [node]
    while left:
        new = set(seen(left.pop())) - found
        found |= new
        left += new
    return found


def at(node: Node) -> tuple[float, float]:
    """Where a state is drawn. Segments have a gap between them."""
    layer, position = node
    return LEFT + position * STEP + position // SEGMENT * STEP / 2, TOP + (LAYERS - layer) * RISE


def text(x: float, y: float, words: str, *, size: int = 14, anchor: str = "middle", fill: str = INK) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{words}</text>'


def drawing(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    ground = f'<rect width="{width}" height="{height}" rx="8" fill="#f7f9fc"/>'
    return "\n".join([head, f"<title>{title}</title>", ground, *parts, "</svg>"]) + "\n"


def line(below: Node, above: Node, colour: str, width: float) -> str:
    (x1, y1), (x2, y2) = at(below), at(above)
    ends = f'x1="{x1:g}" y1="{y1 - 7:g}" x2="{x2:g}" y2="{y2 + 7:g}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}" stroke-opacity=".6"/>'


def states(positions: int, colour: Callable[[Node], str]) -> list[str]:
    """The states of all layers as dots, and the names of the layers."""
    dots = []
    for layer in range(LAYERS + 1):
        name = f"layer {layer}" if layer else "embedding"
        dots.append(text(LEFT - 20, at((layer, 0))[1] + 5, name, size=13, anchor="end"))
        for node in ((layer, position) for position in range(positions)):
            x, y = at(node)
            dots.append(f'<circle cx="{x:g}" cy="{y:g}" r="7" fill="{colour(node)}"/>')
    return dots


def recurrence() -> str:
    """Two segments: what the second one computes, and the states of the first one that are its memory."""
    positions = 2 * SEGMENT
    second = [(layer, i) for layer in range(1, LAYERS + 1) for i in range(SEGMENT, positions)]
    parts = []
    for node in second:
        for below in seen(node):
            parts.append(line(below, node, PAST if below[1] < SEGMENT else OWN, 1.2))
    (x1, _), (x2, y) = at((0, 0)), at((0, SEGMENT - 1))
    top = at((LAYERS - 1, 0))[1]
    box = f'x="{x1 - 16:g}" y="{top - 16:g}" width="{x2 - x1 + 32:g}" height="{y - top + 32:g}" rx="10"'
    parts.append(f'<rect {box} fill="{PAST}" fill-opacity=".1" stroke="{PAST}" stroke-dasharray="5 4"/>')
    parts += states(positions, lambda node: OWN if node[1] >= SEGMENT else PAST if node[0] < LAYERS else FAINT)
    middle = [(at((0, s * SEGMENT))[0] + at((0, s * SEGMENT + SEGMENT - 1))[0]) / 2 for s in (0, 1)]
    parts += [text(x, y + 42, f"segment {n}") for x, n in zip(middle, ("τ", "τ + 1"), strict=True)]
    parts.append(text(middle[0], 30, "memory: no gradient", fill=PAST))
    parts.append(text(middle[1], 30, "computed now", fill=OWN))
    return drawing(440, 340, "Segment recurrence: each layer also attends to its inputs of the segment before", parts)


def reach() -> str:
    """Five segments: all states that the last token's output depends on."""
    positions = 5 * SEGMENT
    top = (LAYERS, positions - 1)
    found = reached(top)
    parts = [line(b, n, PAST, 0.8) for n in sorted(found) for b in seen(n) if n == top or n[1] % SEGMENT == 0]
    parts += states(positions, lambda node: PAST if node in found else FAINT)
    first = min(position for layer, position in found if not layer)
    distance = top[1] - first
    assert distance == LAYERS * MEMORY + SEGMENT - 1
    (x1, y), (x2, _) = at((0, first)), at((0, top[1]))
    parts.append(f'<path d="M{x1:g} {y + 20:g} V{y + 28:g} H{x2:g} V{y + 20:g}" fill="none" stroke="{INK}"/>')
    words = f"N M + T - 1 = {LAYERS} x {MEMORY} + {SEGMENT} - 1 = {distance} positions back"
    parts.append(text((x1 + x2) / 2, y + 48, words))
    parts.append(text(at(top)[0], 34, "this token", fill=PAST))
    return drawing(900, 340, "Reach: each layer looks one memory further back", parts)


QUERIES, KEYS, CELL = 3, 5, 40
"""T and S of the picture of the shift."""
COLOURS = ("#08519c", "#3182bd", "#6baed6", "#bdd7e7", "#eff3ff")
"""Of the distances 0, 1, ...; wrapped entries are grey."""


def written() -> list[int | None]:
    """The memory after the product: T rows of S + 1 entries, a spare one (None), then the distances S - 1, ..., 0."""
    return [entry for _ in range(QUERIES) for entry in (None, *range(KEYS - 1, -1, -1))]


def matrix(x: float, y: float, columns: int, values: Iterable[tuple[str, str]]) -> list[str]:
    """Cells in rows of `columns`, each with its text and its colour."""
    parts = []
    for n, (words, colour) in enumerate(values):
        left, top = x + n % columns * CELL, y + n // columns * CELL
        box = f'x="{left:g}" y="{top:g}" width="{CELL}" height="{CELL}" fill="{colour}" stroke="{INK}"'
        ink = "#ffffff" if colour in COLOURS[:2] else INK
        parts += [f"<rect {box}/>", text(left + CELL / 2, top + CELL / 2 + 5, words, fill=ink)]
    return parts


def shift() -> str:
    """The scores as they are written, as they lie in memory, and read again from offset T in rows of S."""
    memory = written()
    cells = [("·", "#ffffff") if d is None else (str(d), COLOURS[d]) for d in memory]
    view = []
    for i in range(QUERIES):
        for j in range(KEYS):
            distance = KEYS - QUERIES + i - j
            entry = memory[QUERIES + i * KEYS + j]
            assert distance < 0 or entry == distance
            view.append(cells[QUERIES + i * KEYS + j] if distance >= 0 else ("x", "#d5d9df"))
    parts = [text(30, 32, f"written: a spare entry, {KEYS} distances", anchor="start")]
    parts += matrix(30, 46, KEYS + 1, cells)
    parts.append(text(30, 210, "the same memory, entry after entry", anchor="start"))
    parts += matrix(30, 224, len(cells), cells)
    x1, x2 = 30 + QUERIES * CELL, 30 + (QUERIES + QUERIES * KEYS) * CELL
    for n in range(QUERIES):
        left = x1 + n * KEYS * CELL
        span = f"M{left + 3:g} 270 V278 H{left + KEYS * CELL - 3:g} V270"
        parts.append(f'<path d="{span}" fill="none" stroke="{PAST}" stroke-width="2"/>')
        parts.append(text(left + KEYS * CELL / 2, 296, f"row {n} of the view", size=13, fill=PAST))
    assert x2 == 30 + len(cells) * CELL
    parts.append(text(x1 + 230, 32, f"read from entry {QUERIES}, in rows of {KEYS}", anchor="start"))
    parts += matrix(x1 + 230, 46, KEYS, view)
    parts.append(text(x1 + 230 + KEYS * CELL + 16, 112, "x: after the query, masked", size=13, anchor="start"))
    return drawing(790, 316, "The relative shift without a copy", parts)


PICTURES = {"recurrence": recurrence, "reach": reach, "shift": shift}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FIGURES / f"{name}.svg").write_text(draw(), "utf-8")
