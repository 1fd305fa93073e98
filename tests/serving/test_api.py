"""The HTTP interface: OpenAI's client, lm-evaluation-harness's requests, streams, limits, errors, the page."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from pydantic import ValidationError
from serving_live import BYTES, WORDS, Live, language_model, live_server

from transformer_xl.data.vocab import Vocab
from transformer_xl.run.checkpoint import save_checkpoint
from transformer_xl.serving.api import network_of
from transformer_xl.serving.requests import Completion, Limits
from transformer_xl.serving.scores import TokenScores, token_name

openai = pytest.importorskip("openai")
JSON = {"Content-Type": "application/json"}
TEXT = "A bird sang twice, and twice again, until it was evening."


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(language_model()) as made:
        yield made


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.mark.parametrize("prompt", [TEXT, "", [65, 66, 67], ["a", "b"], [[65], [66, 10, 13]]], ids=str)
def test_openai_completes_every_form_of_prompt(client: Any, prompt: Any) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]
    many = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    options = {"model": "toy", "prompt": prompt, "max_tokens": 7, "n": 2, "seed": 1, "logprobs": 3}
    answer = client.completions.create(**options)
    assert [choice.index for choice in answer.choices] == list(range(2 * many))
    assert answer.usage.completion_tokens == 14 * many
    for choice in answer.choices:
        assert choice.finish_reason == "length" and len(choice.logprobs.tokens) == 7
        assert all(len(top) in (3, 4) for top in choice.logprobs.top_logprobs)
    again = client.completions.create(**options)
    assert [choice.text for choice in again.choices] == [choice.text for choice in answer.choices]
    assert answer.choices[0].text != answer.choices[1].text


def joined(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """The choices of a stream, put together."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            whole = found.setdefault(choice["index"], {"text": "", "logprobs": {}})
            whole["text"] += choice["text"]
            whole["finish_reason"] = choice["finish_reason"]
            for name, values in (choice["logprobs"] or {}).items():
                whole["logprobs"].setdefault(name, []).extend(values or [])
    return found


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stop", [None, "e", ["\u00e9", "t"]])
def test_a_stream_gives_the_same_as_one_piece(live: Live, echo: bool, stop: Any) -> None:
    asked = {
        "prompt": ["ab\u00e9", TEXT],
        "n": 2,
        "seed": 5,
        "max_tokens": 60,
        "logprobs": 2,
        "echo": echo,
        "stop": stop,
    }
    whole = live.post(**asked)
    options = {"include_usage": True}
    with live.client.stream(
        "POST", "/v1/completions", json={**asked, "stream": True, "stream_options": options}
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = "".join(answer.iter_text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert chunks[-1]["usage"] == whole["usage"]
    expected = {choice.pop("index"): choice for choice in whole["choices"]}
    found = joined(chunks)
    for index, choice in expected.items():
        choice.pop("id")
        assert found[index]["text"] == choice["text"] and found[index]["finish_reason"] == choice["finish_reason"]
        assert found[index]["logprobs"]["tokens"] == choice["logprobs"]["tokens"]
        costs = (each["logprobs"]["token_logprobs"] for each in (found[index], choice))
        np.testing.assert_allclose(*(np.array(list(each), float) for each in costs), atol=1e-4)
        if stop is not None:
            stops = [stop] if isinstance(stop, str) else stop
            written = choice["text"].removeprefix(["ab\u00e9", TEXT][index // 2] if echo else "")
            assert not any(one in written for one in stops)


@pytest.mark.parametrize("vocab", [BYTES, WORDS, Vocab.build("byte", [], newlines="drop")], ids=str)
def test_echo_gives_the_log_probabilities_of_a_score(vocab: Vocab) -> None:
    model, text = language_model(vocab), "a bird sang twice a bird sang " * 4
    asked = {"model": "toy", "prompt": text, "max_tokens": 0, "echo": True, "logprobs": 1}
    with live_server(model) as live, openai.OpenAI(base_url=f"{live.url}/v1", api_key="none") as client:
        choice = client.completions.create(**asked).choices[0]
        pieces = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    found = choice.logprobs.token_logprobs
    assert [cost for piece in pieces if piece.logprobs for cost in piece.logprobs.token_logprobs] == found
    assert "".join(piece.text for piece in pieces) == choice.text == text
    for name, start in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert text[start:].startswith(name)
    costs = -model.score(text).nats
    if vocab.line_end is None:
        assert found.pop(0) is None
    np.testing.assert_allclose(found, costs, rtol=0, atol=1e-6)


def test_the_harness_gets_what_it_reads(live: Live) -> None:
    """The requests of lm-evaluation-harness's `local-completions`."""
    info = live.client.get("/tokenizer_info").json()
    assert info["eos_token"] == "\n"
    encode = lambda text: live.post("/tokenize", prompt=text, add_special_tokens=False)["tokens"]  # noqa: E731
    assert encode(info["eos_token"]) == [10]
    context, more = encode("A bird \u00e9"), encode(" sang")
    assert live.post("/detokenize", tokens=context + more)["prompt"] == "A bird \u00e9 sang"
    asked = {"model": "toy", "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    answer = live.post(prompt=[[10, *context, *more], [10, *more]], **asked)
    for choice, start in zip(answer["choices"], (1 + len(context), 1), strict=True):
        logprobs = choice["logprobs"]
        costs, tops = logprobs["token_logprobs"][start:-1], logprobs["top_logprobs"][start:-1]
        assert len(costs) == len(more) and logprobs["token_logprobs"][0] is None
        for token, cost, top in zip(logprobs["tokens"][start:-1], costs, tops, strict=True):
            assert top[token] == cost and max(top.values()) >= cost


def test_the_names_of_tokens_are_unique() -> None:
    assert len({token_name(BYTES, i) for i in range(256)}) == 256
    assert token_name(BYTES, 0xE2) == "bytes:\\xe2" and token_name(BYTES, 65) == "A"
    assert token_name(WORDS, 0) == "<eos>"


def test_a_shorter_memory_forgets(live: Live) -> None:
    """With `mem_len`, a token sees exactly as many tokens before it: what is earlier changes nothing."""
    costs = [
        live.post(prompt=text, max_tokens=0, echo=True, logprobs=0, mem_len=3)["choices"][0]["logprobs"]
        for text in ("first " + TEXT, "other " + TEXT)
    ]
    first, other = (np.array(each["token_logprobs"]) for each in costs)
    reach = 3 * 3  # three layers
    np.testing.assert_allclose(first[6 + reach :], other[6 + reach :], atol=1e-5)
    assert abs(first[6] - other[6]) > 1e-3
    live.post(prompt="a", mem_len=16)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("max_tokens", -1, "greater than or equal to 0"),
        ("max_tokens", 10**30, "at most 16,384"),
        ("n", 2.5, "valid integer"),
        ("n", 17, "less than or equal to 16"),
        ("temperature", float("nan"), "less than or equal to 10000"),
        ("top_p", 0, "greater than 0"),
        ("seed", 10**400, "less than"),
        ("logprobs", True, "valid integer"),
        ("stop", ["a"] * 17, "at most 16"),
        ("stop", "", "1 to 256 characters"),
        ("prompt", None, "a text, a list"),
        ("prompt", ["a"] * 65, "at most 64"),
        ("prompt", [[]], "a text, a list"),
        ("prompt", [256], "ids from 0 to 255"),
        ("prompt", [-1], "a text, a list"),
        ("prompt", "x" * 140_000, "at most 131,072 tokens"),
        ("prompt", [1] * 140_000, "at most 131,072 tokens"),
        ("prompt", ["x" * 70_000] * 2, "at most 131,072 tokens in all"),
        ("stream", "yes", "valid boolean"),
        ("best_of", 3, "left out or 1"),
        ("presence_penalty", 0.5, "left out or 0"),
        ("suffix", "x", "left out, because"),
        ("logit_bias", {"256": 1.0}, "ids from 0 to 255"),
        ("logit_bias", {"-1": 1.0}, "token ids as decimal numbers"),
        ("logit_bias", {"05": 1.0}, "token ids as decimal numbers"),
        ("logit_bias", {"5": 101.0}, "from -100 to 100"),
        ("__class__", 1, "no field of a request"),
        ("mem_len", 0, "greater than or equal to 1"),
        ("mem_len", 17, "from 1 to 16"),
        ("model", "gpt", "no model gpt"),
    ],
)
def test_a_wrong_field_is_refused_in_a_sentence(live: Live, field: str, value: Any, told: str) -> None:
    content = json.dumps({"prompt": "a", field: value})
    answer = live.client.post("/v1/completions", content=content, headers=JSON)
    error = answer.json()["error"]
    assert answer.status_code == (404 if field == "model" else 400)
    assert told in error["message"] and error["param"] == field and error["message"].endswith(".")


@pytest.mark.parametrize(
    "wrong",
    [{name: {str(-n): 1 for n in range(4000)}} for name in ("logit_bias", "stream_options")]
    + [{str(n): 1 for n in range(4000)}],
)
def test_of_many_mistakes_few_are_listed(wrong: dict[str, object]) -> None:
    """To list those of a megabyte would hold up all other clients for a second."""
    with pytest.raises(ValidationError) as caught:
        Completion.model_validate({"prompt": "a"} | wrong)
    assert caught.value.error_count() <= 700


def test_null_is_the_default(live: Live) -> None:
    plain = {"prompt": "a", "seed": 1}
    nulls = dict.fromkeys(("max_tokens", "temperature", "top_p", "n", "echo", "stream", "stop", "logprobs"))
    found = [live.client.post("/v1/completions", json=each).json() for each in (plain, plain | nulls)]
    assert len({each["choices"][0]["text"] for each in found}) == 1 and found[0]["usage"] == found[1]["usage"]


def test_a_wrong_body_or_header_is_told_as_what_it_is(live: Live) -> None:
    for headers in ({"Content-Type": "text/plain"}, {}):  # which a page from elsewhere can send
        answer = live.client.post("/v1/completions", content=b"{}", headers=headers)
        assert answer.status_code == 400 and "the header Content-Type: application/json" in answer.text
    error = live.post("/tokenize", prompt=["a"], status=400)["error"]
    assert "prompt is wrong" in error["message"] and "valid string, got ['a']" in error["message"]


@pytest.mark.parametrize("cut", [1, 2])
def test_a_text_that_ends_inside_a_character_goes_on_with_its_rest(live: Live, cut: int) -> None:
    raw = [*b"ab", *"\u754c".encode()]
    more = {"max_tokens": 1, "top_k": 1, "logprobs": 0}
    for bytes_before in (0, 1):  # a text that was read, or read and written
        begun = live.post(
            prompt=raw[: 2 + cut - bytes_before], max_tokens=bytes_before, logit_bias={str(raw[1 + cut]): 100}
        )
        name = begun["id"]
        for byte in raw[2 + cut :]:
            answer = live.post(prompt="", previous_response_id=name, logit_bias={str(byte): 100}, **more)
            name, choice = answer["id"], answer["choices"][0]
        assert choice["text"] == "\u754c"


def test_tokens_that_complete_a_character_begin_where_it_does(live: Live) -> None:
    raw = [*b"a", *"\U0001f618".encode()]
    assert raw[3] == raw[4]
    begun = live.post(prompt=raw[:3], max_tokens=0)["id"]
    asked = {"previous_response_id": begun, "logprobs": 0, "max_tokens": 2, "temperature": 0}
    for echo in (False, True):
        prompt = [*raw[3:], 99] if echo else ""
        answer = live.post(prompt=prompt, echo=echo, n=2, logit_bias={str(raw[3]): 100}, **asked)
        for choice in answer["choices"]:
            assert choice["text"] == ("\U0001f618c\ufffd\ufffd" if echo else "\U0001f618")
            assert choice["logprobs"]["text_offset"] == ([0, 0, 1, 2, 3] if echo else [0, 0])


@pytest.mark.parametrize(
    ("vocab", "prompt", "expected"),
    [
        (WORDS, "  zzzq  of\n  sang ", [2, 8, 10, 13, 19]),
        (Vocab.build("byte", [], newlines="drop"), "\na\n\u00e9\n", [1, 3, 3, 5]),
        (Vocab.build("char", ["ab\u00e9c"], newlines="drop"), "\na\n\u00e9\n", [1, 3, 5]),
    ],
    ids=str,
)
def test_offsets_are_those_of_the_text_that_was_sent(vocab: Vocab, prompt: str, expected: list[int]) -> None:
    """Which has other spaces and words than the model's own text, and line ends that the model does not read."""
    with live_server(language_model(vocab)) as live:
        answer = live.post(prompt=prompt, max_tokens=1, temperature=0, echo=True, logprobs=0)["choices"][0]
    assert answer["text"].startswith(prompt) and answer["logprobs"]["text_offset"] == expected


@pytest.mark.parametrize("prompt", [[97, 195], [195], [97, 0xE7, 0x95]])
def test_a_prompt_of_ids_may_end_inside_a_character(live: Live, prompt: list[int]) -> None:
    """What is written after it completes the character; without an answer its mark is in the echo alone."""
    whole = bytes(prompt).decode(errors="replace")
    assert live.post(prompt=prompt, max_tokens=0)["choices"][0]["text"] == ""
    assert live.post(prompt=prompt, max_tokens=0, echo=True)["choices"][0]["text"] == whole
    asked = {"max_tokens": 1, "temperature": 0, "logprobs": 0, "logit_bias": {"169": 100}, "echo": True}
    answer = live.post(prompt=prompt, **asked)["choices"][0]
    assert answer["text"] == bytes([*prompt, 169]).decode(errors="replace")
    begins = len(bytes(prompt[:1]).decode(errors="ignore"))  # the cut character does, after the first token
    assert answer["logprobs"]["text_offset"] == [0, *[begins] * len(prompt)]
    assert live.model.generate(bytes(prompt), max_tokens=0) == ""


def test_a_token_after_half_a_character_begins_after_its_mark() -> None:
    scores = TokenScores(BYTES, [10]).add([0xD3, 0x20, 0x74, 0xC3, 0xA9], [0.0] * 5, [[]] * 5)
    assert scores["text_offset"] == b"0, 1, 2, 3, 3"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"a",
        b"[]",
        b"[" * 15_000,
        b'{"prompt": "a", "seed": ' + b"9" * 9000 + b"}",
        '{"prompt": "\u00e9"'.encode("latin1"),
    ],
    ids=["empty", "word", "list", "deep", "digits", "latin1"],
)
def test_a_body_that_is_no_object_is_refused_in_a_sentence(live: Live, body: bytes) -> None:
    answer = live.client.post("/v1/completions", content=body, headers=JSON)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and "body" in message and message.endswith(".")


def test_other_mistakes_have_openais_form(live: Live) -> None:
    name = live.post(prompt="a", max_tokens=1)["id"]
    assert "Leave it out" in live.post(previous_response_id=name, mem_len=3, status=400)["error"]["message"]
    wrong = [("PUT", "/v1/completions"), ("GET", "/v1/completions"), ("POST", "/page.js"), ("DELETE", "/health")]
    assert live.client.head("/health").status_code == live.client.head("/").status_code == 200
    for method, path, status in (("GET", "/nothing", 404), *((*each, 405) for each in wrong), ("GET", "/../etc", 404)):
        error = live.client.request(method, path)
        assert error.status_code == status and error.json()["error"]["message"].endswith(".")


def test_a_long_prompt_or_a_large_body_is_refused() -> None:
    limits = Limits(prompt_tokens=100)
    most = 8 * 100 + (1 << 16)
    with live_server(language_model(), limits=limits) as live:
        assert live.post(prompt=[10] * 100, max_tokens=0)["usage"]["prompt_tokens"] == 100, "the first one counts"
        live.post(prompt=[10] * 101, max_tokens=0, status=400)
        live.post(prompt="a" * 100, user="b" * (most - 200))
        for content in (b"a" * (most + 1), iter([b"a" * (most // 2)] * 3)):
            answer = live.client.post("/v1/completions", content=content, headers=JSON)
            assert answer.status_code == 413 and answer.json()["error"]["message"].endswith(".")
        live.post(prompt="a")


def test_an_answer_beyond_its_values_is_refused_before_it_is_made(live: Live) -> None:
    read = live.service.engine.counts["tokens_read"]
    for more in ({"echo": True, "prompt": "ab" * 45_000}, {"max_tokens": 16_000, "prompt": ["a"] * 4}):
        error = live.post(**{"max_tokens": 0, "logprobs": 20, "n": 16, **more}, status=400)["error"]
        assert "The answer must hold at most 524,288 values, and could hold" in error["message"]
    assert live.service.engine.counts["tokens_read"] == read and not live.service.held


def test_answers_of_a_client_that_reads_nothing_count_until_it_leaves(live: Live) -> None:
    body = json.dumps({"prompt": "a" * 5000, "max_tokens": 0, "n": 16, "logprobs": 5, "echo": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with socket.socket() as unread:
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        unread.connect(("127.0.0.1", int(live.url.rpartition(":")[2])))
        unread.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
        time.sleep(0.5)
        assert live.service.held.total() == 16 * 6 * 5001
    end = time.monotonic() + 20
    while live.service.held and time.monotonic() < end:
        time.sleep(0.1)
    assert not live.service.held
    live.settle()


def test_only_names_of_the_server_are_answered() -> None:
    """Or a page on the internet could re-point its name to this machine, and read."""
    with live_server(language_model(), names=["me.example"]) as live:
        for host in ("localhost:1", "127.0.0.1", "[::1]:8000", "me.example"):
            assert live.client.get("/v1/models", headers={"Host": host}).status_code == 200, host
        for host in ("evil.example", "["):
            answer = live.client.get("/v1/models", headers={"Host": host})
            assert answer.status_code == 421 and answer.json()["error"]["code"] == "wrong_host", host


def test_a_full_queue_asks_to_wait() -> None:
    with live_server(language_model(), start=False, most=4) as live:
        error = live.post(prompt=["a", "b", "c"], status=400)["error"]  # never: also alone it is too much
        assert error["message"] == "prompt must hold at most 2 texts, got 3."
        with suppress(httpx.ReadTimeout):
            live.client.post("/v1/completions", json={"prompt": "a", "stream": True}, timeout=0.5)
        answer = live.client.post("/v1/completions", json={"prompt": ["a", "b"]})
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) == 10
        assert answer.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_the_work(live: Live, stream: bool) -> None:
    asked = {"prompt": "a", "max_tokens": 16_384, "stream": stream, "n": 8}
    with httpx.Client(base_url=live.url, timeout=0.5) as client:
        answer = client.stream("POST", "/v1/completions", json=asked)
        with suppress(httpx.ReadTimeout), answer as begun:
            next(begun.iter_text())
    live.settle(seconds=5)
    assert live.service.engine.counts["steps"] < 16_384


def test_a_client_that_leaves_while_it_sends_leaves_nothing_in_the_log(live, caplog) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", httpx.URL(live.url).port or 0)) as connection:
        connection.sendall(f'{head}Content-Length: 1000\r\n\r\n{{"prompt": "'.encode())
        live.post(prompt="a")  # the server has read it by now
    live.post(prompt="a")
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("part", ["_read", "_begin", "_seat", "_write"])
def test_a_mistake_of_ours_is_a_500_with_a_traceback_in_the_log(live, part, monkeypatch, caplog) -> None:
    def fail(*_: Any) -> Any:
        raise KeyError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(live.service.engine, part, fail)
        error = live.post(prompt="abc", status=500)["error"]
    assert error["type"] == "server_error" and "broken" not in error["message"]
    assert "KeyError: 'broken'" in caplog.text
    live.post(prompt="a")


def test_metrics_count(live: Live) -> None:
    live.post(prompt="abc", max_tokens=5)
    found = dict(line.split() for line in live.client.get("/metrics").text.splitlines())
    assert float(found["txl_tokens_written_total"]) >= 5 and found["txl_rows"] == "8"
    assert live.client.get("/health").json() == {"status": "ok"}


def test_the_page_loads_nothing_from_elsewhere(live: Live) -> None:
    for path in ("/", "/page.css", "/page.js"):
        answer = live.client.get(path)
        assert answer.status_code == 200 and "://" not in answer.text, path
    assert "Content-Security-Policy" in live.client.get("/").text
    paths = live.client.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/models", "/tokenize"} <= paths.keys()
    assert all("422" not in route["responses"] for methods in paths.values() for route in methods.values())
    assert [*paths["/metrics"]["get"]["responses"]["200"]["content"]] == ["text/plain"]
    [about] = live.client.get("/v1/models").json()["data"]
    assert live.client.get(f"/v1/models/{about['id']}").json() == about
    assert live.client.get("/v1/models/another").json()["error"]["type"] == "not_found_error"


def test_the_command_serves_and_ends_gracefully(tmp_path: Path) -> None:
    """After SIGTERM a running text is finished, and no new one is taken."""
    model = language_model()
    save_checkpoint(tmp_path / "toy", model=model.model, vocab=BYTES, config=model.config)
    command = [sys.executable, "-m", "transformer_xl", "serve", str(tmp_path / "toy"), "--port", "0", "--device", "cpu"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TXL_SERVE_TOKEN": "t"}
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-3]
        with httpx.Client(base_url=url, timeout=60, headers={"Authorization": "Bearer t"}) as client:
            asked = {"prompt": "a", "max_tokens": 1500, "stream": True, "logprobs": 0}
            with client.stream("POST", "/v1/completions", json=asked) as answer:
                chunks = answer.iter_text()
                next(chunks)
                server.send_signal(signal.SIGTERM)
                time.sleep(0.3)
                with pytest.raises(httpx.ConnectError):
                    client.post("/v1/completions", json={"prompt": "a"})
                text = "".join(chunks)
        assert text.endswith("data: [DONE]\n\n")
        assert server.wait(timeout=30) == -signal.SIGTERM


def test_the_command_refuses_in_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformer_xl.commands.main import main

    model = language_model()
    run = save_checkpoint(tmp_path / "toy", model=model.model, vocab=BYTES, config=model.config)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, told in (
            ([f"--port={port}"], "in use"),
            (["--port=70000"], "--port must be"),
            (["--rows=0"], "--rows must be"),
            (["--queue=1"], "--queue must be at least 2"),
            (["--mem-len=0"], "--mem-len must be at least 1"),
            (["--token", " "], "not blank"),
            (["--host", "nowhere.invalid"], "nowhere.invalid"),
            (["--trusted-proxy", "localhost"], "--trusted-proxy must be addresses"),
            (["--trusted-proxy=*"], "--trusted-proxy must be addresses"),
        ):
            assert main(["serve", str(run), *words]) == 2
            assert told in capsys.readouterr().err


def test_a_client_is_one_address_of_ipv4_or_one_network_of_ipv6() -> None:
    names = ["1.2.3.4", "::ffff:1.2.3.4", "::ffff:9.9.9.9", "2001:db8::1", "2001:db8::2", "unix:"]
    found = ["1.2.3.4/32", "1.2.3.4/32", "9.9.9.9/32", "2001:db8::/64", "2001:db8::/64", "unix:"]
    assert [network_of(name) for name in names] == found


@pytest.mark.parametrize("own", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-6}], ids=str)
def test_each_setting_of_drawing_can_leave_the_likeliest_token_alone(live, own):
    asked = {"prompt": "a bird", "max_tokens": 30, "seed": 4}
    greedy = live.post(**asked, temperature=0)["choices"][0]["text"]
    assert live.post(**asked, **own)["choices"][0]["text"] == greedy != live.post(**asked)["choices"][0]["text"]
