"""Reads the folder of a run, whether the run has ended, goes on, was resumed, or lost a file.

A file that is missing or damaged raises nothing: the page reports it from `Record.faults`.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from ..evaluation.measures import figure
from ..runtime.files import plain_file
from ..train.metric_log import read_metrics

MOST_PICTURE_BYTES = 8 << 20
TRACKED = ("step", "loss", "grad_norm", "lr", "tokens_per_second", "seconds", "skipped")
LENGTHS = ("tgt_len", "mem_len", "clamp_len", "attn_len")
ANALYSES = ("analysis", "attention", "recl", "length")
"""Folders of a run whose pictures the page shows."""
CAPTIONS = {
    "recl_gains_relative": "Relative gain of more context; dotted: that of going back",
    "recl_gains": "Gain of more context, as in the paper's Figure 3",
    "recl_context": "Loss by context length, as in the paper's Figure 4",
    "length": "Loss by attention length",
    "average": "Average attention by relative distance, a row for each head, as in the paper's Figure 5",
    "terms": "The terms of attention apart, each through its own softmax, as in the paper's Figure 7",
    "position-": "Chosen heads from one position, the top 20 % of memory marked, as in the paper's Figure 6",
}
PICTURES = {".png": "image/png", ".svg": "image/svg+xml"}

_START = re.compile(r"^([\d.]+)M parameters on ", re.MULTILINE)


class Sample(NamedTuple):
    """Text the model wrote after a step of training."""

    step: int
    text: str


class Picture(NamedTuple):
    """A picture that an analysis left in the run folder."""

    path: Path
    caption: str


@dataclass(frozen=True)
class Record:
    """A run as its folder describes it; what is unknown is empty or nan."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    entries: Sequence[Mapping[str, Any]] = ()
    """All entries of `metrics.jsonl` that name a step."""
    parameters: int | None = None
    samples: Sequence[Sample] = ()
    starts: int = 0
    """How often training started, resumptions included."""
    best_step: int | None = None
    """The step of the checkpoint with the lowest validation loss."""
    pictures: Sequence[Picture] = ()
    faults: Sequence[str] = ()

    @cached_property
    def train(self) -> dict[str, Float[np.ndarray, " n"]]:
        """Each figure of training as a column, by name; nan where an entry has no number."""
        return _columns(entry for entry in self.entries if entry.get("split") == "train")

    @cached_property
    def valid(self) -> dict[str, Float[np.ndarray, " n"]]:
        """The same for the validation split."""
        return _columns(entry for entry in self.entries if entry.get("split") == "valid")

    def setting(self, section: str, name: str) -> Any:
        """A setting of `config.toml`; None if it has none."""
        return self.config.get(section, {}).get(name)

    @property
    def unit(self) -> str:
        """The corpus's unit: "byte", "char", "word" or "bpe"."""
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
    def tested(self) -> Mapping[str, Any] | None:
        """The last evaluation of the split and at the lengths that `[eval]` names."""
        split = self.setting("eval", "split") or "test"
        own = {name: self.setting("eval", name) for name in LENGTHS}
        asked = {name: self.setting("train", name) if size is None else size for name, size in own.items()}
        found = [entry for entry in self.evaluations if entry.get("split") == split]
        meant = [entry for entry in found if all(entry.get(name) == size for name, size in asked.items())]
        return (meant or found or [None])[-1]

    @property
    def best_valid(self) -> Mapping[str, Any] | None:
        known = [e for e in self.evaluations if e.get("split") == "valid" and math.isfinite(number(e.get("loss")))]
        return min(known, key=lambda entry: number(entry["loss"]), default=None)

    @property
    def partial(self) -> str:
        """Says what its corpus lacks; empty for a whole corpus."""
        return next((str(entry["partial"]) for entry in reversed(self.evaluations) if entry.get("partial")), "")

    def tokens(self, steps: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Targets trained on up to each of `steps`, from speeds and times, or by the settings if some are missing."""
        train = self.train
        counted = np.cumsum(train["tokens_per_second"] * np.diff(train["seconds"], prepend=0.0))
        if len(counted) and np.isfinite(counted).all() and (np.diff(counted, prepend=0.0) >= 0).all():
            return np.round(np.interp(steps, np.append(0, train["step"]), np.append(0, counted)))
        planned = number(self.setting("train", "batch_size")) * number(self.setting("train", "tgt_len"))
        return steps * planned

    def seconds(self, steps: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Time in training steps, evaluations not counted, up to each of `steps`."""
        train = self.train
        if not len(train["step"]) or not np.isfinite(train["seconds"]).all():
            return np.full(len(steps), math.nan)
        return np.interp(steps, np.append(0, train["step"]), np.append(0, train["seconds"]))


def last_part(value: str) -> str:
    """`value`, or the last part of an absolute path: a page that is passed on says nothing about the machine."""
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


def read_run(run: Path, name: str) -> Record:
    """Read a run's folder as far as it can be read.

    Raises:
        FileNotFoundError: `txl train` did not write it.
    """
    if not any((run / file).exists() for file in ("config.toml", "metrics.jsonl", "log.txt", "checkpoints")):
        raise FileNotFoundError(f"{run} is no run: it must be a folder that `txl train` wrote, with its metrics.jsonl.")
    faults: list[str] = []
    config = _tables(_read(run / "config.toml", faults, lambda path: tomllib.loads(_text(path))))
    environment = _read(run / "environment.json", faults, _json)
    entries = _read(run / "metrics.jsonl", faults, read_metrics)
    entries = sorted((e for e in entries or () if math.isfinite(number(e.get("step")))), key=lambda e: e["step"])
    log = _read(run / "log.txt", faults, partial(_text, errors="replace")) or ""
    starts = _START.findall(log)
    best, parameters = _checkpoint(run, faults)
    return Record(
        name=name,
        config=config,
        environment=environment if isinstance(environment, dict) else {},
        entries=entries,
        parameters=parameters or (round(1e6 * float(starts[-1])) if starts else None),
        samples=[Sample(int(e["step"]), e["sample"]) for e in entries if isinstance(e.get("sample"), str)],
        starts=len(starts),
        best_step=best,
        pictures=_pictures(run, faults),
        faults=faults,
    )


def _read(path: Path, faults: list[str], reading: Any) -> Any:
    if not path.exists():
        faults.append(f"{path.name} is missing.")
        return None
    try:
        return reading(path)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:  # whatever the file holds
        faults.append(f"{path.name} could not be read: {error}")
        return None


def _text(path: Path, errors: str = "strict") -> str:
    return plain_file(path).read_text("utf-8", errors)


def _json(path: Path) -> Any:
    return json.loads(_text(path))


def _tables(config: Any) -> dict[str, dict[str, Any]]:
    return {name: table for name, table in (config or {}).items() if isinstance(table, dict)}


def _checkpoint(run: Path, faults: list[str]) -> tuple[int | None, int | None]:
    """The step of the best checkpoint, and the number of parameters in the last one; None where unknown."""
    folders = sorted(run.glob("checkpoints/step_*"))
    headers = [_read(folder / "config.json", faults, _json) for folder in folders]
    known = [header for header in headers if isinstance(header, dict) and header.get("valid_loss") is not None]
    best = min(reversed(known), key=lambda header: number(header["valid_loss"]), default={}).get("step")
    sizes = [size for folder in folders if (size := _read(folder / "model.safetensors", faults, _stored)) is not None]
    return best, sizes[-1] if sizes else None


def _stored(path: Path) -> int:
    """The number of elements in a safetensors file, from its header: eight bytes of length, then JSON."""
    with plain_file(path).open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(size, 100 << 20)))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _pictures(run: Path, faults: list[str]) -> list[Picture]:
    """The pictures in the folders `ANALYSES`; of two formats of one picture, the smaller file."""
    found: dict[Path, Path] = {}
    for path in sorted(path for name in ANALYSES for path in (run / name).rglob("*")):
        if path.suffix.lower() in PICTURES and path.is_file():
            other = found.setdefault(path.with_suffix(""), path)
            found[path.with_suffix("")] = min(other, path, key=lambda file: file.stat().st_size)
    large = [path for path in found.values() if path.stat().st_size > MOST_PICTURE_BYTES]
    faults += [f"{path.relative_to(run)} is left out because it is over 8 MB." for path in large]
    return [Picture(path, _caption(path)) for path in found.values() if path not in large]


def _caption(picture: Path) -> str:
    """The "caption" of a JSON beside the picture, or words for the picture's name with the JSON's corpus and split."""
    known = (words for begin, words in CAPTIONS.items() if picture.stem.startswith(begin))
    words = next(known, picture.stem.replace("_", " "))
    folder = picture.parent
    beside = [path for path in folder.glob("*.json") if picture.stem.startswith(path.stem) or path.stem == folder.name]
    try:
        content = _json(max(beside, key=lambda path: len(path.stem)))
        text = ", ".join(str(content[name]) for name in ("corpus", "split") if content.get(name))
        return str(content.get("caption") or (f"{words}: {text}" if text else words))
    except (OSError, ValueError, AttributeError):
        return words
