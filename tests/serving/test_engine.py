"""Continuous batching: a text has the same bits alone as among others, and clients take turns."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from serving_live import BYTES, LENGTHS, language_model
from small_models import VARIANTS

from transformer_xl.config.settings import Lengths
from transformer_xl.evaluation.generate import Sampling
from transformer_xl.evaluation.language_model import LanguageModel
from transformer_xl.serving.engine import Engine, empty_cache, refusal
from transformer_xl.serving.jobs import Ended, Job, Scored, Turns
from transformer_xl.serving.requests import Refused
from transformer_xl.serving.sessions import shorter_memory


class Written:
    """Collects the events of a job."""

    def __init__(self) -> None:
        self.events: queue.Queue[Any] = queue.Queue()

    def all(self, n: int = 1) -> list[Any]:
        """All events until the n-th end."""
        found: list[Any] = []
        while sum(isinstance(event, Ended | Exception) for event in found) < n:
            found.append(self.events.get(timeout=30))
        return found


def job(ids: np.ndarray, written: Written, **options: Any) -> Job:
    """A job with these options, of which some are of how tokens are drawn."""
    drawing = {name: options.pop(name) for name in ("seed", "temperature", "top_k", "top_p", "bias") if name in options}
    sampling = Sampling(**{"seed": 0, "top_k": 0} | drawing)
    sizes = {"lengths": LENGTHS, "max_tokens": 5} | options
    return Job(ids=ids, past=None, sampling=sampling, emit=written.events.put, **sizes)


def plain(events: list[Any]) -> list[Any]:
    """Events without the state that they carry."""
    return [
        (event.log_probs.tolist(), event.tops)
        if isinstance(event, Scored)
        else tuple(event)[: 3 if isinstance(event, Ended) else 5]
        for event in events
    ]


@contextmanager
def running(model: LanguageModel, **options: Any) -> Iterator[Engine]:
    made = Engine(model.model, BYTES, LENGTHS, rows=8, **options)
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.fixture
def engine() -> Iterator[Engine]:
    with running(language_model()) as made:
        yield made


def mixed_jobs(count: int, seed: int) -> list[dict[str, Any]]:
    """Arguments of very different jobs."""
    dice = np.random.default_rng(seed)
    return [
        {
            "ids": dice.integers(256, size=int(dice.integers(1, 60))),
            "seed": int(dice.integers(1000)),
            "max_tokens": int(dice.integers(0, 40)),
            "temperature": float(dice.choice([0.2, 1])),
            "top_k": int(dice.choice([0, 5])),
            "top_p": float(dice.choice([0.2, 1])),
            "bias": ((98, 9.0),) * int(dice.integers(2)),
            "n": int(dice.choice([1, 1, 3])),
            "echo": bool(dice.integers(2)),
            "top": int(dice.integers(3)),
            "client": str(dice.integers(3)),
            "lengths": LENGTHS if dice.integers(2) else shorter_memory(LENGTHS, int(dice.integers(1, 16))),
        }
        for _ in range(count)
    ]


@torch.no_grad()
@pytest.mark.parametrize(("reading", "reads"), [(1, 12), (3, 4)])
def test_reading_and_writing_take_turns_by_their_whole_time(
    reading: int, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where drawing a token takes as long as reading a segment, each step of writing is followed by one of reading.
    Here a segment is read by a device that works while the host goes on; drawing waits for it."""
    engine = Engine(language_model().model, BYTES, LENGTHS, rows=8)
    now, left, read, draw, steps = [0.0], [0], engine._read_segment, engine._draw, 12

    def start(*args: Any) -> Any:
        left[0] += reading
        return read(*args)

    def wait(*_: Any) -> None:
        now[0], left[0] = now[0] + left[0], 0

    def slow(*args: Any) -> Any:
        wait()
        now[0] += 1
        return draw(*args)

    monkeypatch.setattr("transformer_xl.serving.engine.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr("transformer_xl.serving.engine.synchronize", wait)
    monkeypatch.setattr(engine, "_read_segment", start)
    monkeypatch.setattr(engine, "_draw", slow)
    engine.submit([job(np.arange(1 + 16 * LENGTHS.tgt_len), Written(), max_tokens=90) for _ in range(2)])
    engine._begin(engine._queue.first(), empty_cache(engine.model, LENGTHS))  # a text that is being written meanwhile
    for _ in range(steps):
        engine._admit()
        engine._read()
        engine._seat()
        engine._write()
    assert engine.counts["steps"] == steps
    assert engine.counts["tokens_read"] == reads * LENGTHS.tgt_len


def texts_of(engine: Engine, wanted: list[dict[str, Any]], *, together: bool) -> list[list[Any]]:
    """The events of each job, sorted by their continuation."""
    outs = [Written() for _ in wanted]
    found = []
    for out, each in zip(outs, wanted, strict=True):
        engine.submit([job(written=out, **each)])
        if not together:
            found.append(out.all(each["n"]))
    if together:
        found = [out.all(each["n"]) for out, each in zip(outs, wanted, strict=True)]
    order = lambda event: -1 if isinstance(event, Scored) else event.index  # noqa: E731
    return [plain(sorted(events, key=order)) for events in found]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["post-norm", "n-grams", "QK-norm"])
def test_a_text_has_the_same_bits_alone_as_among_others(kind: str, precision: str, built: Path) -> None:
    """With the step in C++; neighbouring rows draw each by its own settings."""
    wanted = mixed_jobs(40, seed=3)
    with running(language_model(**VARIANTS[kind]), precision=precision) as engine:
        assert engine._native
        assert texts_of(engine, wanted, together=True) == texts_of(engine, wanted, together=False)


