"""A web server on this machine that behaves as badly as it is told to, request by request."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote


@dataclass(frozen=True)
class Turn:
    """How one request is answered; as it is, an honest answer with the whole file or the range asked for."""

    status: int | None = None
    """Instead of the file."""
    location: str | None = None
    """Where to, with a status of 3xx."""
    body: bytes | None = None
    """What the file holds this time."""
    etag: str | None = '"first"'
    modified: str | None = None
    cut: int | None = None
    """The connection ends after so many bytes of the body."""
    stall: int | None = None
    """Silence after so many bytes of the body, for as long as the server lives."""
    seconds: float = 0.0
    """Time each kilobyte takes."""
    ranges: bool = True
    """Whether ranges are served, and If-Range is obeyed."""
    obeys: bool = True
    """Whether If-Range is looked at."""
    shift: int = 0
    """How far the start that Content-Range tells is off."""
    says: int = 0
    """How many bytes more than there are Content-Length promises."""
    silent: bool = False
    """No Content-Length: the body ends with the connection."""
    chunked: bool = False


@dataclass
class Script:
    """The file at one path, and a turn for each request; the last one stays."""

    content: bytes
    turns: list[Turn] = field(default_factory=lambda: [Turn()])
    requests: list[dict[str, str]] = field(default_factory=list)
    """The headers that came."""
    sent: int = 0
    """Bytes of bodies, all requests together."""


class Server(ThreadingHTTPServer):
    """Serves the scripts that `put` was given."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.scripts: dict[str, Script] = {}
        self.closing = threading.Event()

    def put(self, name: str, content: bytes, turns: Sequence[Turn] = (Turn(),)) -> Script:
        self.scripts[f"/{name}"] = script = Script(content, list(turns))
        return script

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"


@contextmanager
def serving() -> Iterator[Server]:
    """A server for the time of a `with`."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.close_connection = True
        script = self.server.scripts.get(unquote(self.path), Script(b"", [Turn(status=404)]))
        script.requests.append(dict(self.headers.items()))
        turn = script.turns.pop(0) if len(script.turns) > 1 else script.turns[0]
        content = script.content if turn.body is None else turn.body
        if turn.status is not None:
            self._refuse(turn.status, {"Location": turn.location} if turn.location else {})
            return
        start = self._start(turn)
        if start and start >= len(content):
            self._refuse(416, {"Content-Range": f"bytes */{len(content)}"})
            return
        self.send_response(200 if start is None else 206)
        if start is not None:
            self.send_header("Content-Range", f"bytes {start + turn.shift}-{len(content) - 1}/{len(content)}")
        for name, value in (("ETag", turn.etag), ("Last-Modified", turn.modified)):
            if value:
                self.send_header(name, value)
        body = content[start or 0 :]
        if turn.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif not turn.silent:
            self.send_header("Content-Length", str(len(body) + turn.says))
        self.end_headers()
        self._send(script, turn, body)

    def _start(self, turn: Turn) -> int | None:
        """Where the range starts that is to be sent; None for the whole file."""
        asked, known = self.headers.get("Range"), self.headers.get("If-Range")
        if asked is None or not turn.ranges or (turn.obeys and known not in (None, turn.etag, turn.modified)):
            return None
        return int(asked.removeprefix("bytes=").removesuffix("-"))

    def _refuse(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": "0"}.items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, script: Script, turn: Turn, body: bytes) -> None:
        end = min(len(body) if stop is None else stop for stop in (turn.cut, turn.stall))
        try:
            for start in range(0, end, 1024):
                piece = body[start : min(start + 1024, end)]
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if turn.chunked else piece)
                script.sent += len(piece)
                time.sleep(turn.seconds)
            if turn.chunked and turn.cut is None:
                self.wfile.write(b"0\r\n\r\n")
        except OSError:
            return  # the other side has had enough
        if turn.stall is not None:
            self.server.closing.wait()
