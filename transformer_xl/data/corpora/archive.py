"""Unpack archives that nobody vouches for: only plain files, inside one folder, no larger than expected."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path, PureWindowsPath
from tempfile import TemporaryDirectory
from typing import IO, Any, NamedTuple

from filelock import FileLock

from ...mistake import Mistake
from ...runtime.files import UNFINISHED, explain_write_error, remove_unfinished
from ..reading import DAMAGE, read_errors

_PIECE = 1 << 16
_HEADERS = 1 << 17
"""Maximum bytes of the headers of one member of a tar, which tarfile keeps in memory."""
_OPENERS = {
    re.compile(rb"\x1f\x8b"): gzip.open,
    re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"): bz2.open,  # a text may begin with BZh
    re.compile(rb"\xfd7zXZ\0"): lzma.open,
}
"""The first bytes of compressed files."""
_ZIP = (b"PK\3\4", b"PK\5\6")
_NO_FILE = "is a link, a device or a folder, not a file"
_UNPACKED, _RATIO = 1 << 30, 100
"""Maximum size of an unpacked archive: this many bytes, or this many times its own size; no text compresses better."""
_ZIP_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
"""The other methods unpack a piece of any size at once."""
_DAMAGE = (
    *DAMAGE,
    zipfile.BadZipFile,
    tarfile.TarError,
    struct.error,
    NotImplementedError,
    RecursionError,
    OSError,
    ValueError,
)
"""The errors that the standard library raises for a damaged archive."""


class RefusedArchive(Mistake):
    """An archive is damaged or hostile, or lacks a file that was asked for."""


class _Member(NamedTuple):
    name: str | None
    """Its path in the archive; None if the format has no names."""
    trouble: str
    """The reason why it cannot be unpacked; empty if it can."""
    open: Callable[[], IO[bytes] | None]


def unpack(archive: Path, wanted: Mapping[str, int], folder: Path) -> dict[str, Path]:
    """Unpack the files `wanted` (base name to maximum bytes) from a zip, a tar or a compressed file.

    The content decides which it is, not the name: zip; tar, plain or as .gz, .bz2 or .xz; one file as .gz, .bz2 or .xz.
    Each file is written to `folder/<base name>`, whatever its path in the archive, and replaces a file there. Nothing
    else is written, and after an error no file remains.

    Raises:
        RefusedArchive: a `ValueError` of one sentence: the archive is damaged or hostile, or lacks a file.
        OSError: one sentence that names the file and the reason, for instance a full disk.
    """
    if not archive.is_file():
        raise FileNotFoundError(f"There is no file {archive}.")
    for name in wanted:
        assert name not in ("", ".", "..") and PureWindowsPath(name).name == name, f"{name!r} is no plain name"
        assert (folder / name).resolve() != archive.resolve(), f"{archive} would replace itself"
    written: dict[str, Path] = {}
    try:
        with closing(_members(archive)) as members:
            for member in members:
                if member.name is None and len(wanted) != 1:
                    must = f"{archive} must be an archive with {', '.join(wanted)}"
                    raise RefusedArchive(f"{must}, and is one compressed file.")
                name = _path_of(member).name if member.name else next(iter(wanted))
                if name in wanted:
                    _write(member, archive, folder / name, wanted[name], written)
        if missing := [name for name in wanted if str(folder / name) not in written]:
            raise RefusedArchive(f"{archive} must hold {', '.join(wanted)}, and has no {', '.join(missing)}.")
    except BaseException:
        for path in written.values():
            with suppress(OSError):
                path.unlink(missing_ok=True)
        raise
    return {path.name: path for path in written.values()}


def _path_of(member: _Member) -> PureWindowsPath:
    """A member's path, split at / and at \\."""
    return PureWindowsPath(member.name or "")


def _write(member: _Member, archive: Path, path: Path, most: int, written: dict[str, Path]) -> int:
    """Write a member of at most `most` bytes to `path`, add it to `written`, and return its size."""
    inside, refused = _path_of(member), f"{archive} is refused: its member {member.name!r}"
    if inside.anchor or ".." in inside.parts:
        raise RefusedArchive(f"{refused} points outside the archive.")
    if member.trouble:
        raise RefusedArchive(f"{refused} {member.trouble}.")
    if written.setdefault(str(path), path) is not path:
        raise RefusedArchive(f"{refused} is the second of the name {path.name}.")
    size = 0
    with explain_write_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # writing must not follow a link that is there
        with path.open("xb") as file:
            for piece in _pieces(member, archive):
                size += len(piece)
                if size > most:
                    limit = f"more than {most:,} bytes"
                    raise RefusedArchive(f"{archive}: {path.name} has {limit}: a damaged or hostile archive.")
                file.write(piece)
    return size