@pytest.mark.parametrize("kind", ["post-norm", "bands"])
def test_otherwise_a_text_is_the_same_to_rounding(kind: str) -> None:
    """PyTorch's attention, and products with few columns, round in another way in each row."""
    wanted = mixed_jobs(40, seed=4)
    with running(language_model(**VARIANTS[kind])) as engine:
        assert not engine._native
        runs = [texts_of(engine, wanted, together=which) for which in (False, True)]
    for alone, among in zip(*runs, strict=True):
        costs = [[event[3] for event in events if len(event) == 5] for events in (alone, among)]
        np.testing.assert_allclose(*costs, atol=1e-4)


def test_a_long_prompt_does_not_stall_a_short_one(engine: Engine) -> None:
    """The short text is complete when the long one has not been read."""
    long, short = Written(), Written()
    ids = np.zeros(8 * 600, np.int64)
    engine.submit([job(ids, long, max_tokens=1)])
    engine.submit([job(ids[:20], short, max_tokens=20)])
    short.all()
    assert long.events.empty()
    assert isinstance(long.all()[-1], Ended)


def test_clients_take_turns() -> None:
    turns, out = Turns[Job](lambda item: item.client), Written()
    for client in ("many", "many", "many", "one", "many"):
        turns.append(job(np.array([1]), out, client=client))
    assert [turns.next().client for _ in range(3)] == ["many", "one", "many"] and len(turns) == 2
    again = job(np.array([1]), out, client="many")
    turns.put_back(again)
    turns.append(job(np.array([1]), out, client="one"))
    assert turns.next(lambda client: client == "many").client == "one" and turns.next() is again
    turns.keep(lambda item: False)
    assert not turns and turns.of("many") == 0


@pytest.mark.unchecked
def test_prompts_of_many_clients_wait_for_nothing_but_their_turn() -> None:
    """To begin 1,000 of 1,000 clients takes 0.3 seconds, and took 30 when those begun were counted for each client; the
    limit allows for a busy machine."""
    engine, ids, out = Engine(language_model().model, BYTES, LENGTHS, rows=8, most=5000), np.array([1]), Written()
    for client in map(str, range(1000)):
        engine.submit([job(ids, out, client=client)])
    started = time.perf_counter()
    engine._admit()
    assert not engine.waiting and engine.busy == 1000 and time.perf_counter() - started < 8


def test_a_client_gets_a_row_at_once_and_the_others_lose_nothing(engine: Engine) -> None:
    """A text that gave up its row goes on later as if nothing had been."""
    long, found = {"ids": np.arange(9), "max_tokens": 400, "top_k": 1}, []
    for others in (0, 8):  # the long texts take far more steps than these
        outs = [Written() for _ in range(8)]
        engine.submit([job(written=out, seed=seed, client="many", **long) for seed, out in enumerate(outs)])
        for _ in range(others):
            one = Written()
            engine.submit([job(np.arange(20), one, n=3, max_tokens=4, client="one")])
            one.all(3)
            assert not any(isinstance(event, Ended) for out in outs for event in list(out.events.queue))
        found.append([out.all()[:-1] for out in outs])
    for alone, beside in zip(*found, strict=True):
        assert [event.token for event in alone] == [event.token for event in beside]
        costs = ([event.log_prob for event in events] for events in (alone, beside))
        np.testing.assert_allclose(*costs, atol=0 if engine._native else 1e-4)


def test_a_full_queue_refuses_all_or_nothing() -> None:
    engine = Engine(language_model().model, BYTES, LENGTHS, rows=8, most=8)
    jobs = [job(np.array([1]), Written()) for _ in range(5)]
    with pytest.raises(Refused, match="full"):
        engine.submit(jobs)
    assert engine.waiting == 0
    engine.submit(jobs[:4])
    with pytest.raises(Refused, match="full"):
        engine.submit(jobs[4:])
    engine.submit([job(np.array([1]), Written(), client="another")])
    assert engine.waiting == 5


def test_no_numbers_end_one_text() -> None:
    """Texts in other rows go on, not only later ones."""
    model, bad, good = language_model(tie_weight=False), Written(), Written()
    with torch.no_grad():
        model.model.embedding.tables[0][7] = torch.nan
    with running(model) as engine:
        engine.submit([job(np.array([1]), good, bias=((7, -1000.0),), max_tokens=400), job(np.array([7]), bad)])
        assert isinstance(bad.all()[-1], Refused)
        assert isinstance(good.all()[-1], Ended)


def test_a_shorter_memory_holds_for_what_is_written(engine: Engine) -> None:
    """At lengths that no segmentation changes, tokens cost what they cost in a prompt."""
    wrote, read, call = Written(), Written(), {"lengths": shorter_memory(LENGTHS, 3)}
    ids = np.arange(20)
    engine.submit([job(ids, wrote, max_tokens=30, **call)])
    *events, _ = wrote.all()
    whole = np.array([*ids, *(event.token for event in events)])
    engine.submit([job(whole, read, max_tokens=0, echo=True, **call)])
    costs = np.concatenate([event.log_probs for event in read.all()[:-1]])
    np.testing.assert_allclose([event.log_prob for event in events], costs[-30:], atol=1e-4)


def test_models_that_do_not_remember_are_refused() -> None:
    config = language_model().model.config
    assert refusal(config, LENGTHS) is None
    assert "--mem-len must be at least 1" in str(refusal(config, Lengths(tgt_len=4, mem_len=0)))
    assert "shaw" in str(refusal(language_model(kind="shaw", positions=64).model.config, LENGTHS))
