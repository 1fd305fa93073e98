"""Files and folders that are there whole or not at all: written beside, synced to the disk, renamed.

A folder may be sealed with the checksums of its files, and held by one process at a time.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ..mistake import Mistake

UNFINISHED = ".tmp-"
"""How the name of anything half-written begins; `remove_unfinished` sweeps up what a killed process left."""
_MARK = 8
"""Digits behind such a name, which keep two writers apart."""
SEAL = "SHA256SUMS"
"""The checksums of a folder's files, as `sha256sum --check SHA256SUMS` reads them."""
LOCK = ".lock"


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path` to write into; on success it replaces `path`.

    On any error the half-written folder is removed and `path` stays as it was.

    Raises:
        OSError: one sentence that names `path` and the reason, for instance a full disk.
    """
    path = Path(path)
    with _unfinished(path) as unfinished:
        unfinished.mkdir()
        yield unfinished
        mode = _mode_of_new_files(unfinished)
        for file in sorted(unfinished.rglob("*")):
            if file.is_file():  # safetensors makes files that only their owner can read
                file.chmod(mode)
            sync(file)
        sync(unfinished)
        _replace_folder(unfinished, path)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write one file; a reader sees the old content or the new, never a mixture.

    Raises:
        OSError: one sentence that names `path` and the reason, for instance a full disk.
    """
    path = Path(path)
    with _unfinished(path) as unfinished:
        if path.exists() and not path.is_file():  # a rename would replace a device or a pipe
            raise OSError(errno.EINVAL, "no file")
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(unfinished)
        unfinished.replace(path)


@contextmanager
def _unfinished(path: Path) -> Iterator[Path]:
    """Yield a free name beside `path`, to be renamed to it. Remove what is left under that name; sync the folder."""
    unfinished = _beside(path)
    with explained(path):
        try:
            make_folder(path.parent)
            yield unfinished
            sync(path.parent)
        finally:
            _remove(unfinished)


def plain_file(path: Path) -> Path:
    """`path`, which is to be read. A missing file is left to the call that opens it.

    Raises:
        ValueError: it is a folder, or a pipe or device, which may never end.
    """
    if path.exists() and not path.is_file():
        raise Mistake(f"{path} must be a file, and is a folder, a pipe or a device. Save its content in a file first.")
    return path


def make_folder(path: Path) -> list[Path]:
    """Make a folder and those above it that are missing, have the disk hold each, and return them, innermost first."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        sync(folder.parent)
    return missing


def seal(folder: Path) -> None:
    """Write down the checksum of each file in `folder`, by which `check_seal` knows it again."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    (folder / SEAL).write_text("".join(f"{_sha256(path)}  {path.name}\n" for path in files), encoding="utf-8")


def check_seal(path: Path) -> None:
    """Compare a file with its checksum; a folder without checksums has nothing to compare.

    Raises:
        ValueError: the file, or the checksum, is not what was written.
    """
    try:
        lines = plain_file(path.parent / SEAL).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return
    if f"{_sha256(path)}  {path.name}" not in lines:
        raise Mistake(f"its checksum is not the one in {SEAL}; remove that file if you changed this one on purpose")


def _sha256(path: Path) -> str:
    with plain_file(path).open("rb") as file:
        try:
            return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:  # of a bad disk, which names no file
            error.filename = str(path)
            raise


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep `folder` to this process; the system gives it free when the process ends, however it ends. What is made for
    this and left empty goes again.

    Raises:
        BlockingIOError: another process holds it.
    """
    made = make_folder(folder)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise BlockingIOError(
            f"{folder} is in use by another process. Wait until that ends, or choose another folder with --out."
        ) from None
    try:
        yield
    finally:
        lock.release()
        if made and not holds_anything(folder):
            (folder / LOCK).unlink(missing_ok=True)
            with suppress(OSError):  # others may have put something there since
                for empty in made:
                    empty.rmdir()


def refuse_odd_name(name: Path | str, option: str) -> None:
    """Refuse a name that no text file can hold, because its bytes are not UTF-8, or not in this locale's encoding."""
    try:
        str(name).encode()
    except UnicodeEncodeError:
        raise Mistake(
            f"{option} must be a name in UTF-8, got {str(name)!a}. Rename it, or set LC_ALL=C.UTF-8."
        ) from None


def holds_anything(folder: Path) -> bool:
    """Whether there is more in a folder than its lock."""
    return any(path.name != LOCK for path in folder.iterdir())


def empty_folder(folder: Path) -> None:
    """Remove everything in a folder except its lock."""
    for path in folder.iterdir():
        if path.name != LOCK:
            _remove(path)


def remove_folder(path: Path) -> None:
    """Remove a folder; at no moment is a part of it there under its name."""
    unfinished = _beside(Path(path))
    Path(path).rename(unfinished)
    _remove(unfinished)


def remove_unfinished(folder: Path, name: str = "") -> None:
    """Remove what a killed process left half-written in `folder`: under one `name`, or all of it."""
    for left in Path(folder).glob(f"{UNFINISHED}{glob.escape(name) if name else '*'}-{'?' * _MARK}"):
        _remove(left)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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
    _remove(old)


def sync(path: Path) -> None:
    """Wait until the disk holds the file, or the folder's entries (which only POSIX can be asked for)."""
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # Windows syncs no file that is only read
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
