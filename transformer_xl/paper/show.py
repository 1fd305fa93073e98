"""How the paper's tables are shown: the paper's figures beside ours, as text, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import mean, stdev

from .exhibits import Exhibit, Result, first_like
from .measures import MEASURES, Results, Value

NONE = "-"


@cache
def measured(size: str) -> Results:
    """The results of this project at a size, which come with the package, by row."""
    file, found = Path(__file__).with_name("measured") / f"{size}.json", {}
    for result in json.loads(file.read_text(encoding="utf-8")) if file.exists() else []:
        found.setdefault(result["row"], []).append(result)
    return found


def of_rows(exhibit: Exhibit, size: str, results: Results) -> Results:
    """The results that an exhibit shows, by the names in its lines. Where two lines are the same model at this size, a
    table of lengths has it once; in Table 8 it is in two groups."""
    rows = exhibit.rows()
    once = [row for row in rows if first_like(row, size) == row or first_like(row, size) not in rows]
    shown = once if exhibit.measure == "lengths" else rows
    return {row: results.get(first_like(row, size), ()) for row in [*shown, exhibit.home]}


def table(exhibit: Exhibit, results: Results) -> list[list[str]]:
    """The names of the columns, then a list of cells for each line: what it is, the paper's figures, and ours if there
    are any."""
    measure = MEASURES[exhibit.measure]
    units = [result.get("unit", "") for found in results.values() for result in found]
    columns = [f"here: {name.format(units[0])}" for name in measure.columns] if units else []
    rows = [[*exhibit.columns, *(f"paper: {name}" for name in exhibit.published), *columns]]
    for line in exhibit.lines:
        found = [measure.values(line, result) for result in results.get(line.row or exhibit.home, ())]
        ours = [over_seeds(column) for column in zip(*found, strict=True)] or [NONE] * len(columns)
        rows.append([*map(str, line.cells), *map(str, line.paper), *ours])
    return rows


def over_seeds(values: Sequence[Value]) -> str:
    """The mean and its standard error, which one seed lacks; of lengths and counts the least and the greatest."""
    known = [value for value in values if value is not None]
    floats = [value for value in known if isinstance(value, float)]
    if floats:
        return f"{mean(floats):.3f}" + (f" ± {standard_error(floats):.3f}" if len(floats) > 1 else "")
    texts = [value if isinstance(value, str) else f"{value:,}" for value in known]
    ordered = sorted(dict.fromkeys(texts), key=lambda text: int(text.strip(">= ").replace(",", "")))
    return " to ".join(dict.fromkeys(ordered[:1] + ordered[-1:])) or NONE


def standard_error(values: Sequence[float]) -> float:
    return stdev(values) / len(values) ** 0.5


def claims(exhibit: Exhibit, results: Results) -> list[list[str]]:
    """What the paper concludes, and here: how much worse the other row's figure is, paired by seed, over its standard
    error."""
    rows = [["the paper's conclusion", "here: the other is worse by", "in standard errors"]]
    for says, better, worse, *at in exhibit.claims:
        times = at[0] if at else 0
        one, other = ({r["seed"]: compared(exhibit, r, times) for r in results.get(row, ())} for row in (better, worse))
        seeds = [seed for seed in sorted(one.keys() & other.keys()) if one[seed] and other[seed]]
        pairs = [other[seed] - one[seed] for seed in seeds]
        error = standard_error(pairs) if len(pairs) > 1 else 0.0
        margin = f"{mean(pairs) / error:+.1f}" if error else "one seed" if pairs else NONE
        rows.append([says, f"{mean(pairs):+.3f}" if pairs else NONE, margin])
    return rows


def compared(exhibit: Exhibit, result: Result, times: int) -> float:
    """The figure by which an exhibit compares models: the test figure, or that at `times` the trained length, or with 0
    the best of all lengths. 0 if it was not measured."""
    if exhibit.measure != "lengths":
        return result["test"]
    lengths = result.get("lengths", {})
    return lengths.get(str(times * result["trained_length"]), 0.0) if times else min(lengths.values(), default=0.0)


def first_column(exhibit: Exhibit, results: Results) -> list[str]:
    """The first measured figure of each line; empty if there are none."""
    rows = table(exhibit, results)[1:] if exhibit.columns and any(results.values()) else []
    return [row[len(exhibit.columns) + len(exhibit.published)] for row in rows]


def few(texts: Sequence[str], most: int = 3) -> str:
    """The first of some texts."""
    return ", ".join([*texts[:most], *["..."] * (len(texts) > most)]) or NONE


def as_csv(rows: Iterable[Sequence[str]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def as_latex(title: str, rows: Sequence[Sequence[str]]) -> str:
    """A `tabular` for LaTeX's package booktabs."""
    escapes = str.maketrans({sign: f"\\{sign}" for sign in "&%$#_"} | {"±": r"$\pm$", ">": "$>$", "<": "$<$"})
    head, *body = [" & ".join(cell.translate(escapes) for cell in row) + r" \\" for row in rows]
    lines = [f"% {title}", rf"\begin{{tabular}}{{{'l' * len(rows[0])}}}", r"\toprule", head, r"\midrule", *body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])
