"""The checkpoints of a run, oldest first: which is the last, which the best, which are kept, which are damaged."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from ..runtime.files import check_seal, remove_folder
from .parts import FILES, read_header, whole_and_ours


def step_folder(run: str | Path, step: int) -> Path:
    """Where a run keeps its checkpoint of that step."""
    return Path(run) / "checkpoints" / f"step_{step:08d}"


def checkpoints(run: str | Path) -> list[Path]:
    """A run's whole checkpoints, oldest first."""
    found = [(int(m[1]), p) for p in Path(run).glob("checkpoints/*") if (m := re.fullmatch(r"step_(\d+)", p.name))]
    return [path for _, path in sorted(found)]


def latest(run: str | Path) -> Path | None:
    """A run's last checkpoint; None before the first."""
    return next(reversed(checkpoints(run)), None)


def best(run: str | Path) -> Path | None:
    """A run's checkpoint of the lowest known validation loss, the later of equals; None where none is known.

    Raises:
        ValueError, FileNotFoundError: a checkpoint is damaged, and might be the best.
    """
    return _lowest(run, valid_loss)


def _lowest(run: str | Path, loss_of: Callable[[Path], float | None]) -> Path | None:
    losses = [(loss_of(path), path) for path in reversed(checkpoints(run))]
    known = [(loss, path) for loss, path in losses if loss is not None]
    return min(known, key=lambda entry: entry[0])[1] if known else None


def _loss_if_sound(folder: Path) -> float | None:
    with suppress(ValueError, FileNotFoundError):
        return valid_loss(folder)
    return None


def valid_loss(folder: str | Path) -> float | None:
    """The validation loss a checkpoint was saved with, in nats per target; None if it was not measured."""
    return read_header(Path(folder) / "config.json").get("valid_loss")


def prune(run: str | Path, keep: int) -> None:
    """Remove a run's checkpoints but the last `keep` and the best."""
    assert keep >= 1, f"prune must keep at least one checkpoint, got keep={keep}"
    kept = {*checkpoints(run)[-keep:], _lowest(run, _loss_if_sound)}  # damage is no reason to stop a run
    for path in checkpoints(run):
        if path not in kept:
            remove_folder(path)


def put_damaged_aside(run: str | Path, warn: Callable[[str], None]) -> None:
    """Rename a run's checkpoints that are not what was written, so that what comes before them counts; `warn` is told
    of each."""
    for folder in checkpoints(run):
        try:
            for name in FILES:
                with whole_and_ours(folder / name):
                    (folder / name).stat()
                    check_seal(folder / name)
        except (ValueError, OSError) as error:
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError) and error.errno != errno.EIO:
                raise
            aside = folder.with_name(f"damaged_{folder.name}")
            if aside.exists():
                remove_folder(aside)
            folder.rename(aside)
            warn(f"{error} It is {aside.name} now, and does not count.")


def find_checkpoint(path: str | Path, which: Literal["best", "last"] = "best") -> Path:
    """The checkpoint folder that `path` means: itself, or a run's best (by default; else its last) one.

    Raises:
        FileNotFoundError: there is nothing at `path`, or no checkpoint in it.
    """
    path = Path(path)
    if path.is_dir():
        if (path / "model.safetensors").exists():
            return path
        found = (best(path) if which == "best" else None) or latest(path)
        if found is not None:
            return found
        reason = "holds no checkpoint"
    else:
        reason = "is a file" if path.exists() else "does not exist"
    raise FileNotFoundError(
        f"{path} {reason}. Name a run folder that `txl train` wrote, or one of the folders in its checkpoints/."
    )
