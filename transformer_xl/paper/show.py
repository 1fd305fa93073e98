"""How the paper's tables are shown: the paper's figures beside ours, as text, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import mean, stdev

from .exhibits import Exhibit, first_like
from .measures import MEASURES, Results
from .study import Result

NONE = "-"


@cache
def measured(size: str) -> Results:
    """The results of this project at a size, which come with the package, by row."""
    file, found = Path(__file__).with_name("measured") / f"{size}.json", {}
    for result in json.loads(file.read_text(encoding="utf-8")) if file.exists() else []:
        found.setdefault(result["row"], []).append(result)
    return found


def of_rows(exhibit: Exhibit, size: str, results: Results) -> Results:
    """The results that an exhibit shows, by the names in its lines."""
    return {row: results.get(first_like(row, size), ()) for row in exhibit.rows()} | {
        exhibit.name: results.get(exhibit.name, ())
    }


def table(exhibit: Exhibit, results: Results) -> list[list[str]]:
    """The names of the columns, then a list of cells for each line: what it is, the paper's figures, and ours."""
    _, columns, values = MEASURES[exhibit.measure]
    unit = next((result["unit"] for found in results.values() for result in found if "unit" in result), "figure")
    head = [*exhibit.columns, *(f"paper: {name}" for name in exhibit.published)]
    rows = [[*head, *(f"here: {name.format(unit)}" for name in columns)]]
    for line in exhibit.lines:
        found = [values(line, result) for result in results.get(line.row or exhibit.name, ())]
        known = [[value for value in column if value is not None] for column in zip(*found, strict=True)]
        ours = [over_seeds(column) for column in known] or [NONE] * len(columns)
        rows.append([*map(str, line.cells), *map(str, line.paper), *ours])
    return rows


def over_seeds(values: Sequence[float]) -> str:
    """The mean and its standard error, which one seed lacks; of whole numbers the least and the greatest."""
    if not values:
        return NONE
    if all(isinstance(value, int) for value in values):
        return " to ".join(f"{value:,.0f}" for value in sorted({min(values), max(values)}))
    return f"{mean(values):.3f}" + (f" ± {standard_error(values):.3f}" if len(values) > 1 else "")


def standard_error(values: Sequence[float]) -> float:
    return stdev(values) / len(values) ** 0.5


def claims(exhibit: Exhibit, results: Results) -> list[list[str]]:
    """What the paper concludes, and here: how much worse the other row's best is, paired by seed, over its standard
    error."""
    rows = [["the paper's conclusion", "here: the other is worse by", "in standard errors"]]
    for says, better, worse in exhibit.claims:
        one, other = ({result["seed"]: best(result) for result in results.get(row, ())} for row in (better, worse))
        pairs = [other[seed] - one[seed] for seed in sorted(one.keys() & other.keys())]
        error = standard_error(pairs) if len(pairs) > 1 else 0.0
        margin = f"{mean(pairs) / error:+.1f}" if error else "one seed" if pairs else NONE
        rows.append([says, f"{mean(pairs):+.3f}" if pairs else NONE, margin])
    return rows


def best(result: Result) -> float:
    """The figure by which conclusions compare a model: the best of all attention lengths, if they were measured."""
    return min(result["lengths"].values()) if "lengths" in result else result["test"]


def summary(exhibit: Exhibit, results: Results) -> str:
    """The best figures of an exhibit's models, in the order of its lines; "-" if none is known."""
    found = [results.get(line.row, ()) for line in exhibit.lines]
    texts = [f"{mean(map(best, each)):.2f}" if each else NONE for each in found]
    return ", ".join(texts) if set(texts) - {NONE} else NONE


def as_csv(rows: Iterable[Sequence[str]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def as_latex(title: str, rows: Sequence[Sequence[str]]) -> str:
    """A `tabular` for LaTeX's package booktabs."""
    head, *body = [" & ".join(map(_escaped, row)) + r" \\" for row in rows]
    lines = [f"% {title}", rf"\begin{{tabular}}{{{'l' * len(rows[0])}}}", r"\toprule", head, r"\midrule", *body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _escaped(cell: str) -> str:
    for character in "&%$#_":
        cell = cell.replace(character, "\\" + character)
    return cell.replace("±", r"$\pm$")
