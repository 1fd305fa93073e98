"""HTML and SVG by calls: what is not marked up is escaped, so that no text of a run becomes part of the page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

VOID = {"img", "meta", "br"}
_NO_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


class Markup(str):
    """Text that is HTML and goes into the page as it stands."""

    __slots__ = ()


def text(value: object) -> Markup:
    """`value` as HTML that shows it. `Markup` stays; what no page can hold (control signs, half pairs) is replaced."""
    return value if isinstance(value, Markup) else Markup(escape(_NO_TEXT.sub("\ufffd", str(value)), quote=True))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. `class_` is written class and `stroke_width` stroke-width; an attribute that is None is left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>" + ("" if name in VOID else f"{join(children)}</{name}>"))


def join(parts: Iterable[object]) -> Markup:
    """Parts one behind the other; None is nothing."""
    return Markup("".join(text(part) for part in parts if part is not None))


def table(columns: Sequence[object], rows: Iterable[Sequence[object]], *, words: int = 1, class_: str = "") -> Markup:
    """A table whose first `words` columns are words, and the rest figures, aligned to the right."""
    kinds = [None if index < words else "n" for index in range(len(columns))]
    head = tag("tr", *(tag("th", name, scope="col", class_=kind) for name, kind in zip(columns, kinds, strict=True)))
    body = [
        tag("tr", *(tag("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)), class_=_marked(row))
        for row in rows
    ]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body), class_=class_ or None), class_="wide")


def _marked(row: Sequence[object]) -> str | None:
    return "own" if any(isinstance(cell, Own) for cell in row) else None


class Own(str):
    """A cell that marks its row as that of a run of this page."""

    __slots__ = ()
