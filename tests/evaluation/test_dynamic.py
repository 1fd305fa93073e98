"""Dynamic evaluation scores a target before it learns from it, and changes only a copy of the weights."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import VARIANTS, lengths, small_model, text

from transformer_xl.data.loader import StreamLoader
from transformer_xl.evaluation.dynamic import Dynamic, DynamicConfig, relative_rms
from transformer_xl.evaluation.score import evaluate
from transformer_xl.evaluation.sliding import Sliding
from transformer_xl.mistake import Mistake
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.runtime.device import autocast

CALL = lengths(7, tgt_len=5)
RULES = {"sgd": {"lr": 0.3, "decay": 0.2}, "rms": {"lr": 0.05, "decay": 0.2, "epsilon": 0.3}}
each_rule = pytest.mark.parametrize("rule", RULES)


def segments(ids: np.ndarray, batch_size: int = 1) -> StreamLoader:
    return StreamLoader(ids, batch_size=batch_size, tgt_len=5)


def dynamic(model: Any, rule: str, **changes: float) -> Dynamic:
    config = DynamicConfig(rule=rule, **RULES[rule] | changes)  # type: ignore[arg-type]
    other = segments(text(1, 41, seed=9)[0].numpy())
    return Dynamic(model, config, relative_rms(model, other, CALL) if rule == "rms" else None)


def losses(model: Any, ids: np.ndarray, batch_size: int = 1, precision: str = "fp32") -> torch.Tensor:
    """Nats of each target, in order, in the model's own precision."""
    found: list[torch.Tensor] = []
    evaluate(model, segments(ids, batch_size), CALL, precision=precision, dump=lambda _, nll: found.append(nll.clone()))
    return torch.cat(found, 1)


def text_of(length: int, seed: int = 0) -> np.ndarray:
    return text(1, length, seed=seed)[0].numpy()


@each_rule
@settings(max_examples=examples(5))
@given(place=st.integers(0, 30), token=st.integers(0, 22))
def test_later_text_never_changes_a_loss(rule: str, place: int, token: int) -> None:
    model, ids = dynamic(small_model(), rule), text_of(32)
    other = ids.copy()
    other[place + 1 :] = (other[place + 1 :] + token) % 23
    assert torch.equal(losses(model, ids)[:, :place], losses(model, other)[:, :place])


@each_rule
def test_every_pass_starts_from_the_unchanged_trained_weights(rule: str) -> None:
    model = small_model(train=True)
    before = [p.clone() for p in model.parameters()]
    learning = dynamic(model, rule)
    first = losses(learning, text_of(32))
    assert model.training and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert torch.equal(losses(learning, text_of(32)), first)
    with pytest.raises(AssertionError, match="must not change"):
        learning(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64), None, CALL)


@each_rule
@pytest.mark.parametrize(("batch_size", "decay"), [(1, 0.2), (2, 0.2), (1, 3.0)])
def test_steps_follow_the_equation(rule: str, batch_size: int, decay: float) -> None:
    model, ids = small_model(**VARIANTS["bands"], dropout=0.4, train=True), text_of(40)
    learning, found = dynamic(model, rule, decay=decay), []
    copy, memory, how = small_model(**VARIANTS["bands"]), None, RULES[rule]
    for segment in segments(ids, batch_size):
        nll, memory = copy(segment.ids, segment.targets, memory, CALL)
        found.append(nll.detach())
        copy.zero_grad()
        (nll.sum() / (segment.targets >= 0).sum()).backward()
        with torch.no_grad():
            for i, (w, w0) in enumerate(zip(copy.parameters(), model.parameters(), strict=True)):
                assert w.grad is not None
                r = torch.ones_like(w) if learning.rms is None else learning.rms[i]
                rate = how["lr"] / (r + how["epsilon"]) if rule == "rms" else how["lr"]
                w += (decay * r).clamp(max=1) * (w0 - w) - rate * w.grad
    torch.testing.assert_close(losses(learning, ids, batch_size), torch.cat(found, 1))


