"""The study's tables, from the JSON of its runs, beside the paper's figures.

    python -m experiments.study --tables        writes experiments/study/SCALE/README.md

Differences are paired by seed. Their margin is the mean divided by the standard error; one seed has no margin.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev, variance
from typing import Any

TABLE_6 = {
    "ours": ("yes", "ours", "full", 27.02, 26.77, 500),
    "shaw": ("yes", "Shaw", "full", 27.94, 27.94, 256),
    "ours-half": ("yes", "ours", "half", 28.69, 28.33, 460),
    "ours-alone": ("no", "ours", "full", 29.59, 29.02, 260),
    "ours-alone-half": ("no", "ours", "half", 30.10, 30.10, 120),
    "shaw-alone": ("no", "Shaw", "full", 29.75, 29.75, 120),
    "shaw-alone-half": ("no", "Shaw", "half", 30.50, 30.50, 120),
    "vaswani-alone-half": ("no", "Vaswani", "half", 30.97, 30.97, 120),
    "al-rfou-alone-half": ("no", "Al-Rfou", "half", 31.16, 31.16, 120),
    "ours-long": ("yes", "ours, four times the steps", "full", "-", "-", "-"),
    "shaw-long": ("yes", "Shaw, four times the steps", "full", "-", "-", "-"),
}
"""Row: recurrence, encoding, loss; the paper's perplexity at the training length, its best, and the best's length."""
TABLE_7 = {
    "sentences-ours": ("ours", 25.2),
    "sentences-shaw": ("Shaw", 25.7),
    "sentences-alone": ("no recurrence", 27.1),
}
TABLE_10 = {
    "ours": ("128", "yes", "full", 27.02, 26.77, 500),
    "ours-half": ("128", "yes", "half", 28.69, 28.33, 460),
    "longer-alone": ("176", "no", "full", 28.43, 27.98, 400),
    "longer-alone-half": ("172", "no", "half", 28.83, 28.83, 120),
}
TABLE_8 = {
    "models": {"ours": (900, 800, 700), "qrnn": (500, 400, 300), "lstm": (400, 300, 200)},
    "parts": {
        "ours": (700, 600, 500),
        "shaw": (400, 400, 300),
        "ours-alone": (300, 300, 300),
        "vaswani-alone-half": (128, 128, 128),
    },
}
"""The paper's context lengths at r = 0.1, 0.5, 1."""
CLAIMS = (
    ("Recurrence helps (full loss)", "ours", "ours-alone"),
    ("Recurrence helps (half loss)", "ours-half", "ours-alone-half"),
    ("Recurrence helps Shaw's encoding", "shaw", "shaw-alone"),
    ("Our encoding beats Shaw's, with recurrence", "ours", "shaw"),
    ("Our encoding beats Shaw's, without recurrence", "ours-alone", "shaw-alone"),
    ("Our encoding beats Shaw's, half loss", "ours-alone-half", "shaw-alone-half"),
    ("Relative beats Vaswani's absolute encoding", "ours-alone-half", "vaswani-alone-half"),
    ("Relative beats Al-Rfou's absolute encoding", "ours-alone-half", "al-rfou-alone-half"),
    ("The full loss beats the half, with recurrence", "ours", "ours-half"),
    ("The full loss beats the half, without", "ours-alone", "ours-alone-half"),
    ("At equal memory recurrence beats longer segments", "ours", "longer-alone"),
    ("Recurrence helps on shuffled sentences", "sentences-ours", "sentences-alone"),
    ("Our encoding beats Shaw's on shuffled sentences", "sentences-ours", "sentences-shaw"),
    ("Our encoding beats Shaw's after four times the steps", "ours-long", "shaw-long"),
    ("Our encoding beats Shaw's at twice the trained length, without recurrence", "ours-alone", "shaw-alone", 64),
    ("Our encoding beats Shaw's at twice the trained length, with recurrence", "ours", "shaw", 128),
    ("Transformer-XL beats the LSTM of its size", "ours", "lstm"),
    ("Transformer-XL beats the QRNN of its size", "ours", "qrnn"),
)
"""What the paper says, the row that is to be better, and the other: at their best lengths, or at one length."""


