"""Tables: drawn on a terminal, plain aligned columns in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text under column names; every column but the first is aligned to the right."""
    if not sys.stdout.isatty():
        print("\n".join(plain_table(title, columns, rows)), flush=True)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table without any drawing."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = [title]
    for row in (columns, *rows):
        first, *rest = (
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]).rstrip())
    return lines


def show_pairs(title: str, pairs: Mapping[str, str]) -> None:
    """Print names and values, a line each."""
    width = max(map(len, pairs))
    print("\n".join([title, *(f"  {name.ljust(width)}  {value}" for name, value in pairs.items())]), flush=True)
