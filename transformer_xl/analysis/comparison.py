"""Trained runs that are compared on one text."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..data.corpus import Split
from ..data.vocab import Vocab
from ..run.trained import TrainedRun
from ..runtime.files import write_whole


class Comparison(NamedTuple):
    """Runs with the same vocabulary, and the text on which they are compared."""

    runs: Sequence[TrainedRun]
    names: Sequence[str]
    vocab: Vocab
    split: Split
    unit: str
    """The unit of the results: ppl or bpc."""

    def facts(self, of_runs: Iterable[Mapping[str, object]]) -> dict[str, object]:
        """The JSON entries about the text and each run, with the results of each run."""
        runs = [
            {"run": str(each.path), "name": name, "kind": each.config.model.kind, **figures}
            for each, name, figures in zip(self.runs, self.names, of_runs, strict=True)
        ]
        return {**self.split.about, "precision": self.runs[0].precision, "runs": runs}


def save_arrays(stem: Path, facts: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> None:
    """Write `facts` to `stem`.json and `arrays` to `stem`.npz."""
    write_whole(stem.with_suffix(".json"), json.dumps(facts, indent=1) + "\n")
    file = io.BytesIO()
    np.savez_compressed(file, allow_pickle=False, **arrays)
    write_whole(stem.with_suffix(".npz"), file.getvalue())
