"""Listens on a port until a signal ends it; then running texts may finish."""

from __future__ import annotations

import socket
import time
from typing import Any

import uvicorn
from fastapi import FastAPI

from .engine import Engine

CONNECTIONS = 1000
"""Maximum number of open connections."""


class Server(uvicorn.Server):
    """A server that ends gracefully: after the first signal it answers 503 to new texts, and running ones have `grace`
    seconds. A second signal ends it at once."""

    def __init__(self, app: FastAPI, engine: Engine, *, grace: float = 30.0) -> None:
        super().__init__(
            uvicorn.Config(
                app,
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
