"""Tables as data for the template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """A row of a table."""

    cells: Sequence[object]
    class_: str = ""


class Table(NamedTuple):
    """A table. Its first `words` columns hold words; the others hold figures, aligned to the right."""

    columns: Sequence[str]
    rows: Sequence[Row]
    words: int = 1
