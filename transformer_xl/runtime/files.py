"""Files and folders that are written whole or not at all: under another name, synced to the disk, then renamed.

A folder can be sealed with the checksums of its files, and locked by one process at a time.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import gzip
import hashlib
import json
import lzma
import os
import shutil
import sys
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PureWindowsPath
from typing import Any

from filelock import FileLock, Timeout

from ..mistake import Mistake, printable, shortened

UNFINISHED = ".tmp-"
"""The prefix of every half-written file and folder; `remove_unfinished` removes what killed processes left."""
_MARK = 8
"""Number of random digits at the end of such a name, because two writers need two names."""
SEAL = "SHA256SUMS"
"""The checksums of a folder's files, as `sha256sum --check SHA256SUMS` reads them."""
LOCK = ".lock"


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder next to `path` to write into; on success it replaces `path`.

    On any error the half-written folder is removed and `path` stays as it was; an OSError names it and the reason. It
    is an error if `path` is no folder, or one of other files: a repository, or without the name of a new file.
    """
    with _temporary_file(path) as unfinished:
        unfinished.mkdir()
        yield unfinished
        old = sorted(file.name for file in path.iterdir()) if path.is_dir() else []
        shared = {file.name for file in unfinished.iterdir() if file.name != "README.md"} & set(old)
        other = [name for name in old if name == ".git" or not (shared or name.startswith("."))]
        if other or (path.exists() and not path.is_dir()):
            what = f"it holds {shortened(other[0])}" if other else "it is a file"
            raise FileExistsError(f"{path} must be a new folder, and {what}. Choose another path.")
        os.umask(mask := os.umask(0))
        for file in sorted(unfinished.rglob("*")):
            if file.is_file():  # safetensors makes files that only their owner can read
                with suppress(OSError):  # some file systems have no such rights
                    file.chmod(0o666 & ~mask)
            sync(file)
        sync(unfinished)
        if path.exists():
            _exchange(unfinished, path)  # then the old one is what is left, and removed
        else:
            unfinished.rename(path)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write one file; a reader sees the old content or the new, never a mixture. An OSError names the file."""
    with _temporary_file(path) as unfinished:
        if path.exists() and not path.is_file():  # a rename would replace a device or a pipe
            raise OSError(errno.EINVAL, "no file")
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(unfinished)
        unfinished.replace(path)


@contextmanager
def _temporary_file(path: Path) -> Iterator[Path]:
    """Yield a free name next to `path`, which the block renames. Then sync the folder and remove anything left."""
    unfinished = _beside(path)
    with explain_write_error(path):
        try:
            make_folder(path.parent)
            yield unfinished
            sync(path.parent)
        finally:
            _remove(unfinished)


def plain_file(path: Path) -> Path:
    """Refuse a folder, and a pipe or device, which may never end. The call that opens `path` reports a missing file."""
    if not path.is_file() and path.exists():  # in this order a file is looked up once
        raise Mistake(f"{path} must be a file, and is a folder, a pipe or a device. Save its content in a file first.")
    return path


DAMAGE = (zlib.error, lzma.LZMAError, EOFError, gzip.BadGzipFile)
"""Errors that damaged files raise, besides an `OSError` without `errno`."""


