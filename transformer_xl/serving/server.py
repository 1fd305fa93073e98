"""The socket and the web server, which is uvicorn."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import socket
import sys
from collections.abc import Sequence
from functools import partial

import uvicorn
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from uvicorn.protocols.http.h11_impl import H11Protocol

from .answers import Service

CONNECTIONS, SPARE = 512, 128
"""Those beyond are closed; and the files that they leave to the rest of the process."""


class Connection(H11Protocol):
    """A connection of uvicorn's that is closed if there are too many: idle ones would use up all files."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > connection_limit():
            transport.close()


class Server(uvicorn.Server):
    """Does not report requests that its end has cancelled."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)


def make_server(app: FastAPI, *, grace: float = 30.0, trusted: Sequence[str] = ()) -> Server:
    """A server for an application of `build_app`.

    Args:
        grace: seconds that running answers get after a signal. Then they are cut.
        trusted: addresses of proxies. Only their `X-Forwarded-For` is believed.
    """
    if sys.platform == "linux" and (limit := getattr(ctypes.CDLL(None), "mallopt", None)):
        limit(-8, 2)  # M_ARENA_MAX: many threads with arenas of their own leave many holes
    for name in ("asyncio", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.ERROR)  # what clients do wrong is told to them
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(trusted),
        forwarded_allow_ips=list(trusted),
        backlog=SPARE // 4,  # connections that are accepted before one beyond the limit can be closed
        timeout_graceful_shutdown=grace,  # type: ignore[arg-type]  # asyncio takes fractions
        timeout_notify=10,
        callback_notify=partial(run_in_threadpool, tidy, app.state.service),
    )
    return Server(config)


def tidy(service: Service) -> None:
    """Forget texts whose time is over, and give memory that is not used back to the system."""
    service.sessions.trim()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)  # glibc keeps it otherwise


def connection_limit() -> int:
    """How many connections can be open in this process."""
    try:
        import resource
    except ImportError:  # Windows
        return CONNECTIONS
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS if files == resource.RLIM_INFINITY else max(1, min(CONNECTIONS, files - SPARE))


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
