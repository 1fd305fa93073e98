"""Train the models of a table, as `txl` commands, and keep their results.

    OUT/SIZE/ROW-SEED/          a run folder, with result.json once it has been scored
    OUT/SIZE/EXHIBIT/           the table as CSV and LaTeX, and what other commands measured and drew for it
    OUT/texts/                  texts that are made for the toy size and for shuffled sentences

Everything can be killed: the same command goes on with it.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..config.settings import CorpusConfig
from ..data.datasets import open_corpus
from ..data.library import library
from ..evaluation.score import figure
from ..mistake import Mistake
from ..run.folder import Run
from ..run.metrics import validations
from ..runtime.files import read_table, whole_folder, write_whole
from . import al_rfou
from .exhibits import AL_RFOU, Result, content, first_like, training

BYTES = {"train": 1_500_000, "valid": 50_000, "test": 100_000}
"""Bytes of each split of the toy text, taken from the source of Python's library."""


@dataclass
class Study:
    """The folder of all models of one size, and how they are trained."""

    size: str
    out: Path
    launch: Sequence[str] = (sys.executable,)
    """What runs `-m transformer_xl train ...`, for example torchrun with its options."""
    jobs: int = 1
    """Trainings side by side; they share the cores."""
    _stopped: bool = field(default=False, init=False)

    def folder(self, row: str, seed: int) -> Path:
        """The run folder of a row and a seed. Rows that are the same model share it. An exhibit without models has one
        of its name."""
        return self.out / self.size / f"{first_like(row, self.size)}-{seed}"

    def facts(self, name: str) -> Any:
        """A value of the size in `exhibits.toml`."""
        return content()["sizes"][self.size][name]

    def command(self, row: str, seed: int) -> list[str]:
        """The words of `txl` that train a row."""
        words = [
            str(make_text(word.strip("{}"), self.out / "texts", self.size)) if word.startswith("{") else word
            for word in self.settings(row, seed)
        ]
        return ["train", *words, "--no-report", "--out", str(self.folder(row, seed))]

    def settings(self, row: str, seed: int) -> list[str]:
        """The words of `txl train` that make the model what it is, without paths."""
        return [*(training(row, self.size) or ()), "--train.seed", str(seed)]

    def result(self, row: str, seed: int) -> Result | None:
        """The result of a row that was trained, or None.

        Raises:
            Mistake: its folder has a model with other settings.
        """
        file = self.folder(row, seed) / "result.json"
        if not file.exists():
            return None
        found = read_table(file, "Give --again for this row and seed to make it again.", settings=str)
        if "settings" in found and found["settings"] != " ".join(self.settings(row, seed)):
            raise Mistake(
                f"{file.parent} was made with other settings, `{found['settings']}`. Give --again for this "
                "row and seed to train it again, or another --out."
            )
        return found

    def results(self, rows: Sequence[str], without: Collection[Path] = ()) -> dict[str, list[Result]]:
        """The results of these rows by name, of every seed that is there, in the order of seeds, `without` those in
        some folders."""
        found: dict[str, list[Result]] = {}
        for row in dict.fromkeys(first_like(row, self.size) for row in rows):
            names = [file.parent.name for file in (self.out / self.size).glob(f"{row}-*/result.json")]
            seeds = sorted(int(name.removeprefix(f"{row}-")) for name in names if name[len(row) + 1 :].isdecimal())
            seeds = [seed for seed in seeds if self.folder(row, seed) not in without]
            results = [(seed, self.result(row, seed)) for seed in seeds]
            found[row] = [result | {"seed": seed} for seed, result in results if result is not None]
        return found

    def keep(self, row: str, seed: int, result: Result) -> None:
        """Write the result of a row."""
        write_whole(self.folder(row, seed) / "result.json", json.dumps(result, indent=1) + "\n")

    def train(self, rows: Sequence[str], seeds: Sequence[int]) -> None:
        """Train the rows that have no result yet."""
        wanted = {self.folder(row, seed): (first_like(row, self.size), seed) for seed in seeds for row in rows}
        missing = [pair for pair in wanted.values() if self.result(*pair) is None]
        if done := len(wanted) - len(missing):
            print(f"Trained before, and used: {done} of {len(wanted)} models. --again trains them again.", flush=True)
        for pair in missing:
            self.command(*pair)  # makes the texts, before trainings side by side need them

        def one(number: int) -> None:
            if self._stopped:
                return
            row, seed = missing[number]
            head = f"[{number + 1}/{len(missing)} {row}, seed {seed}]"
            try:
                self.txl([*self.command(row, seed), "--resume", "auto"], head)
                about = {"row": row, "seed": seed, "settings": " ".join(self.settings(row, seed))}
                self.keep(row, seed, result_of(self.folder(row, seed)) | about)
            except BaseException:
                self._stopped = True
                raise

        with ThreadPoolExecutor(self.jobs) as pool:
            list(pool.map(one, range(len(missing))))

    def txl(self, words: Sequence[str], head: str = "") -> str:
        """Run a command of `txl`, print its output, each line after `head`, and return it.

        Raises:
            Mistake: it failed, or a signal stopped it.
        """
        kind = f"TXL_IMPORT={al_rfou.__file__} " if AL_RFOU in words else ""
        print(f"{head} {kind}{shown(words)}".strip(), flush=True)
        launch = self.launch if words[0] == "train" else (sys.executable,)
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        if self.jobs > 1:
            environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // self.jobs))
        if AL_RFOU in words:
            environment["TXL_IMPORT"] = al_rfou.__file__
        lines: list[str] = []
        command = [*launch, "-m", "transformer_xl", *words]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None, "it is a pipe"
            for line in process.stdout:
                lines.append(line)
                if "--json" not in words or not line.startswith("{"):  # JSON is for this program
                    print(f"{head} {line}" if head else line, end="", flush=True)
        if process.returncode:
            how = "" if process.returncode == 2 else "; the same command goes on from there"
            raise Mistake(f"`{shown(words)}` ended with status {process.returncode}{how}.")
        return "".join(lines)

    def measured(self, words: Sequence[str]) -> Any:
        """The JSON object that a command of `txl` prints with `--json`."""
        return json.loads(self.txl([*words, "--json"]).splitlines()[-1])


