"""The one-token step gives the same numbers as `Memory`, in a ring that never moves, for rows of any age."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import VARIANTS, lengths, small_model, text

from transformer_xl.commands.generate import _compiling_problems
from transformer_xl.config.settings import Lengths
from transformer_xl.evaluation.generate import Sampling, stream
from transformer_xl.model.inference import KVCache, has_compiler
from transformer_xl.model.step import Step, step_state
from transformer_xl.model.transformer_xl import TransformerXL

KINDS: dict[str, dict[str, Any]] = {
    **VARIANTS,
    "attended zeros": {"zero_memory": True},
    "shared projection": {"share_position_projection": True},
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same step without the compiler, because its numbers must not depend on that."""
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)


@torch.no_grad()
def states_after(
    model: TransformerXL, prompt: torch.Tensor, call: Lengths, valid: list[int] | None = None
) -> tuple[KVCache, Any]:
    """A cache and a memory after the same prompt."""
    rows = None if valid is None else torch.tensor(valid)
    states = [model.empty_cache(len(prompt), call, rows), model.empty_memory(len(prompt), call, rows)]
    cache, memory = (model.log_probs(prompt, state, call)[1] for state in states)
    return cache, memory


@torch.no_grad()
def follow(model: TransformerXL, ids: torch.Tensor, memory: Any, call: Lengths) -> tuple[torch.Tensor, Any]:
    """The results with the paper's memory, one token at a time."""
    found = []
    for token in ids.split(1, dim=1):
        log_probs, memory = model.log_probs(token, memory, call)
        found.append(log_probs[:, -1])
    return torch.stack(found, 1), memory


def steps(step: Step, ids: torch.Tensor) -> torch.Tensor:
    return torch.stack([step(token) for token in ids.split(1, dim=1)], 1)


@each_kind
@settings(max_examples=examples(12), deadline=None)
@given(data=st.data())
def test_it_gives_the_same_numbers_as_memory(kind: dict, data: st.DataObject) -> None:
    model = small_model(**kind)
    mem_len, rows = data.draw(st.integers(0, 7)), data.draw(st.integers(1, 3))
    call = lengths(
        mem_len, data.draw(st.none() | st.integers(1, mem_len + 1)), data.draw(st.none() | st.integers(1, 9))
    )
    size = data.draw(st.integers(1, 11))
    valid = st.lists(st.integers(1 - size, 0), min_size=rows, max_size=rows)
    late = None if kind.get("zero_memory") else data.draw(st.none() | valid)
    cache, memory = states_after(model, text(rows, size), call, late)
    step = Step(model, cache, call)
    ids = text(rows, 2 * mem_len + 5, seed=1)
    torch.testing.assert_close(steps(step, ids), follow(model, ids, memory, call)[0])


def test_selected_rows_keep_their_numbers() -> None:
    model, call = small_model(), lengths(5)
    cache, memory = states_after(model, text(4, 3), call)
    step, first, second = Step(model, cache, call), torch.tensor([3, 0, 2]), torch.tensor([2, 0])
    steps(step, text(4, 4, seed=1))
    _, memory = follow(model, text(4, 4, seed=1), memory, call)
    for rows in (first, second):
        step, memory, ids = step.select(rows), memory.select(rows), text(len(rows), 3, seed=len(rows))
        expected, memory = follow(model, ids, memory, call)
        torch.testing.assert_close(steps(step, ids), expected)


@each_kind
def test_reset_rows_equal_those_of_a_memory(kind: dict) -> None:
    model, call = small_model(**kind), lengths(5)
    cache, memory = states_after(model, text(3, 7), call)
    step, rows = Step(model, cache, call, compiled=False), torch.tensor([True, False, True])
    step.reset(rows)
    memory, ids = memory.reset(rows), text(3, 8, seed=1)
    expected, memory = follow(model, ids, memory, call)
    torch.testing.assert_close(steps(step, ids), expected)
    step, memory = step.select(torch.tensor([2, 0])), memory.select(torch.tensor([2, 0]))
    step.reset(rows[:2])
    torch.testing.assert_close(steps(step, ids[:2]), follow(model, ids[:2], memory.reset(rows[:2]), call)[0])


def test_rows_selected_before_the_first_token_are_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda run, **_: compiled.append(run) or run)
    model, call = small_model(), lengths(5)
    cache, memory = states_after(model, text(3, 4), call)
    rows, ids = torch.tensor([2, 0]), text(2, 3, seed=1)
    step = Step(model, cache, call).select(rows)
    torch.testing.assert_close(steps(step, ids), follow(model, ids, memory.select(rows), call)[0])
    assert len(compiled) == 1


def test_nothing_grows_or_moves() -> None:
    model, call = small_model(), lengths(4)
    step = Step(model, states_after(model, text(2, 9), call)[0], call)
    addresses = set()
    for token in text(2, 12).split(1, dim=1):
        step(token)
        addresses.add(tuple(x.data_ptr() for x in (*step.vectors.rings, step.vectors.slots, step.vectors.counts)))
    assert len(addresses) == 1


@pytest.mark.parametrize("rows", [1, 3])
def test_in_bf16_it_is_as_close_as_the_cache(rows: int) -> None:
    model = small_model(dtype=torch.float32, **VARIANTS["bands"]).for_inference("bf16")
    call, ids = lengths(6), text(rows, 9, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        cache, memory = states_after(model, text(rows, 8), call)
        found, (expected, _) = steps(Step(model, cache, call), ids), follow(model, ids, memory, call)
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)  # a few roundings of bfloat16, 2^-8