@contextmanager
def unpack_if_archive(path: Path, home: Path) -> Iterator[Path]:
    """Yield `path` itself, or if it is a zip or a tar, a folder below `home` that holds its files until the block ends.

    Raises:
        RefusedArchive: it is damaged or hostile.
        OSError: one sentence that names the file and the reason, for instance a full disk.
    """
    if not path.is_file() or not is_archive(path):
        yield path
        return
    with explain_write_error(home):
        home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / f".{path.name}.lock"):
        remove_unfinished(home, path.name)  # left by a process that was killed
        with explain_write_error(home):
            temporary = TemporaryDirectory(prefix=f"{UNFINISHED}{path.name}-", dir=home)
        with temporary as folder:
            inside = Path(folder) / path.name  # a sentence about a file in it then names the archive
            inside.mkdir()
            left, written = max(_UNPACKED, _RATIO * path.stat().st_size), {}
            with closing(_members(path)) as members:
                for member in members:
                    if member.trouble != _NO_FILE:
                        left -= _write(member, path, inside.joinpath(*_path_of(member).parts), left, written)
            yield inside


def is_archive(path: Path) -> bool:
    """Whether a file is a zip, or a tar that may be compressed."""
    with read_errors(path):
        is_zip, opener = _format(path)
        if is_zip:
            return True
        with (opener or open)(path, "rb") as file:
            return _is_tar(file.read(tarfile.BLOCKSIZE))


def _format(path: Path) -> tuple[bool, Any]:
    """By a file's first bytes: whether it is a zip, and the function that decompresses it, or None."""
    with path.open("rb") as file:
        start = file.read(10)
    return start.startswith(_ZIP), next((opener for magic, opener in _OPENERS.items() if magic.match(start)), None)


@contextmanager
def _refuse_damage(archive: Path) -> Iterator[None]:
    """Raise an error of reading as a refusal. Nothing is written inside, because errors of writing look the same."""
    try:
        yield
    except RefusedArchive:
        raise
    except _DAMAGE as error:
        reason = str(error).rstrip(".") or type(error).__name__
        raise RefusedArchive(f"{archive} cannot be unpacked: {reason}. Download it again.") from error


def _pieces(member: _Member, archive: Path) -> Iterator[bytes]:
    with _refuse_damage(archive):
        source = member.open()
        assert source is not None, "only plain files are opened"
        with source:
            while piece := source.read(_PIECE):
                yield piece


def _members(archive: Path) -> Generator[_Member, None, None]:
    with _refuse_damage(archive):
        yield from _read_members(archive)


def _read_members(archive: Path) -> Iterator[_Member]:
    is_zip, opener = _format(archive)
    if is_zip:
        yield from _zip_members(archive)
        return
    with (opener or open)(archive, "rb") as file:
        is_tar = _is_tar(file.read(tarfile.BLOCKSIZE))
        file.seek(0)
        if is_tar:
            yield from _tar_members(file)
        elif opener:
            yield _Member(None, "", lambda: file)
        else:
            raise RefusedArchive(f"{archive} must be a zip, a tar or a file in gzip, bzip2 or xz, and is neither.")


def _zip_members(archive: Path) -> Iterator[_Member]:
    with zipfile.ZipFile(archive) as opened:
        for info in opened.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            trouble = ""
            if info.is_dir() or kind not in (0, stat.S_IFREG):
                trouble = _NO_FILE
            elif info.flag_bits & 1:
                trouble = "is encrypted"
            elif info.compress_type not in _ZIP_METHODS:
                trouble = "is compressed by another method than deflate"
            yield _Member(info.filename, trouble, lambda info=info: opened.open(info))


def _tar_members(file: Any) -> Iterator[_Member]:
    """The members in one pass to the end of the file, because gzip, bzip2 and xz keep their checksums there."""
    bounded = _Bounded(file)
    with tarfile.open(fileobj=bounded, mode="r|", bufsize=_PIECE) as opened:  # type: ignore[call-overload]
        while (member := opened.next()) is not None:
            bounded.end = opened.offset + _HEADERS
            opened.members.clear()  # otherwise it keeps all of them in memory
            trouble = "" if member.isreg() else _NO_FILE
            yield _Member(member.name, trouble, lambda member=member: opened.extractfile(member))
        while file.read(_PIECE):
            pass


class _Bounded:
    """A tar whose reading ends with an error if the headers of a member are too long."""

    def __init__(self, file: Any):
        self.file, self.position, self.end = file, 0, _HEADERS

    def read(self, size: int) -> bytes:
        if self.position > self.end:
            raise tarfile.ReadError("the headers of a member have no end")
        piece = self.file.read(size)
        self.position += len(piece)
        return piece


def _is_tar(block: bytes) -> bool:
    """Whether the first block of a file is the header of a tar, with the right checksum."""
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True
