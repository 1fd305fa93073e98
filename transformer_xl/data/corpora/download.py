"""Download published files over HTTP: resume after a cut, try the next mirror after a failure, verify, then rename.

NAME             the file, verified and synced before it gets this name
NAME.part        the bytes received so far
NAME.part.json   their address, and their version at that address (ETag or Last-Modified)
.NAME.lock       the lock of the process that downloads it
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib import request
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit

from filelock import FileLock, Timeout

from ... import __version__
from ...mistake import Mistake
from ...runtime.files import digest_of, explain_write_error, write_whole

_PIECE = 1 << 18
_LONGEST_PAUSE = 30.0


@dataclass(frozen=True)
class Origin:
    """One address of a file."""

    url: str
    bytes: int | None = None
    """Exact length; None if it is not published."""
    digest: str | None = None
    """"sha256:..." or "md5:..."; None if it is not published."""

    @property
    def name(self) -> str:
        """The file's name: the end of the address, decoded.

        Raises:
            ValueError: that is no plain name.
        """
        name = unquote(urlsplit(self.url).path).rsplit("/", 1)[-1]
        if name.startswith(".") or not re.fullmatch(r"[^/\\:\x00-\x1f]+", name):
            raise Mistake(f"An address must end in the plain name of a file, got {self.url}.")
        return name


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def download(
    origins: Sequence[Origin],
    folder: Path,
    *,
    check: Callable[[Path], str] = lambda path: "",
    say: Callable[[str], None] = _say,
    attempts: int = 5,
    timeout: float = 30.0,
    pause: float = 1.0,
) -> Path:
    """Download the file of the first origin that works to `folder`; no network is needed if it is there already.

    Args:
        check: returns the problem of a file without a published digest; empty if there is none.
        say: prints a line for people.
        attempts: give up an origin after this many tries in a row without new bytes.
        timeout: treat a connection as cut after this many seconds without a byte.
        pause: seconds before a new try, doubled after each try without new bytes.

    Raises:
        OSError: one sentence with every address and the reason; the bytes received so far are kept for the next run.
    """
    files = [(origin, folder / origin.name) for origin in origins]
    for origin, path in files:
        if _is_there(path, origin):
            return path
    with explain_write_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
    files.sort(key=lambda file: _Part(file[1]).usable(file[0])[0] == 0)  # first a file that an earlier run began
    reasons = []
    for origin, path in files:
        with _one_at_a_time(path, say):
            if _is_there(path, origin):
                return path
            try:
                _Download(origin, _Part(path), check, say, attempts, timeout, pause).run()
                return path
            except _Refused as refusal:
                reasons.append(f"{origin.url} ({refusal})")
                say(f"{reasons[-1]}: this address is given up.")
    raise OSError(_all_failed(files, reasons))


def _all_failed(files: Sequence[tuple[Origin, Path]], reasons: Sequence[str]) -> str:
    kept = {part.path: part.size for _, path in files if (part := _Part(path)).size}
    again = "".join(f"run it again to go on from the {size:,} bytes in {path}, or " for path, size in kept.items())
    advice = f"{again}give --source a copy that was downloaded by other means."
    return f"{files[0][0].name} could not be downloaded from {', nor from '.join(reasons)}: {advice}"


def megabytes_per_second(loaded: int, seconds: float) -> float:
    """Throughput in 10^6 bytes per second; 0 if no time has passed."""
    return loaded / seconds / 1e6 if seconds > 0 else 0.0


class _Cut(Exception):
    """A try ended early; the next one may receive more."""


class _Refused(Exception):
    """An origin does not give the file, however often it is asked."""


@dataclass(frozen=True)
class _Part:
    """The bytes of the file `whole` received so far, and the note about their origin."""

    whole: Path

    @property
    def path(self) -> Path:
        return self.whole.with_name(f"{self.whole.name}.part")

    @property
    def note(self) -> Path:
        return self.whole.with_name(f"{self.whole.name}.part.json")

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def usable(self, origin: Origin) -> tuple[int, str | None]:
        """Number of bytes after which `origin` can resume, and their version at its address.

        Bytes from another address count only if both addresses publish the same digest, which verifies the whole.
        """
        try:
            noted = json.loads(self.note.read_text(encoding="utf-8"))
            here, same = noted["url"] == origin.url, noted["digest"] == origin.digest is not None
            size = self.size if here or same else 0
            return (0 if origin.bytes is not None and size > origin.bytes else size), noted["version"] if here else None
        except (OSError, ValueError, KeyError, TypeError):
            return 0, None

    def begin(self, origin: Origin, version: str | None) -> None:
        """Start an empty part for `origin`; old bytes are removed first, so a note never describes other bytes."""
        self.remove()
        write_whole(self.note, json.dumps({"url": origin.url, "digest": origin.digest, "version": version}))

    def remove(self) -> None:
        with explain_write_error(self.path):
            self.path.unlink(missing_ok=True)
            self.note.unlink(missing_ok=True)

    def rename(self) -> None:
        """Give the file its name after the disk holds it."""
        with explain_write_error(self.whole):
            with self.path.open("rb+") as file:
                os.fsync(file.fileno())
            self.path.replace(self.whole)
            self.note.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Download:
    """The download of one file from one origin, over as many connections as needed."""

    origin: Origin
    part: _Part
    check: Callable[[Path], str]
    say: Callable[[str], None]
    attempts: int
    timeout: float
    pause: float

    def run(self) -> None:
        """Receive, verify, rename. `_Refused` means that this origin cannot give the file."""
        if urlsplit(self.origin.url).scheme not in ("http", "https"):
            raise _Refused("only http and https are loaded from")
        self._check_space()
        for last in (False, True):
            resumed = self._fill()
            found = _difference(self.part.path, self.origin)
            found = found or ("" if self.origin.digest else self.check(self.part.path))
            if not found:
                return self.part.rename()
            self.part.remove()
            if last or not resumed:
                raise _Refused(found)
            self.say(f"{self.origin.name}: {found}, in pieces from several connections; loading it from the start.")

    def _check_space(self) -> None:
        needed = (self.origin.bytes or 0) - self.part.usable(self.origin)[0]
        folder = self.part.whole.parent
        if needed > (free := shutil.disk_usage(folder).free):
            full = OSError(f"{self.origin.name} needs {needed:,} bytes, and {folder} has {free:,}. Free some space.")
            full.errno = errno.ENOSPC
            raise full

    def _fill(self) -> bool:
        """Try until the part is whole; return whether it came over several connections."""
        furthest, failed = self.part.usable(self.origin)[0], 0
        with _Meter(self.origin, furthest, self.say) as meter:
            while True:
                try:
                    return self._try(meter) > 0
                except _Cut as cut:
                    size = self.part.size
                    failed = 0 if size > furthest else failed + 1
                    furthest = max(furthest, size)
                    if failed >= self.attempts:
                        raise _Refused(f"{cut}, {failed} times in a row") from cut
                    seconds = min(self.pause * 2**failed, _LONGEST_PAUSE)
                    self.say(f"{self.origin.name}: {cut}; {size:,} bytes are here, trying again in {seconds:g} s.")
                    time.sleep(seconds)

    def _try(self, meter: _Meter) -> int:
        """Receive the missing bytes over one connection; return the position of the first. `_Cut`: some are missing."""
        offset, version = self.part.usable(self.origin)
        if offset and offset == self.origin.bytes:
            return offset
        asked = {"Range": f"bytes={offset}-"} | ({"If-Range": version} if version else {}) if offset else {}
        with _ask(self.origin.url, asked, self.timeout) as response:
            start, total = _extent(response)
            there = _version(response.headers)
            changed = version is not None and there not in (None, version)
            if response.status == 416 and total == offset and not changed:
                return offset
            if response.status != 200 and (start != offset or changed):
                self.part.remove()
                raise _Cut(f"the server does not go on from byte {offset:,}, so it starts over")
            if None not in (total, self.origin.bytes) and total != self.origin.bytes:
                raise _Refused(f"it has {total:,} bytes there, and {self.origin.bytes:,} are published")
            if start == 0:
                self.part.begin(self.origin, there)
            assert start is not None, "a response that does not start at the offset was refused"
            self._append(response, start, total if self.origin.bytes is None else self.origin.bytes, meter)
        return start

    def _append(self, response: Any, size: int, total: int | None, meter: _Meter) -> None:
        with explain_write_error(self.part.path), self.part.path.open("ab") as file:
            for piece in _pieces(response):
                size += len(piece)
                if total is not None and size > total:
                    self.part.remove()
                    raise _Refused(f"it sends more than {total:,} bytes")
                file.write(piece)
                meter.add(len(piece), size, total)
        if total is not None and size < total:
            raise _Cut(f"the connection ended before the {total:,} bytes were here")


class _Meter:
    """Progress: a bar on a terminal, otherwise one line at the start and one at the end."""

    def __init__(self, origin: Origin, at: int, say: Callable[[str], None]):
        self.name, self.say = origin.name, say
        self.loaded, self.began = 0, time.monotonic()
        self.bar = _bar() if sys.stderr.isatty() else None
        if self.bar:
            self.task = self.bar.add_task(self.name, total=origin.bytes, completed=at)
        else:
            size = "" if origin.bytes is None else f" ({origin.bytes:,} bytes)"
            say(f"Loading {origin.url}{size}{f', going on from byte {at:,}' if at else ''}.")

    def __enter__(self) -> _Meter:
        if self.bar:
            self.bar.start()
        return self

    def add(self, loaded: int, at: int, total: int | None) -> None:
        self.loaded += loaded
        if self.bar:
            self.bar.update(self.task, completed=at, total=total)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.bar:
            self.bar.stop()
        elif error is None:
            seconds = time.monotonic() - self.began
            speed = megabytes_per_second(self.loaded, seconds)
            self.say(f"{self.name}: {self.loaded / 1e6:.1f} MB in {seconds:.1f} s, {speed:.1f} MB/s.")


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    name = TextColumn("{task.description}", markup=False)
    columns = (name, BarColumn(bar_width=20), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True))


@contextmanager
def _one_at_a_time(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Let one process at a time download `path`."""
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    with explain_write_error(path):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"{path.name} is being loaded by another process: waiting for it.")
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _is_there(path: Path, origin: Origin) -> bool:
    return path.is_file() and not _difference(path, origin)


