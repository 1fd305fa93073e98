"""A file is whole under its name or absent, whatever the network does and an archive contains."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import tarfile
import tempfile
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from server import Server, Turn, serving

from transformer_xl.data.corpora import archive as archives
from transformer_xl.data.corpora.archive import unpack_if_archive
from transformer_xl.data.corpora.preparing import download
from transformer_xl.data.corpora.published import DownloadSource
from transformer_xl.data.datasets import open_corpus
from transformer_xl.mistake import Mistake

CONTENT = bytes(range(251)) * 41
DIGEST = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
COMPRESS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
DAMAGES = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a proxy, and without pauses between tries."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)


def published(server: Server, name: str = "f") -> DownloadSource:
    return DownloadSource(server.url(name), len(CONTENT), DIGEST)


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


class TestDownloads:
    def test_broken_connections_and_busy_servers_are_tried_again(self, server, tmp_path, capsys) -> None:
        script = server.put("f", CONTENT, [Turn(cut=5000), Turn(status=500), Turn()])
        assert download([published(server)], tmp_path).read_bytes() == CONTENT
        assert len(script.requests) == 3 and visible(tmp_path) == {"f"}
        assert all(headers["User-Agent"].startswith("transformer-xl/") for headers in script.requests)
        assert f"Loading {server.url('f')} (10,291 bytes).\n" in capsys.readouterr().err

    def test_an_existing_file_needs_no_network(self, server, tmp_path, capsys) -> None:
        (tmp_path / "f").write_bytes(CONTENT)
        script = server.put("f", CONTENT)
        assert download([published(server, "other"), published(server)], tmp_path) == tmp_path / "f"
        assert not script.requests and not capsys.readouterr().err
        (tmp_path / "f").write_bytes(CONTENT[1:])  # a damaged one is loaded again
        assert download([published(server)], tmp_path).read_bytes() == CONTENT and len(script.requests) == 1

    @pytest.mark.parametrize(
        ("turn", "reason"),
        [
            (Turn(status=404), "404 Client Error"),
            (Turn(body=b"?" * len(CONTENT)), "(?i)hash"),
            (Turn(body=CONTENT + b"?", silent=True), "(?i)hash"),
            (Turn(status=302, location="file:///etc/passwd"), "file:///etc/passwd"),
            (Turn(cut=4000), "(?i)incomplete"),
        ],
    )
    def test_after_one_address_fails_the_next_is_used(self, server, tmp_path, turn, reason, capsys) -> None:
        server.put("bad/f", CONTENT, [turn] * 9)
        good = server.put("good/f", CONTENT)
        with pytest.raises(OSError, match=reason):
            download([published(server, "bad/f")], tmp_path)
        assert not visible(tmp_path), "nothing gets the file's name before it is verified"
        path = download([published(server, "bad/f"), published(server, "good/f")], tmp_path)
        assert path.read_bytes() == CONTENT and len(good.requests) == 1
        assert "this address is given up" in capsys.readouterr().err

    def test_a_folder_that_cannot_be_written_is_named(self, server, tmp_path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(OSError, match=r"file/folder.* could not be written: .+\."):
            download([published(server)], tmp_path / "file" / "folder")


def zipped(members: list[tuple[str, bytes]], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content, method)
    return file.getvalue()


def tarred(members: list[tuple[str, bytes]], kind: bytes = tarfile.REGTYPE, link: str = "") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size, info.type, info.linkname = len(content), kind, link
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


KINDS: dict[str, Callable[[list[tuple[str, bytes]]], bytes]] = {
    "zip": zipped,
    **{f"tar{suffix}": lambda members, pack=pack: pack(tarred(members)) for suffix, pack in COMPRESS.items()},
}


def unpack(archive: Path, home: Path) -> dict[str, bytes]:
    """The files of an archive, by their path in it."""
    with unpack_if_archive(archive, home) as folder:
        assert folder != archive
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        return {name: path.read_bytes() for name, path in files.items()}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which only the archive `a` may be, to unpack at most 20,011 bytes below `in`."""
    (tmp_path / "in").mkdir()
    monkeypatch.setattr("transformer_xl.runtime.files.UNPACKED", 20_011)
    monkeypatch.setattr("transformer_xl.runtime.files.RATIO", 0)
    return tmp_path


def files_below(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if not path.is_dir() and path.suffix != ".lock"}


def refused(root: Path, archive: bytes, reason: str) -> None:
    """Check that the archive is refused with that reason, and that nothing remains."""
    (root / "a").write_bytes(archive)
    with pytest.raises(ValueError, match=reason) as error:
        unpack(root / "a", root / "in")
    assert str(root / "a") in str(error.value)
    assert files_below(root) == {root / "a"}


def refused_in_little_memory(root: Path, archive: bytes, reason: str) -> None:
    tracemalloc.start()
    refused(root, archive, reason)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000


HOSTILE = ("../x", "../../x", "d/../../x", "/etc/x", "C:\\x", "C:x", "..\\x", "\\\\host\\share\\x")


