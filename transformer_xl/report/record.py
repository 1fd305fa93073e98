"""Reading of a run's folder: the run may be finished, in progress, resumed, or without some of its files.

A file that is missing or damaged raises nothing: the page reports it from `Record.faults`.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
from jaxtyping import Float

from ..evaluation.measures import figure
from ..runtime.files import plain_file
from ..train.metric_log import read_metrics
from .figures import FILE, Figures, are_current, load_figures

TRACKED = ("step", "loss", "grad_norm", "lr", "tokens_per_second", "seconds", "skipped")
LENGTHS = ("tgt_len", "mem_len", "clamp_len", "attn_len")
ANALYSES = ("analysis", "attention", "recl", "length")
"""Folders of a run whose pictures the page shows."""


@dataclass(frozen=True)
class Record:
    """A run as its folder describes it. Unknown values are empty or nan."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    entries: Sequence[Mapping[str, Any]] = ()
    """All entries of `metrics.jsonl` that name a step."""
    parameters: int | None = None
    pictures: Sequence[Path] = ()
    figures: Figures | None = None
    """The figures that the model gives, of the best checkpoint."""
    faults: Sequence[str] = ()

    @cached_property
    def train(self) -> dict[str, Float[np.ndarray, " n"]]:
        """The columns of training by name; nan where an entry has no number."""
        return _columns(entry for entry in self.entries if entry.get("split") == "train")

    @cached_property
    def valid(self) -> dict[str, Float[np.ndarray, " n"]]:
        """The columns of the validation split by name."""
        return _columns(entry for entry in self.entries if entry.get("split") == "valid")

    def setting(self, section: str, name: str) -> Any:
        """A setting of `config.toml`; None if it is not set."""
        return self.config.get(section, {}).get(name)

    @property
    def samples(self) -> list[Mapping[str, Any]]:
        """The entries that hold a text written by the model, under "sample"."""
        return [entry for entry in self.entries if isinstance(entry.get("sample"), str)]

    @property
    def unit(self) -> str:
        """The corpus's unit: "byte", "char", "word", "bpe" or "id"."""
        named = [entry["unit"] for entry in self.evaluations if isinstance(entry.get("unit"), str)]
        return named[-1] if named else str(self.setting("corpus", "unit") or "byte")

    @property
    def figure(self) -> str:
        """The figure that its losses are shown as: ppl or bpc."""
        return figure(self.unit, 0.0)[0]

    @cached_property
    def evaluations(self) -> list[Mapping[str, Any]]:
        return [entry for entry in self.entries if entry.get("split") not in (None, "train")]

    @property
    def step(self) -> int:
        """The last step that an entry names."""
        return int(max((entry["step"] for entry in self.entries), default=0))

    @property
    def lengths(self) -> dict[str, Any]:
        """The lengths of `[eval]`; where one is not set, the length of `[train]`."""
        own = {name: self.setting("eval", name) for name in LENGTHS}
        return {name: self.setting("train", name) if size is None else size for name, size in own.items()}

    @property
    def test_entry(self) -> Mapping[str, Any] | None:
        """The last evaluation with the split and lengths of `[eval]`, or the last one with this split."""
        split = self.setting("eval", "split") or "test"
        found = [entry for entry in self.evaluations if entry.get("split") == split]
        meant = [entry for entry in found if all(entry.get(name) == size for name, size in self.lengths.items())]
        return (meant or found or [None])[-1]

    @property
    def best_valid(self) -> Mapping[str, Any] | None:
        known = [e for e in self.evaluations if e.get("split") == "valid" and math.isfinite(number(e.get("loss")))]
        return min(known, key=lambda entry: number(entry["loss"]), default=None)

    def tokens(self, steps: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Targets trained on up to each of `steps`, from speeds and times."""
        counted = np.cumsum(self.train["tokens_per_second"] * np.diff(self.train["seconds"], prepend=0.0))
        return np.round(np.interp(steps, np.append(0, self.train["step"]), np.append(0, counted)))

    def seconds(self, steps: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Time in training steps up to each of `steps`, without evaluations."""
        return np.interp(steps, np.append(0, self.train["step"]), np.append(0, self.train["seconds"]))


def last_part(value: str) -> str:
    """`value`, or the last part of an absolute path, because a shared page must not describe the machine's folders."""
    return PureWindowsPath(value).name if value.startswith("/") or PureWindowsPath(value).is_absolute() else value


def _columns(entries: Iterable[Mapping[str, Any]]) -> dict[str, Float[np.ndarray, " n"]]:
    rows = [[number(entry.get(name)) for name in TRACKED] for entry in entries]
    return dict(zip(TRACKED, np.array(rows, dtype=float).reshape(-1, len(TRACKED)).T, strict=True))


def number(value: object) -> float:
    """A number from JSON; nan for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _pictures(run: Path, faults: list[str]) -> list[Path]:
    """The pictures of the analyses. A link could name any file, and a page is meant to be shared."""
    found, home = [], run.resolve()
    for path in (path for analysis in ANALYSES for path in sorted((run / analysis).rglob("*.png"))):
        if path.is_file() and path.resolve().is_relative_to(home) and not path.is_symlink():
            found.append(path)
        else:
            faults.append(f"{path.relative_to(run)} is a link or no file, and is left out.")
    return found


def read_run(run: Path, name: str) -> Record:
    """Read as much of a run's folder as can be read; refuse a folder that `txl train` did not write."""
    if not any((run / file).exists() for file in ("config.toml", "metrics.jsonl", "checkpoints")):
        raise FileNotFoundError(f"{run} is not a run: it must be a folder that `txl train` wrote, with metrics.jsonl.")
    faults: list[str] = []
    config = _read(run / "config.toml", faults, lambda path: tomllib.loads(plain_file(path).read_text("utf-8")))
    environment = _read(run / "environment.json", faults, lambda path: json.loads(plain_file(path).read_text("utf-8")))
    entries = _read(run / "metrics.jsonl", faults, read_metrics)
    entries = sorted((e for e in entries or () if math.isfinite(number(e.get("step")))), key=lambda e: e["step"])
    folders = sorted(run.glob("checkpoints/step_*"))
    return Record(
        name=name,
        config={name: table for name, table in (config or {}).items() if isinstance(table, dict)},
        environment=environment if isinstance(environment, dict) else {},
        entries=entries,
        parameters=_read(folders[-1] / "model.safetensors", faults, _stored_numbers) if folders else None,
        pictures=_pictures(run, faults),
        figures=_figures(run, faults) if folders else None,
        faults=faults,
    )


def _figures(run: Path, faults: list[str]) -> Figures | None:
    """The stored figures, if they are of the best checkpoint."""
    if not (run / FILE).exists():
        faults.append("The figures that need the model are missing. `txl report` computes them if it has the text.")
        return None
    figures = _read(run / FILE, faults, load_figures)
    if figures is not None and not _read(run, faults, lambda run: are_current(figures, run)):
        faults.append(f"{FILE} is of another checkpoint than the best one, so its figures are left out.")
        return None
    return figures


def _read(path: Path, faults: list[str], reading: Any) -> Any:
    if not path.exists():
        faults.append(f"{path.name} is missing.")
        return None
    try:
        return reading(path)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:  # whatever the file holds
        faults.append(f"{path.name} could not be read: {str(error).replace(str(path), path.name)}")  # no folder
        return None


def _stored_numbers(path: Path) -> int:
    """The number of elements in a safetensors file, from its header: eight bytes of length, then JSON."""
    with plain_file(path).open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(size, 100 << 20)))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
