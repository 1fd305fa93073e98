"""`txl serve`: answer requests over HTTP."""

from __future__ import annotations

import gc
import logging
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from ipaddress import ip_address
from typing import Annotated

from tyro.conf import arg

from ..mistake import Mistake, printable
from .shared import Precision, RunFolder, Size, open_run

TOKEN = "TXL_SERVE_TOKEN"
LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Serve:
    """Answer requests over HTTP in the form of OpenAI's completions, and show a page to read and write texts."""

    folder: RunFolder
    port: int = 8000
    """0: any free port, which is printed."""
    host: str = "127.0.0.1"
    """The address to listen at. Any other lets other machines in: give a token."""
    token: Annotated[tuple[str, ...], arg(metavar="TEXT ...")] = ()
    """Answer only requests with one of these tokens. By default the variable TXL_SERVE_TOKEN is one, if it is set."""
    host_name: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = ()
    """Names under which clients reach the server, besides localhost and addresses. Others are refused."""
    trusted_proxy: Annotated[tuple[str, ...], arg(metavar="ADDRESS ...")] = ()
    """Addresses of proxies whose X-Forwarded-For names the client."""
    rows: int = 16
    """Number of texts that are written at the same time, rounded up to a multiple of 8."""
    queue: int = 256
    """Number of prompts that may wait; more are answered 429. One client may use as much as is left free."""
    max_prompt: Annotated[int, arg(metavar="N")] = 131_072
    """Tokens of all prompts of a request, at most."""
    max_tokens: Annotated[int, arg(metavar="N")] = 16_384
    """Tokens of an answer, at most."""
    session_minutes: float = 60.0
    """How long a text can be continued after its last use."""
    session_mb: int = 1024
    """Megabytes of texts that can be continued, at most; the client that keeps most loses its oldest first. 0: none."""
    grace: float = 30.0
    """Seconds that unfinished answers get after a stop signal."""
    mem_len: Size = None
    """Tokens of memory; by default as in evaluation."""
    device: str = "auto"
    precision: Precision = "auto"

    def run(self) -> None:
        if lacking := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
            raise Mistake(f"txl serve needs {' and '.join(lacking)}. Run `pip install fastapi uvicorn`.")
        from ..serving.answers import Service
        from ..serving.api import build_app
        from ..serving.engine import Engine, refusal
        from ..serving.requests import Limits
        from ..serving.server import listen, make_server
        from ..serving.sessions import Sessions

        trained = open_run(self.folder, self.device, self.precision)
        problems = trained.problems
        problems.bound(self, "port", least=0, most=65_535)
        problems.bound(self, "rows", least=1, most=1024)
        problems.bound(self, "queue", least=2, most=1 << 24)
        problems.bound(self, "max_prompt", "max_tokens", least=1, most=1 << 24)
        problems.bound(self, "session_mb", "grace", least=0, most=1 << 24)
        problems.bound(self, "session_minutes", above=0, most=1 << 24)
        found = trained.lengths(self)
        if found and (reason := refusal(trained.config.model, found[0])):
            problems.append(reason)
        try:
            proxies = [str(ip_address(proxy)) for proxy in self.trusted_proxy]
        except ValueError as error:
            problems.append(f"--trusted-proxy must be addresses of proxies, such as 10.0.0.1: {error}.")
        tokens = self.token or tuple(filter(None, [os.environ.get(TOKEN)]))
        if not all(token.strip() for token in tokens):
            problems.append(f"--token and {TOKEN} must be texts that are not blank.")
        loaded, precision = trained.load(), trained.precision
        logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
        engine = Engine(loaded.model, loaded.vocab, found[0], rows=self.rows, most=self.queue, precision=precision)
        sessions = Sessions(seconds=60 * self.session_minutes, most_bytes=self.session_mb << 20)
        values = max(Limits.values, 2 * self.max_prompt, 2 * self.max_tokens)
        limits = Limits(prompt_tokens=self.max_prompt, max_tokens=self.max_tokens, values=values)
        service = Service(self.folder.resolve().name or "model", engine, sessions, limits)
        names = [name.lower() for name in (self.host, *self.host_name)]
        server = make_server(build_app(service, tokens, names), grace=self.grace, trusted=proxies)
        with listen(self.host, self.port) as socket:
            host = f"[{self.host}]" if ":" in self.host else self.host
            url = f"http://{host}:{socket.getsockname()[1]}"
            print(f"{printable(service.name)}, {service.vocab}: {url} (completions: /v1)", flush=True)
            if self.host not in LOCAL and not tokens:
                print(
                    f"txl: Other machines can use this server, because no token is set. Set {TOKEN}.", file=sys.stderr
                )
            engine.start()
            gc.freeze()  # what there is now stays, so it need not be searched for garbage
            try:
                server.run(sockets=[socket])
            finally:
                engine.stop()
