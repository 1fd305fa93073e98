"""`txl serve`: answer requests over HTTP."""

from __future__ import annotations

import gc
import logging
import os
import sys
from typing import TYPE_CHECKING

from ...config.settings import Lengths
from ...mistake import Mistake
from ...run import LoadedModel
from ..options.use import Serve
from .trained import Trained

if TYPE_CHECKING:
    from ...serving.service import Service

TOKEN = "TXL_SERVE_TOKEN"
LOCAL = ("127.0.0.1", "localhost", "::1")


def serve(options: Serve) -> None:
    """Load the model, listen, and answer until a signal comes."""
    _refuse_without_packages()
    from ...serving.api import build_app
    from ...serving.engine import refusal
    from ...serving.server import Server, listen

    trained = Trained(options.folder, options.device, options.precision)
    problems = trained.problems
    problems.bound(options, "port", least=0, most=65_535)
    problems.bound(options, "rows", least=1, most=1024)
    problems.bound(options, "queue", "max_prompt", "max_tokens", least=1, most=1 << 24)
    problems.bound(options, "sessions", "session_mb", "grace", least=0, most=1 << 24)
    problems.bound(options, "session_minutes", above=0, most=1 << 24)
    found = trained.lengths(options)
    if found and (reason := refusal(trained.config.model, found[0])):
        problems.append(reason)
    tokens = options.token or tuple(os.environ.get(TOKEN, "").split())
    if not all(tokens):
        problems.append("--token must be texts that are not empty.")
    loaded = trained.load(step=True)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    service = _service(options, loaded, found[0], trained.precision)
    server = Server(build_app(service, tokens), service.engine, grace=options.grace)
    with listen(options.host, options.port) as socket:
        _report(options, service, socket.getsockname()[1], locked=bool(tokens))
        service.engine.start()
        gc.freeze()  # what there is now stays, so it need not be searched for garbage
        try:
            server.run(sockets=[socket])
        finally:
            service.engine.stop()


def _service(options: Serve, loaded: LoadedModel, lengths: Lengths, precision: str) -> Service:
    from ...serving.engine import Engine
    from ...serving.requests import Limits
    from ...serving.service import Service
    from ...serving.sessions import Sessions

    engine = Engine(loaded.model, loaded.vocab, lengths, rows=options.rows, most=options.queue, precision=precision)
    sessions = Sessions(
        seconds=60 * options.session_minutes, most=options.sessions, most_bytes=options.session_mb << 20
    )
    limits = Limits(prompt_tokens=options.max_prompt, max_tokens=options.max_tokens)
    return Service(options.folder.resolve().name or "model", engine, sessions, limits)


def _report(options: Serve, service: Service, port: int, *, locked: bool) -> None:
    host = f"[{options.host}]" if ":" in options.host else options.host
    print(f"{service.name}, {service.vocab}: http://{host}:{port} (completions: /v1)", flush=True)
    if options.host not in LOCAL and not locked:
        print(f"txl: Other machines can use this server, because no token is set. Set {TOKEN}.", file=sys.stderr)


def _refuse_without_packages() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        message = f"txl serve needs {error.name}. Install it: pip install fastapi uvicorn prometheus-client."
        raise Mistake(message) from None
