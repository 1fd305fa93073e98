"""Download published files over HTTP: resume broken connections, try the next mirror after a failure, verify, rename.

NAME             the file, verified and synced before it gets this name
part-NAME        the bytes received so far
part-NAME.json   the address, and the version of the file there (ETag or Last-Modified)
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib import request
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ... import __version__
from ...runtime.files import digest_of, explain_write_error, sync, write_whole

_PIECE = 1 << 18


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
        """The file's name: the end of the address, decoded."""
        return unquote(urlsplit(self.url).path).rsplit("/", 1)[-1]


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def download(
    origins: Sequence[Origin],
    folder: Path,
    *,
    check: Callable[[Path], object] = lambda path: None,
    say: Callable[[str], None] = _print_line,
    attempts: int = 5,
    timeout: float = 30.0,
    pause: float = 1.0,
) -> Path:
    """Download a file to `folder` from the first origin that works. If it is there already, no network is needed.

    Args:
        check: verifies a file without a published digest, or raises `ValueError`.
        say: prints a line of progress.
        attempts: give up an origin after this number of tries in a row without new bytes.
        timeout: treat a connection as broken after this number of seconds without a byte.
        pause: seconds before a new try, doubled after each try without new bytes.

    Raises:
        OSError: a sentence with every address and the reason. The bytes received so far are kept for the next run.
    """
    with explain_write_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for origin in origins:
        path = folder / origin.name
        if path.is_file() and not _difference(path, origin):
            return path
    reasons, kept = [], ""
    for origin in origins:
        path, part = folder / origin.name, folder / f"part-{origin.name}"
        try:
            _Download(origin, part, say, timeout).run(attempts, pause)
            _verify(part, origin, check)
            with explain_write_error(path):
                sync(part)
                part.replace(path)
                _note(part).unlink()
            return path
        except _Refused as refusal:
            reasons.append(f"{origin.url} ({refusal})")
            say(f"{reasons[-1]}: this address is given up.")
        if size := _size(part):
            kept = f"run it again to go on from the {size:,} bytes in {part}, or "
    raise OSError(
        f"{origins[0].name} could not be downloaded from {', nor from '.join(reasons)}: {kept}give --source a copy "
        "that was downloaded by other means."
    )


class _Cut(Exception):
    """A try that ended early. The next one may receive more."""


class _Refused(Exception):
    """An origin that cannot give the file, so another try is useless."""


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _note(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


@dataclass(frozen=True)
class _Download:
    """The download of one file from one origin, over as many connections as needed."""

    origin: Origin
    part: Path
    say: Callable[[str], None]
    timeout: float

    def run(self, attempts: int, pause: float) -> None:
        """Receive the missing bytes; raise `_Refused` if this origin cannot give the file."""
        size = "" if self.origin.bytes is None else f" ({self.origin.bytes:,} bytes)"
        self.say(f"Loading {self.origin.url}{size}.")
        furthest, failed = self._resumable()[0], 0
        with _progress(self.origin.name) as show:
            while furthest != self.origin.bytes:
                try:
                    return self._receive(show)
                except _Cut as cut:
                    size = _size(self.part)
                    failed = 0 if size > furthest else failed + 1
                    furthest = max(furthest, size)
                    if failed >= attempts:
                        raise _Refused(f"{cut}, {failed} times in a row") from cut
                    seconds = min(pause * 2**failed, 30.0)
                    self.say(f"{self.origin.name}: {cut}; {size:,} bytes are here, trying again in {seconds:g} s.")
                    time.sleep(seconds)

    def _resumable(self) -> tuple[int, str]:
        """Number of bytes from which this origin can resume, and their version; 0 if it cannot."""
        try:
            noted = json.loads(_note(self.part).read_text(encoding="utf-8"))
            same = noted["url"] == self.origin.url and noted["version"]
            return (_size(self.part), noted["version"]) if same else (0, "")
        except (OSError, ValueError, KeyError, TypeError):
            return 0, ""

    def _receive(self, show: Callable[[int, int | None], None]) -> None:
        """Receive bytes over one connection; raise `_Cut` if some are missing afterwards."""
        size, version = self._resumable()
        asked = {"Range": f"bytes={size}-", "If-Range": version} if size else {}
        with _ask(self.origin.url, asked, self.timeout) as response:
            there = _version(response.headers)
            resumes = response.headers.get("Content-Range", "").startswith(f"bytes {size}-") and there == version
            if response.status == 200:
                size = 0
                self.part.unlink(missing_ok=True)  # first, because the note must never describe other bytes
                write_whole(_note(self.part), json.dumps({"url": self.origin.url, "version": there}))
            elif not resumes:
                _note(self.part).unlink(missing_ok=True)
                raise _Cut(f"the server does not go on from byte {size:,}, so it starts over")
            total = self.origin.bytes if response.length is None else size + response.length
            if self.origin.bytes not in (None, total):
                raise _Refused(f"it has {total:,} bytes there, and {self.origin.bytes:,} are published")
            with explain_write_error(self.part), self.part.open("ab") as file:
                for piece in _pieces(response):
                    size += file.write(piece)
                    show(size, total)
        if total is not None and size < total:
            raise _Cut(f"the connection ended before the {total:,} bytes were here")


@contextmanager
def _progress(name: str) -> Iterator[Callable[[int, int | None], None]]:
    """Yield a function that shows received and total bytes as a bar on a terminal."""
    title = TextColumn("{task.description}", markup=False)
    columns = (title, BarColumn(bar_width=20), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(name, total=None)
        yield lambda size, total: bar.update(task, completed=size, total=total)


def _verify(part: Path, origin: Origin, check: Callable[[Path], object]) -> None:
    """Compare the received bytes with the published ones; remove and refuse them if they differ."""
    problem = _difference(part, origin)
    if not problem and origin.digest is None:
        try:
            check(part)
        except ValueError as error:
            problem = str(error)
    if problem:
        part.unlink()
        raise _Refused(problem)


def _difference(path: Path, origin: Origin) -> str:
    """The difference between a file and its published size and digest; empty if there is none."""
    if origin.bytes is not None and (size := path.stat().st_size) != origin.bytes:
        return f"it has {size:,} bytes, and {origin.bytes:,} are published"
    if origin.digest is None:
        return ""
    algorithm, _, digest = origin.digest.partition(":")
    found = digest_of(path, algorithm)
    return "" if found == digest else f"its content has {algorithm} {found}, and {digest} is published"


def _ask(url: str, headers: dict[str, str], timeout: float) -> Any:
    """Send a request, and return the response with status 200, 206 or 416."""
    headers = {"User-Agent": f"transformer-xl/{__version__}", "Accept-Encoding": "identity", **headers}
    try:
        return request.urlopen(request.Request(url, headers=headers), timeout=timeout)
    except HTTPError as error:
        if error.code == 416:
            return error
        error.close()
        passing = error.code >= 500 or error.code == 429
        raise (_Cut if passing else _Refused)(f"HTTP {error.code} {error.reason}") from error
    except URLError as error:  # no such host, no connection, no valid certificate
        raise _Refused(_reason(error.reason)) from error
    except (OSError, HTTPException) as error:
        raise _Cut(_reason(error)) from error


def _version(headers: Message) -> str | None:
    """The server's name for this version: a strong ETag, or else the date. If-Range accepts no weak ETag."""
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