def _difference(path: Path, origin: Origin) -> str:
    """The difference between a file and what is published of it; empty if there is none."""
    if origin.bytes is not None and (size := path.stat().st_size) != origin.bytes:
        return f"it has {size:,} bytes, and {origin.bytes:,} are published"
    if origin.digest is None:
        return ""
    algorithm, _, digest = origin.digest.partition(":")
    assert algorithm in ("sha256", "md5"), f"a digest is sha256:... or md5:..., not {origin.digest}"
    found = digest_of(path, algorithm)
    return "" if found == digest.lower() else f"its content has {algorithm} {found}, and {digest} is published"


def _ask(url: str, headers: dict[str, str], timeout: float) -> Any:
    """The response, of status 200, 206 or 416."""
    opener = request.OpenerDirector()  # the usual opener also loads from file:, data: and ftp:
    proxies = {scheme: proxy for scheme, proxy in request.getproxies().items() if scheme in ("http", "https")}
    for handler in (
        request.ProxyHandler(proxies),
        request.HTTPHandler(),
        request.HTTPSHandler(),
        request.HTTPRedirectHandler(),
        request.HTTPErrorProcessor(),
        request.HTTPDefaultErrorHandler(),
        request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    headers = {"User-Agent": f"transformer-xl/{__version__}", "Accept-Encoding": "identity", **headers}
    try:
        response = opener.open(request.Request(url, headers=headers), timeout=timeout)
    except HTTPError as error:
        if error.code == 416:
            return error
        error.close()
        passing = error.code >= 500 or error.code in (408, 429)
        raise (_Cut if passing else _Refused)(f"HTTP {error.code} {error.reason}") from error
    except URLError as error:
        reason = error.reason
        passing = isinstance(reason, TimeoutError | ConnectionResetError | ConnectionAbortedError | BrokenPipeError)
        raise (_Cut if passing else _Refused)(_reason(reason)) from error
    except (OSError, HTTPException) as error:
        raise _Cut(_reason(error)) from error
    assert response is not None, "a handler answers every address"
    if response.status not in (200, 206):
        response.close()
        raise _Refused(f"HTTP {response.status}, without a file")
    return response


def _extent(response: Any) -> tuple[int | None, int | None]:
    """The position in the file at which the response starts, and the file's length; None if the server omits it."""
    if response.status == 200:
        return 0, response.length
    found = re.fullmatch(r"bytes (?:\*|(\d+)-\d+)/(\d+|\*)", response.headers.get("Content-Range", "").strip())
    start, total = found.groups() if found else (None, None)
    return None if start is None else int(start), int(total) if total and total != "*" else None


def _version(headers: Message) -> str | None:
    """The server's name for this version: a strong ETag or the date, because If-Range accepts no weak ETag."""
    tag = headers.get("ETag")
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified")


def _pieces(response: Any) -> Iterator[bytes]:
    try:
        while piece := response.read1(_PIECE):
            yield piece
    except (OSError, HTTPException) as error:
        raise _Cut(_reason(error)) from error


def _reason(error: object) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
