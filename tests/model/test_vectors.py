"""A backbone alone: vectors of any origin, rows of any age, and one vector at a time in constant memory."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import lengths, small_backbone, small_model, text, used, vectors
from torch import Tensor

from transformer_xl import TransformerXLBackbone, TransformerXLConfig, VectorStep
from transformer_xl.config.settings import Lengths

PLAIN: dict[str, dict[str, Any]] = {
    "post-norm": {},
    "pre-norm, final norm, own biases": {"pre_lnorm": True, "final_norm": True, "untie_r": True},
    "shared projection": {"share_position_projection": True},
    "gated": {"gate": "gru", "gate_bias": 0.5, "relu_output": True, "pre_lnorm": True},
    "highway, post-norm": {"gate": "highway", "gate_bias": 0.5},
}
KINDS = {**PLAIN, "attended zeros": {"zero_memory": True, "pre_lnorm": True}}
each_plain = pytest.mark.parametrize("kind", PLAIN.values(), ids=PLAIN)
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@torch.no_grad()
def read(
    backbone: TransformerXLBackbone, x: Tensor, call: Lengths, sizes: list[int] | None = None, state: Any = None
) -> tuple[Tensor, Any]:
    """The outputs of all layers, [N, B, T, D], for `x` in segments of these sizes."""
    found = []
    for end, size in zip(accumulate(sizes or [x.shape[1]]), sizes or [x.shape[1]], strict=True):
        outputs, state = backbone(x[:, end - size : end], state, call)
        found.append(torch.stack(outputs))
    return torch.cat(found, 2), state


@st.composite
def cuts(draw: st.DrawFn, length: int) -> list[int]:
    """Sizes of segments that add up to `length`."""
    inner = sorted(draw(st.sets(st.integers(1, length - 1))))
    return [b - a for a, b in pairwise([0, *inner, length])]


def drawn_call(data: st.DataObject, *, window: bool = False) -> Lengths:
    """Lengths of a call; with `window` each query sees the same keys, however a sequence is cut."""
    mem_len = data.draw(st.integers(0, 7))
    window_len = st.integers(1, mem_len + 1)
    return lengths(
        mem_len, data.draw(window_len if window else st.none() | window_len), data.draw(st.none() | st.integers(1, 9))
    )


@each_plain
@settings(max_examples=examples(10), deadline=None)
@given(data=st.data())
def test_with_a_window_cutting_changes_nothing(kind: dict, data: st.DataObject) -> None:
    backbone, x, call = small_backbone(**kind), vectors(2, 13), drawn_call(data, window=True)
    whole, memory = read(backbone, x, call)
    found, after = read(backbone, x, call, data.draw(cuts(13)))
    torch.testing.assert_close(found, whole)
    torch.testing.assert_close(after.layers, memory.layers)


@each_plain
@settings(max_examples=examples(10), deadline=None)
@given(data=st.data())
def test_rows_that_reset_and_begin_with_padding_equal_rows_alone(kind: dict, data: st.DataObject) -> None:
    backbone, x, call = small_backbone(**kind), vectors(3, 12), drawn_call(data)
    sizes = data.draw(cuts(12))
    padding = data.draw(st.lists(st.integers(0, sizes[0]), min_size=3, max_size=3))
    rows = st.lists(st.booleans(), min_size=3, max_size=3)
    resets = [[False] * 3, *data.draw(st.lists(rows, min_size=len(sizes) - 1, max_size=len(sizes) - 1))]
    states: list[Any] = [backbone.empty_memory(3, call, -torch.tensor(padding)), *[None] * 3]
    states.append(backbone.cached(states[0], call))
    for end, size, reset in zip(accumulate(sizes), sizes, resets, strict=True):
        part = x[:, end - size : end]
        for which in (0, 4):
            states[which] = states[which].reset(torch.tensor(reset)) if any(reset) else states[which]
        found, states[0] = read(backbone, part, call, state=states[0])
        cached, states[4] = read(backbone, part, call, state=states[4])
        torch.testing.assert_close(cached, found)
        for row in range(3):
            first = padding[row] if end == size else 0
            past = None if reset[row] else states[row + 1]
            if first < size:
                alone, states[row + 1] = read(backbone, part[row : row + 1, first:], call, state=past)
                torch.testing.assert_close(found[:, row, first:], alone[:, 0])
                assert used(states[0])[row] == used(states[row + 1])[0]


@each_kind
@settings(max_examples=examples(12), deadline=None)
@given(data=st.data())
def test_a_step_gives_the_numbers_of_memory_for_rows_that_reset(kind: dict, data: st.DataObject) -> None:
    backbone, call = small_backbone(**kind), drawn_call(data)
    _, memory = read(backbone, vectors(3, 9), call, data.draw(cuts(9)))
    if data.draw(st.booleans()):
        memory = backbone.empty_memory(3, call)
    step = VectorStep(backbone, memory if data.draw(st.booleans()) else backbone.cached(memory, call), call)
    for x in vectors(3, 2 * call.mem_len + 5, seed=1).split(1, dim=1):
        found, (expected, memory) = step(x), read(backbone, x, call, state=memory)
        torch.testing.assert_close(found, expected[-1, :, 0])
        rows = torch.tensor(data.draw(st.lists(st.booleans(), min_size=3, max_size=3)))
        step.reset(rows)
        memory = memory.reset(rows)


def test_a_step_with_selected_rows_keeps_their_numbers_and_resets_them_alone() -> None:
    backbone, call, x = small_backbone(), lengths(5), vectors(4, 12, seed=1)
    _, memory = read(backbone, vectors(4, 6), call)
    step, rows, ended = VectorStep(backbone, memory, call), torch.tensor([3, 0, 2]), torch.tensor([False, True, False])
    other = step.select(rows)
    other.reset(ended)
    memory = memory.select(rows).reset(ended)
    for one in x[rows].split(1, dim=1):
        expected, memory = read(backbone, one, call, state=memory)
        torch.testing.assert_close(other(one), expected[-1, :, 0])
    assert step.counts.tolist() == other.counts.tolist(), "they share the past"


def test_nothing_of_a_step_grows_or_moves() -> None:
    backbone, call = small_backbone(), lengths(4)
    step, seen = VectorStep(backbone, backbone.empty_memory(2, call), call), set()
    for number, x in enumerate(vectors(2, 60).split(1, dim=1)):
        step(x)
        step.reset(torch.tensor([number % 7 == 0, number % 11 == 0]))
        held = (*step.rings, step.slots, step.counts, *(each.r for each in step.positions))
        seen.add(tuple((kept.data_ptr(), kept.shape) for kept in held))
    assert len(seen) == 1
    assert not any(isinstance(value, Tensor) and value.requires_grad for value in vars(step).values())


def test_a_step_is_compiled_only_if_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda run, **_: compiled.append(run) or run)
    backbone, call, x = small_backbone(), lengths(4), vectors(2, 3)
    memory = backbone.empty_memory(2, call)
    eager, both = VectorStep(backbone, memory, call), VectorStep(backbone, memory, call, compiled=True)
    for one in x.split(1, dim=1):
        torch.testing.assert_close(both(one), eager(one), rtol=0, atol=0)
    assert len(compiled) == 1


def test_a_head_belongs_to_the_step() -> None:
    backbone, call = small_backbone(), lengths(4)
    memory, head = backbone.empty_memory(2, call), torch.nn.Linear(14, 3, dtype=torch.float64)
    plain, headed = VectorStep(backbone, memory, call), VectorStep(backbone, memory, call, head=head)
    for x in vectors(2, 6).split(1, dim=1):
        torch.testing.assert_close(headed(x), head(plain(x)))


def test_a_language_model_is_an_embedding_a_backbone_and_a_softmax() -> None:
    model, ids, call = small_model(), text(2, 7), lengths(5)
    outputs, memory = read(model.backbone, model.embedding(ids), call, [3, 4])
    hidden, after = model.hidden(ids[:, 3:], model.hidden(ids[:, :3], None, call)[1], call)
    torch.testing.assert_close(outputs[-1, :, 3:], hidden)
    torch.testing.assert_close(memory.layers, after.layers)


def test_the_vocabulary_does_not_matter() -> None:
    sizes: dict[str, Any] = {"n_layer": 1, "n_head": 2, "d_head": 3, "d_model": 6, "d_inner": 5}
    states = []
    for vocab_size in (0, 7):
        torch.manual_seed(0)
        states.append(TransformerXLBackbone(TransformerXLConfig(vocab_size=vocab_size, **sizes)).state_dict())
    torch.testing.assert_close(*map(dict, states), rtol=0, atol=0)


def test_gradients_reach_the_inputs_of_a_segment_but_not_the_memory() -> None:
    backbone, call = small_backbone(train=True, gate="gru"), lengths(5)
    early, late = (vectors(2, 4, seed).requires_grad_() for seed in (1, 2))
    _, memory = backbone(early, None, call)
    outputs, _ = backbone(late, memory, call)
    outputs[-1].sum().backward()
    assert early.grad is None and late.grad is not None and late.grad.any()


WRONG = """
import torch
from small_models import lengths, small_backbone, small_model, text, vectors
from transformer_xl import VectorStep

