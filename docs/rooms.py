"""Draw the rooms of the package on their floors, with an arrow for each import between rooms: docs/rooms.svg.

    python docs/rooms.py

The arrows come from the imports in the files; the floors from the tree in CONTRIBUTING.md.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "transformer_xl"
WIDTH, HEIGHT, ROOM, STEP = 900, 90, 130, 220


def floors() -> dict[str, int]:
    """The floor of each room, as CONTRIBUTING.md lists them."""
    tree = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    return {name: int(floor) for floor, name in re.findall(r"^(\d) (\w+)/", tree, re.MULTILINE)}


def imports(rooms: dict[str, int]) -> Counter[tuple[str, str]]:
    """How many imports lead from one room to another."""
    found: Counter[tuple[str, str]] = Counter()
    for path in PACKAGE.glob("*/**/*.py"):
        here = path.relative_to(PACKAGE).parent.parts
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                target = (*here[: len(here) - node.level + 1], *(node.module or node.names[0].name).split("."))
                if target[0] in rooms and target[0] != here[0]:
                    found[here[0], target[0]] += 1
    return found


def picture() -> str:
    """The drawing as SVG."""
    rooms = floors()
    top = max(rooms.values())
    positions: dict[str, tuple[float, float]] = {}
    for floor in range(top + 1):
        row = [name for name, own in rooms.items() if own == floor]
        for i, name in enumerate(row):
            positions[name] = (WIDTH / 2 + (i - (len(row) - 1) / 2) * STEP, (top - floor) * HEIGHT + 40)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {(top + 1) * HEIGHT}" font-family="sans-serif">',
        "<title>Rooms of transformer_xl: imports lead downwards only</title>",
        f'<rect width="{WIDTH}" height="{(top + 1) * HEIGHT}" fill="white"/>',
    ]
    for (above, below), count in sorted(imports(rooms).items()):
        (x1, y1), (x2, y2) = positions[above], positions[below]
        line = f'x1="{x1:.0f}" y1="{y1 + 16:.0f}" x2="{x2:.0f}" y2="{y2 - 16:.0f}"'
        parts.append(f'<line {line} stroke="#7a8ca5" stroke-opacity=".45" stroke-width="{min(1 + count / 8, 5):.1f}"/>')
    for name, (x, y) in positions.items():
        box = f'x="{x - ROOM / 2:.0f}" y="{y - 16:.0f}" width="{ROOM}" height="32" rx="6"'
        parts.append(f'<rect {box} fill="#eef3fa" stroke="#35507a"/>')
        parts.append(f'<text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle" font-size="15">{name}</text>')
    for floor in range(top + 1):
        parts.append(f'<text x="12" y="{(top - floor) * HEIGHT + 45}" font-size="13" fill="#666">{floor}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "rooms.svg").write_text(picture(), "utf-8")
