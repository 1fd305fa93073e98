"""What is measured for each kind of exhibit, by `txl` commands on the models of a study.

A measure returns its columns and, for each line of the exhibit, a list of values over seeds for each column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..analysis.figures import Curve, draw_curves
from .exhibits import Exhibit
from .speed import slowdown
from .study import Result, Study

SAMPLES = 3
"""Number of texts of Appendix E."""


class Measured(NamedTuple):
    """The columns of an exhibit that are measured, and their values: by line, by column, over seeds."""

    columns: Sequence[str]
    lines: Sequence[Sequence[Sequence[float]]]
    files: Sequence[Path] = ()


def results(study: Study, row: str, seeds: Sequence[int]) -> list[Result]:
    """The results of a row, in the order of the seeds."""
    found = [study.result(row, seed) for seed in seeds] if row else []
    return [result for result in found if result is not None]


def score(study: Study, exhibit: Exhibit, seeds: Sequence[int], folder: Path) -> Measured:
    """The test and validation figures, and the number of parameters."""
    rows = [results(study, line.row, seeds) for line in exhibit.lines]
    [unit] = {result["unit"] for row in rows for result in row}
    names = {unit: "test", "valid": "valid", "parameters": "parameters"}
    return Measured([*names], [[[r[name] for r in row if name in r] for name in names.values()] for row in rows])


def lengths(study: Study, exhibit: Exhibit, seeds: Sequence[int], folder: Path) -> Measured:
    """The figure at the trained length, the best one, and the shortest length within 0.1 % of the best (Table 6)."""
    for seed in seeds:
        _sweep(study, exhibit.rows(), seed)
    rows, curves = [results(study, line.row, seeds) for line in exhibit.lines], {}
    [unit] = {result["unit"] for row in rows for result in row}
    for line, row in zip(exhibit.lines, rows, strict=True):
        if row:
            x = np.array(sorted({int(n) for result in row for n in result["lengths"]}))
            y = np.array([np.mean([result["lengths"][str(n)] for result in row]) for n in x])
            trained = int(np.searchsorted(x, row[0]["trained_length"]))
            curves[", ".join(map(str, line.cells))] = Curve(
                x, y, marks={trained: "trained"} if trained < len(x) else {}
            )
    paths = draw_curves(folder / "lengths", {"": curves}, "attention length in tokens", unit)
    columns = [f"{unit}, trained length", f"best {unit}", "its length"]
    return Measured(columns, [[list(values) for values in zip(*map(_best, row), strict=True)] for row in rows], paths)


def _best(result: Result) -> tuple[float, float, float]:
    values = {int(length): value for length, value in result["lengths"].items()}
    return values[result["trained_length"]], min(values.values()), result["shortest"]


def _sweep(study: Study, rows: Sequence[str], seed: int) -> None:
    """Score the rows of a seed that were not, at the lengths of the size and at the trained ones of all rows."""
    found = {row: study.result(row, seed) for row in rows}
    missing = {study.folder(row, seed): row for row, result in found.items() if result and "lengths" not in result}
    if not missing:
        return
    trained = {result["trained_length"] for result in found.values() if result}
    attn_lens = map(str, sorted({*study.facts("attn_lens"), *trained}))
    how = [*map(str, missing), "--attn-len", *attn_lens, "--precision", "fp32", *study.facts("score").split()]
    for run in study.measured(["analyse", "length", *how])["runs"]:
        row = missing[Path(run["run"])]
        values = {str(r["attn_len"]): r["ppl" if r["unit"] in ("word", "bpe", "id") else "bpc"] for r in run["results"]}
        study.keep(row, seed, (found[row] or {}) | {"lengths": values, "shortest": run["shortest"]})


def recl(study: Study, exhibit: Exhibit, seeds: Sequence[int], folder: Path) -> Measured:
    """The relative effective context lengths within each group of models (Table 8), and Figures 3 and 4."""
    found: dict[tuple[object, str], list[Sequence[float]]] = {}
    files: list[Path] = []
    for group in dict.fromkeys(line.cells[0] for line in exhibit.lines):
        rows = [line.row for line in exhibit.lines if line.cells[0] == group]
        for seed in seeds:
            here = [row for row in rows if study.result(row, seed)]
            out = folder / f"{group}-{seed}"
            runs = [str(study.folder(row, seed)) for row in here]
            if len(here) > 1:
                facts = study.measured(["analyse", "recl", *runs, *study.facts("recl").split(), "--out", str(out)])
                for i, row in enumerate(here):
                    found.setdefault((group, row), []).append([share["runs"][i]["recl"] for share in facts["recl"]])
                files += sorted(out.glob("*.png"))
    lines = [found.get((line.cells[0], line.row), []) for line in exhibit.lines]
    return Measured(exhibit.published, [[list(values) for values in zip(*line, strict=True)] for line in lines], files)


def speed(study: Study, exhibit: Exhibit, seeds: Sequence[int], folder: Path) -> Measured:
    """How many times as long a sliding window takes per token as segments with a memory (Table 9)."""
    lines = []
    for line in exhibit.lines:
        attn_len = int(str(line.cells[0])) // (1 if study.size == "paper" else 4 if study.size == "small" else 16)
        lines.append([[float(attn_len)], [slowdown(study.size, attn_len)]])
    return Measured(["attention length", "slowdown"], lines)


def attention(study: Study, exhibit: Exhibit, seeds: Sequence[int], folder: Path) -> Measured:
    """Pictures of the attention of the heads of the first model (Figures 5 to 7)."""
    [line] = exhibit.lines
    run = study.folder(line.row, seeds[0])
    study.txl(["analyse", "attention", str(run), *study.facts("look").split(), "--out", str(folder)])
    return Measured([], [[]], sorted(folder.glob("*.png")))


def text(study: Study, exhibit: Exhibit, seeds: Sequence[int], folder: Path) -> Measured:
    """Samples beside the reference, from positions drawn by chance (Appendix E)."""
    [line] = exhibit.lines
    run, how = str(study.folder(line.row, seeds[0])), study.facts("write").split()
    for seed in range(1, SAMPLES + 1):
        study.txl(["generate", run, *how, "--at", "random", "--reference", "--seed", str(seed)])
    return Measured([], [[]])


MEASURES: dict[str, Callable[..., Measured]] = {
    "score": score,
    "lengths": lengths,
    "recl": recl,
    "speed": speed,
    "attention": attention,
    "text": text,
}
