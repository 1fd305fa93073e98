"""Whatever the network does and an archive contains, a file is whole under its name, or it is not there."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server import Server, Turn, serving

from transformer_xl.data.corpora.archive import unpack
from transformer_xl.data.corpora.download import Origin, download, megabytes_per_second

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
    def test_after_any_cuts_the_file_is_whole_and_every_byte_was_sent_once(
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

    def test_a_stall_counts_as_a_cut(self, server, tmp_path) -> None:
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

    def test_a_weak_etag_is_no_condition_and_a_date_is(self, server, tmp_path) -> None:
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
    def test_a_file_that_is_there_needs_no_network(self, server, tmp_path) -> None:
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
        while not (tmp_path / "f.part").exists() or not (tmp_path / "f.part").stat().st_size:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        kept = (tmp_path / "f.part").stat().st_size
        assert 0 < kept < len(CONTENT)
        assert load(Origin(server.url("f")), folder=tmp_path).read_bytes() == CONTENT
        assert script.requests[1]["Range"] == f"bytes={kept}-"

    def test_an_error_of_printing_stops_and_keeps_the_bytes(self, server, tmp_path) -> None:
        script = server.put("f", CONTENT, [Turn(cut=5000), Turn()])

        def stop(line: str) -> None:
            if "trying again" in line:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            download([published(server)], tmp_path, say=stop)
        assert visible(tmp_path) == {"f.part", "f.part.json"}
        load(published(server), folder=tmp_path)
        assert script.sent == len(CONTENT)

    @pytest.mark.parametrize("known", [False, True])
    @pytest.mark.parametrize("kept", [len(CONTENT), len(CONTENT) + 5, 100])
    def test_a_part_of_any_length_becomes_the_file(self, server, tmp_path, kept, known) -> None:
        origin = published(server) if known else Origin(server.url("f"))
        script = server.put("f", CONTENT)
        (tmp_path / "f.part").write_bytes((CONTENT + b"12345")[:kept])
        note = {"url": origin.url, "digest": origin.digest, "version": '"first"'}
        (tmp_path / "f.part.json").write_text(json.dumps(note))
        assert load(origin, folder=tmp_path).read_bytes() == CONTENT
        assert script.sent == {len(CONTENT): 0, 100: len(CONTENT) - 100}.get(kept, len(CONTENT))

    @pytest.mark.parametrize("note", ["", "[]", "{}", '{"url": "http://elsewhere/f", "digest": null, "version": null}'])
    def test_a_part_of_unknown_origin_is_not_used(self, server, tmp_path, note) -> None:
        server.put("f", CONTENT)
        (tmp_path / "f.part").write_bytes(b"?" * 100)
        (tmp_path / "f.part.json").write_text(note)
        assert load(Origin(server.url("f")), folder=tmp_path).read_bytes() == CONTENT

    def test_two_threads_load_once(self, server, tmp_path) -> None:
        script = server.put("f", CONTENT, [Turn(seconds=0.01)])
        lines: list[str] = []
        threads = [
            threading.Thread(target=load, args=[published(server)], kwargs={"folder": tmp_path, "lines": lines})
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (tmp_path / "f").read_bytes() == CONTENT
        assert len(script.requests) == 1
        assert lines.count("f is being loaded by another process: waiting for it.") == 1


class TestMirrors:
    @pytest.mark.parametrize(
        ("turn", "reason", "requests"),
        [
            (Turn(status=404), "HTTP 404 Not Found", 1),
            (Turn(status=403), "HTTP 403 Forbidden", 1),
            (Turn(status=410), "HTTP 410 Gone", 1),
            (Turn(status=503), "HTTP 503 Service Unavailable, 3 times in a row", 3),
            (Turn(says=1), "it has 10,292 bytes there, and 10,291 are published", 1),
            (Turn(body=CONTENT + b"?", silent=True), "it sends more than 10,291 bytes", 1),
            (Turn(body=b"?" * len(CONTENT)), "its content has sha256 [0-9a-f]{64}, and [0-9a-f]{64} is published", 1),
            (Turn(status=302, location="file:///etc/passwd"), "HTTP 302 .*not allowed", 1),
            (Turn(status=302, location="ftp://127.0.0.1/f"), "unknown url type: ftp", 1),
        ],
    )
    def test_after_one_fails_the_next_is_used(self, server, tmp_path, turn, reason, requests) -> None:
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

    def test_passing_errors_are_tried_again_and_redirects_followed(self, server, tmp_path) -> None:
        server.put("moved", b"", [Turn(status=500), Turn(status=302, location=server.url("f"))])
        script = server.put("f", CONTENT, [Turn(cut=5000), Turn()])
        path = load(published(server, "moved"), folder=tmp_path)
        assert path == tmp_path / "moved"
        assert script.sent == len(CONTENT)
        assert all(headers["User-Agent"].startswith("transformer-xl/") for headers in script.requests)

    def test_pieces_of_two_mirrors_are_joined_only_under_a_digest(self, server, tmp_path) -> None:
        for known in (False, True):
            server.put("1/f", CONTENT, [Turn(cut=4000), Turn(status=404)])
            second = server.put("2/f", CONTENT)
            mirrors = [Origin(server.url(f"{number}/f"), None, DIGEST if known else None) for number in (1, 2)]
            assert load(*mirrors, folder=tmp_path / str(known)).read_bytes() == CONTENT
            assert second.sent == len(CONTENT) - 4000 * known

    def test_pieces_that_do_not_fit_are_loaded_once_more_from_the_start(self, server, tmp_path) -> None:
        server.put("f", CONTENT, [Turn(body=b"?" * len(CONTENT), cut=4000), Turn()])
        lines: list[str] = []
        assert load(published(server), folder=tmp_path, lines=lines).read_bytes() == CONTENT
        assert any("in pieces from several connections; loading it from the start." in line for line in lines)

    def test_if_every_address_fails_one_sentence_says_so_and_the_bytes_are_kept(self, server, tmp_path) -> None:
        server.put("1/f", CONTENT, [Turn(cut=4000), Turn(cut=0)])
        with pytest.raises(OSError) as error:
            load(published(server, "1/f"), published(server, "none/f"), folder=tmp_path)
        assert str(error.value) == (
            f"f could not be downloaded from {server.url('1/f')} (the connection ended before the 10,291 bytes were "
            f"here, 3 times in a row), nor from {server.url('none/f')} (HTTP 404 Not Found): run it again to go on "
            f"from the 4,000 bytes "
            f"in {tmp_path / 'f.part'}, or give --source a copy that was downloaded by other means."
        )
        script = server.put("1/f", CONTENT)
        load(published(server, "1/f"), folder=tmp_path)
        assert script.sent == len(CONTENT) - 4000

    def test_the_mirror_of_an_earlier_part_is_asked_first(self, server, tmp_path) -> None:
        mirrors = [Origin(server.url("none/f")), Origin(server.url("2/f"))]
        server.put("2/f", CONTENT, [Turn(cut=4000), Turn(cut=0)])
        with pytest.raises(OSError, match="go on from the 4,000 bytes"):
            load(*mirrors, folder=tmp_path)
        first, second = server.put("1/f", CONTENT), server.put("2/f", CONTENT)
        load(Origin(server.url("1/f")), mirrors[1], folder=tmp_path)
        assert (first.sent, second.sent) == (0, len(CONTENT) - 4000)

    def test_no_connection_is_the_next_mirror_at_once(self, server, tmp_path, monkeypatch) -> None:
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
                "file:///etc/f",
                "ftp://127.0.0.1/f",
            ]
            with pytest.raises(OSError) as error:
                load(*map(Origin, urls), folder=tmp_path)
        for reason in ("Connection refused", "Name or service not known", "SSL", "only http and https"):
            assert reason in str(error.value)
        assert "in a row" not in str(error.value)

    def test_a_full_disk_is_reported_before_loading(self, server, tmp_path, monkeypatch) -> None:
        script = server.put("f", CONTENT)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=7))
        with pytest.raises(OSError, match=r"f needs 10,291 bytes, and .* has 7\. Free some space"):
            load(published(server), folder=tmp_path)
        assert not script.requests

    def test_a_place_that_cannot_be_written_is_named(self, server, tmp_path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(OSError, match=r"file/folder could not be written: .+\."):
            load(published(server), folder=tmp_path / "file" / "folder")

    @pytest.mark.parametrize("last", ["", "..", ".f", "%2e%2e", "x%2f", "a%5Cb", "c%3Ax", "a%00b", "a%0Ab"])
    def test_a_name_that_is_no_plain_file_is_refused(self, tmp_path, last) -> None:
        with pytest.raises(ValueError, match="must end in the plain name of a file"):
            load(Origin(f"http://127.0.0.1/{last}"), folder=tmp_path)

    def test_wrong_bytes_in_pieces_are_loaded_exactly_once_more(self, server, tmp_path) -> None:
        script = server.put("f", CONTENT, [turn for _ in range(9) for turn in (Turn(cut=5000), Turn())])
        origin = Origin(server.url("f"), len(CONTENT), "sha256:" + "0" * 64)
        with pytest.raises(OSError, match="its content has sha256"):
            load(origin, folder=tmp_path)
        assert len(script.requests) == 4

    def test_a_name_is_decoded(self, server, tmp_path) -> None:
        server.put("two words", CONTENT)
        assert load(published(server, "two%20words"), folder=tmp_path) == tmp_path / "two words"


class TestLines:
    def test_a_pipe_gets_a_line_at_the_start_and_one_at_the_end(self, server, tmp_path, capsys) -> None:
        server.put("f", CONTENT)
        download([published(server)], tmp_path)
        start, end = capsys.readouterr().err.splitlines()
        assert start == f"Loading {server.url('f')} (10,291 bytes)."
        assert end.startswith("f: 0.0 MB in ")

    def test_a_terminal_gets_a_bar(self, server, tmp_path, monkeypatch) -> None:
        server.put("f", CONTENT)
        terminal = io.StringIO()
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stderr", terminal)
        download([published(server)], tmp_path)
        assert "10.3/10.3 kB" in terminal.getvalue()
        assert "Loading" not in terminal.getvalue()

    def test_speed_by_hand(self) -> None:
        assert megabytes_per_second(3_000_000, 1.5) == 2
        assert megabytes_per_second(3_000_000, 0.0) == 0


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


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder in which only the archive `a` may be, to unpack into `in/out`."""
    (tmp_path / "in").mkdir()
    return tmp_path