class TestArchives:
    @pytest.mark.parametrize("kind", KINDS)
    def test_files_keep_their_paths_and_are_removed_afterwards(self, root, kind) -> None:
        (root / "a").write_bytes(KINDS[kind]([("d/x", CONTENT), ("./d/e/z", b""), ("xx", b"no")]))
        assert unpack(root / "a", root / "in") == {"d/x": CONTENT, "d/e/z": b"", "xx": b"no"}
        assert files_below(root) == {root / "a"}

    @pytest.mark.parametrize("path", HOSTILE)
    @pytest.mark.parametrize("kind", KINDS)
    def test_no_path_leads_outside(self, root, kind, path) -> None:
        (root / "a").write_bytes(KINDS[kind]([(path, b"1")]))
        before = set(Path("/etc").iterdir())
        try:
            with unpack_if_archive(root / "a", root / "in") as folder:
                assert all(file.is_relative_to(folder) for file in files_below(root) - {root / "a"})
        except ValueError as error:
            assert "outside the destination" in str(error)
        assert files_below(root) == {root / "a"} and set(Path("/etc").iterdir()) == before

    @pytest.mark.parametrize(
        "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]
    )
    def test_members_that_are_not_files_are_left_out(self, root, kind) -> None:
        (root / "a").write_bytes(tarred([("d/x", b"")], kind, "/etc/passwd"))
        assert unpack(root / "a", root / "in") == {}

    @pytest.mark.filterwarnings("ignore:Duplicate name")
    @pytest.mark.parametrize("other", ["d/x", "./d/x"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_two_files_of_one_name_are_refused(self, root, kind, other) -> None:
        refused(root, KINDS[kind]([("d/x", b"one"), (other, b"two")]), "has 2 files named d/x. Unpack it")

    @pytest.mark.parametrize("kind", ["zip", "tar"])
    def test_an_archive_of_countless_files_is_refused(self, root, kind, monkeypatch) -> None:
        monkeypatch.setattr(archives, "_MEMBERS", 20)
        refused(root, KINDS[kind]([(str(number), b"") for number in range(21)]), "or are more than 20")

    @pytest.mark.parametrize(
        ("names", "reason"),
        [
            (("a", "a/b"), "names that no folder can hold"),
            (("n" * 300,), "names that no folder can hold"),
            (("[Content_Types].xml",), "a must be text, and is a document of an office program"),
            (("mimetype",), "a must be text, and is a document of an office program"),
        ],
    )
    def test_names_that_no_folder_can_hold_or_that_documents_have_are_refused(self, root, names, reason) -> None:
        refused(root, zipped([(name, b"1") for name in names]), reason)

    def test_a_mistake_in_a_file_names_the_archive_and_no_temporary_folder(self, root) -> None:
        (root / "a").write_bytes(zipped([("d/x.jsonl", b'{"text": "x"}\n{"no": 1}\n')]))
        with pytest.raises(Mistake, match="must be a JSON string") as error:
            open_corpus(root / "a")
        assert str(error.value).startswith(f"{root / 'a'}/d/x.jsonl, line 2")

    def test_an_encrypted_archive_is_refused(self, root) -> None:
        encrypted = bytearray(zipped([("x", b"1")]))
        encrypted[6] |= 1
        encrypted[encrypted.index(b"PK\1\2") + 8] |= 1
        refused(root, bytes(encrypted), "is encrypted")

    @pytest.mark.parametrize("kind", ["zip", "tar.gz", "tar.bz2", "tar.xz", "sparse"])
    def test_an_archive_bomb_uses_neither_disk_nor_memory(self, root, kind) -> None:
        if kind == "sparse":
            info = tarfile.TarInfo("x")
            info.pax_headers = {"GNU.sparse.map": "0,1", "GNU.sparse.size": "99999999999", "GNU.sparse.name": "x"}
            info.size = 512
            bomb = info.tobuf(tarfile.PAX_FORMAT) + b"1" * 512 + bytes(1024)
        else:
            bomb = KINDS[kind]([("x", bytes(25_000_000))])
        refused_in_little_memory(root, bomb, "its files have more than 20,011 bytes")

    @pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
    @pytest.mark.parametrize("member", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE], ids=["name", "pax"])
    def test_a_long_header_in_a_tar_is_not_read_into_memory(self, root, member, first) -> None:
        long, plain = tarfile.TarInfo("long"), tarfile.TarInfo("x")
        long.size, long.type = 25_000_000, member
        bomb = gzip.compress((b"" if first else plain.tobuf()) + long.tobuf() + bytes(long.size))
        refused_in_little_memory(root, bomb, "a member has a header of 25,000,000 bytes")

    @given(kind=st.sampled_from(sorted(KINDS)), damages=DAMAGES)
    @example(kind="zip", damages=[(-4, 1)])  # its files begin before it
    @example(kind="zip", damages=[(-83, 1)])  # the comment of the first file goes on to the end
    def test_an_archive_with_flipped_bytes_is_right_or_refused(self, kind, damages) -> None:
        archive = bytearray(KINDS[kind]([("y", CONTENT), ("x", b"12345")]))
        for position, flip in damages:
            archive[position % len(archive)] ^= flip
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "a")
            path.write_bytes(archive)
            try:
                with unpack_if_archive(path, Path(folder)) as inside:
                    read = inside / "x"
                    right = inside == path or (read.is_file() and read.read_bytes() == b"12345")
            except (ValueError, OSError) as error:
                assert str(path) in str(error)
            else:
                assert kind == "tar" or right
            assert {file.name for file in Path(folder).iterdir()} <= {"a", ".a.lock"}

    @pytest.mark.parametrize("content", [b"<html>Not Found</html>", b"", bytes(2000), gzip.compress(CONTENT)])
    def test_a_file_that_is_no_archive_stays_as_it_is(self, root, content) -> None:
        (root / "a").write_bytes(content)
        with unpack_if_archive(root / "a", root / "in") as found:
            assert found == root / "a"

    def test_a_folder_that_cannot_be_written_is_named(self, root) -> None:
        (root / "a").write_bytes(tarred([("x", b"1")]))
        (root / "file").touch()
        with pytest.raises(OSError, match=r"file could not be written: .+\."):
            unpack(root / "a", root / "file")
