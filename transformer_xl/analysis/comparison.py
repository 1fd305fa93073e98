"""Trained runs that are compared on one text."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ..config.problems import Problems
from ..data.corpus import Split
from ..data.vocab import Vocab
from ..evaluation.score import figure
from ..run.checkpoint import load_vocab
from ..run.folder import find_checkpoint, short_names
from ..run.trained import Part, TrainedRun
from ..runtime.files import write_whole


class Comparison:
    """Runs with the same vocabulary, and the text on which they are compared."""

    def __init__(
        self,
        runs: Sequence[Path],
        problems: Problems,
        *,
        data: str | None = None,
        split: Part | None = None,
        device: str = "auto",
        precision: str = "auto",
    ):
        """Open the runs and the text. If there are `problems`, raise `Mistake` before that."""
        if not runs:
            problems.append("RUN must be at least one run, got none.")
        problems.refuse()
        self.runs: list[TrainedRun] = [TrainedRun(run, device, precision) for run in runs]
        for each in self.runs:
            each.problems.refuse()
        first, vocabs = self.runs[0], [load_vocab(find_checkpoint(each.path)) for each in self.runs]
        problems += [
            f"All runs must have the same vocabulary, because they are compared target by target; {each.path} has "
            f"{vocab}, and {first.path} {'as many others' if str(vocab) == str(vocabs[0]) else vocabs[0]}. Leave one "
            "of them out."
            for each, vocab in zip(self.runs, vocabs, strict=True)
            if vocab != vocabs[0]
        ]
        problems.refuse()
        self.names: list[str] = short_names([each.path for each in self.runs])
        self.vocab: Vocab = vocabs[0]
        self.precision: str = first.precision
        self.split: Split = first.text(self.vocab, data, split, "test")
        self.unit: str = figure(self.vocab.unit, 0.0)[0]
        """The unit of the results: ppl or bpc."""

    def facts(self, of_runs: Iterable[Mapping[str, object]]) -> dict[str, object]:
        """The JSON entries about the text and each run, with the results of each run."""
        runs = [
            {"run": str(each.path), "name": name, "kind": each.config.model.kind, **figures}
            for each, name, figures in zip(self.runs, self.names, of_runs, strict=True)
        ]
        return {**self.split.about, "precision": self.precision, "runs": runs}


def save_arrays(stem: Path, facts: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> None:
    """Write `facts` to `stem`.json and `arrays` to `stem`.npz."""
    write_whole(stem.with_suffix(".json"), json.dumps(facts, indent=1) + "\n")
    file = io.BytesIO()
    np.savez_compressed(file, allow_pickle=False, **arrays)
    write_whole(stem.with_suffix(".npz"), file.getvalue())
