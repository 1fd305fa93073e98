"""Reading of a run's folder: the run may be finished, in progress, resumed, or without some of its files.

A file that is missing or damaged raises nothing: the page reports it from `Record.faults`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
from jaxtyping import Float

from ..evaluation.measures import figure
from ..run import Run
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


def read_run(folder: Path, name: str) -> Record:
    """Read as much of a run's folder as can be read; refuse a folder that `txl train` did not write."""
    run, faults = Run(folder), list[str]()
    if not run.exists():
        raise FileNotFoundError(
            f"{folder} is not a run: it must be a folder that `txl train` wrote, with metrics.jsonl."
        )
    config = _read(folder / "config.toml", faults, run.tables)
    entries = _read(run.metrics.path, faults, run.metrics.entries)
    entries = sorted((e for e in entries or () if math.isfinite(number(e.get("step")))), key=lambda e: e["step"])
    saved = bool(run.checkpoints())
    return Record(
        name=name,
        config={name: table for name, table in (config or {}).items() if isinstance(table, dict)},
        environment=_read(folder / "environment.json", faults, run.facts) or {},
        entries=entries,
        parameters=_read(folder, faults, run.parameters) if saved else None,
        pictures=_pictures(folder, faults),
        figures=_figures(folder, faults) if saved else None,
        faults=faults,
    )


def _figures(run: Path, faults: list[str]) -> Figures | None:
    """The stored figures, if they are of the best checkpoint."""
    if not (run / FILE).exists():
        faults.append("The figures that need the model are missing. `txl report` computes them if it has the text.")
        return None
    figures = _read(run / FILE, faults, lambda: load_figures(run / FILE))
    if figures is not None and not _read(run, faults, lambda: are_current(figures, run)):
        faults.append(f"{FILE} is of another checkpoint than the best one, so its figures are left out.")
        return None
    return figures


def _read(path: Path, faults: list[str], read: Callable[[], Any]) -> Any:
    """What `read` returns; None after a fault, which names `path`."""
    if not path.exists():
        faults.append(f"{path.name} is missing.")
        return None
    try:
        return read()
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:  # whatever the file holds
        faults.append(f"{path.name} could not be read: {str(error).replace(str(path), path.name)}")  # no folder
        return None
