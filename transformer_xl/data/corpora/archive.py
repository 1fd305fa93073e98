"""Unpack untrusted archives: only plain files, inside one folder, with a limit on their size."""

from __future__ import annotations

import errno
import os
import posixpath
import struct
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...mistake import Mistake, shortened
from ...runtime import files

Unpack = Callable[[Path, Path, int], None]
"""Unpacks an archive into a folder, at most a number of bytes."""
_PACKED = {"gz": b"\x1f\x8b", "bz2": b"BZh", "xz": b"\xfd7zXZ\0"}
_ZIP = (b"PK\3\4", b"PK\5\6")
"""The first bytes of a zip."""
_DOCUMENT = {"[Content_Types].xml", "mimetype"}
"""Members of a .docx or .xlsx, and of an .odt or .epub."""
_MEMBERS = 1 << 15
"""Maximum number of files and folders in an archive."""
_DAMAGE = (*files.DAMAGE, zipfile.BadZipFile, tarfile.TarError, struct.error, RuntimeError, OSError, ValueError)
"""The errors that the standard library raises for an archive that is damaged or encrypted."""
_NAMES = (errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL)
"""Errors of writing a file whose cause is its name."""
_PAX_TYPES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_LONGEST_HEADER = 1 << 17
"""In bytes."""


class _Member(tarfile.TarInfo):
    """A member of a tar. A long extended header is refused, because tarfile would read all of it into memory."""

    def _proc_member(self, opened: Any) -> Any:
        extended = self.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, *_PAX_TYPES)
        if extended and self.size > _LONGEST_HEADER:
            raise Mistake(f"{opened.name} is refused: a member has a header of {self.size:,} bytes. Download it again.")
        return super()._proc_member(opened)  # type: ignore[misc]


@contextmanager
def unpack_if_archive(path: Path, home: Path) -> Iterator[Path]:
    """Yield `path`; for a zip or a tar, yield a temporary folder below `home` with its content.

    Raises:
        ValueError: the archive is damaged or too large, or has paths that lead out of its folder.
        OSError: one sentence that names the file and the reason, for instance a full disk.
    """
    unpack = _unpacker(path) if path.is_file() and path.suffix != ".npz" else None
    if unpack is None:
        yield path
        return
    name = path.name[-48:]  # names have at most 255 bytes
    with files.wait_for(home / f".{name}.lock", f"unpacking {path}"):
        files.remove_unfinished(home, name)  # left by a process that was killed
        with files.explain_write_error(home):
            temporary = TemporaryDirectory(prefix=f"{files.UNFINISHED}{name}-", dir=home)
        with temporary as folder:
            inside = Path(folder) / path.name  # errors about a file in it then name the archive
            _unpack(path, inside, unpack)
            try:
                yield inside
            except Mistake as error:  # the user knows the archive, not the temporary folder
                raise Mistake(str(error).replace(f"{folder}/", f"{path.parent}/")) from error


def _unpacker(path: Path) -> Unpack | None:
    """The function that unpacks a file: a zip, or a tar, compressed or plain; None for any other file."""
    with files.read_errors(path):
        with path.open("rb") as file:
            if file.read(4) in _ZIP:
                return _unpack_zip
        try:
            with _open_tar(path) as opened:
                return None if opened.next() is None else _unpack_tar
        except (tarfile.TarError, *files.DAMAGE):
            return None


def _open_tar(path: Path) -> tarfile.TarFile:
    """Open a tar, unpacked by its first bytes: tarfile would search a whole file for the start of an xz."""
    with path.open("rb") as file:
        first = file.read(6)
    mode: Any = f"r:{next((kind for kind, mark in _PACKED.items() if first.startswith(mark)), '')}"
    return tarfile.open(path, mode, tarinfo=_Member)


def _unpack(archive: Path, folder: Path, unpack: Unpack) -> None:
    """Unpack the plain files of an archive. Nothing is written outside of `folder`."""
    try:
        with files.explain_write_error(folder):
            folder.mkdir()
            unpack(archive, folder, files.unpack_limit(archive))
    except _DAMAGE as error:
        number = getattr(error, "errno", None)
        if isinstance(error, Mistake) or (number is not None and number not in _NAMES):
            raise
        reason = str(error).rstrip(".") or type(error).__name__
        if number is not None:
            reason = f"it has names that no folder can hold together ({os.strerror(number)})"
        raise Mistake(f"{archive} cannot be unpacked: {reason}. Download it again.") from error


def _unpack_zip(archive: Path, folder: Path, limit: int) -> None:
    with zipfile.ZipFile(archive) as opened:
        _check_size(sum(info.file_size for info in opened.infolist()), len(opened.infolist()), limit)
        if any(info.header_offset < 0 for info in opened.infolist()):
            raise ValueError("a file begins before the archive")
        if any(b"PK\x01\x02" in info.comment for info in opened.infolist()):  # zipfile would not read the others
            raise ValueError("a comment holds other files")
        if _DOCUMENT & set(opened.namelist()):
            raise Mistake(f"{archive} must be text, and is a document of an office program or a book. Save it as .txt.")
        _check_names(archive, opened.namelist())
        opened.extractall(folder)


def _unpack_tar(archive: Path, folder: Path, limit: int) -> None:
    size, names = 0, []
    with _open_tar(archive) as opened:
        for count, member in enumerate(opened, start=1):
            if member.size < 0:
                raise ValueError("a file has a negative size")
            size += member.size
            _check_size(size, count, limit)
            names += [member.name] * member.isreg()
            if member.isreg():
                opened.extract(member, folder, set_attrs=False, filter="data")
        _check_names(archive, names)
        assert opened.fileobj is not None
        while opened.fileobj.read(1 << 20):  # the checksums of gzip, bzip2 and xz are at the end
            pass


def _check_names(archive: Path, names: list[str]) -> None:
    """Refuse two files of one name, of which only the last would be read."""
    counts = Counter(posixpath.normpath(name) for name in names if not name.endswith("/"))
    if twice := next((name for name, count in counts.items() if count > 1), None):
        raise Mistake(f"{archive} has {counts[twice]} files named {shortened(twice)}. Unpack it, and name the folder.")


def _check_size(size: int, members: int, limit: int) -> None:
    if size > limit or members > _MEMBERS:
        raise ValueError(f"its files have more than {limit:,} bytes, or are more than {_MEMBERS:,}")
