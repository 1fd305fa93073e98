"""Reading of a run's folder: the run may be finished, in progress or resumed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Float

from ..config.settings import LENGTHS, RunConfig
from ..config.values import fits
from ..run.folder import Run
from ..run.metrics import validations
from .figures import Figures, stored_figures

TRACKED = ("step", "loss", "grad_norm", "lr", "tokens_per_second", "seconds", "skipped", "overflows")
Entry = Mapping[str, object]
"""A line of `metrics.jsonl`."""
LARGEST_PICTURE = 1 << 24


@dataclass(frozen=True)
class Record:
    """A run as its folder describes it."""

    name: str
    config: RunConfig
    entries: Sequence[Entry]
    environment: Mapping[str, object]
    parameters: int | None
    """None before the first checkpoint."""
    pictures: Sequence[Path]
    figures: Figures | None
    """The figures that the model gives, of the best checkpoint."""

    @cached_property
    def train(self) -> dict[str, Float[np.ndarray, " n"]]:
        """The columns of training by name; nan where an entry has no number."""
        return _columns([entry for entry in self.entries if entry.get("split") == "train"])

    @cached_property
    def valid(self) -> dict[str, Float[np.ndarray, " n"]]:
        """The columns of the validations by name, of the weights that are saved."""
        return _columns(validations(self.entries))

    @property
    def corpus(self) -> str:
        """The name of the corpus, without its path."""
        return Path(self.config.corpus.name or "a text without a name").name

    @cached_property
    def evaluations(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.get("split") not in (None, "train")]

    @cached_property
    def step(self) -> int:
        """The last step that an entry names."""
        return max((int(number(entry.get("step", 0))) for entry in self.entries), default=0)

    @cached_property
    def test_entry(self) -> Entry | None:
        """The last evaluation with the split and lengths of `[eval]`, or the last one with this split."""
        lengths = asdict(self.config.eval_lengths).items()
        found = [entry for entry in self.evaluations if entry["split"] == self.config.eval.split]
        meant = [entry for entry in found if all(entry.get(name) == size for name, size in lengths)]
        return (meant or found or [None])[-1]

    @cached_property
    def best_valid(self) -> Entry | None:
        """The validation with the lowest loss, of those over the targets and at the lengths of the last one."""
        known = [e for e in validations(self.entries) if math.isfinite(number(e.get("loss")))]
        alike = [e for e in known if all(e.get(name) == known[-1].get(name) for name in ("targets", *LENGTHS))]
        return min(alike, key=lambda entry: number(entry["loss"]), default=None)

    def tokens(self, steps: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Targets trained on up to each of `steps`, from speeds and times."""
        counted = np.cumsum(self.train["tokens_per_second"] * np.diff(self.train["seconds"], prepend=0.0))
        return np.round(np.interp(steps, np.append(0, self.train["step"]), np.append(0, counted)))

    def seconds(self, steps: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Time in training steps up to each of `steps`, without evaluations."""
        return np.interp(steps, np.append(0, self.train["step"]), np.append(0, self.train["seconds"]))


def number(value: object) -> float:
    """A number from JSON; nan for null, which stands for a number that is not finite."""
    return float(value) if isinstance(value, int | float) and fits(value, float) else math.nan


def _columns(entries: Sequence[Entry]) -> dict[str, Float[np.ndarray, " n"]]:
    return {name: np.array([number(entry.get(name)) for entry in entries], float) for name in TRACKED}


def _is_picture(path: Path, folder: Path) -> bool:
    """Whether a file of the run's own is a PNG that a page can hold. A link may lead to what nobody wants to share."""
    if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(8) == b"\x89PNG\r\n\x1a\n" and path.stat().st_size < LARGEST_PICTURE


def read_run(folder: Path, name: str) -> Record:
    """Read a run's folder; refuse a folder that `txl train` did not write."""
    run = Run(folder)
    if not run.exists():
        raise FileNotFoundError(
            f"{folder} is not a run: it must be a folder that `txl train` wrote, with metrics.jsonl."
        )
    saved = bool(run.checkpoints())
    return Record(
        name=name,
        config=run.settings(),
        entries=run.metrics.entries(),
        environment=run.facts(),
        parameters=run.parameters() if saved else None,
        pictures=sorted(path for path in folder.glob("*/*.png") if _is_picture(path, folder)),
        figures=stored_figures(folder) if saved else None,
    )
