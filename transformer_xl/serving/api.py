"""The HTTP interface: OpenAI's completions, tokens for lm-evaluation-harness, health, metrics and the page."""

from __future__ import annotations

import asyncio
import hashlib
import html
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from .choices import token_name
from .engine import Closing, QueueFull
from .guard import BodyGuard, Envelope, error_json
from .metrics import ServerMetrics
from .requests import FORMS, Completion, Detokenize, Refused, Tokenize, check_ids, form_error, short
from .service import Answer, ClientGone, Service

PAGE = Path(__file__).parent / "page"
GONE = 499
"""The status, seen only in metrics, of a request whose client left."""
SAFE = {
    b"content-security-policy": b"default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
}
"""Headers of every answer: a page loads nothing from elsewhere."""


def build_app(service: Service, tokens: Sequence[str] = ()) -> FastAPI:
    """The application. With `tokens`, requests need one of them, and a text belongs to the token that made it."""
    app = FastAPI(title="transformer-xl", docs_url=None, redoc_url=None)
    app.state.service, app.state.metrics, app.state.tokens = service, ServerMetrics(service), tuple(tokens)
    app.add_middleware(BodyGuard, most=service.limits.body_bytes, seconds=service.limits.body_seconds)
    app.add_middleware(Envelope, headers=SAFE, count=app.state.metrics.count)
    for kind, answer in {
        Refused: _refused,
        HTTPException: _http_error,
        RequestValidationError: _form_error,
        QueueFull: _queue_full,
        Closing: _closing,
        ClientGone: _client_gone,
    }.items():
        app.add_exception_handler(kind, answer)
    _add_routes(app)
    return app


