"""Repeat the paper's ablations at a scale for two cores: train each row, store its figures, and make the tables.

    python -m experiments.study [--scale small|gpu] [--rows ROW ...] [--seeds 1 2 3] [--runs DIR] [--jobs 1]
    python -m experiments.study --tables

The study continues where it was stopped: a run with its JSON in experiments/study/SCALE is done, and a run with a
checkpoint resumes. Every step is a `txl` command, and the JSON records it. experiments/study/README.md has the plan and
its budget.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.study_tables import write_tables

HERE = Path(__file__).parent / "study"


@dataclass(frozen=True)
class Row:
    """One model of the study: its changes of the scale's recipe."""

    kind: str = "transformer-xl"
    recurrence: bool = True
    loss: str = "full"
    longer: float = 1.0
    """Segments so many times as long, for Table 10's equal memory."""
    sentences: bool = False
    """Train and score on shuffled sentences, for Table 7."""
    steps: float = 1.0
    """So many times the steps, for what begins to show later."""


ROWS: dict[str, Row] = {
    "ours": Row(),
    "shaw": Row("shaw"),
    "ours-half": Row(loss="half"),
    "ours-alone": Row(recurrence=False),
    "ours-alone-half": Row(recurrence=False, loss="half"),
    "shaw-alone": Row("shaw", recurrence=False),
    "shaw-alone-half": Row("shaw", recurrence=False, loss="half"),
    "vaswani-alone-half": Row("vaswani", recurrence=False, loss="half"),
    "al-rfou-alone-half": Row("al-rfou", recurrence=False, loss="half"),
    "lstm": Row("lstm"),
    "qrnn": Row("qrnn"),
    "sentences-ours": Row(sentences=True),
    "sentences-shaw": Row("shaw", sentences=True),
    "sentences-alone": Row(recurrence=False, sentences=True),
    "longer-alone": Row(recurrence=False, longer=176 / 128),
    "longer-alone-half": Row(recurrence=False, loss="half", longer=172 / 128),
    "ours-long": Row(steps=4),
    "shaw-long": Row("shaw", steps=4),
}
"""Alone: without recurrence."""

GROUPS = {"models": ("ours", "qrnn", "lstm"), "parts": ("ours", "shaw", "ours-alone", "vaswani-alone-half")}
"""Table 8: groups whose models share a baseline."""


@dataclass(frozen=True)
class Scale:
    """The size of the study."""

    tgt_len: int
    max_steps: int
    lengths: tuple[int, ...]
    """Attention lengths at test time, in segments of training."""
    sizes: dict[str, tuple[str, ...]]
    """What makes a recurrent network as large as Transformer-XL."""
    recl: tuple[str, ...]


SCALES = {
    "small": Scale(
        tgt_len=32,
        max_steps=800,
        lengths=(1, 2, 3, 4, 6, 8),
        sizes={
            "lstm": ("--model.n-layer", "2", "--model.d-inner", "336"),
            "qrnn": ("--model.n-layer", "3", "--model.d-inner", "376"),
        },
        recl=("--step", "16", "--max-context", "256", "--positions", "2000"),
    ),
    "gpu": Scale(
        tgt_len=128,
        max_steps=50_000,
        lengths=(1, 2, 3, 4, 6, 8),
        sizes={
            "lstm": ("--model.n-layer", "3", "--model.d-inner", "1660"),
            "qrnn": ("--model.n-layer", "4", "--model.d-inner", "2256"),
        },
        recl=("--step", "100", "--max-context", "1200", "--positions", "10000"),
    ),
}