class Rows:
    """The runs of a scale, by row and seed."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.runs: dict[str, dict[int, Any]] = {}
        self.groups: dict[str, dict[int, Any]] = {}
        for file in sorted(folder.glob("*.json")):
            facts = json.loads(file.read_text(encoding="utf-8"))
            if "row" in facts:
                self.runs.setdefault(facts["row"], {})[facts["seed"]] = facts
            elif "group" in facts:
                self.groups.setdefault(facts["group"], {})[facts["seed"]] = facts["recl"]

    def curve(self, row: str, seed: int) -> dict[int, float]:
        """Bits by attention length; 0 is the state of a recurrent network."""
        if self.runs[row][seed]["length"] is None:
            return {0: self.runs[row][seed]["test"]["bpc"]}
        [run] = self.runs[row][seed]["length"]["runs"]
        return {result["attn_len"] or run["best"]: result["bpc"] for result in run["results"]}  # None: its only length

    def at(self, row: str, length: int) -> dict[int, float]:
        """Bits at an attention length, by seed; of the runs that were scored at it."""
        curves = {seed: self.curve(row, seed) for seed in self.runs.get(row, ())}
        return {seed: curve[length] for seed, curve in curves.items() if length in curve}

    def trained(self, row: str) -> int:
        """The attention length in training: segment and memory."""
        words = next(iter(self.runs[row].values()))["command"].split()
        return sum(int(words[words.index(f"--train.{name}") + 1]) for name in ("tgt-len", "mem-len"))

    def best(self, row: str) -> dict[int, float]:
        return {seed: min(self.curve(row, seed).values()) for seed in self.runs.get(row, ())}

    def shortest(self, row: str) -> str:
        """The shortest attention length within 0.1 % of the best, by seed."""
        found = sorted({self.runs[row][seed]["length"]["runs"][0]["shortest"] for seed in self.runs[row]})
        return " to ".join(str(n) for n in (found[:1] + found[-1:] if len(found) > 1 else found))


def spread(values: Iterable[float]) -> str:
    """Mean and standard deviation."""
    values = list(values)
    if not values:
        return "-"
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else " (one seed)")


def differences(better: dict[int, float], worse: dict[int, float]) -> list[float]:
    """The increase of the figure, by seed."""
    return [worse[seed] - better[seed] for seed in sorted(better.keys() & worse.keys())]


def claims(rows: Rows) -> list[list[str]]:
    """Each claim's mean difference, divided by its own standard error, and by one from the spread of all claims' pairs,
    because the spread of only two or three differences is often small by chance."""
    found = {
        what: differences(*(rows.at(row, *length) if length else rows.best(row) for row in (better, worse)))
        for what, better, worse, *length in CLAIMS
    }
    spreads = [variance(pairs) for pairs in found.values() if len(pairs) > 1]
    cells = []
    for what, pairs in found.items():
        if len(pairs) < 2:
            cells.append([what, f"{pairs[0]:+.3f}" if pairs else "-", "one seed" if pairs else "-", "-"])
            continue
        errors = [(spread / len(pairs)) ** 0.5 for spread in (variance(pairs), mean(spreads))]
        cells.append([what, f"{mean(pairs):+.3f}", *(f"{mean(pairs) / error:+.1f}" for error in errors)])
    return cells


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *lines])


def ablations(rows: Rows, paper: dict[str, tuple], head: Sequence[str]) -> str:
    """Table 6 or 10."""
    columns = [*head, "seeds", "bpc, trained length", "best bpc", "its length", "paper: ppl", "best", "length"]
    body = [
        [*facts[:-3], len(rows.runs[row]), *measured(rows, row), *facts[-3:]]
        for row, facts in paper.items()
        if row in rows.runs
    ]
    return table(columns, body)


def measured(rows: Rows, row: str) -> list[str]:
    """The figure at the trained length, the best figure, and the length of the best."""
    return [spread(rows.at(row, rows.trained(row)).values()), spread(rows.best(row).values()), rows.shortest(row)]


def recl(rows: Rows, group: str) -> str:
    """Table 8 for one group."""
    body = []
    for row, paper in TABLE_8[group].items():
        cells = []
        for share in range(3):
            found = [
                length["recl"]
                for facts in rows.groups[group].values()
                for length in facts["recl"][share]["runs"]
                if length["name"].rpartition("-")[0] == row
            ]
            cells.append(f"{min(found)} to {max(found)}" if len(set(found)) > 1 else str(*set(found)))
        body.append([row, *cells, *paper])
    text = table(["model", "r = 0.1", "0.5", "1", "paper: 0.1", "0.5", "1"], body)
    picture = Path("figures", f"recl-{group}-context.png")
    return f"{text}\n\n![losses by context]({picture})" if (rows.folder / picture).exists() else text


def figures(folder: Path) -> list[str]:
    """Figures 5 to 7 of `ours` with the first seed, if they exist."""
    names = {"average": "Figure 5", "position": "Figure 6", "terms": "Figure 7"}
    shown = [
        f"![{title}](figures/attention-{name}.png)"
        for name, title in names.items()
        if (folder / "figures" / f"attention-{name}.png").exists()
    ]
    command = "`txl analyse attention runs/study/small/ours-1 --max-tokens 20000`"
    return [f"## Figures 5 to 7\n\n{command} on validation.", *shown] if shown else []


def write_tables(folder: Path) -> None:
    """Write all results so far into the folder's README.md."""
    rows = Rows(folder)
    sizes = sorted({f"{row}: {facts['model']}" for row, runs in rows.runs.items() for facts in runs.values()})
    text = [
        f"# The study, {folder.name}: tables",
        "Generated by `python -m experiments.study --tables`; the plan is [one folder up](../README.md). bpc is bits"
        " per byte of the first 100,000 targets of test, mean ± standard deviation over seeds.",
        "## Claims\n\nHow much worse the other row's best is, paired by seed; that over its standard error, and over"
        " one by the spread of all these pairs.",
        table(["the paper's claim", "bpc", "standard errors", "by the pooled spread"], claims(rows)),
        "## Table 6",
        ablations(rows, TABLE_6, ["recurrence", "encoding", "loss"]),
        "## Table 7, shuffled sentences",
        table(
            ["model", "seeds", "bpc", "paper: ppl"],
            [
                [facts[0], len(rows.runs[row]), spread(rows.best(row).values()), facts[1]]
                for row, facts in TABLE_7.items()
                if row in rows.runs
            ],
        ),
        "## Table 10, equal memory",
        ablations(rows, TABLE_10, ["the paper's length", "recurrence", "loss"]),
        *[f"## Table 8, {group}\n\n{recl(rows, group)}" for group in TABLE_8 if group in rows.groups],
        *figures(folder),
        "## Runs",
        "\n".join(f"- {size}" for size in sizes),
    ]
    (folder / "README.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
