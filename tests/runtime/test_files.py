"""File systems that lack what ext4 has."""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path

import pytest

from transformer_xl.runtime import files
from transformer_xl.runtime.files import lock_folder, wait_for, whole_folder, write_whole


def failing(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def write_both(folder: Path) -> None:
    write_whole(folder / "new" / "file", "text")
    with whole_folder(folder / "checkpoint") as unfinished:
        (unfinished / "weights").write_text("1")
    assert (folder / "new" / "file").read_text() == "text" and (folder / "checkpoint" / "weights").read_text() == "1"


def write_again(folder: Path) -> None:
    with whole_folder(folder / "checkpoint") as unfinished:
        (unfinished / "weights").write_text("2")
    assert (folder / "checkpoint" / "weights").read_text() == "2"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint", "new"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_folders_that_cannot_be_synced_are_written(tmp_path, monkeypatch, code):
    """As on network shares and clouds mounted as folders."""
    sync = os.fsync

    def files_only(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise failing(code)
        sync(handle)

    monkeypatch.setattr(os, "fsync", files_only)
    write_both(tmp_path)


def test_files_that_cannot_be_synced_are_not_taken_for_written(tmp_path, monkeypatch):
    def none(handle: int) -> None:
        raise failing(errno.EINVAL)

    monkeypatch.setattr(os, "fsync", none)
    with pytest.raises(OSError, match="file could not be written: Invalid argument"):
        write_whole(tmp_path / "file", "text")


@pytest.mark.skipif(sys.platform != "linux", reason="exchanges no folders")
def test_a_folder_that_is_replaced_has_its_name_at_every_moment(tmp_path, monkeypatch):
    """A kill between two renames would leave no checkpoint of that name."""
    write_both(tmp_path)
    rename = Path.rename

    def checked(path: Path, target: Path) -> Path:
        renamed = rename(path, target)
        assert (tmp_path / "checkpoint" / "weights").exists()
        return renamed

    monkeypatch.setattr(Path, "rename", checked)
    write_again(tmp_path)


def test_a_folder_is_replaced_where_two_names_cannot_be_exchanged(tmp_path, monkeypatch):
    monkeypatch.setattr(files.ctypes, "CDLL", lambda _: object())
    write_both(tmp_path)
    write_again(tmp_path)


def test_rights_that_a_file_system_does_not_have_are_not_asked_for(tmp_path, monkeypatch):
    """FAT refuses a file that its owner may write and nobody run."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "chmod", refuse)
    write_both(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="has no flock")
@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told_in_a_sentence(tmp_path, monkeypatch, code):
    import fcntl

    def refuse(*_: object) -> None:
        raise failing(code)

    monkeypatch.setattr(fcntl, "flock", refuse)
    sentence = f"{tmp_path} could not be written: {os.strerror(code)}. Choose a path on another file system."
    for locked in (lambda: wait_for(tmp_path / ".lock", "waiting"), lambda: lock_folder(tmp_path)):
        with pytest.raises(OSError) as caught, locked():
            pass
        assert str(caught.value) == sentence and caught.value.strerror is None
