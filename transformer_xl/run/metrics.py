"""`Metrics`: the file in which a run records losses, speeds, scores and samples."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config.values import Hint, fits
from ..mistake import Mistake
from ..runtime.files import explain_write_error, plain_file, sync, write_whole

_HINTS: dict[str, Hint] = {"step": int, "split": str, "checkpoint": str, "sample": str}
"""The types of what programs look entries up by. Every entry has a step."""


class Metrics:
    """`metrics.jsonl`: one JSON object per line. Programs can read it during the run."""

    def __init__(self, path: str | Path):
        self.path: Path = Path(path)

    def log(self, entry: Mapping[str, object]) -> None:
        """Append an entry. JSON has no nan or inf: they become null. An `OSError` is one sentence with the reason."""
        line = json.dumps({name: finite(value) for name, value in entry.items()}, allow_nan=False)
        with explain_write_error(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def sync(self) -> None:
        """Wait until the disk holds all entries."""
        if self.path.exists():
            with explain_write_error(self.path):
                sync(self.path)

    def truncate(self, step: int, *, validated: bool = True) -> None:
        """Remove the entries after `step`, because resuming writes them again, the final scores of a finished run
        (which name their checkpoint), and a last line that a killed run left unfinished. If the step was not
        `validated`, its validation is removed, too."""
        kept = [entry for entry in self.entries(step) if entry.get("step", 0) <= step and "checkpoint" not in entry]
        if not validated:
            kept = [e for e in kept if e.get("step") != step or not str(e.get("split")).startswith("valid")]
        if self.path.exists():
            write_whole(self.path, "".join(json.dumps(entry) + "\n" for entry in kept))

    def entries(self, step: int | None = None) -> list[dict[str, Any]]:
        """The entries; none if there is no file.

        A kill or a power loss may leave a damaged line, which ends the entries. If an entry follows it (with `step`:
        an entry of at most this step), this raises a `Mistake`.
        """
        if not self.path.exists():
            return []
        lines = plain_file(self.path).read_text(encoding="utf-8", errors="replace").splitlines()
        entries = [_entry(line) for line in lines]
        damaged = entries.index(None) if None in entries else len(entries)
        if any(entry is not None and (step is None or entry.get("step", 0) <= step) for entry in entries[damaged:]):
            raise Mistake(
                f"{self.path}, line {damaged + 1} is not a JSON object with a step: {lines[damaged][:60]!r}. Remove "
                "the line."
            )
        return [entry for entry in entries[:damaged] if entry is not None]


def validations(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The validations of the weights that a run saves: of their average, from the step on where it begins. A final
    score, which names its checkpoint, is none."""
    averaged = {entry["step"] for entry in entries if entry.get("split") == "valid-average"}
    found = [e for e in entries if e.get("split") in ("valid", "valid-average") and "checkpoint" not in e]
    return [e for e in found if e["split"] != "valid" or e["step"] not in averaged]


def _entry(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or "step" not in entry:
        return None
    return entry if all(fits(entry[name], hint) for name, hint in _HINTS.items() if name in entry) else None


def finite(value: object) -> object:
    """A value for JSON, which has no nan or inf: they become None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