def _add_routes(app: FastAPI) -> None:
    locked: Any = {"dependencies": [Depends(owner_of)]}
    hidden: Any = {"include_in_schema": False}
    routes: Any = (
        ("/v1/models", models, "GET", locked),
        ("/v1/completions", completions, "POST", {}),
        ("/tokenizer_info", tokenizer_info, "GET", locked),
        ("/tokenize", tokenize, "POST", locked),
        ("/detokenize", detokenize, "POST", locked),
        ("/metrics", metrics, "GET", locked),
        ("/health", health, "GET", {}),
        ("/docs", docs, "GET", hidden),
    )
    for path, call, method, options in routes:
        app.add_api_route(path, call, methods=[method], response_model=None, **options)
    for path, name in {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js"}.items():
        app.add_api_route(path, _sender(PAGE / name), methods=["GET"], include_in_schema=False)


def _sender(file: Path) -> Any:
    def send() -> FileResponse:
        return FileResponse(file)

    return send


def owner_of(request: Request) -> str:
    """Who asks: a digest of the token, or "" on a server without tokens. Raises `Refused` without a right token."""
    tokens = request.app.state.tokens
    if not tokens:
        return ""
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    raw = given.strip().encode("utf-8", "surrogateescape")
    known = [secrets.compare_digest(raw, token.encode()) for token in tokens]
    if kind.lower() != "bearer" or not any(known):
        raise Refused(401, "Give the server's token: Authorization: Bearer TOKEN.", code="invalid_api_key")
    return hashlib.sha256(raw).hexdigest()


def models(request: Request) -> Any:
    """The model that is served."""
    service: Service = request.app.state.service
    lengths = service.engine.lengths
    about = {"id": service.name, "object": "model", "created": 0, "owned_by": "transformer-xl"}
    sizes = {"tgt_len": lengths.tgt_len, "mem_len": lengths.mem_len, "attn_len": lengths.attn_len}
    return {"object": "list", "data": [{**about, **sizes, "vocab": str(service.vocab)}]}


async def completions(request: Request, asked: Completion, owner: str = Depends(owner_of)) -> Any:
    """Continue or score texts; see OpenAI's completions."""
    service: Service = request.app.state.service
    client = request.client.host if request.client is not None else ""
    answer = await run_in_threadpool(service.plan, asked, owner, client)
    answer.start()
    began = time.perf_counter()
    watcher = asyncio.create_task(_watch(request, answer))
    if not asked.stream:
        try:
            return JSONResponse(await answer.whole())
        finally:
            watcher.cancel()
    events = _events(answer, watcher)
    first = await anext(events)
    request.app.state.metrics.first_token.observe(time.perf_counter() - began)
    return StreamingResponse(_after(first, events), media_type="text/event-stream")


async def _watch(request: Request, answer: Answer) -> None:
    """Stop the work when the client leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    answer.abandon()


async def _events(answer: Answer, watcher: asyncio.Task[None]) -> AsyncIterator[str]:
    """The response as server-sent events. An error after the first one is an event, too."""
    sent = False
    try:
        async for chunk in answer.chunks():
            yield _event(chunk)
            sent = True
        yield "data: [DONE]\n\n"
    except Exception as error:
        if not sent:
            raise
        if not isinstance(error, ClientGone):
            yield _event(error_json(str(error), 500))
    finally:
        answer.cancel()
        watcher.cancel()


async def _after(first: str, events: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for event in events:
        yield event


def _event(content: Any) -> str:
    return f"data: {json.dumps(content, allow_nan=False)}\n\n"


def tokenizer_info(request: Request) -> Any:
    """What lm-evaluation-harness asks first."""
    vocab = request.app.state.service.vocab
    eos = vocab.line_end or 0
    return {"eos_token": token_name(vocab, eos), "eos_token_id": eos, "bos_token": None, "vocab_size": len(vocab)}


def tokenize(request: Request, asked: Tokenize) -> Any:
    """The ids of a text, without the line end before it."""
    vocab = request.app.state.service.vocab
    ids = vocab.encode(asked.prompt).tolist()
    return {"tokens": ids, "count": len(ids)}


def detokenize(request: Request, asked: Detokenize) -> Any:
    """The text of ids."""
    service: Service = request.app.state.service
    if asked.tokens:
        check_ids(asked.tokens, service.limits.body_bytes, len(service.vocab), "tokens")
    return {"prompt": service.vocab.decode(asked.tokens or [])}


def health(request: Request) -> Any:
    """Whether the server takes new texts."""
    if request.app.state.service.engine.closing:
        raise Closing
    return {"status": "ok"}


def metrics(request: Request) -> Response:
    """Counters in the form of Prometheus."""
    request.app.state.service.sessions.trim()
    return Response(generate_latest(request.app.state.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def docs(request: Request) -> HTMLResponse:
    """The routes, on a page that loads nothing."""
    rows = []
    for path, methods in request.app.openapi()["paths"].items():
        for method, about in methods.items():
            words = html.escape(about.get("description", ""))
            rows.append(f"<tr><td>{method.upper()}</td><td><code>{path}</code></td><td>{words}</td></tr>")
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>transformer-xl</title>'
    style = '<link rel="stylesheet" href="/page.css">'
    more = '<p>All fields: <a href="/openapi.json">openapi.json</a></p>'
    return HTMLResponse(f"{head}{style}<main><h1>Routes</h1><table>{''.join(rows)}</table>{more}</main></html>")


# Errors.


def _error(status: int, message: str, param: str | None = None, code: str | None = None, **headers: str) -> Response:
    return JSONResponse(error_json(message, status, param, code), status, headers)


def _refused(_: Request, error: Any) -> Response:
    return _error(error.status, error.message, error.param, error.code)


def _http_error(request: Request, error: Any) -> Response:
    messages = {
        404: f"There is nothing at {short(request.url.path)}. See /docs.",
        405: f"{short(request.method)} is not for {short(request.url.path)}. See /docs.",
        400: "The body must be JSON, and it is not.",
    }
    return _error(error.status_code, messages.get(error.status_code, str(error.detail)))


def _form_error(_: Request, error: Any) -> Response:
    """One sentence for the first field that has the wrong type."""
    first = error.errors()[0]
    names = [part for part in first["loc"] if part in FORMS]
    if names:
        return _refused(_, form_error(names[0]))
    return _error(400, "The body must be one JSON object of fields, with the header Content-Type: application/json.")


def _queue_full(_: Request, error: Any) -> Response:
    return _error(429, str(error), code="queue_full", **{"Retry-After": str(error.seconds)})


def _closing(_: Request, error: Any) -> Response:
    return _error(503, str(error), code="shutting_down", **{"Retry-After": "10"})


def _client_gone(_: Request, __: Any) -> Response:
    return Response(status_code=GONE)