def test_it_compiles_without_graph_breaks() -> None:
    """This runs in a separate process, because the type checks of the tests cannot be compiled."""
    program = """
import torch
from functools import partial
from small_models import VARIANTS, lengths, small_model, text
from transformer_xl.model.step import Step
torch.set_grad_enabled(False)
model, call = small_model(**VARIANTS["bands"]), lengths(5)
found = []
for compile in (partial(torch.compile, backend="eager", fullgraph=True), lambda run, **_: run):
    torch.compile = compile
    step = Step(model, model.log_probs(text(1, 3), model.empty_cache(1, call), call)[1], call)
    found.append(torch.stack([step(token) for token in text(1, 9, seed=1).split(1, dim=1)]))
torch.testing.assert_close(*found)
"""
    here = Path(__file__).parents[1]
    subprocess.run(
        [sys.executable, "-c", program], check=True, cwd=here, env={**os.environ, "PYTHONPATH": str(here.parent)}
    )


def test_it_replaces_only_a_cache_and_only_if_requested() -> None:
    model, call = small_model(), lengths(5)
    cache, memory = states_after(model, text(2, 3), call)
    assert step_state(model, memory, call, compiled=True) is memory
    assert step_state(model, cache, call) is cache
    assert step_state(object(), cache, call, compiled=True) is cache
    step = step_state(model, cache, call, compiled=True)
    assert isinstance(step, Step)
    assert step_state(model, step, call, compiled=True) is step
    with pytest.raises(RuntimeError, match="fork"):
        step_state(model, cache, call, compiled=True)


def test_a_row_that_still_begins_with_padding_is_refused() -> None:
    model, call = small_model(), lengths(5)
    with torch.no_grad():
        cache = model.empty_cache(2, call, torch.tensor([-1, 0]))
    with pytest.raises(ValueError, match="whole prompt"):
        Step(model, cache, call)


@pytest.mark.parametrize("kind", [{}, {"zero_memory": True}], ids=["padded", "attended zeros"])
def test_it_generates_the_same_text(kind: dict) -> None:
    model, call = small_model(**kind), Lengths(tgt_len=4, mem_len=6)
    prompts = [text(1, size, seed=size)[0].numpy() for size in (9, 2, 5)]
    draw, written = Sampling(seed=3), []
    for compiled in (False, True):
        lives = [11, 3, 7]

        def ended(row: int, left: list[int] = lives) -> bool:
            left[row] -= 1
            return left[row] == 0

        written.append(list(stream(model, prompts, call, draw, 20, ended=ended, compiled=compiled)))
    assert written[0] == written[1] and len(written[0]) == 11


def test_compiling_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert not has_compiler()
    memory = Lengths(tgt_len=4, mem_len=4)
    [sentence] = _compiling_problems(torch.device("cpu"), memory, "transformer-xl")
    assert "C++ compiler" in sentence
    [sentence] = _compiling_problems(torch.device("cuda"), memory, "transformer-xl")
    assert "captured anyway" in sentence
    kind, window, _ = _compiling_problems(torch.device("cpu"), Lengths(tgt_len=4, mem_len=0), "shaw")
    assert "got" not in kind and "shaw" in kind and "needs a memory" in window


@each_kind
@settings(max_examples=examples(12), deadline=None)
@given(data=st.data())
def test_a_row_put_into_a_running_step_goes_on_and_can_be_taken_out(kind: dict, data: st.DataObject) -> None:
    """Rows come and go at any time; each equals a memory of its own, and others do not change."""
    model, mem_len = small_model(**kind), data.draw(st.integers(1, 7))
    call = lengths(mem_len, tgt_len=4)
    with torch.no_grad():
        step = Step(model, model.empty_cache(3, call), call, compiled=False)
    memories: list[Any] = [model.empty_memory(1, call) for _ in range(3)]
    for seed in range(data.draw(st.integers(1, 6))):
        row, size = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 9))
        if data.draw(st.booleans()):
            cache, memories[row] = states_after(model, text(1, size, seed=seed), call)
        else:
            cache = step.take(row)
        step.put(row, cache)
        ids = text(3, data.draw(st.integers(1, 2 * mem_len)), seed=9 + seed)
        found = steps(step, ids)
        for other, own in enumerate(ids):
            expected, memories[other] = follow(model, own[None], memories[other], call)
            torch.testing.assert_close(found[other : other + 1], expected)


@pytest.mark.parametrize("kind", [{}, VARIANTS["n-grams"]], ids=["plain", "n-grams"])
def test_a_row_may_see_less_than_the_step_allows(kind: dict) -> None:
    model, call, short = small_model(**kind), lengths(6), lengths(2, 3)
    prompt, ids = text(1, 9), text(2, 11, seed=1)
    with torch.no_grad():
        step = Step(model, model.empty_cache(2, call), call, compiled=False)
    cache, memory = states_after(model, prompt, short)
    step.put(1, cache, reach=2)
    found = steps(step, ids)
    torch.testing.assert_close(found[1:], follow(model, ids[1:], memory, short)[0])
    torch.testing.assert_close(found[:1], follow(model, ids[:1], model.empty_memory(1, call), call)[0])
    assert step.take(1).length == 2
