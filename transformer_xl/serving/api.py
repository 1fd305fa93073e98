"""The HTTP interface: OpenAI's completions, tokens for lm-evaluation-harness, health, metrics and the page."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from .answers import Answer, ClientGone, Service, check_ids, token_name
from .engine import QueueFull
from .requests import Completion, Detokenize, Refused, Tokenize, form_error, short


def build_app(service: Service, tokens: Sequence[str] = ()) -> FastAPI:
    """The application. With `tokens`, requests need one of them, and a text belongs to the token that made it."""
    most = service.limits.body_bytes
    app = FastAPI(title="transformer-xl", docs_url=None, redoc_url=None, max_body_size=most)
    app.state.service, app.state.tokens = service, tuple(tokens)
    for kind, answer in {
        Refused: _refused,
        HTTPException: _http_error,
        RequestValidationError: _form_error,
        QueueFull: _queue_full,
        ClientGone: _client_gone,
    }.items():
        app.add_exception_handler(kind, answer)
    locked = [Depends(owner_of)]
    app.add_api_route("/v1/completions", completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", models, dependencies=locked)
    app.add_api_route("/tokenizer_info", tokenizer_info, dependencies=locked)
    app.add_api_route("/tokenize", tokenize, methods=["POST"], dependencies=locked)
    app.add_api_route("/detokenize", detokenize, methods=["POST"], dependencies=locked)
    app.add_api_route("/metrics", metrics, dependencies=locked)
    app.add_api_route("/health", health)
    app.mount("/", StaticFiles(directory=Path(__file__).parent / "page", html=True))
    return app


def owner_of(request: Request) -> str:
    """Who asks: the token, or "" on a server without tokens. Raises `Refused` without a right token."""
    tokens: tuple[str, ...] = request.app.state.tokens
    if not tokens:
        return ""
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    raw = given.strip().encode("utf-8", "surrogateescape")
    found = [token for token in tokens if secrets.compare_digest(raw, token.encode())]
    if kind.lower() != "bearer" or not found:
        raise Refused(401, "Give the server's token: Authorization: Bearer TOKEN.", code="invalid_api_key")
    return found[0]


def models(request: Request) -> dict[str, object]:
    """The model that is served."""
    service: Service = request.app.state.service
    lengths = service.engine.lengths
    about = {"id": service.name, "object": "model", "created": 0, "owned_by": "transformer-xl"}
    sizes = {"tgt_len": lengths.tgt_len, "mem_len": lengths.mem_len, "attn_len": lengths.attn_len}
    return {"object": "list", "data": [{**about, **sizes, "vocab": str(service.vocab)}]}


async def completions(request: Request, asked: Completion, owner: str = Depends(owner_of)) -> Response:
    """Continue or score texts; see OpenAI's completions."""
    service: Service = request.app.state.service
    client = request.client.host if request.client is not None else ""
    answer = await run_in_threadpool(service.plan, asked, owner, client)
    answer.start()
    watcher = asyncio.create_task(_watch(request, answer))
    if not asked.stream:
        try:
            return JSONResponse(await answer.whole())
        finally:
            watcher.cancel()
    return StreamingResponse(_events(answer, watcher), media_type="text/event-stream")


async def _watch(request: Request, answer: Answer) -> None:
    """Stop the work when the client leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    answer.abandon()


async def _events(answer: Answer, watcher: asyncio.Task[None]) -> AsyncIterator[str]:
    """The response as server-sent events. An error is an event, too."""
    try:
        async for chunk in answer.chunks():
            yield _event(chunk)
        yield "data: [DONE]\n\n"
    except Refused as error:
        yield _event(error.to_json())
    except ClientGone:
        pass
    finally:
        answer.cancel()
        watcher.cancel()


def _event(content: dict[str, object]) -> str:
    return f"data: {json.dumps(content, allow_nan=False)}\n\n"


def tokenizer_info(request: Request) -> dict[str, object]:
    """What lm-evaluation-harness asks first."""
    vocab = request.app.state.service.vocab
    eos = vocab.line_end or 0
    return {"eos_token": token_name(vocab, eos), "eos_token_id": eos, "bos_token": None, "vocab_size": len(vocab)}


def tokenize(request: Request, asked: Tokenize) -> dict[str, object]:
    """The ids of a text, without the line end before it."""
    ids = request.app.state.service.vocab.encode(asked.prompt).tolist()
    return {"tokens": ids, "count": len(ids)}


def detokenize(request: Request, asked: Detokenize) -> dict[str, object]:
    """The text of ids."""
    vocab = request.app.state.service.vocab
    check_ids(asked.tokens, vocab, "tokens")
    return {"prompt": vocab.decode(asked.tokens)}


def health() -> dict[str, str]:
    """Whether the server answers."""
    return {"status": "ok"}


def metrics(request: Request) -> PlainTextResponse:
    """Counters in the form of Prometheus."""
    service: Service = request.app.state.service
    engine, sessions = service.engine, service.sessions
    sessions.trim()
    values = {
        "txl_tokens_read_total": engine.counts.read,
        "txl_tokens_written_total": engine.counts.written,
        "txl_steps_total": engine.counts.steps,
        "txl_step_seconds_total": engine.counts.seconds,
        "txl_rows": engine.rows,
        "txl_busy": engine.busy,
        "txl_waiting": engine.waiting,
        "txl_sessions": len(sessions),
        "txl_session_bytes": sessions.nbytes,
    }
    return PlainTextResponse("".join(f"{name} {value}\n" for name, value in values.items()))


# Errors.


def _refused(_: Request, error: Refused) -> Response:
    return JSONResponse(error.to_json(), error.status)


def _http_error(request: Request, error: HTTPException) -> Response:
    path = short(request.url.path)
    messages = {
        400: "The body must be JSON, and it is not.",
        404: f"There is nothing at {path}. See /openapi.json.",
        405: f"{short(request.method)} is not for {path}. See /openapi.json.",
        413: "The body is too large.",
    }
    message = messages.get(error.status_code, str(error.detail))
    return _refused(request, Refused(error.status_code, message))


def _form_error(request: Request, error: RequestValidationError) -> Response:
    first = error.errors()[0]
    return _refused(request, form_error(first["loc"], first["msg"]))


def _queue_full(_: Request, error: QueueFull) -> Response:
    refusal = Refused(429, str(error), code="queue_full")
    return JSONResponse(refusal.to_json(), 429, {"Retry-After": "10"})


def _client_gone(_: Request, error: ClientGone) -> Response:
    return Response(status_code=499)