@dataclass(frozen=True)
class Study:
    """The folders of the runs and their figures, and the scale."""

    scale: str
    runs: Path
    threads: int

    @property
    def results(self) -> Path:
        return HERE / self.scale

    def settings(self, row: Row, seed: int) -> list[str]:
        """The options of `txl train` for a row and a seed."""
        scale = SCALES[self.scale]
        size, memory = self.lengths(row)
        lengths = [f"--{section}.{name}" for section in ("train", "eval") for name in ("tgt-len", "mem-len")]
        sizes = [str(n) for n in (size, memory, size, memory)]
        given = [word for pair in zip(lengths, sizes, strict=True) for word in pair]
        given += ["--model.kind", row.kind, "--train.loss", row.loss, "--train.seed", str(seed)]
        given += ["--train.max-steps", str(round(scale.max_steps * row.steps / row.longer))]  # in tokens
        given += scale.sizes.get(row.kind, ())
        if row.kind in ("shaw", "al-rfou"):  # as many vectors as training reaches; others would stay as they were drawn
            given += ["--model.positions", str(size + memory if row.kind == "shaw" else size)]
        if row.sentences:
            given += ["--data", str(sentences(self.runs / "sentences"))]
        return given

    def run(self, name: str, seed: int) -> None:
        """Train a row and score it at every attention length, unless this was done before."""
        kept = self.results / f"{name}-{seed}.json"
        if kept.exists():
            return
        row, folder = ROWS[name], self.runs / self.scale / f"{name}-{seed}"
        recurrent = "-recurrent" if row.kind in ("lstm", "qrnn") else ""
        begin = ["train", str(HERE / f"{self.scale}{recurrent}.toml"), "--out", str(folder)]
        command = [*begin, *self.settings(row, seed)]
        if not trained(folder):
            self.txl([*begin, "--resume"] if any(folder.glob("checkpoints/step_*")) else command)
        found = None
        if not recurrent:
            sweep = ["analyse", "length", str(folder), "--attn-len", *map(str, self.attention_lengths(row)), "--json"]
            found = last_json(self.txl([*sweep, "--precision", "fp32", "--max-tokens", "100000"]))
        keep(kept, {"row": name, "seed": seed, **facts_of(folder), "command": shown(command), "length": found})

    def recl(self, group: str, seed: int) -> None:
        """The relative effective context lengths of a group's models."""
        kept = self.results / f"recl-{group}-{seed}.json"
        folders = [self.runs / self.scale / f"{name}-{seed}" for name in GROUPS[group]]
        if kept.exists() or not all(map(trained, folders)):
            return
        command = ["analyse", "recl", *map(str, folders), *SCALES[self.scale].recl]
        found = json.loads(
            self.txl(
                [*command, "--json", "--out", str(self.runs / self.scale / "figures" / f"{group}-{seed}")]
            ).splitlines()[-1]
        )
        keep(kept, {"group": group, "seed": seed, "command": shown(command), "recl": found})

    def lengths(self, row: Row) -> tuple[int, int]:
        """The lengths of a row's segments and of its memory."""
        size = round(SCALES[self.scale].tgt_len * row.longer)
        return size, size if row.recurrence else 0

    def attention_lengths(self, row: Row) -> list[int]:
        """The lengths at which a row is scored; the length that it was trained with is one of them."""
        scale = SCALES[self.scale]
        return sorted({sum(self.lengths(row)), *(scale.tgt_len * times for times in scale.lengths)})

    def txl(self, words: list[str]) -> str:
        """Run a command and return its output."""
        environment = os.environ | ({"OMP_NUM_THREADS": str(self.threads)} if self.threads else {})
        done = subprocess.run(
            [sys.executable, "-m", "transformer_xl", *words], env=environment, text=True, stdout=subprocess.PIPE
        )
        if done.returncode:
            raise SystemExit(f"`{shown(words)}` ended with status {done.returncode}.")
        return done.stdout


def last_json(printed: str) -> Any:
    return json.loads(printed.splitlines()[-1])


def sentences(folder: Path) -> Path:
    """Penn Treebank's sentences in random order within each split, so only style carries over from line to line."""
    import numpy as np

    from transformer_xl.config.settings import CorpusConfig
    from transformer_xl.data.datasets import open_corpus

    for split in ("train", "valid", "test"):
        file = folder / f"{split}.txt"
        if not file.exists():
            corpus = open_corpus(CorpusConfig(name="ptb", unit="word"))
            lines = corpus.vocab.decode(corpus.split(split).ids).splitlines()
            order = np.random.default_rng(0).permutation(len(lines))
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(lines[i].strip() + "\n" for i in order), encoding="utf-8")
    return folder


def trained(folder: Path) -> bool:
    """Whether a run has ended; the end scores the test split."""
    file = folder / "metrics.jsonl"
    return file.exists() and any(json.loads(line).get("split") == "test" for line in file.read_text().splitlines())


def facts_of(folder: Path) -> dict[str, Any]:
    """Facts about a run from its own files."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    [last, test] = [[entry for entry in entries if entry.get("split") == split][-1] for split in ("train", "test")]
    log = (folder / "log.txt").read_text().splitlines()[0]
    environment = json.loads((folder / "environment.json").read_text())
    kept = {name: environment[name] for name in ("packages", "cores", "cpu_features", "devices")}
    return {
        "model": log.split(";")[0],
        "steps": last["step"],
        "seconds": last["seconds"],
        "test": test,
        "environment": kept,
    }


def keep(file: Path, facts: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".part")
    beside.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    beside.replace(file)


def shown(words: list[str]) -> str:
    """A command as a user types it in the root of the repository."""
    root = str(HERE.parent.parent) + "/"
    return "txl " + " ".join(word.removeprefix(root) for word in words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, default=Path("runs/study"), help="where the run folders go")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, the cores shared among them")
    parser.add_argument("--tables", action="store_true", help="only write the tables")
    given = parser.parse_args()
    threads = max((os.cpu_count() or 1) // given.jobs, 1) if given.jobs > 1 else 0
    study = Study(given.scale, given.runs, threads)
    if not given.tables:
        if any(ROWS[name].sentences for name in given.rows):
            sentences(study.runs / "sentences")
        with ThreadPoolExecutor(given.jobs) as pool:
            for seed in given.seeds:
                list(pool.map(study.run, given.rows, [seed] * len(given.rows)))
                list(pool.map(study.recl, GROUPS, [seed] * len(GROUPS)))
    write_tables(study.results)


if __name__ == "__main__":
    main()