@contextmanager
def read_errors(path: Path, advice: str = "Download it again.", *more: type[Exception]) -> Iterator[None]:
    """Turn an error of reading, which may be one of `more`, into a sentence that names the file and the reason."""
    try:
        yield
    except Mistake:
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(f"There is no file {printable(str(path))}.") from error
    except (*DAMAGE, *more, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(f"Cannot read {path}: {error.strerror or error}.") from error
        reason = shortened(str(error).strip('"').partition("\n")[0].rstrip(".")) or type(error).__name__
        raise Mistake(f"{path} cannot be read as {path.suffix}: {reason}. {advice}") from error


UNPACKED, RATIO = 1 << 30, 100
"""Maximum size of what is unpacked: this many bytes or this many times the packed size, whichever is larger."""


def unpack_limit(path: Path) -> int:
    """How many bytes a packed file may hold."""
    return max(UNPACKED, RATIO * path.stat().st_size)


def check_unpacked(path: Path, size: int) -> None:
    """Raise a `Mistake` if a packed file holds more than `unpack_limit`."""
    if size > UNPACKED and size > unpack_limit(path):
        raise Mistake(f"{path} unpacks to more than {unpack_limit(path):,} bytes. Unpack it, and name the result.")


def below_home(path: Path) -> str:
    """A path with ~ instead of the home folder, which could reveal the user's name."""
    home = os.path.expanduser("~")
    return f"~/{path.relative_to(home).as_posix()}" if path.is_relative_to(home) else str(path)


def last_part(value: str) -> str:
    """`value`, or the last part of an absolute path: what is shared must not describe the machine's folders."""
    return PureWindowsPath(value).name if value.startswith("/") or PureWindowsPath(value).is_absolute() else value


def make_folder(path: Path) -> list[Path]:
    """Make a folder and its missing parents, sync each to the disk, and return the new ones, innermost first."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        sync(folder.parent)
    return missing


def seal(folder: Path) -> None:
    """Store the checksum of each file in `folder`; `check_seal` reads them."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    (folder / SEAL).write_text("".join(f"{digest_of(path)}  {path.name}\n" for path in files), encoding="utf-8")


def check_seal(path: Path) -> None:
    """Refuse a file whose checksum is not the stored one; do nothing if the folder has no checksums."""
    try:
        lines = plain_file(path.parent / SEAL).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return
    if f"{digest_of(path)}  {path.name}" not in lines:
        raise Mistake(f"its checksum is not the one in {SEAL}; remove that file if you changed this one on purpose")


def digest_of(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal digits."""
    with plain_file(path).open("rb") as file:
        try:
            return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:  # the error of a bad disk names no file
            error.filename = str(path)
            raise


def digest_of_json(content: object) -> str:
    """SHA-256 of JSON, whatever its white space and the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_table(path: Path, advice: str, **kinds: type) -> dict[str, Any]:
    """The JSON object in a file, in which these fields have these types, if they are there.

    Raises:
        FileNotFoundError, Mistake: the file is missing, or damaged. The sentence ends with `advice`.
    """
    try:
        found = json.loads(plain_file(path).read_text(encoding="utf-8-sig"))
        if not isinstance(found, dict):
            raise ValueError("it holds no table")
        for name, kind in kinds.items():
            if not isinstance(found.get(name, kind()), kind):
                raise ValueError(f"its {name} must be of type {kind.__name__}")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} is missing. {advice}") from error
    except (ValueError, RecursionError) as error:
        raise Mistake(f"{path} is damaged ({shortened(str(error))}). {advice}") from error
    return found


@contextmanager
def wait_for(lock: Path, what: str) -> Iterator[None]:
    """Hold a lock, in a folder that is made if it is missing. If another process holds it for more than 2 seconds,
    print `what` that process is doing."""
    held = FileLock(lock)
    with explain_write_error(lock.parent):
        lock.parent.mkdir(parents=True, exist_ok=True)
        try:
            held.acquire(timeout=2)
        except Timeout:
            print(f"txl: Another process is {what}; this one waits for it ({lock}).", file=sys.stderr)
            held.acquire()
    try:
        yield
    finally:
        held.release()


@contextmanager
def lock_folder(folder: Path) -> Iterator[Callable[[], None]]:
    """Lock `folder` for this process, and remove it afterwards if it was made for this and is still empty.

    The system releases the lock however the process ends. Raises `BlockingIOError` if another process holds it. Yields
    a check, which raises a `Mistake` if the lock was removed, so that another process may write here.
    """
    lock = FileLock(folder.resolve() / LOCK, is_singleton=True)  # a process may lock a folder more than once
    try:
        with explain_write_error(folder):
            made = make_folder(folder)
            lock.acquire(timeout=0)
    except Timeout:
        raise BlockingIOError(
            f"{folder} is in use by another process or thread. Wait until that ends, or choose another folder."
        ) from None
    mark = _identity(folder / LOCK)

    def check() -> None:
        if _identity(folder / LOCK) != mark:
            lost = f"{folder / LOCK} was removed or replaced"
            raise Mistake(f"{lost}, so another process may write here. If none does, go on with --resume.")

    try:
        yield check
    finally:
        lock.release()
        if made and folder.exists() and not holds_anything(folder):  # it may have been moved away
            (folder / LOCK).unlink(missing_ok=True)
            with suppress(OSError):  # another process may have added a file
                for empty in made:
                    empty.rmdir()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def refuse_odd_name(name: Path | str, option: str) -> None:
    """Refuse a name that no text file can hold because its bytes are not UTF-8, or not in this locale's encoding."""
    try:
        str(name).encode()
    except UnicodeEncodeError:
        raise Mistake(
            f"{option} must be a name in UTF-8, got {str(name)!a}. Rename it, or set LC_ALL=C.UTF-8."
        ) from None


def holds_anything(folder: Path) -> bool:
    """Whether a folder contains more than its lock and what a killed process left."""
    return any(path.name != LOCK and not path.name.startswith(UNFINISHED) for path in folder.iterdir())


def empty_folder(folder: Path) -> None:
    """Remove everything in a folder except its lock."""
    for path in folder.iterdir():
        if path.name != LOCK:
            _remove(path)


def remove_folder(path: Path) -> None:
    """Remove a folder. It is renamed first, so a half-removed folder never has its name."""
    unfinished = _beside(path)
    path.rename(unfinished)
    _remove(unfinished)


def remove_unfinished(folder: Path, name: str = "") -> None:
    """Remove the half-written files of killed processes in `folder`: those for `name`, or all of them."""
    for left in folder.glob(f"{UNFINISHED}{glob.escape(name) if name else '*'}-{'?' * _MARK}"):
        _remove(left)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def explain_write_error(path: Path) -> Iterator[None]:
    """Turn an OSError into a sentence that names the path and the reason. Its type and `errno` stay."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        reason = os.strerror(error.errno)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "Free some space, or write elsewhere." if full else "Choose a path that you may write to."
        if error.errno == errno.ENOENT:
            advice = "Its folder is missing: make it, or put it back."
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP):
            advice = "Choose a path on another file system."
        sentence = type(error)(f"{path} could not be written: {reason}. {advice}")
        sentence.errno = error.errno
        raise sentence from error


def _beside(path: Path) -> Path:
    return path.parent / f"{UNFINISHED}{path.name}-{uuid.uuid4().hex[:_MARK]}"


def _exchange(new: Path, old: Path) -> None:
    """Exchange the names of two folders, because no rename replaces a full folder. Where the system and its file system
    can, this is one step: a kill between two renames would leave no folder of the old one's name."""
    if sys.platform == "linux":
        here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        with suppress(AttributeError):  # an old C library
            if ctypes.CDLL(None).renameat2(here, os.fsencode(new), here, os.fsencode(old), exchange) == 0:
                return
    aside = _beside(old)
    old.rename(aside)
    try:
        new.rename(old)
    except BaseException:
        aside.rename(old)
        raise
    aside.rename(new)


def sync(path: Path) -> None:
    """Wait until the disk holds the file, or the folder's entries where the system and its file system can tell."""
    folder = path.is_dir()
    if folder and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if folder else os.O_RDWR)  # Windows cannot sync a file opened for reading
    try:
        os.fsync(handle)
    except OSError as error:  # of folders, shares and clouds know no fsync
        if not folder or error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(handle)
