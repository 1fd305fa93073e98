"""Experiment trackers: what goes to `metrics.jsonl` also goes to TensorBoard or Weights & Biases.

All are off unless `train.trackers` names them. A tracker that fails is switched off, and training continues.
"""

from __future__ import annotations

import html
import json
import math
import os
import textwrap
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, runtime_checkable

from ..config.settings import RunConfig
from ..mistake import Mistake
from ..run.folder import Run
from ..runtime.files import read_table, write_whole

Entry = Mapping[str, Any]
"""An entry of `metrics.jsonl`: the figures of a split, or a sample of text."""


@runtime_checkable
class Tracker(Protocol):
    """Receives the entries of `metrics.jsonl`. Any exception switches the tracker off and does not end the run."""

    def log(self, entry: Entry) -> None: ...

    def close(self) -> None: ...


class Trackers(AbstractContextManager["Trackers"]):
    """All trackers of a run, closed at the end of a `with`. `warn` is called with a line for each that fails."""

    def __init__(self, trackers: Mapping[str, Tracker] | None = None, warn: Callable[[str], None] = print):
        self._on = dict(trackers or {})
        self._failed: list[Tracker] = []
        self._warn = warn

    def __exit__(self, *_: object) -> None:
        for tracker in self._failed:
            with suppress(Exception):
                tracker.close()
        self._each(lambda tracker: tracker.close())

    def log(self, entry: Entry) -> None:
        self._each(lambda tracker: tracker.log(entry))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._on.items()):
            try:
                call(tracker)
            except Exception as error:
                self._failed.append(self._on.pop(name))
                self._warn(_failure(name, error))


def require_installed(names: Sequence[str]) -> None:
    """Refuse trackers that are not installed. A folder of that name, which a run may have left, does not count."""
    lacking = [name for name in dict.fromkeys(names) if getattr(find_spec(name), "origin", None) is None]
    if lacking:
        raise Mistake(
            f"train.trackers must name trackers that are installed, got {', '.join(lacking)}. Run "
            f"`pip install {' '.join(lacking)}`, or leave it out (`--train.trackers=` names none)."
        )


def open_trackers(run: Run, config: RunConfig) -> Trackers:
    """The trackers of a run that begins or goes on. Its log has a line for each that cannot start, or fails."""
    trackers: dict[str, Tracker] = {}
    for name in dict.fromkeys(config.train.trackers):
        try:
            trackers[name] = TensorBoard(run) if name == "tensorboard" else WeightsAndBiases(run, config)
        except Exception as error:
            run.say(_failure(name, error))
    return Trackers(trackers, run.say)


def _failure(name: str, error: Exception) -> str:
    reason = next(iter(str(error).splitlines()), "")
    return f"{name} is switched off for the rest of this run because it failed: {type(error).__name__}: {reason}"


class TensorBoard:
    """Event files in the run's folder `tensorboard`. Resuming hides later events, because it repeats them."""

    def __init__(self, run: Run):
        from torch.utils.tensorboard import SummaryWriter

        # A new run purges too: TensorBoard takes the first purge as the start and only later purges as restarts.
        self._writer = SummaryWriter(run.path / "tensorboard", purge_step=run.step + 1)

    def log(self, entry: Entry) -> None:
        if "sample" in entry:  # TensorBoard reads Markdown: indented, the text is shown as it is
            self._writer.add_text("sample", textwrap.indent(entry["sample"], "    "), entry["step"])
        for name, value in figures(entry).items():
            self._writer.add_scalar(name, value, entry["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Weights & Biases. Its environment variables override our defaults.

    It cannot delete entries. `wandb.json` in the run's folder keeps the record's id and the last step sent of each
    kind, so a resumed run sends nothing twice. A run that begins again, because it saved nothing, is a new record.
    """

    def __init__(self, run: Run, config: RunConfig):
        self._module = import_module("wandb")
        self._file = run.path / "wandb.json"
        self._kept: dict[str, Any] = {"id": uuid.uuid4().hex[:8], "told": {}}
        if run.step and self._file.exists():
            self._kept |= read_table(self._file, "Remove it to begin a new record.", id=str, told=dict)
        self._before = dict(self._kept["told"])
        self._save()
        self._module.init(
            project=os.environ.get("WANDB_PROJECT", "transformer-xl"),
            name=os.environ.get("WANDB_NAME", run.path.resolve().name),
            dir=os.environ.get("WANDB_DIR", str(run.path)),
            id=self._kept["id"],
            resume="allow",
            config=asdict(config),
            allow_val_change=True,
        )

    def log(self, entry: Entry) -> None:
        kind, step, values = entry.get("split", "sample"), entry["step"], figures(entry)
        if kind == "sample":
            values = {"sample": self._module.Html(f"<pre>{html.escape(entry['sample'])}</pre>")}
        if step > self._before.get(kind, -1):
            self._module.log(values, step=step)
            self._kept["told"][kind] = step
            self._save()

    def close(self) -> None:
        self._module.finish()

    def _save(self) -> None:
        write_whole(self._file, json.dumps(self._kept) + "\n")


def figures(entry: Entry) -> dict[str, float]:
    """The finite numbers of an entry of `metrics.jsonl`, as `train/loss`, `valid/ppl`, `test/bpc`, ..."""
    return {
        f"{entry['split']}/{name}": value
        for name, value in entry.items()
        if name != "step" and type(value) in (int, float) and math.isfinite(value)
    }
