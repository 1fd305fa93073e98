"""Reads the body of a request before anything else does: not too large, and not too slowly."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

from .requests import Refused


def error_json(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's form."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = "server_error" if status >= 500 else kinds.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


LOG = logging.getLogger("transformer_xl.serving")
ENDURED = 4
"""A body may be this many times too large to be read to its end."""


class Envelope:
    """ASGI middleware: adds headers to each answer, counts it by route and status, and answers 500 to our mistakes."""

    def __init__(self, app: Any, headers: dict[bytes, bytes], count: Callable[[str, int], None]) -> None:
        self.app: Any = app
        self.headers: dict[bytes, bytes] = headers
        self.count: Callable[[str, int], None] = count

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        begun = False

        async def stamp(message: Any) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message["headers"] = [*message.get("headers", ()), *self.headers.items()]
                self.count(self._route(scope), message["status"])
            await send(message)

        try:
            await self.app(scope, receive, stamp)
        except Exception:
            LOG.exception("A request failed.")
            if begun:
                raise
            await _refuse(stamp, 500, "The server made a mistake. Its log says which one.")

    @staticmethod
    def _route(scope: Any) -> str:
        return getattr(scope.get("route"), "path", "other")


class BodyGuard:
    """ASGI middleware: a request reaches `app` with its whole body, or is refused."""

    def __init__(self, app: Any, most: int, seconds: float) -> None:
        self.app: Any = app
        self.most: int = most
        self.seconds: float = seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            body = await asyncio.wait_for(self._body(scope, receive), self.seconds)
        except TimeoutError:
            return await _refuse(send, 408, f"The request must arrive within {self.seconds:g} s.")
        except Refused as error:
            return await _refuse(send, error.status, error.message)
        if body is None:
            return None
        first = [{"type": "http.request", "body": body, "more_body": False}]
        return await self.app(scope, lambda: _again(first, receive), send)

    async def _body(self, scope: Any, receive: Any) -> bytes | None:
        """The body; None if the client has left.

        The rest of a body that is too large is read and thrown away, because most clients send all before they listen.
        """
        sizes = [value for name, value in scope["headers"] if name == b"content-length"]
        if sizes and sizes[0].isdigit() and int(sizes[0][:20]) > ENDURED * self.most:
            raise self._too_large()
        body, size, going = bytearray(), 0, True
        while going and size <= ENDURED * self.most:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            piece, going = message.get("body", b""), message.get("more_body", False)
            size += len(piece)
            if size <= self.most:
                body += piece
        if size > self.most:
            raise self._too_large()
        return bytes(body)

    def _too_large(self) -> Refused:
        return Refused(413, f"The request must have at most {self.most:,} bytes.")


async def _again(first: list[Any], receive: Any) -> Any:
    """The message that was read already, then the next ones."""
    return first.pop() if first else await receive()


def refusal(status: int, message: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body of an error that ends the connection."""
    body = json.dumps(error_json(message, status)).encode()
    length = str(len(body)).encode()
    return [(b"content-type", b"application/json"), (b"content-length", length), (b"connection", b"close")], body


async def _refuse(send: Any, status: int, message: str) -> None:
    headers, body = refusal(status, message)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
