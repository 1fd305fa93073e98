"""Listens on a port until a signal ends it; then running texts may finish."""

from __future__ import annotations

import asyncio
import socket
import time
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from .engine import Engine
from .guard import refusal
from .requests import Limits

CONNECTIONS = 1000
"""Maximum number of open connections."""


class Connection(H11Protocol):
    """A connection whose requests must begin in time, and that refuses in our words what is not HTTP."""

    seconds: float = Limits.body_seconds
    """Time for the head of a request; `BodyGuard` limits that of the body."""
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        """Keep a timer while the head of a request is incomplete."""
        if self.conn.their_state is not h11.IDLE and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif self.conn.their_state is h11.IDLE and self._timer is None:
            self._timer = self.loop.call_later(self.seconds, self._end)

    def _end(self) -> None:
        if not self.transport.is_closing():
            self._refuse(408, f"The request must arrive within {self.seconds:g} s.")

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "The request must be HTTP/1.1, and it is not.")

    def _refuse(self, status: int, message: str) -> None:
        headers, body = refusal(status, message)
        reason = HTTPStatus(status).phrase.encode()
        head = h11.Response(status_code=status, headers=headers, reason=reason)
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class Server(uvicorn.Server):
    """A server that ends gracefully: after the first signal it answers 503 to new texts, and running ones have `grace`
    seconds. A second signal ends it at once."""

    def __init__(
        self, app: FastAPI, engine: Engine, *, grace: float = 30.0, seconds: float = Connection.seconds
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=type("Connection", (Connection,), {"seconds": seconds}),
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                lifespan="off",
                limit_concurrency=CONNECTIONS,
                timeout_graceful_shutdown=5,
            )
        )
        self.engine: Engine = engine
        self.grace: float = grace
        self._end: float | None = None

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self._end is not None:
            self.should_exit = True
            return
        self._end = time.monotonic() + self.grace
        self.engine.close()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; True ends the server."""
        if self._end is not None and (self.engine.idle or time.monotonic() > self._end):
            return True
        return await super().on_tick(counter)


def listen(host: str, port: int) -> socket.socket:
    """A socket at this address. Raises `OSError` with a sentence, for example if the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        made = socket.create_server((host, port), family=family, backlog=256)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]
        raise OSError(
            f"--host and --port must be a free address of this machine, got {host} {port}: {reason}."
        ) from None
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # of its connections too; asyncio misses them
    return made
