"""Requests that want to break the server: it answers each in a sentence, and afterwards nothing is left of them."""

from __future__ import annotations

import gzip
import json
import random
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
from serving_live import Live, language_model, live_server

from transformer_xl.serving.requests import Completion, Limits
from transformer_xl.serving.sessions import new_id

MANY = 105
"""Number of requests of each test that draws them."""
LIMITS = Limits(body_bytes=20_000, body_seconds=0.3, max_tokens=10_000, prompt_tokens=500)
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
        waits, leaves, goes_on, shuts = (dice.random() < share for share in (0.2, 0.1, 0.5, 0.5))
        found = b""
        with suppress(OSError):  # the server may answer and close before it has read all
            wire.sendall(request[:cut])
            if waits:
                time.sleep(0.02)
            if leaves:
                return b""
            wire.sendall(request[cut:] if goes_on else b"")
            if shuts:
                wire.shutdown(socket.SHUT_WR)
        with suppress(OSError):
            while piece := wire.recv(1 << 16):
                found += piece
        return found


def post(body: bytes, *, path: str = "/v1/completions", kind: str = "application/json", length: int = -1) -> bytes:
    """A request on the wire."""
    size = len(body) if length < 0 else length
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Type: {kind}", f"Content-Length: {size}"]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body


def fields(**values: Any) -> bytes:
    return post(json.dumps({"prompt": "a", **values}).encode())


def too_large(dice: random.Random) -> bytes:
    body = post(b"a" * dice.choice([20_001, 50_000, 79_000]))
    ids, many = [1] * 501, dice.choice([10**5, 10**30, 10**300])
    sizes: list[dict[str, Any]] = [
        {"prompt": "a" * 501},
        {"prompt": ids},
        {"prompt": ["a", ids]},
        {"prompt": ["a"] * 65},
    ]
    sizes += [{"stop": ["a"] * 17}, {"stop": "a" * 257}, {"n": many}, {"max_tokens": many}, {"logprobs": many}]
    return dice.choice([body, post(b"", length=10**18), post(b"[" * 15_000), *(fields(**each) for each in sizes)])


def wrong_type(dice: random.Random) -> bytes:
    wrong = dice.choice([{"a": 1}, [[[1]]], [None], [{}], "\ud800"])
    return fields(**{dice.choice(FIELDS): wrong})


def wrong_encoding(dice: random.Random) -> bytes:
    text = json.dumps({"prompt": "\u00e9" * dice.randrange(1, 9)}, ensure_ascii=False)
    broken = [
        text.encode("latin1"),
        text.encode()[:-4],
        gzip.compress(text.encode()),
        text.encode("utf-16")[:-3],
        b"\0",
    ]
    kinds = ["text/plain", "multipart/form-data", "application/x-www-form-urlencoded", "image/png"]
    return dice.choice([*map(post, broken), *(post(text.encode(), kind=kind) for kind in kinds)])


def forged_id(dice: random.Random) -> bytes:
    real, spot = KEPT[0], dice.randrange(len(KEPT[0]))
    names = [real[:-1], real + "A", real.swapcase(), real[:spot] + "~" + real[spot + 1 :], f" {real}", real + "\0"]
    names += [new_id(), "", "cmpl-", "' OR 1=1", "../" * 9, "\u202e", "x" * 9000]
    return fields(previous_response_id=dice.choice(names))


def wrong_path(dice: random.Random) -> bytes:
    paths = ["/v1", "/%00", "/..%2f..%2fetc/passwd", "/page.js/x", "//", "/v1/completions/../../x", "/v1/" + "y" * 3000]
    return post(b"{}", path=dice.choice([*paths, "/", "/docs", "/metrics", "/v1/models", "/page.css"]))


def wrong_wire(dice: random.Random) -> bytes:
    """No HTTP, or one that contradicts itself."""
    start = b"POST /v1/completions HTTP/1.1\r\n"
    lines = [
        b"Content-Length: -1",
        b"Content-Length: x",
        b"Content-Length: 1\r\nContent-Length: 2",
        b": x",
        b"no colon",
    ]
    noise = b"\0" + dice.randbytes(dice.randrange(1, 2000)) + b"\r\n\r\n"
    return dice.choice([noise, *(start + line + b"\r\n\r\n" for line in lines)])


def slow(dice: random.Random) -> bytes:
    """A request that does not go on, in its head or in its body."""
    whole = fields(max_tokens=1)
    return whole[: dice.randrange(1, len(whole))]


KEPT: list[str] = []
"""The id of a text that can be continued."""
FORGERIES = [too_large, wrong_type, wrong_encoding, forged_id, wrong_path, wrong_wire, slow]


def test_each_hostile_request_is_refused_in_a_sentence(live: Live) -> None:
    """Also a slow one; clients that leave get nothing. No text of any of them is kept."""
    dice = random.Random(3)
    KEPT[:] = [live.post(prompt="a", max_tokens=1)["id"]]
    kept = len(live.service.sessions)
    for number in range(MANY):
        kind = FORGERIES[number % len(FORGERIES)]
        request = kind(dice)
        if number % 10 == 0:
            leave(live.url, dice)
        found = exchange(live.url, request)
        assert re.match(rb"HTTP/1.1 4\d\d ", found), (kind.__name__, request[:300], found[:500])
        assert sentence_of(found).endswith("."), (kind.__name__, request[:300], found)
        if kind is forged_id:
            assert b" 404 " in found.splitlines()[0]
        if kind is slow:
            assert b" 408 " in found.splitlines()[0]
    live.resolve_settings()
    assert len(live.service.sessions) == kept
    assert not live.server.server_state.tasks and len(live.server.server_state.connections) <= 1, "live.client's own"
    assert live.post(prompt="a", previous_response_id=KEPT[0], max_tokens=1)["choices"]


def exchange(url: str, request: bytes) -> bytes:
    """What comes back until the server closes the connection."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=60) as wire:
        wire.sendall(request)
        return b"".join(iter(lambda: wire.recv(1 << 16), b""))


def leave(url: str, dice: random.Random) -> None:
    """Ask for long texts and leave: at once, or after some of the stream."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=10) as wire:
        wire.sendall(fields(max_tokens=10_000, n=8, stream=dice.random() < 0.5))
        wire.settimeout(0.1)
        with suppress(TimeoutError):
            wire.recv(dice.choice([1, 1000]))


def sentence_of(answer: bytes) -> str:
    """The message of an error."""
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_mangled_requests_break_nothing(live: Live) -> None:
    dice, answered = random.Random(7), 0
    for number in range(MANY):
        request = request_of(dice)
        found = answer_to(live.url, request, dice)
        head, _, body = found.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        cut = length is not None and len(body) < int(length[1]) and not request.startswith(b"HEAD")
        if not found or cut:  # nobody answers a request that does not end, and a reset may cut an answer
            continue
        answered += 1
        status = int(head.split()[1])
        assert 200 <= status < 500, (number, request[:300], found[:500])
        if status >= 400 and b"application/json" in head and not request.startswith(b"HEAD"):
            assert json.loads(body)["error"]["message"].endswith("."), (number, request[:300], body)
    assert answered > MANY // 2
    live.resolve_settings()
    assert live.post(prompt="a", max_tokens=1)["choices"][0]["finish_reason"] == "length"
    texts = live.service.sessions
    assert texts.nbytes == sum(each.past.nbytes for each in texts._texts.values())
