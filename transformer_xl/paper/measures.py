"""What is measured for each kind of exhibit: by `txl` commands on the models of a study, into their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..config.shape import ABSOLUTE
from ..runtime.files import write_whole
from .exhibits import Exhibit, Line, Result

if TYPE_CHECKING:
    from .study import Study

SAMPLES = 3
"""Number of texts of Appendix E."""
SHRINK = {"toy": 16, "small": 4, "paper": 1}
"""Table 9's attention lengths are divided by this."""

Value = float | str | None
Results = Mapping[str, Sequence[Result]]
"""The results of each row, one per seed; those of an exhibit without models are under its name."""


class Measure(NamedTuple):
    """A kind of exhibit."""

    columns: Sequence[str] = ()
    """What is measured; "{}" stands for ppl or bpc. Nothing, if only files are made."""
    values: Callable[[Line, Result], Sequence[Value]] = lambda line, result: ()
    """The values of a line in the result of its row, in the order of the columns."""
    make: Callable[[Study, Exhibit, int, Path], None] | None = None
    """Measure the models of a seed, and write files to a folder; None: training has scored them."""


def score_values(line: Line, result: Result) -> Sequence[Value]:
    return [result.get(name) for name in ("test", "valid", "parameters")]


def make_lengths(study: Study, exhibit: Exhibit, seed: int, folder: Path) -> None:
    """Score at the attention lengths of the size, and at those that the rows were trained with (Table 6)."""
    from ..evaluation.score import figure

    found = {row: result for row in exhibit.rows() if (result := study.result(row, seed))}
    wanted = {*study.facts("attn_lens"), *(result["trained_length"] for result in found.values())}
    split = exhibit.split if study.size == "paper" else "test"
    missing = {study.folder(row, seed): row for row, result in found.items() if not _has_lengths(result, wanted)}
    if not missing:
        return
    how = ["--attn-len", *map(str, sorted(wanted)), "--split", split, *study.facts("score").split()]
    how += ["--precision", "fp32"]  # differences of rows are as small as the rounding of bf16
    runs = study.measured(["analyse", "length", *map(str, missing), *how, "--out", str(folder / str(seed))])["runs"]
    for run in runs:
        row = missing[Path(run["run"])]
        values = {str(r["attn_len"]): figure(r["unit"], r["loss"])[1] for r in run["results"]}
        study.keep(row, seed, found[row] | {"lengths": values, "shortest": run["shortest"]})


def _has_lengths(result: Result, wanted: set[int]) -> bool:
    """Whether a result has the wanted lengths; models with positions in the segment have none beyond it."""
    own = {length for length in wanted if result["kind"] not in ABSOLUTE or length <= result["trained_length"]}
    return {*map(str, own)} <= result.get("lengths", {}).keys()


def length_values(line: Line, result: Result) -> Sequence[Value]:
    lengths: Mapping[str, float] = result.get("lengths", {})
    return [lengths.get(str(result["trained_length"])), min(lengths.values(), default=None), result.get("shortest")]


def make_recl(study: Study, exhibit: Exhibit, seed: int, folder: Path) -> None:
    """The relative effective context lengths within each group of models (Table 8), and Figures 3 and 4."""
    for group in dict.fromkeys(str(line.cells[0]) for line in exhibit.lines):
        rows = [line.row for line in exhibit.lines if line.cells[0] == group]
        found = {row: result for row in rows if (result := study.result(row, seed))}
        if len(found) < 2 or all(group in result.get("recl", {}) for result in found.values()):
            continue
        runs = [str(study.folder(row, seed)) for row in found]
        how = [*study.facts("recl").split(), "--out", str(folder / f"{group}-{seed}")]
        shares = study.measured(["analyse", "recl", *runs, *how])["recl"]
        for i, (row, result) in enumerate(found.items()):
            own = [share["runs"][i] for share in shares]
            lengths = [run["recl"] if run["reached"] else f">= {run['recl']}" for run in own]
            study.keep(row, seed, result | {"recl": result.get("recl", {}) | {group: lengths}})


def recl_values(line: Line, result: Result) -> Sequence[Value]:
    return result.get("recl", {}).get(line.cells[0], [None] * 3)


def make_speed(study: Study, exhibit: Exhibit, seed: int, folder: Path) -> None:
    """How many times as long a sliding window takes per token as segments with a memory (Table 9)."""
    from .speed import slowdown

    found: dict[str, list[float]] = {}
    for line in exhibit.lines:
        attn_len = int(str(line.cells[0])) // SHRINK[study.size]
        print(f"Timing at an attention length of {attn_len:,}", flush=True)
        found[str(line.cells[0])] = [slowdown(study.size, attn_len), attn_len]
    study.keep(exhibit.home, seed, {"speed": found})


def speed_values(line: Line, result: Result) -> Sequence[Value]:
    return result["speed"][str(line.cells[0])]


def make_attention(study: Study, exhibit: Exhibit, seed: int, folder: Path) -> None:
    """Pictures of the attention of the heads (Figures 5 to 7)."""
    run = str(study.folder(exhibit.lines[0].row, seed))
    study.txl(["analyse", "attention", run, *study.facts("look").split(), "--out", str(folder / str(seed))])


def make_samples(study: Study, exhibit: Exhibit, seed: int, folder: Path) -> None:
    """Samples beside the reference, at positions drawn by chance (Appendix E)."""
    from .study import shown

    run, how = str(study.folder(exhibit.lines[0].row, seed)), study.facts("write").split()
    draws = [["--at", "random", "--reference", "--seed", str(draw)] for draw in range(1, SAMPLES + 1)]
    commands = [["generate", run, *how, *draw] for draw in draws]
    samples = [f"$ {shown(words)}\n\n{study.txl(words)}" for words in commands]
    write_whole(folder / f"samples-{seed}.txt", "\n".join(samples))


MEASURES = {
    "score": Measure(("{}", "valid", "parameters"), score_values),
    "lengths": Measure(("{}, trained length", "best {}", "shortest as good"), length_values, make_lengths),
    "recl": Measure(("r = 0.1", "r = 0.5", "r = 1"), recl_values, make_recl),
    "speed": Measure(("slowdown", "attention length"), speed_values, make_speed),
    "attention": Measure(make=make_attention),
    "text": Measure(make=make_samples),
}
