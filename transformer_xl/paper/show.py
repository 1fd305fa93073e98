"""How the paper's tables are shown: the paper's figures beside ours, as text, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from .exhibits import Exhibit
from .measures import Measured

NONE = "-"


def table(exhibit: Exhibit, measured: Measured) -> list[list[str]]:
    """The names of the columns, then a list of cells for each line: what it is, the paper's figures, and ours."""
    paper = [f"paper: {name}" for name in exhibit.published]
    rows = [[*exhibit.columns, *paper, *(f"here: {name}" for name in measured.columns)]]
    for line, values in zip(exhibit.lines, measured.lines, strict=True):
        ours = [over_seeds(column) for column in values] or [NONE] * len(measured.columns)
        rows.append([*map(str, line.cells), *map(str, line.paper), *ours])
    return rows


def over_seeds(values: Sequence[float]) -> str:
    """The mean and its standard error; one seed has none."""
    if not values:
        return NONE
    if all(value == int(value) for value in values) and min(values) >= 1:  # lengths and counts
        return f"{min(values):,.0f}" if min(values) == max(values) else f"{min(values):,.0f} to {max(values):,.0f}"
    error = f" ± {standard_error(values):.3f}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{error}"


def standard_error(values: Sequence[float]) -> float:
    return stdev(values) / len(values) ** 0.5


def claims(exhibit: Exhibit, best: Mapping[str, Mapping[int, float]]) -> list[list[str]]:
    """What the paper concludes, and here: how much worse the other row is, paired by seed, over its standard error.

    `best` has the best figure of each row by seed.
    """
    rows = [["the paper's conclusion", "here: the other is worse by", "standard errors"]]
    for says, better, worse in exhibit.claims:
        one, other = best.get(better, {}), best.get(worse, {})
        pairs = [other[seed] - one[seed] for seed in sorted(one.keys() & other.keys())]
        margin = f"{mean(pairs) / standard_error(pairs):+.1f}" if len(pairs) > 1 and len(set(pairs)) > 1 else "one seed"
        rows.append([says, f"{mean(pairs):+.3f}", margin] if pairs else [says, NONE, NONE])
    return rows


def best_of(result: Mapping[str, Any]) -> float:
    """The figure of a model by which the conclusions compare it."""
    return min(result["lengths"].values()) if "lengths" in result else result["test"]


def as_csv(rows: Iterable[Sequence[str]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def as_latex(title: str, rows: Sequence[Sequence[str]]) -> str:
    """A `tabular` with `booktabs`."""
    head, *body = [" & ".join(map(_escaped, row)) + r" \\" for row in rows]
    lines = [f"% {title}", rf"\begin{{tabular}}{{{'l' * len(rows[0])}}}", r"\toprule", head, r"\midrule", *body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _escaped(cell: str) -> str:
    for character in "&%$#_":
        cell = cell.replace(character, "\\" + character)
    return cell.replace("±", r"$\pm$")


@cache
def measured_here(size: str) -> Sequence[dict[str, Any]]:
    """The results of this project at a size, which come with the package; none if there are none."""
    file = Path(__file__).with_name("measured") / f"{size}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else []


def summary(exhibit: Exhibit, size: str) -> str:
    """Our best figures for the lines of an exhibit, in their order."""
    found = []
    for line in exhibit.lines:
        values = [best_of(result) for result in measured_here(size) if line.row and result.get("row") == line.row]
        found.append(f"{mean(values):.2f}" if values else NONE)
    return ", ".join(found) if set(found) - {NONE} else NONE
