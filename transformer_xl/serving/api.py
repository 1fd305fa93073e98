"""The HTTP interface: OpenAI's completions, tokens for lm-evaluation-harness, health, metrics and the page."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ..mistake import shortened
from .answers import Answer, Service, check_ids
from .requests import Completion, Detokenize, Refused, Tokenize
from .scores import token_name

PAGE = Path(__file__).parent / "page"
OPEN = {"/", "/health", *(f"/{file.name}" for file in PAGE.iterdir())}
"""What needs no token."""


def build_app(service: Service, tokens: Sequence[str] = (), names: Sequence[str] = ()) -> FastAPI:
    """The application.

    Args:
        tokens: requests need one of them, and a text belongs to the token that made it.
        names: of the server, besides localhost and its addresses.
    """
    most = 8 * service.limits.prompt_tokens + (1 << 16)  # bytes
    # without this, openapi.json promises errors in FastAPI's form, with status 422
    refused: dict[int | str, Any] = {"4XX": {"description": "an error in OpenAI's form"}}
    app = FastAPI(title="transformer-xl", docs_url=None, redoc_url=None, redirect_slashes=False, responses=refused)
    app.state.service = service
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=most)  # it would replace what the gate says
    app.add_middleware(Gate, tokens=tokens, names={"localhost", *names}, most=most)
    answers = {Refused: _refused, HTTPException: _http_error, RequestValidationError: _form_error, Exception: _mistake}
    for kind, answer in answers.items():
        app.add_exception_handler(kind, answer)
    app.add_api_route("/v1/models", models)
    app.add_api_route("/v1/models/{name:path}", model_named)
    app.add_api_route("/tokenizer_info", tokenizer_info)
    app.add_api_route("/metrics", metrics, response_class=PlainTextResponse)
    app.add_route("/health", health)
    app.add_api_route("/v1/completions", completions, methods=["POST"])
    app.add_api_route("/tokenize", tokenize, methods=["POST"])
    app.add_api_route("/detokenize", detokenize, methods=["POST"])
    for path in OPEN - {"/health"}:
        app.add_route(path, page, methods=["GET"])
    return app


@dataclass
class Gate:
    """What is looked at before anything of a body is read: the name of the server, the token, the length of the body,
    and who asks."""

    app: ASGIApp
    tokens: Sequence[str]
    names: set[str]
    most: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        try:
            self._check_name(request.headers.get("host", ""))
            request.state.owner = "" if scope["path"] in OPEN else self._owner(request.headers)
            if int(request.headers.get("content-length", 0)) > self.most:
                raise Refused(413, f"The body must be at most {self.most:,} bytes.")
        except Refused as error:
            await _refused(request, error)(scope, receive, send)
            return
        address = network_of(request.client.host if request.client is not None else "")
        request.state.client = f"{address} {request.state.owner}"
        await self.app(scope, receive, send)

    def _check_name(self, host: str) -> None:
        """A page on the internet may give its own name the address of this machine, but it cannot send another name."""
        with suppress(ValueError):
            host = urlsplit(f"//{host}").hostname or ""
        if host and host not in self.names and network_of(host) == host:
            name = shortened(host)
            message = f"This server has no name {name}. If it should, start it with --host-name {name}."
            raise Refused(421, message, code="wrong_host")

    def _owner(self, headers: Mapping[str, str]) -> str:
        """Who asks: the token, or "" on a server without tokens. Raises `Refused` without a right token."""
        if not self.tokens:
            return ""
        kind, _, given = headers.get("authorization", "").partition(" ")
        raw = given.strip(" \t").encode("latin-1")
        found = [token for token in self.tokens if secrets.compare_digest(raw, token.encode())]
        if kind.lower() != "bearer" or not found:
            raise Refused(401, "Give the server's token: Authorization: Bearer TOKEN.", code="invalid_api_key")
        return found[0]


def network_of(address: str) -> str:
    """One client's addresses: a single one of IPv4, 2^64 of IPv6. A text that is no address stays as it is."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    found = getattr(found, "ipv4_mapped", None) or found  # as a proxy with sockets for both may write IPv4
    return str(ipaddress.ip_network((found, 64 if found.version == 6 else 32), strict=False))


async def models(request: Request) -> dict[str, Any]:
    """The model that is served."""
    service: Service = request.app.state.service
    lengths = service.engine.lengths
    about = {"id": service.name, "object": "model", "created": 0, "owned_by": "transformer-xl"}
    sizes = {"tgt_len": lengths.tgt_len, "mem_len": lengths.mem_len, "attn_len": lengths.attn_len}
    return {"object": "list", "data": [{**about, **sizes, "vocab": str(service.vocab)}]}


async def model_named(request: Request, name: str) -> object:
    """The model that is served, by its name."""
    (about,) = (await models(request))["data"]
    if name != about["id"]:
        raise Refused(404, f"{shortened(name)} is not served here. {about['id']} is.")
    return about


