"""A web server on this machine whose answers a test chooses, request by request."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote


@dataclass(frozen=True)
class Turn:
    """How one request is answered. By default with the whole file."""

    status: int | None = None
    """Instead of the file."""
    location: str | None = None
    """The target of a redirect, with a status of 3xx."""
    body: bytes | None = None
    """The content of the file in this answer."""
    cut: int | None = None
    """The connection ends after this number of bytes of the body."""
    silent: bool = False
    """No Content-Length: the body ends with the connection."""


@dataclass
class Script:
    """The file at one path, and a turn for each request; the last one stays."""

    content: bytes
    turns: list[Turn] = field(default_factory=lambda: [Turn()])
    requests: list[dict[str, str]] = field(default_factory=list)
    """The headers of each request."""


class Server(ThreadingHTTPServer):
    """Serves the scripts that `put` was given."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.scripts: dict[str, Script] = {}

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
            content = b""
        self.send_response(turn.status or 200)
        if turn.location:
            self.send_header("Location", turn.location)
        if not turn.silent:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with suppress(OSError):  # the client may have closed the connection
            self.wfile.write(content[: turn.cut])