def test_rms_is_the_root_of_the_mean_square_and_has_mean_one() -> None:
    model, loader = small_model(dropout=0.4, train=True), segments(text_of(38, seed=3))
    rms = relative_rms(model, loader, CALL)
    assert model.training
    copy, memory, squares = small_model(), None, []
    for segment in loader:
        nll, memory = copy(segment.ids, segment.targets, memory, CALL)
        gradients = torch.autograd.grad(nll.sum() / nll.numel(), list(copy.parameters()))
        squares.append([g.square() for g in gradients])
    roots = [torch.stack(square).mean(0).sqrt() for square in zip(*squares, strict=True)]
    mean = torch.cat([root.flatten() for root in roots]).mean()
    for r, root in zip(rms, roots, strict=True):
        torch.testing.assert_close(r, root / mean)


def test_gradients_are_measured_on_each_document_from_an_empty_memory() -> None:
    """Documents of one segment: their gradients have no order."""
    model, ids = small_model(), text_of(12, seed=3)
    found = [
        relative_rms(model, StreamLoader(each, batch_size=1, tgt_len=5, documents=[0, 6]), CALL)
        for each in (ids, np.roll(ids, 6))
    ]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@each_rule
def test_under_bf16_scores_use_the_learned_weights(rule: str) -> None:
    """They do not use the weights that autocast rounded before the step."""
    learner, part = dynamic(small_model(dtype=torch.float32), rule).for_inference(), text(1, 6)
    with torch.no_grad(), autocast("bf16", torch.device("cpu")):
        learner(part[:, :-1], part[:, 1:], None, CALL)
        with torch.enable_grad():  # gradients select another backend
            fresh, _ = deepcopy(learner.model)(part[:, :-1], part[:, 1:], None, CALL)
        assert torch.equal(learner(part[:, :-1], part[:, 1:], None, CALL)[0], fresh)


def test_in_fp16_it_is_refused() -> None:
    """Its loss has no scale, so small gradients would be 0."""
    learner, part = dynamic(small_model(dtype=torch.float32), "sgd").for_inference(), text(1, 6)
    with (
        autocast("fp16", torch.device("cpu")),
        pytest.raises(Mistake, match="precision must be fp32 or bf16 for dynamic"),
    ):
        learner(part[:, :-1], part[:, 1:], None, CALL)


def test_a_reset_empties_the_memory_and_keeps_the_weights() -> None:
    model, ids = small_model(), text_of(23)
    loader = StreamLoader(ids, batch_size=1, tgt_len=5, documents=[0, 11])
    found: list[torch.Tensor] = []
    evaluate(dynamic(model, "sgd"), loader, CALL, dump=lambda _, nll: found.append(nll))
    learner, memory = dynamic(model, "sgd").for_inference(), None
    for place, segment in enumerate(loader):
        memory = None if place == 2 else memory
        nll, memory = learner(segment.ids, segment.targets, memory, CALL)
        torch.testing.assert_close(found[place], nll)


@each_rule
def test_sliding_and_tempered_models_can_learn(rule: str) -> None:
    inner, ids = small_model(), text_of(32)
    inner.softmax.temperature = 1.3
    model = Sliding(inner, 5, 2)
    static, learning = losses(model, ids), losses(dynamic(model, rule), ids)
    torch.testing.assert_close(learning[:, :5], static[:, :5])
    assert ((learning - static)[:, 5:].abs() > 1e-6).all()


def test_weights_without_a_gradient_do_not_change() -> None:
    class More(TransformerXL):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.more = torch.nn.Parameter(torch.ones(3))

    model, ids = small_model(), text_of(32)
    more = More(model.config).to(torch.float64)
    more.load_state_dict(model.state_dict(), strict=False)
    for rule in RULES:
        assert losses(dynamic(more, rule), ids).isfinite().all()
    torch.testing.assert_close(losses(dynamic(more, "sgd"), ids), losses(dynamic(model, "sgd"), ids))
