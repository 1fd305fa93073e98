"""A request can continue an earlier text without reading it again, if the text is its owner's and has not expired."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
import torch
from serving_live import LENGTHS, Live, language_model, live_server

from transformer_xl.config.settings import Lengths
from transformer_xl.model.inference import KVCache
from transformer_xl.serving import sessions
from transformer_xl.serving.sessions import Past, Sessions

WINDOW = Lengths(tgt_len=8, mem_len=16, attn_len=17)
"""Lengths at which a result does not depend on where a text is cut."""
PARTS = ("A bird sang", " twice, and twice again, until it was", " evening, and then no more.")


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(language_model(lengths=WINDOW)) as made:
        yield made


def costs(answer: dict) -> list[float]:
    return answer["choices"][0]["logprobs"]["token_logprobs"]


def test_a_part_has_the_bits_of_a_context(live: Live) -> None:
    """At any lengths, a session is `LanguageModel.score(text, context)`."""
    with live_server(language_model(lengths=LENGTHS)) as other:
        context, last = None, None
        for part in PARTS:
            scored = other.model.score(part, context)
            answer = other.post(prompt=part, previous_response_id=last, max_tokens=0, echo=True, logprobs=0)
            assert costs(answer) == (-scored.nats).tolist()
            context, last = scored.context, answer["id"]


def test_texts_fork(live: Live) -> None:
    """Each choice can be continued, any number of times, and no continuation changes another."""
    ascii_only = {str(byte): -100.0 for byte in range(128, 256)}  # or a text need not be UTF-8
    start = live.post(prompt=PARTS[0], max_tokens=9, n=3, seed=2, logit_bias=ascii_only)
    ids = [choice["id"] for choice in start["choices"]]
    assert start["id"] == ids[0] and len(set(ids)) == 3
    asked = {"max_tokens": 0, "echo": True, "logprobs": 0}
    for _ in range(2):
        for choice in start["choices"]:
            found = costs(live.post(prompt=PARTS[1], previous_response_id=choice["id"], **asked))
            text = choice["text"]
            whole = costs(live.post(prompt=PARTS[0] + text + PARTS[1], **asked))
            np.testing.assert_allclose(found, whole[-len(found) :], atol=1e-4)
            found_again = costs(live.post(prompt=PARTS[1], previous_response_id=choice["id"], **asked))
            assert found == found_again


def test_going_on_reads_only_what_is_new(live: Live) -> None:
    answer = live.post(prompt="x" * 200, max_tokens=0)
    before = live.service.engine.counts["tokens_read"]
    live.post(prompt="yz", previous_response_id=answer["id"], max_tokens=1)
    assert live.service.engine.counts["tokens_read"] - before == 2


def test_an_id_that_is_forged_or_not_stored_is_not_found(live: Live) -> None:
    kept = [live.post(prompt="a", store=False, max_tokens=count)["id"] for count in (0, 1)]
    for name in (*kept, "cmpl-" + 32 * "x", "", "x" * 10_000, "../../etc/passwd", "cmpl-\u00e9"):
        error = live.post(prompt="a", previous_response_id=name, status=404)["error"]
        assert (error["code"], error["param"]) == ("response_not_found", "previous_response_id")
        assert error["message"].endswith("Send the whole text.")


def test_a_text_belongs_to_its_token_before_which_nothing_is_read() -> None:
    wrong, own = {"Authorization": "Bearer three"}, "three words \u00e0"
    with live_server(language_model(), tokens=("first", own)) as live:
        for path in ("/v1/completions", "/v1/models", "/metrics", "/openapi.json", "/docs", "/nothing", "/tokenize"):
            assert live.client.post(path, content=(b"a" for _ in range(3)), headers=wrong).status_code == 401
            assert live.client.get(path).status_code == 401
        assert live.client.get("/health").status_code == live.client.get("/").status_code == 200

        def ask(token: str, status: int, **body: str) -> dict:
            live.client.headers = httpx.Headers([(b"Authorization", f"Bearer {token}".encode())])
            return live.post(status=status, prompt="a", **body)

        assert ask("third", 401)["error"]["code"] == "invalid_api_key"
        name = ask("first", 200)["id"]
        ask(own, 404, previous_response_id=name)
        ask("first", 200, previous_response_id=name)


def past(positions: int = 4) -> Past:
    """A text whose keys and values have 8 bytes for each position."""
    return Past(KVCache([torch.zeros(1, 2, 1, positions, 1)], LENGTHS, positions), [0], LENGTHS)


def test_texts_go_after_their_time_or_when_they_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sessions, "LEAST", 1)
    texts = Sessions(seconds=10, most_bytes=100)
    for name in "abc":
        texts.add(name, past())
    assert texts.nbytes == 96 and texts.get("a") is not None
    texts.add("d", past())
    assert texts.get("b") is None and texts.get("a") is not None and len(texts) == 3
    texts.add("large", past(8))
    assert len(texts) == 2 and texts.nbytes == 96 and texts.get("a") is not None
    texts.add("too large", past(80))
    assert texts.get("too large") is None and texts.get("a") is not None
    now[0] = 9.0
    assert texts.get("a") is not None
    now[0] = 12.0
    texts.trim()
    assert len(texts) == 1 and texts.get("large") is None
    now[0] = 19.0
    assert texts.get("a") is None and texts.nbytes == len(texts) == len(texts._held) == 0


def test_the_client_that_keeps_most_loses_its_oldest_text_first() -> None:
    """However many texts one client makes, another one's stay while they are fewer."""
    texts = Sessions(seconds=10, most_bytes=10 * sessions.LEAST)
    for number in range(5):
        texts.add(f"mine {number}", past(), client="me")
    for number in range(1000):
        texts.add(f"theirs {number}", past(), client="another")
    assert all(texts.get(f"mine {number}") for number in range(5)) and texts.get("theirs 999")
    assert len(texts) == 10 and texts.nbytes == 10 * sessions.LEAST


def test_a_kept_text_has_no_encoded_distances() -> None:
    text, texts = past(), Sessions(seconds=10, most_bytes=1 << 20)
    text.cache.positions, text.cache.reach = [None, None], 4
    texts.add("a", text.to_keep())
    kept = texts.get("a")
    assert kept is not None and kept.tail == text.tail and kept.cache.reach == len(kept.cache.positions) == 0