backbone, call, x = small_backbone(), lengths(3), vectors(2, 5)
memory = backbone(x, None, call)[1]

def step(past=None, of=backbone):
    return VectorStep(of, of.empty_memory(2, call) if past is None else past, call)

for name, do in {
    "x: ids": lambda: backbone(text(2, 5), None, call),
    "x: ids of floats": lambda: backbone(text(2, 5).double(), None, call),
    "x: another width": lambda: backbone(x[..., :9], None, call),
    "x: one row": lambda: backbone(x[0], None, call),
    "x: single precision": lambda: backbone(x.float(), None, call),
    "x: another device": lambda: backbone(x.to("meta"), None, call),
    "memory: other rows": lambda: backbone(x[:1], memory, call),
    "memory: another width": lambda: backbone(x, memory._replace(layers=[y[..., 1:] for y in memory.layers]), call),
    "memory: single precision": lambda: backbone(x, memory.to(torch.float32), call),
    "memory: a tensor": lambda: backbone(x, x, call),
    "x: two steps": lambda: step()(x[:, :2]),
    "x: no axis of positions": lambda: step()(x[:, 0]),
    "x: one row of two": lambda: step()(x[:1, :1]),
    "x: ids in a step": lambda: step()(text(2, 1)),
    "memory: a tensor as the past": lambda: step(x),
    "memory: another depth as the past": lambda: step(memory._replace(layers=memory.layers[:2])),
    "memory: padding": lambda: step(backbone.empty_memory(2, call, torch.tensor([-1, 0]))),
    "backbone: in training": lambda: step(of=small_backbone(train=True)),
    "backbone: of a baseline": lambda: step(of=small_model(kind="vaswani").backbone),
}.items():
    try:
        do()
        print(name, "| nothing was raised")
    except Exception as error:
        print(name, "|", type(error).__name__, error)
"""


def test_invalid_arguments_raise_one_sentence() -> None:
    # A separate process, without the tests' check of shapes.
    paths = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parents[1])])
    shown = subprocess.run(
        [sys.executable, "-c", WRONG], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert len(lines) == 19
    for line in lines:
        assert f"| Mistake {line.partition(':')[0]} must " in line and line.endswith("."), line
