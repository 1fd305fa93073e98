"""Requests that want to break the server: it answers each in a sentence, and afterwards nothing is left of them."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from serving_live import Live, language_model, live_server

from transformer_xl.serving.requests import Completion, Limits

MANY = 300
LIMITS = Limits(body_bytes=20_000, body_seconds=0.3, max_tokens=40, prompt_tokens=500)
FIELDS = [*Completion.model_fields, "words", "__class__", "model_config", "prompt\u0000"]
VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 2, 10**30, -(10**30), 1.5, 1e308, -0.0, 5e-324, float("nan"), float("inf")),
    *("", "a", "\u0000", "\u202e", "\u00e9" * 50, "a" * 600, "\ud800", "cmpl-x", "' OR 1=1", "../" * 9, "toy"),
    *(
        [],
        [[]],
        [""],
        [1],
        [256],
        [-1],
        [1.5],
        ["a", 1],
        [[1], [2]],
        [[1], "a"],
        [None],
        [[[1]]],
        ["a"] * 70,
        [1] * 600,
    ),
    *({}, {"a": 1}, {"include_usage": 1}),
]
PATHS = [
    "/",
    "/v1",
    "/v1/completions/",
    "/tokenize",
    "/detokenize",
    "/metrics",
    "/%00",
    "/..%2f..%2fetc/passwd",
    "/page.js/x",
]
PATHS += [
    "/v1/models?x=" + "y" * 3000,
    "/\u00e9".encode().decode("latin1"),
    "/openapi.json",
    "/docs",
    "//",
    "/v1/completions?stream=1",
]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(language_model(), limits=LIMITS) as made:
        yield made


def body_of(dice: random.Random) -> bytes:
    """A request's body: JSON with hostile values, or no JSON at all."""
    kind = dice.randrange(8)
    if kind == 0:
        return dice.randbytes(dice.randrange(2000))
    if kind == 1:
        return b"[" * dice.randrange(1, 15_000)
    if kind == 2:
        return b'{"prompt": "' + b"a" * dice.choice([10, 19_000, 30_000, 200_000]) + b'"}'
    if kind == 3:
        return b'{"prompt": "a", "seed": ' + b"9" * dice.randrange(1, 9000) + b"}"
    fields = {dice.choice(FIELDS): dice.choice(VALUES) for _ in range(dice.randrange(4))}
    if dice.random() < 0.7:
        fields.setdefault("prompt", "abc")
    text = json.dumps(fields).encode()
    return text[: dice.randrange(len(text) + 1)] if kind == 4 else text


def request_of(dice: random.Random) -> bytes:
    """A request as bytes on the wire."""
    body = body_of(dice)
    path = "/v1/completions" if dice.random() < 0.7 else dice.choice(PATHS)
    method = dice.choice(["POST"] * 9 + ["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "get", "X" * 50])
    length = dice.choice([len(body)] * 12 + [0, len(body) // 2, 10**18, -1])
    kind = dice.choice(["application/json"] * 6 + ["text/plain", "application/json; charset=utf-16", "\u00e9", ""])
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Content-Length: {length}", f"Content-Type: {kind}"]
    lines.append(
        dice.choice(["X-A: b", "Authorization: Bearer \u00ff", "Transfer-Encoding: chunked", "X: " + "y" * 70_000])
    )
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin1") + body


def answer_to(url: str, request: bytes, dice: random.Random) -> bytes:
    """Send a request whole, in two parts, or not to its end; return what comes back."""
    address = urlsplit(url)
    cut = dice.choice([len(request)] * 4 + [dice.randrange(len(request))])
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=5) as wire:
        try:
            wire.sendall(request[:cut])
            if dice.random() < 0.2:
                time.sleep(0.02)
            if dice.random() < 0.1:
                return b""
            wire.sendall(request[cut:] if dice.random() < 0.5 else b"")
            if dice.random() < 0.5:
                wire.shutdown(socket.SHUT_WR)
            found = b""
            while piece := wire.recv(1 << 16):
                found += piece
            return found
        except OSError:
            return b""


def test_hostile_requests_are_answered_in_a_sentence(live: Live) -> None:
    dice, answered = random.Random(7), 0
    for number in range(MANY):
        request = request_of(dice)
        found = answer_to(live.url, request, dice)
        if not found:
            continue
        answered += 1
        head, _, body = found.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        assert 200 <= status < 500, (number, request[:300], found[:500])
        if status >= 400 and b"application/json" in head and not request.startswith(b"HEAD"):
            assert json.loads(body)["error"]["message"].endswith("."), (number, request[:300], body)
    assert answered > MANY // 2
    live.settle()
    assert live.post(prompt="a", max_tokens=1)["choices"][0]["finish_reason"] == "length"
    assert live.service.sessions.nbytes == sum(each.past.nbytes for each in live.service.sessions._texts.values())


def test_a_slow_request_is_ended(live: Live) -> None:
    address = urlsplit(live.url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=10) as wire:
        wire.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        found = b"".join(iter(lambda: wire.recv(1 << 16), b""))
    assert b" 408 " in found.splitlines()[0] and b"must arrive within 0.3 s." in found
