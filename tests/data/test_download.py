"""A file is whole under its name or absent, whatever the network does and an archive contains."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from server import Server, Turn, serving

from transformer_xl.data.corpora import archive as archives
from transformer_xl.data.corpora.archive import unpack_if_archive
from transformer_xl.data.corpora.download import Origin, download
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
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


def load(*origins: Origin, folder: Path, lines: list[str] | None = None, timeout: float = 5.0) -> Path:
    say = [].append if lines is None else lines.append
    return download(origins, folder, say=say, attempts=3, timeout=timeout, pause=0.001)


def published(server: Server, name: str = "f") -> Origin:
    return Origin(server.url(name), len(CONTENT), DIGEST)


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


class TestCuts:
    @settings(max_examples=30, deadline=None)
    @given(
        cuts=st.lists(st.integers(1, 3000), max_size=7).filter(lambda cuts: sum(cuts) < len(CONTENT)),
        known=st.booleans(),
        ranges=st.booleans(),
        chunked=st.booleans(),
    )
    def test_after_any_interruptions_the_file_is_whole_and_every_byte_was_sent_once(
        self, server, cuts, known, ranges, chunked
    ) -> None:
        cuts = cuts if ranges else sorted(set(cuts))[-2:]  # without ranges, only a longer piece is progress
        script = server.put("f", CONTENT, [Turn(cut=cut, ranges=ranges, chunked=chunked) for cut in cuts] + [Turn()])
        with tempfile.TemporaryDirectory() as folder:
            path = load(published(server) if known else Origin(server.url("f")), folder=Path(folder))
            assert path.read_bytes() == CONTENT
            assert visible(Path(folder)) == {"f"}
        assert len(script.requests) == len(cuts) + 1
        if ranges:
            assert script.sent == len(CONTENT)
            assert [headers.get("If-Range") for headers in script.requests] == [None] + ['"first"'] * len(cuts)

    def test_a_try_with_new_bytes_does_not_count(self, server, tmp_path) -> None:
        server.put("f", CONTENT, [Turn(cut=2000)] * 5 + [Turn()])
        assert load(published(server), folder=tmp_path).read_bytes() == CONTENT

    @pytest.mark.parametrize("turn", [Turn(cut=700, ranges=False), Turn(status=500), Turn(status=429), Turn(cut=0)])
    def test_tries_without_new_bytes_end(self, server, tmp_path, turn) -> None:
        script = server.put("f", CONTENT, [turn])
        with pytest.raises(OSError, match="3 times in a row"):
            load(published(server), folder=tmp_path)
        assert len(script.requests) == 3 + (turn.cut == 700)

    def test_a_stall_counts_as_an_interruption(self, server, tmp_path) -> None:
        script = server.put("f", CONTENT, [Turn(stall=3000), Turn()])
        lines: list[str] = []
        assert load(published(server), folder=tmp_path, lines=lines, timeout=0.1).read_bytes() == CONTENT
        assert script.requests[1]["Range"] == "bytes=3000-"
        assert any("timed out; 3,000 bytes are here, trying again in 0.001 s." in line for line in lines)

    @pytest.mark.parametrize(
        "second",
        [
            Turn(body=CONTENT, ranges=False),
            Turn(body=CONTENT, shift=7),
            Turn(body=CONTENT, etag='"second"'),
            Turn(body=CONTENT, etag='"second"', obeys=False),
            Turn(body=CONTENT[:1000], obeys=False),
        ],
    )
    def test_bytes_that_do_not_fit_are_loaded_from_the_start(self, server, tmp_path, second) -> None:
        server.put("f", b"?" * len(CONTENT), [Turn(cut=3000), second, Turn(body=CONTENT, etag='"second"')])
        assert load(Origin(server.url("f")), folder=tmp_path).read_bytes() == CONTENT

    def test_a_date_makes_a_request_conditional_and_a_weak_etag_does_not(self, server, tmp_path) -> None:
        date = "Sat, 21 Nov 2026 12:00:00 GMT"
        turns = [Turn(etag='W/"1"', modified=date, cut=1000), Turn(etag='W/"2"', modified=date)]
        script = server.put("f", CONTENT, turns)
        assert load(Origin(server.url("f")), folder=tmp_path).read_bytes() == CONTENT
        assert script.requests[1]["If-Range"] == date
        assert script.sent == len(CONTENT)

    def test_a_file_without_a_length_ends_with_the_connection(self, server, tmp_path) -> None:
        server.put("f", CONTENT, [Turn(silent=True)])
        assert load(Origin(server.url("f")), folder=tmp_path).read_bytes() == CONTENT


class TestLaterProcesses:
    def test_an_existing_file_needs_no_network(self, server, tmp_path) -> None:
        script = server.put("f", CONTENT)
        for origin in (published(server), Origin(server.url("f"))):
            assert load(origin, folder=tmp_path).read_bytes() == CONTENT
        (tmp_path / "f").write_bytes(CONTENT[:-1] + b"?")
        assert load(published(server), folder=tmp_path).read_bytes() == CONTENT
        assert len(script.requests) == 2

    def test_a_killed_download_resumes(self, server, tmp_path) -> None:
        script = server.put("f", CONTENT, [Turn(seconds=0.01), Turn()])
        code = "import sys, pathlib; from transformer_xl.data.corpora.download import Origin, download\n"
        code += f"download([Origin({server.url('f')!r})], pathlib.Path({str(tmp_path)!r}))"
        process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
        while not (tmp_path / "part-f").exists() or not (tmp_path / "part-f").stat().st_size:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        kept = (tmp_path / "part-f").stat().st_size
        assert 0 < kept < len(CONTENT)
        assert load(Origin(server.url("f")), folder=tmp_path).read_bytes() == CONTENT
        assert script.requests[1]["Range"] == f"bytes={kept}-"

    def test_a_printing_error_stops_the_download_and_keeps_the_bytes(self, server, tmp_path) -> None:
        script = server.put("f", CONTENT, [Turn(cut=5000), Turn()])

        def stop(line: str) -> None:
            if "trying again" in line:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            download([published(server)], tmp_path, say=stop)
        assert visible(tmp_path) == {"part-f", "part-f.json"}
        load(published(server), folder=tmp_path)
        assert script.sent == len(CONTENT)

    @pytest.mark.parametrize("known", [False, True])
    @pytest.mark.parametrize("kept", [len(CONTENT), len(CONTENT) + 5, 100])
    def test_a_part_of_any_length_becomes_the_file(self, server, tmp_path, kept, known) -> None:
        origin = published(server) if known else Origin(server.url("f"))
        script = server.put("f", CONTENT)
        (tmp_path / "part-f").write_bytes((CONTENT + b"12345")[:kept])
        note = {"url": origin.url, "version": '"first"'}
        (tmp_path / "part-f.json").write_text(json.dumps(note))
        assert load(origin, folder=tmp_path).read_bytes() == CONTENT
        whole = 0 if known else len(CONTENT)
        assert script.sent == {len(CONTENT): whole, 100: len(CONTENT) - 100}.get(kept, len(CONTENT))

    @pytest.mark.parametrize("note", ["", "[]", "{}", '{"url": "http://elsewhere/f", "digest": null, "version": null}'])
    def test_a_part_of_unknown_origin_is_not_used(self, server, tmp_path, note) -> None:
        server.put("f", CONTENT)
        (tmp_path / "part-f").write_bytes(b"?" * 100)
        (tmp_path / "part-f.json").write_text(note)
        assert load(Origin(server.url("f")), folder=tmp_path).read_bytes() == CONTENT


class TestMirrors:
    @pytest.mark.parametrize(
        ("turn", "reason", "requests"),
        [
            (Turn(status=404), "HTTP 404 Not Found", 1),
            (Turn(status=403), "HTTP 403 Forbidden", 1),
            (Turn(status=410), "HTTP 410 Gone", 1),
            (Turn(status=503), "HTTP 503 Service Unavailable, 3 times in a row", 3),
            (Turn(says=1), "it has 10,292 bytes there, and 10,291 are published", 1),
            (Turn(body=CONTENT + b"?", silent=True), "it has 10,292 bytes, and 10,291 are published", 1),
            (Turn(body=b"?" * len(CONTENT)), "its content has sha256 [0-9a-f]{64}, and [0-9a-f]{64} is published", 1),
            (Turn(status=302, location="file:///etc/passwd"), "HTTP 302 .*not allowed", 1),
        ],
    )
    def test_after_one_address_fails_the_next_is_used(self, server, tmp_path, turn, reason, requests) -> None:
        bad, good = server.put("bad/f", CONTENT, [turn]), server.put("good/f", CONTENT)
        with pytest.raises(OSError, match=reason):
            load(published(server, "bad/f"), folder=tmp_path)
        assert "f" not in visible(tmp_path)
        bad.requests.clear()
        lines: list[str] = []
        path = load(published(server, "bad/f"), published(server, "good/f"), folder=tmp_path, lines=lines)
        assert path.read_bytes() == CONTENT
        assert (len(bad.requests), len(good.requests)) == (requests, 1)
        assert any("this address is given up" in line for line in lines)

    def test_temporary_errors_are_retried_and_redirects_followed(self, server, tmp_path) -> None:
        server.put("moved", b"", [Turn(status=500), Turn(status=302, location=server.url("f"))])
        script = server.put("f", CONTENT, [Turn(cut=5000), Turn()])
        path = load(published(server, "moved"), folder=tmp_path)
        assert path == tmp_path / "moved"
        assert script.sent == len(CONTENT)
        assert all(headers["User-Agent"].startswith("transformer-xl/") for headers in script.requests)

    def test_if_every_address_fails_one_sentence_says_so_and_the_bytes_are_kept(self, server, tmp_path) -> None:
        server.put("1/f", CONTENT, [Turn(cut=4000), Turn(cut=0)])
        with pytest.raises(OSError) as error:
            load(published(server, "1/f"), published(server, "none/f"), folder=tmp_path)
        assert str(error.value) == (
            f"f could not be downloaded from {server.url('1/f')} (the connection ended before the 10,291 bytes were "
            f"here, 3 times in a row), nor from {server.url('none/f')} (HTTP 404 Not Found): run it again to go on "
            f"from the 4,000 bytes "
            f"in {tmp_path / 'part-f'}, or give --source a copy that was downloaded by other means."
        )
        script = server.put("1/f", CONTENT)
        load(published(server, "1/f"), folder=tmp_path)
        assert script.sent == len(CONTENT) - 4000

    def test_without_a_connection_the_next_mirror_is_used_at_once(self, server, tmp_path, monkeypatch) -> None:
        resolve = socket.getaddrinfo

        def fail(host: str, *args, **kwargs):
            if host == "nowhere.test":
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return resolve(host, *args, **kwargs)

        monkeypatch.setattr(socket, "getaddrinfo", fail)
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            urls = [
                f"http://127.0.0.1:{closed.getsockname()[1]}/f",
                "http://nowhere.test/f",
                server.url("f").replace("http", "https"),
            ]
            with pytest.raises(OSError) as error:
                load(*map(Origin, urls), folder=tmp_path)
        for reason in ("Connection refused", "Name or service not known", "SSL"):
            assert reason in str(error.value)
        assert "in a row" not in str(error.value)

    def test_a_place_that_cannot_be_written_is_named(self, server, tmp_path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(OSError, match=r"file/folder could not be written: .+\."):
            load(published(server), folder=tmp_path / "file" / "folder")

    def test_a_percent_encoded_name_is_decoded(self, server, tmp_path) -> None:
        server.put("two words", CONTENT)
        assert load(published(server, "two%20words"), folder=tmp_path) == tmp_path / "two words"


class TestLines:
    def test_a_pipe_gets_lines_of_progress(self, server, tmp_path, capsys) -> None:
        server.put("f", CONTENT)
        download([published(server)], tmp_path)
        assert capsys.readouterr().err == f"Loading {server.url('f')} (10,291 bytes).\n"

    def test_a_terminal_gets_a_progress_bar(self, server, tmp_path, monkeypatch) -> None:
        server.put("f", CONTENT)
        terminal = io.StringIO()
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stderr", terminal)
        download([published(server)], tmp_path)
        assert "10.3/10.3 kB" in terminal.getvalue()


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
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which only the archive `a` may be, to unpack at most 20,011 bytes below `in`."""
    (tmp_path / "in").mkdir()
    monkeypatch.setattr(archives, "_UNPACKED", 20_011)
    monkeypatch.setattr(archives, "_RATIO", 0)
    return tmp_path


