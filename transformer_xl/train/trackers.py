"""Experiment trackers: what goes to `metrics.jsonl` also goes to TensorBoard, Weights & Biases or Trackio.

All are off until `train.trackers` names them. One that fails is switched off, and training goes on.
"""

from __future__ import annotations

import html
import json
import math
import os
import textwrap
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ..config.settings import RunConfig
from ..mistake import Mistake
from ..runtime.files import write_whole

PROJECT = "transformer-xl"


@runtime_checkable
class Tracker(Protocol):
    """Where figures go besides `metrics.jsonl`. Whatever it raises is its end, and not the run's."""

    def log(self, entry: Mapping[str, Any]) -> None:
        """Take an entry of `metrics.jsonl`: the figures of a split, or a sample of text."""
        ...

    def close(self) -> None:
        """Finish what is still on its way."""
        ...


class Trackers:
    """All trackers of a run, as one. Use it in a `with` to have them closed.

    Args:
        warn: says in a line that a tracker failed.
    """

    def __init__(self, trackers: Mapping[str, Tracker] | None = None, warn: Callable[[str], None] = print):
        self._on = dict(trackers or {})
        self._warn = warn

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        self._each(lambda tracker: tracker.close())

    def log(self, entry: Mapping[str, Any]) -> None:
        """Give every tracker an entry of `metrics.jsonl`."""
        self._each(lambda tracker: tracker.log(entry))

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._on.items()):
            try:
                act(tracker)
            except Exception as error:
                del self._on[name]
                self._warn(_switched_off(name, error))


def require(names: Sequence[str]) -> None:
    """Refuse trackers that are not installed, all at once.

    Raises:
        ValueError: one sentence that says what to install.
    """
    lacking = [name for name in dict.fromkeys(names) if not _installed(name)]
    if lacking:
        raise Mistake(
            f"train.trackers must name trackers that are installed, got {', '.join(lacking)}. Run "
            f"`pip install {' '.join(lacking)}`, or leave it out (`--train.trackers=` names none)."
        )


def open_trackers(
    names: Sequence[str], run: Path, config: RunConfig, *, step: int = 0, warn: Callable[[str], None] = print
) -> Trackers:
    """The trackers of a run; of one that cannot start, `warn` is told.

    Args:
        step: where a resumed run goes on; its trackers go on with the records they began.
    """
    trackers: dict[str, Tracker] = {}
    for name in dict.fromkeys(names):
        try:
            trackers[name] = TensorBoard(run, step) if name == "tensorboard" else Service(name, run, config)
        except Exception as error:
            warn(_switched_off(name, error))
    return Trackers(trackers, warn)


class TensorBoard:
    """Event files in the run's folder `tensorboard`; those past `step`, which resuming repeats, no longer count."""

    def __init__(self, run: Path, step: int = 0):
        from torch.utils.tensorboard import SummaryWriter

        # A fresh run says so too: TensorBoard takes the first such mark for a start and only later ones for restarts.
        self._writer = SummaryWriter(run / "tensorboard", purge_step=step + 1)

    def log(self, entry: Mapping[str, Any]) -> None:
        if "sample" in entry:  # TensorBoard reads Markdown: indented, the text is shown as it is
            self._writer.add_text("sample", textwrap.indent(entry["sample"], "    "), entry["step"])
        for name, value in figures(entry).items():
            self._writer.add_scalar(name, value, entry["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Service:
    """Weights & Biases or Trackio, which are used alike. Their own environment variables go before ours.

    Neither can take back what it was told, so a file in the run's folder, `wandb.json` or `trackio.json`, keeps the
    record's id and the last step told of each kind: what a resumed run repeats is not told twice.
    """

    def __init__(self, name: str, run: Path, config: RunConfig):
        self._module: Any = import_module(name)
        self._file = run / f"{name}.json"
        kept = json.loads(self._file.read_text()) if self._file.exists() else {"id": uuid.uuid4().hex[:8], "told": {}}
        self._id, self._before, self._told = kept["id"], kept["told"], dict(kept["told"])
        self._keep()
        title = run.resolve().name
        options = {"project": PROJECT, "name": f"{title}-{self._id}"}  # Trackio finds a record by its name
        if name == "wandb":
            options |= {"name": title, "dir": str(run)}
        options = {option: os.environ.get(f"{name}_{option}".upper(), value) for option, value in options.items()}
        if name == "wandb":
            options |= {"id": self._id, "allow_val_change": True}
        self._module.init(**options, config=asdict(config), resume="allow")

    def log(self, entry: Mapping[str, Any]) -> None:
        kind, step, values = entry.get("split", "sample"), entry["step"], figures(entry)
        if kind == "sample":
            values = {"sample": self._module.Html(f"<pre>{html.escape(entry['sample'])}</pre>")}
        if step > self._before.get(kind, -1):
            self._module.log(values, step=step)
            self._told[kind] = step
            self._keep()

    def close(self) -> None:
        self._module.finish()

    def _keep(self) -> None:
        write_whole(self._file, json.dumps({"id": self._id, "told": self._told}) + "\n")


def figures(entry: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of an entry of `metrics.jsonl`, as `train/loss`, `valid/ppl`, `test/bpc`, ..."""
    return {
        f"{entry['split']}/{name}": value
        for name, value in entry.items()
        if name != "step" and type(value) in (int, float) and math.isfinite(value)
    }


def _installed(name: str) -> bool:
    """Whether it is there and works; a folder `wandb` left by a run, which Python takes for a package, is not it."""
    try:
        module = import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
    except Exception:  # one that does not even import is as good as none
        return False
    return hasattr(module, "SummaryWriter" if name == "tensorboard" else "init")


def _switched_off(name: str, error: Exception) -> str:
    reason = next(iter(str(error).splitlines()), "")
    return f"{name} is switched off for the rest of this run, for it failed: {type(error).__name__}: {reason}"
