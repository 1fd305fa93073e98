"""A small model behind a live server on 127.0.0.1, for the tests of serving."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx
import torch
from small_models import small_model

from transformer_xl.config.settings import Lengths, RunConfig, TrainConfig
from transformer_xl.data.vocab import Vocab
from transformer_xl.evaluation.language_model import LanguageModel
from transformer_xl.serving.answers import Service
from transformer_xl.serving.api import build_app
from transformer_xl.serving.engine import Engine
from transformer_xl.serving.requests import Limits
from transformer_xl.serving.server import listen, make_server
from transformer_xl.serving.sessions import Sessions

BYTES = Vocab.build("byte", [])
WORDS = Vocab("word", ("<eos>", "<unk>", "a", "bird", "sang", "twice"))
LENGTHS = Lengths(tgt_len=8, mem_len=16)


class Live(NamedTuple):
    """A server with its parts, and a client without a token."""

    url: str
    service: Service
    model: LanguageModel
    client: httpx.Client

    def post(self, path: str = "/v1/completions", *, status: int = 200, **body: Any) -> dict[str, Any]:
        """The answer to a request, which must have this status."""
        answer = self.client.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def settle(self, seconds: float = 20) -> None:
        """Wait until the engine has nothing to do."""
        end, quiet, engine = time.monotonic() + seconds, 0, self.service.engine
        while quiet < 5:
            assert time.monotonic() < end, "the engine is still busy"
            quiet = 0 if engine.busy or engine.waiting else quiet + 1
            time.sleep(0.01)


def language_model(vocab: Vocab = BYTES, lengths: Lengths = LENGTHS, **shape: Any) -> LanguageModel:
    model = small_model(vocab_size=len(vocab), dtype=torch.float32, **shape)
    return LanguageModel(model, vocab, RunConfig(model=model.config, train=TrainConfig(**vars(lengths))))


@contextmanager
def live_server(
    model: LanguageModel,
    *,
    tokens: Sequence[str] = (),
    names: Sequence[str] = (),
    limits: Limits | None = None,
    start: bool = True,
    **engine: Any,
) -> Iterator[Live]:
    """Serve a model. With `start` False the engine does not run, so its queue only grows."""
    made = Engine(model.model, model.vocab, model.config.eval_lengths, **{"rows": 8} | engine)
    service = Service("toy", made, Sessions(seconds=60, most_bytes=1 << 30), limits or Limits())
    server = make_server(build_app(service, tokens, names))
    if start:
        made.start()
    with listen("127.0.0.1", 0) as socket:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
        thread.start()
        url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        try:
            with httpx.Client(base_url=url, timeout=30) as client:
                yield Live(url, service, model, client)
        finally:
            made.stop()
            server.should_exit = True
            thread.join()
