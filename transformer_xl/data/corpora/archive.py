"""Files out of an archive that nobody vouches for: those asked for by name, no larger than expected, nothing else."""

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
from ...runtime.files import UNFINISHED, explained, remove_unfinished
from ..reading import DAMAGE, read_errors

_PIECE = 1 << 16
_HEADERS = 1 << 17
"""A member's headers in a tar may have so many bytes; tarfile holds them in memory."""
_OPENERS = {
    re.compile(rb"\x1f\x8b"): gzip.open,
    re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"): bz2.open,  # a text may begin with BZh
    re.compile(rb"\xfd7zXZ\0"): lzma.open,
}
"""What a compressed file begins with."""
_ZIP = (b"PK\3\4", b"PK\5\6")
_NO_FILE = "is a link, a device or a folder, not a file"
_UNPACKED, _RATIO = 1 << 30, 100
"""Maximum size of an unpacked archive: this many bytes, or this many times its own size. No text compresses better."""
_ZIP_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
"""Of the others zipfile unpacks at once whatever a piece comes to."""
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
"""What the readers of the standard library raise on a damaged archive."""


class RefusedArchive(Mistake):
    """An archive that is damaged, hostile, or without what was asked for."""


class _Member(NamedTuple):
    name: str | None
    """Its path in the archive; None where the format has no names."""
    trouble: str
    """Why it cannot be taken; empty if it can."""
    open: Callable[[], IO[bytes] | None]


def unpack(archive: Path, wanted: Mapping[str, int], folder: Path) -> dict[str, Path]:
    """Take the files `wanted` (base name to the most bytes it may have) out of a zip, a tar or a compressed file.

    What it is tells its content, not its name: zip; tar, plain or as .gz, .bz2 or .xz; one file as .gz, .bz2 or .xz.
    Each is written to `folder/<base name>`, whatever path it has in the archive, and replaces what is there. Nothing
    else is written, and nothing stays if it fails.

    Raises:
        RefusedArchive: a `ValueError` in one sentence, for an archive that is damaged or hostile or lacks a file.
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
    """A member's path, parted at / and at \\."""
    return PureWindowsPath(member.name or "")


def _write(member: _Member, archive: Path, path: Path, most: int, written: dict[str, Path]) -> int:
    """Write a member of at most `most` bytes to `path`, note that in `written`, and return its size."""
    inside, told = _path_of(member), f"{archive} is refused: its member {member.name!r}"
    if inside.anchor or ".." in inside.parts:
        raise RefusedArchive(f"{told} points outside the archive.")
    if member.trouble:
        raise RefusedArchive(f"{told} {member.trouble}.")
    if written.setdefault(str(path), path) is not path:
        raise RefusedArchive(f"{told} is the second of the name {path.name}.")
    size = 0
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # a link that is there must not lead elsewhere
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
    """`path` itself, or, where it is a zip or a tar, a folder below `home` with its files, until the block ends.

    Raises:
        RefusedArchive: it is damaged or hostile.
        OSError: one sentence that names the file and the reason, for instance a full disk.
    """
    if not path.is_file() or not is_archive(path):
        yield path
        return
    with explained(home):
        home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / f".{path.name}.lock"):
        remove_unfinished(home, path.name)  # what a killed process left
        with explained(home):
            temporary = TemporaryDirectory(prefix=f"{UNFINISHED}{path.name}-", dir=home)
        with temporary as folder:
            inside = Path(folder) / path.name  # so that a sentence about a file in it names the archive
            inside.mkdir()
            left, written = max(_UNPACKED, _RATIO * path.stat().st_size), {}
            with closing(_members(path)) as members:
                for member in members:
                    if member.trouble != _NO_FILE:
                        left -= _write(member, path, inside.joinpath(*_path_of(member).parts), left, written)
            yield inside


def is_archive(path: Path) -> bool:
    """Whether a file is a zip or a tar, which may be compressed."""
    with read_errors(path):
        is_zip, opener = _format(path)
        if is_zip:
            return True
        with (opener or open)(path, "rb") as file:
            return _is_tar(file.read(tarfile.BLOCKSIZE))


def _format(path: Path) -> tuple[bool, Any]:
    """By a file's first bytes: whether it is a zip, and what decompresses it; None: nothing."""
    with path.open("rb") as file:
        start = file.read(10)
    return start.startswith(_ZIP), next((opener for magic, opener in _OPENERS.items() if magic.match(start)), None)


@contextmanager
def _refuse_damage(archive: Path) -> Iterator[None]:
    """For what reads only: an error of writing would be told as one of the archive."""
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
    """The members in one pass, to the end of the file, where gzip, bzip2 and xz have their checksums."""
    bounded = _Bounded(file)
    with tarfile.open(fileobj=bounded, mode="r|", bufsize=_PIECE) as opened:  # type: ignore[call-overload]
        while (member := opened.next()) is not None:
            bounded.end = opened.offset + _HEADERS
            opened.members.clear()  # else it remembers all of them
            trouble = "" if member.isreg() else _NO_FILE
            yield _Member(member.name, trouble, lambda member=member: opened.extractfile(member))
        while file.read(_PIECE):
            pass


class _Bounded:
    """A tar that ends with an error where the headers of its next member have no end."""

    def __init__(self, file: Any):
        self.file, self.position, self.end = file, 0, _HEADERS

    def read(self, size: int) -> bytes:
        if self.position > self.end:
            raise tarfile.ReadError("the headers of a member have no end")
        piece = self.file.read(size)
        self.position += len(piece)
        return piece


def _is_tar(block: bytes) -> bool:
    """Whether the first block is a header with the right checksum."""
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True
