"""The socket and the web server. Limits of connections and time are uvicorn's, or those of a proxy before it."""

from __future__ import annotations

import socket

import uvicorn
from fastapi import FastAPI


def make_server(app: FastAPI, *, grace: float = 30.0) -> uvicorn.Server:
    """A server that, after a signal, takes no new connections and gives running answers `grace` seconds."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=1000,
            timeout_graceful_shutdown=round(grace),
        )
    )


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