def _finite_losses(entries: Iterable[Mapping[str, Any]]) -> list[float]:
    return [entry["loss"] for entry in entries if isinstance(entry.get("loss"), float)]  # null: it was not finite


def result_of(folder: Path) -> Result:
    """What a run's own files say of it when it has been scored: figures are bits per character or perplexities."""
    run = Run(folder)
    entries, facts, config = run.metrics.entries(), run.facts(), run.settings()
    tested = [entry for entry in entries if entry.get("split") == config.eval.split]
    valid, test = _finite_losses(validations(entries)), _finite_losses(tested)
    if not test:
        raise Mistake(f"{folder} has no finite loss on {config.eval.split}. Give --again to train it again.")
    scores = {"valid": min(valid)} if valid else {}
    scores["test"] = test[-1]
    return {
        "unit": figure(config.corpus.unit, 0.0)[0],
        "kind": config.model.base_kind,
        **{name: figure(config.corpus.unit, loss)[1] for name, loss in scores.items()},
        "parameters": run.parameters(),
        "trained_length": config.train.tgt_len + config.train.mem_len,
        "steps": max(entry["step"] for entry in entries),
        "environment": {name: facts[name] for name in ("packages", "cores", "cpu_features", "devices")},
    }


def shown(words: Sequence[str]) -> str:
    """A command of `txl` as a user types it."""
    return shlex.join(["txl", *words])


def make_text(name: str, folder: Path, size: str) -> Path:
    """The folder with a text, made if it is missing.

    text: source of Python's library. sentences: Penn Treebank's in one random order within each split, so that only
    style carries over from line to line; for the toy size, lines of `text`.
    """
    toy = size == "toy"
    path = folder / ("lines" if toy and name == "sentences" else name)
    if path.exists():
        return path
    with whole_folder(path) as new:
        for split, text in _library() if toy else _treebank():
            lines = text.splitlines(keepends=True)
            if name == "sentences":
                lines = [lines[i] for i in np.random.default_rng(0).permutation(len(lines))]
            (new / f"{split}.txt").write_text("".join(lines), encoding="utf-8")
    return path


def _library() -> Iterator[tuple[str, str]]:
    """The first files of each split of Python's library."""
    for split, files in library().items():
        text = b"".join(files.values())[: BYTES[split]]
        yield split, text[: text.rfind(b"\n") + 1].decode(errors="replace")


def _treebank() -> Iterator[tuple[str, str]]:
    """The sentences of each split of Penn Treebank, one per line, which `txl data ptb` prepared."""
    corpus = open_corpus(CorpusConfig(name="ptb", unit="word"))
    for split in ("train", "valid", "test"):
        lines = corpus.vocab.decode(corpus.split(split).ids).splitlines()
        yield split, "".join(line.strip() + "\n" for line in lines)
