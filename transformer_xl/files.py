"""Files and folders that are there whole or not at all: written beside, synced to the disk, renamed."""

from __future__ import annotations

import errno
import glob
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = ".tmp-"
"""How the name of anything half-written begins; `remove_unfinished` sweeps up what a killed process left."""
_MARK = 8
"""Digits behind such a name, which keep two writers apart."""


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path` to write into; on success it takes the place of `path`.

    On any error the half-written folder is removed and `path` stays as it was.

    Raises:
        OSError: one sentence that names `path` and the reason, for instance a full disk.
    """
    path = Path(path)
    unfinished = _beside(path)
    with explained(path):
        try:
            unfinished.mkdir(parents=True)
            yield unfinished
            mode = _mode_of_new_files(unfinished)
            for file in sorted(unfinished.rglob("*")):
                if file.is_file():  # safetensors makes files that only their owner can read
                    file.chmod(mode)
                _sync(file)
            _sync(unfinished)
            _replace_folder(unfinished, path)
            _sync(path.parent)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write one file so that a reader sees the old content or the new, never a part.

    Raises:
        OSError: one sentence that names `path` and the reason, for instance a full disk.
    """
    path = Path(path)
    unfinished = _beside(path)
    with explained(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
            _sync(unfinished)
            unfinished.replace(path)
            _sync(path.parent)
        finally:
            unfinished.unlink(missing_ok=True)


def remove_folder(path: Path) -> None:
    """Remove a folder so that nobody ever finds a part of it under its name."""
    unfinished = _beside(Path(path))
    Path(path).rename(unfinished)
    shutil.rmtree(unfinished, ignore_errors=True)


def remove_unfinished(folder: Path, name: str = "") -> None:
    """Remove what a killed process left half-written in `folder`, of one `name` or of all."""
    for left in Path(folder).glob(f"{UNFINISHED}{glob.escape(name) if name else '*'}-{'?' * _MARK}"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Say in one sentence which path could not be written and why; the type and `errno` of the error stay."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        reason = os.strerror(error.errno)
        full = error.errno in _NO_ROOM
        advice = "Free some space, or write elsewhere." if full else "Choose a place you may write to."
        sentence = type(error)(f"{path} could not be written: {reason}. {advice}")
        sentence.errno = error.errno
        raise sentence from error


_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG} if hasattr(errno, "EDQUOT") else {errno.ENOSPC, errno.EFBIG}


def _mode_of_new_files(folder: Path) -> int:
    with tempfile.TemporaryDirectory(dir=folder) as own:
        (Path(own) / "probe").touch()
        return (Path(own) / "probe").stat().st_mode


def _beside(path: Path) -> Path:
    return path.parent / f"{UNFINISHED}{path.name}-{uuid.uuid4().hex[:_MARK]}"


def _replace_folder(new: Path, path: Path) -> None:
    """Rename `new` to `path`; a folder that is there already steps aside first, for no rename replaces a full one."""
    if not path.exists():
        new.rename(path)
        return
    old = _beside(path)
    path.rename(old)
    try:
        new.rename(path)
    except BaseException:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until the disk holds the file, or the folder's entries (which only POSIX can be asked for)."""
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # Windows syncs no file that is only read
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