def refused(place: Path, archive: bytes, reason: str, wanted: dict[str, int] | None = None) -> None:
    """Check that the archive is refused with that reason, and that nothing is written."""
    (place / "a").write_bytes(archive)
    with pytest.raises(ValueError, match=reason) as error:
        unpack(place / "a", wanted or {"x": 100}, place / "in" / "out")
    assert str(place / "a") in str(error.value)
    assert {path for path in place.rglob("*") if not path.is_dir()} == {place / "a"}


class TestArchives:
    @pytest.mark.parametrize("kind", KINDS)
    def test_only_the_wanted_files_are_unpacked(self, place, kind) -> None:
        members = [("d/x", CONTENT), ("../../y", b"no"), ("/etc/w", b"no"), ("./d/e/z", b""), ("xx", b"no")]
        (place / "a").write_bytes(KINDS[kind](members))
        found = unpack(place / "a", {"z": 0, "x": len(CONTENT)}, place / "in")
        assert found == {"x": place / "in" / "x", "z": place / "in" / "z"}
        assert found["x"].read_bytes() == CONTENT
        assert {path for path in place.rglob("*") if path.is_file()} == {place / "a", *found.values()}

    @pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
    def test_one_compressed_file_gets_the_one_name(self, place, suffix) -> None:
        (place / "a").write_bytes(COMPRESS[suffix](CONTENT))
        assert unpack(place / "a", {"x": len(CONTENT)}, place)["x"].read_bytes() == CONTENT
        (place / "x").unlink()
        refused(place, COMPRESS[suffix](CONTENT), "is one compressed file", {"x": 99999, "y": 99999})
        refused(place, COMPRESS[suffix](CONTENT), "x has more than 10,290 bytes", {"x": len(CONTENT) - 1})

    @pytest.mark.parametrize("kind", KINDS)
    def test_hostile_members_are_refused(self, place, kind) -> None:
        for path in ("../x", "../../x", "d/../../x", "/etc/x", "C:\\x", "C:x", "..\\x", "\\\\host\\share\\x"):
            refused(place, KINDS[kind]([(path, b"1")]), "points outside the archive")
        refused(place, KINDS[kind]([("x", b"1"), ("d/x", b"2")]), "is the second of the name x")
        refused(place, KINDS[kind]([("x", b"1" * 101)]), "x has more than 100 bytes: a damaged or hostile archive")
        missing = "must hold x, y, z, and has no y, z"
        refused(place, KINDS[kind]([("x", b"1")]), missing, {"x": 1, "y": 1, "z": 1})

    @pytest.mark.parametrize(
        "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]
    )
    def test_members_that_are_no_files_are_refused(self, place, kind) -> None:
        refused(place, tarred([("d/x", b"")], kind, "/etc/passwd"), "is a link, a device or a folder")

    def test_zip_members_that_are_no_files_or_encrypted_are_refused(self, place) -> None:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            info = zipfile.ZipInfo("x")
            info.external_attr = 0o120777 << 16
            archive.writestr(info, "/etc/passwd")
        refused(place, file.getvalue(), "is a link, a device or a folder")
        refused(place, zipped([("x/", b"")]), "is a link, a device or a folder")
        encrypted = bytearray(zipped([("x", b"1")]))
        encrypted[6] |= 1
        encrypted[encrypted.index(b"PK\1\2") + 8] |= 1
        refused(place, bytes(encrypted), "is encrypted")
        refused(place, zipped([("x", b"1")], zipfile.ZIP_LZMA), "another method than deflate")

    def test_a_link_in_the_way_is_replaced_and_not_followed(self, place) -> None:
        (place / "other").write_bytes(b"mine")
        (place / "in" / "x").symlink_to(place / "other")
        (place / "a").write_bytes(tarred([("x", b"1")]))
        assert unpack(place / "a", {"x": 1}, place / "in")["x"].read_bytes() == b"1"
        assert (place / "other").read_bytes() == b"mine"

    @pytest.mark.parametrize("kind", ["zip", "gz", "bz2", "xz", "tar.gz", "sparse", "headers"])
    def test_a_bomb_uses_neither_disk_nor_memory(self, place, kind) -> None:
        zeros, reason = bytes(50_000_000), "more than 100 bytes"
        if kind == "sparse":
            info = tarfile.TarInfo("x")
            info.pax_headers = {"GNU.sparse.map": "0,1", "GNU.sparse.size": "99999999999", "GNU.sparse.name": "x"}
            info.size = 512
            bomb = info.tobuf(tarfile.PAX_FORMAT) + b"1" * 512 + bytes(1024)
        elif kind == "headers":
            info = tarfile.TarInfo("long")
            info.size, info.type = len(zeros), tarfile.GNUTYPE_LONGNAME
            bomb, reason = gzip.compress(info.tobuf() + zeros), "the headers of a member have no end"
        elif kind == "zip":
            bomb = zipped([("x", zeros)])
        else:
            bomb = COMPRESS[f".{kind[-3:].strip('.')}"](tarred([("x", zeros)]) if "tar" in kind else zeros)
        del zeros
        tracemalloc.start()
        refused(place, bomb, reason)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 20_000_000

    @pytest.mark.parametrize("kind", [*KINDS, "gz", "bz2", "xz"])
    def test_an_archive_that_is_cut_short_is_refused(self, place, kind) -> None:
        text = os.urandom(20_011)
        archive = KINDS[kind]([("x", text)]) if kind in KINDS else COMPRESS[f".{kind}"](text)
        for share in (3, 2):
            refused(place, archive[: len(archive) // share], "cannot be unpacked: .+ Download it again", {"x": 20_011})
        refused(place, archive[:4], "cannot be unpacked|is neither", {"x": 20_011})

    @settings(max_examples=100, deadline=None)
    @given(kind=st.sampled_from(sorted(KINDS)), damages=DAMAGES)
    def test_an_archive_with_flipped_bytes_is_right_or_refused(self, kind, damages) -> None:
        archive = bytearray(KINDS[kind]([("y", CONTENT), ("x", b"12345")]))
        for position, flip in damages:
            archive[position % len(archive)] ^= flip
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "a")
            path.write_bytes(archive)
            try:
                unpack(path, {"x": 5}, Path(folder, "out"))
            except ValueError as error:
                assert str(path) in str(error)
                assert not list(Path(folder).glob("out/*"))
            else:
                assert kind == "tar" or Path(folder, "out", "x").read_bytes() == b"12345"

    def test_a_file_that_is_no_archive_gets_a_sentence(self, place) -> None:
        refused(place, b"<html>Not Found</html>", "must be a zip, a tar or a file in gzip, bzip2 or xz")
        refused(place, b"", "must be a zip, a tar or a file in gzip, bzip2 or xz")
        with pytest.raises(FileNotFoundError, match="There is no file"):
            unpack(place / "none", {"x": 1}, place)

    def test_a_place_that_cannot_be_written_is_named(self, place) -> None:
        (place / "in" / "x").mkdir()
        (place / "a").write_bytes(tarred([("x", b"1")]))
        with pytest.raises(OSError, match=r"in/x could not be written: .+\."):
            unpack(place / "a", {"x": 1}, place / "in")
        assert (place / "in" / "x").is_dir()