def files_below(place: Path) -> set[Path]:
    return {path for path in place.rglob("*") if not path.is_dir() and path.suffix != ".lock"}


def refused(place: Path, archive: bytes, reason: str) -> None:
    """Check that the archive is refused with that reason, and that nothing remains."""
    (place / "a").write_bytes(archive)
    with pytest.raises(ValueError, match=reason) as error:
        unpack(place / "a", place / "in")
    assert str(place / "a") in str(error.value)
    assert files_below(place) == {place / "a"}


HOSTILE = ("../x", "../../x", "d/../../x", "/etc/x", "C:\\x", "C:x", "..\\x", "\\\\host\\share\\x")


class TestArchives:
    @pytest.mark.parametrize("kind", KINDS)
    def test_files_keep_their_paths_and_are_removed_afterwards(self, place, kind) -> None:
        (place / "a").write_bytes(KINDS[kind]([("d/x", CONTENT), ("./d/e/z", b""), ("xx", b"no")]))
        assert unpack(place / "a", place / "in") == {"d/x": CONTENT, "d/e/z": b"", "xx": b"no"}
        assert files_below(place) == {place / "a"}

    @pytest.mark.parametrize("path", HOSTILE)
    @pytest.mark.parametrize("kind", KINDS)
    def test_no_path_leads_outside(self, place, kind, path) -> None:
        (place / "a").write_bytes(KINDS[kind]([(path, b"1")]))
        before = files_below(Path("/etc"))
        try:
            with unpack_if_archive(place / "a", place / "in") as folder:
                assert all(file.is_relative_to(folder) for file in files_below(place) - {place / "a"})
        except ValueError as error:
            assert "outside the destination" in str(error)
        assert files_below(place) == {place / "a"} and files_below(Path("/etc")) == before

    @pytest.mark.parametrize(
        "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]
    )
    def test_members_that_are_not_files_are_left_out(self, place, kind) -> None:
        (place / "a").write_bytes(tarred([("d/x", b"")], kind, "/etc/passwd"))
        assert unpack(place / "a", place / "in") == {}

    @pytest.mark.filterwarnings("ignore:Duplicate name")
    @pytest.mark.parametrize("other", ["d/x", "./d/x"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_two_files_of_one_name_are_refused(self, place, kind, other) -> None:
        refused(place, KINDS[kind]([("d/x", b"one"), (other, b"two")]), "has 2 files named d/x. Unpack it")

    def test_a_mistake_in_a_file_names_the_archive_and_no_temporary_folder(self, place) -> None:
        (place / "a").write_bytes(zipped([("d/x.jsonl", b'{"text": "x"}\n{"no": 1}\n')]))
        with pytest.raises(Mistake, match="must be a JSON string") as error:
            open_corpus(place / "a")
        assert str(error.value).startswith(f"{place / 'a'}/d/x.jsonl, line 2")

    def test_an_encrypted_archive_is_refused(self, place) -> None:
        encrypted = bytearray(zipped([("x", b"1")]))
        encrypted[6] |= 1
        encrypted[encrypted.index(b"PK\1\2") + 8] |= 1
        refused(place, bytes(encrypted), "is encrypted")

    @pytest.mark.parametrize("kind", ["zip", "tar.gz", "tar.bz2", "tar.xz", "sparse"])
    def test_an_archive_bomb_uses_neither_disk_nor_memory(self, place, kind) -> None:
        zeros = bytes(50_000_000)
        if kind == "sparse":
            info = tarfile.TarInfo("x")
            info.pax_headers = {"GNU.sparse.map": "0,1", "GNU.sparse.size": "99999999999", "GNU.sparse.name": "x"}
            info.size = 512
            bomb = info.tobuf(tarfile.PAX_FORMAT) + b"1" * 512 + bytes(1024)
        else:
            bomb = KINDS[kind]([("x", zeros)])
        del zeros
        tracemalloc.start()
        refused(place, bomb, "its files have more than 20,011 bytes")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 20_000_000

    @pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
    @pytest.mark.parametrize("member", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE], ids=["name", "pax"])
    def test_a_long_header_in_a_tar_is_not_read_into_memory(self, place, member, first) -> None:
        long, plain = tarfile.TarInfo("long"), tarfile.TarInfo("x")
        long.size, long.type = 50_000_000, member
        bomb = gzip.compress((b"" if first else plain.tobuf()) + long.tobuf() + bytes(long.size))
        tracemalloc.start()
        refused(place, bomb, "a member has a header of 50,000,000 bytes")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 20_000_000

    @pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"tar.bz2"}))  # its first block holds the header
    def test_an_archive_that_is_cut_short_is_refused(self, place, kind) -> None:
        archive = KINDS[kind]([("x", os.urandom(20_011))])
        for share in (3, 2):
            refused(place, archive[: len(archive) // share], "cannot be unpacked: .+ Download it again")

    @settings(max_examples=100, deadline=None)
    @given(kind=st.sampled_from(sorted(KINDS)), damages=DAMAGES)
    @example(kind="zip", damages=[(-4, 1)])  # its files begin before it
    def test_an_archive_with_flipped_bytes_is_right_or_refused(self, kind, damages) -> None:
        archive = bytearray(KINDS[kind]([("y", CONTENT), ("x", b"12345")]))
        for position, flip in damages:
            archive[position % len(archive)] ^= flip
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "a")
            path.write_bytes(archive)
            try:
                with unpack_if_archive(path, Path(folder)) as inside:
                    right = (
                        inside == path or (inside / "x").read_bytes() == b"12345" if (inside / "x").exists() else True
                    )
            except (ValueError, OSError) as error:
                assert str(path) in str(error)
            else:
                assert kind == "tar" or right
            assert {file.name for file in Path(folder).iterdir()} <= {"a", ".a.lock"}

    @pytest.mark.parametrize("content", [b"<html>Not Found</html>", b"", bytes(2000), gzip.compress(CONTENT)])
    def test_a_file_that_is_not_an_archive_is_refused(self, place, content) -> None:
        (place / "a").write_bytes(content)
        with unpack_if_archive(place / "a", place / "in") as found:
            assert found == place / "a"

    def test_a_place_that_cannot_be_written_is_named(self, place) -> None:
        (place / "a").write_bytes(tarred([("x", b"1")]))
        (place / "file").touch()
        with pytest.raises(OSError, match=r"file could not be written: .+\."):
            unpack(place / "a", place / "file")