async def completions(request: Request, asked: Completion) -> Response:
    """Continue or score texts; see OpenAI's completions."""
    service: Service = request.app.state.service
    answer = await run_in_threadpool(service.plan, asked, request.state.owner, request.state.client)
    answer.start()
    if asked.stream:
        return Sending(answer, _events(answer), "text/event-stream")
    whole = asyncio.create_task(answer.whole())
    watcher = asyncio.create_task(_cancel_if_gone(request, whole))
    try:
        content = await whole
    except asyncio.CancelledError:  # the client has gone, or the server ends
        answer.close()
        return Response(status_code=499)
    except Exception:
        answer.close()
        raise
    finally:
        watcher.cancel()
    return Sending(answer, iter([content]), "application/json")


class Sending(StreamingResponse):
    """A response that closes its answer when it was sent, or the client has gone."""

    def __init__(self, answer: Answer, content: AsyncIterator[bytes] | Iterator[bytes], kind: str) -> None:
        super().__init__(content, media_type=kind)
        self.answer: Answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.answer.close()


async def _cancel_if_gone(request: Request, whole: asyncio.Task[bytes]) -> None:
    """Cancel what makes an answer when the client leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    whole.cancel()


async def _events(answer: Answer) -> AsyncIterator[bytes]:
    """The response as server-sent events. An error is an event, too."""
    try:
        async for chunk in answer.chunks():
            yield b"data: %b\n\n" % chunk
        yield b"data: [DONE]\n\n"
    except Refused as error:
        yield b"data: %b\n\n" % json.dumps(error.to_json()).encode()


async def tokenizer_info(request: Request) -> dict[str, object]:
    """What lm-evaluation-harness asks first."""
    vocab = request.app.state.service.vocab
    eos = vocab.line_end or 0
    return {"eos_token": token_name(vocab, eos), "eos_token_id": eos, "bos_token": None, "vocab_size": len(vocab)}


def tokenize(request: Request, asked: Tokenize) -> dict[str, object]:
    """The ids of a text, without the line end before it."""
    ids = request.app.state.service.encode(asked.prompt)
    return {"tokens": ids, "count": len(ids)}


def detokenize(request: Request, asked: Detokenize) -> dict[str, object]:
    """The text of ids."""
    vocab = request.app.state.service.vocab
    check_ids(asked.tokens, vocab, "tokens")
    return {"prompt": vocab.decode(asked.tokens)}


async def health(_: Request) -> Response:
    """Whether the server answers."""
    return JSONResponse({"status": "ok"})


async def page(request: Request) -> Response:
    """A file of the page; only their own paths lead here."""
    return FileResponse(PAGE / (request.url.path[1:] or "index.html"))


async def metrics(request: Request) -> PlainTextResponse:
    """Counters in the form of Prometheus."""
    service: Service = request.app.state.service
    engine, sessions = service.engine, service.sessions
    values = {
        **{f"txl_{name}_total": count for name, count in engine.counts.items()},
        "txl_rows": engine.rows,
        "txl_busy": engine.busy,
        "txl_waiting": engine.waiting,
        "txl_sessions": len(sessions),
        "txl_session_bytes": sessions.nbytes,
    }
    return PlainTextResponse("".join(f"{name} {value}\n" for name, value in values.items()))


def _refused(_: Request, error: Refused) -> Response:
    return JSONResponse(error.to_json(), error.status, {"Retry-After": "10"} if error.status == 429 else None)


def _mistake(request: Request, error: Exception) -> Response:
    """The log has the traceback."""
    return _refused(request, Refused(500, "The server made a mistake. Its log says which one."))


def _http_error(request: Request, error: HTTPException) -> Response:
    asked = f"{shortened(request.method)} {shortened(request.url.path)}"
    return _refused(request, Refused(error.status_code, f"{error.detail}: {asked}. See /openapi.json."))


def _form_error(request: Request, error: RequestValidationError) -> Response:
    """One sentence for the first field that is wrong."""
    first = error.errors()[0]
    name, message = next(iter(first["loc"][1:]), 0), first["msg"]
    if isinstance(name, int):  # the position of what is no JSON, or no field at all
        form = "one JSON object of fields, with the header Content-Type: application/json"
        return _refused(request, Refused(400, f"The body must be {form} ({message})."))
    got = "" if first["type"] == "missing" else f", got {shortened(repr(first['input']))}"
    field = Completion.model_fields.get(name) if request.url.path == "/v1/completions" else None
    if field is not None and field.description:
        sentence = f"{name} must be {field.description}{got}."
    elif first["type"] == "extra_forbidden":
        sentence = f"{shortened(name)} is no field of a request. Leave it out."
    else:
        sentence = f"{shortened(name)} is wrong: {message}{got}."
    return _refused(request, Refused(400, sentence, shortened(name)))
