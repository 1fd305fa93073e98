"""The checkpoints of a run: find the last and the best, remove old ones, put damaged ones aside."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from ..runtime.files import check_seal, remove_folder
from .parts import FILES, name_damage, read_header


def step_folder(run: str | Path, step: int) -> Path:
    """The folder of a run's checkpoint after `step` steps."""
    return Path(run) / "checkpoints" / f"step_{step:08d}"


def checkpoints(run: str | Path) -> list[Path]:
    """A run's complete checkpoints, oldest first."""
    found = [(int(m[1]), p) for p in Path(run).glob("checkpoints/*") if (m := re.fullmatch(r"step_(\d+)", p.name))]
    return [path for _, path in sorted(found)]


def latest(run: str | Path) -> Path | None:
    """A run's last checkpoint; None if there is none."""
    return next(reversed(checkpoints(run)), None)


def best(run: str | Path) -> Path | None:
    """A run's checkpoint with the lowest known validation loss; None if no loss is known. The later one wins a tie.

    Raises:
        ValueError, FileNotFoundError: a checkpoint is damaged and could be the best.
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
    """The validation loss of a checkpoint, in nats per target; None if it was not measured."""
    return read_header(Path(folder) / "config.json").get("valid_loss")


def prune(run: str | Path, keep: int) -> None:
    """Remove a run's checkpoints except the last `keep` and the best."""
    assert keep >= 1, f"prune must keep at least one checkpoint, got keep={keep}"
    kept = {*checkpoints(run)[-keep:], _lowest(run, _loss_if_sound)}  # a damaged checkpoint must not stop a run
    for path in checkpoints(run):
        if path not in kept:
            remove_folder(path)


def put_damaged_aside(run: str | Path, warn: Callable[[str], None]) -> None:
    """Rename a run's damaged checkpoints, so the last sound one is the last; call `warn` with a sentence for each."""
    for folder in checkpoints(run):
        try:
            for name in FILES:
                with name_damage(folder / name):
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
    """The checkpoint folder at `path`: `path` itself, or the best or last checkpoint of a run.

    Raises:
        FileNotFoundError: `path` does not exist or holds no checkpoint.
    """
    path = Path(path)
    if (path / "model.safetensors").exists():
        return path
    found = (best(path) if which == "best" else None) or latest(path)
    if found is None:
        state = "does not exist"
        if path.exists():
            state = "has no checkpoint yet" if (path / "config.toml").exists() else "holds no checkpoint"
        raise FileNotFoundError(
            f"{path} {state}. Name a run folder that `txl train` wrote, or one of the folders in its checkpoints/."
        )
    return found
