"""The socket and the web server, with limits on connections and on their time."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import socket
import sys
from collections.abc import Sequence
from functools import partial

import h11
import uvicorn
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from uvicorn.protocols.http.h11_impl import H11Protocol

from .answers import Service
from .requests import Refused

CONNECTIONS = 512
"""At most so many, and a quarter from one address."""
SPARE = 128
"""File descriptors that connections leave to the rest of the process."""
REQUEST_SECONDS = 30.0
"""A request must be complete so long after its connection was opened, or after the response before it."""
SEND_SECONDS = 20.0
"""A client must take what was sent within this time."""


class Connection(H11Protocol):
    """A connection of uvicorn's that ends when its client is slow, or has too many of them."""

    trusted: frozenset[str] = frozenset()
    """Addresses of proxies, which may have all connections."""
    most: int = CONNECTIONS
    address: str = ""
    _request: asyncio.TimerHandle | None = None
    _sending: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client is not None else ""
        own = sum(isinstance(other, Connection) and other.address == self.address for other in self.connections)
        if len(self.connections) > self.most or (own > self.most // 4 and self.address not in self.trusted):
            self._refuse(Refused(503, "There are too many connections. Close some, or try again later."))
        else:
            self._request = self.loop.call_later(REQUEST_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._end_request()

    def on_response_complete(self) -> None:
        if self._request is None:
            self._request = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)
        super().on_response_complete()  # it begins with the next request, if that is here
        self._end_request()

    def _end_request(self) -> None:
        """Stop the clock if a request is here that has no whole answer yet."""
        cycle = self.cycle
        if self._request is not None and cycle is not None and not (cycle.more_body or cycle.response_complete):
            self._request.cancel()
            self._request = None

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._request, self._sending):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._sending = self.loop.call_later(SEND_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._sending is not None:
            self._sending.cancel()

    def send_400_response(self, msg: str) -> None:
        self._refuse(Refused(400, "The request must be well-formed HTTP/1.1, and it is not."))

    def _refuse(self, error: Refused) -> None:
        """Send an error before there is a request, and close."""
        headers = [("Content-Type", "application/json"), ("Connection", "close")]
        headers += [("Retry-After", "10")] if error.status == 503 else []
        body = json.dumps(error.to_json()).encode()
        events = [h11.Response(status_code=error.status, headers=headers), h11.Data(data=body), h11.EndOfMessage()]
        for event in events if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) else ():
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


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
    protocol = type("TrustingConnection", (Connection,), {"trusted": frozenset(trusted), "most": connection_limit()})
    for name in ("asyncio", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.ERROR)  # what clients do wrong is told to them
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(trusted),
        forwarded_allow_ips=list(trusted),
        backlog=SPARE // 4,  # so many are accepted before the first of them can be closed
        timeout_graceful_shutdown=round(grace),
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
    """How many connections this process can have open, after it was allowed as many files as it may be."""
    try:
        import resource
    except ImportError:  # Windows
        return CONNECTIONS
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS + SPARE
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(CONNECTIONS, soft - SPARE))


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
