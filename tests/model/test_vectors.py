"""A backbone alone, with vectors of any origin; and what model, backbone and step refuse in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import lengths, small_backbone, small_config, small_model, text, vectors

from transformer_xl import VectorStep
from transformer_xl.evaluation.sliding import Sliding
from transformer_xl.mistake import Mistake
from transformer_xl.model.attention import sinusoids
from transformer_xl.model.baselines import build_model
from transformer_xl.model.memory import Memory

CALL = lengths(5)


def wrong_calls() -> dict[str, Callable[[], Any]]:
    """What begins each sentence, and a number; and a call that raises it."""
    model, ids, x = small_model(), text(2, 5), vectors(2, 5)
    backbone, bands = model.backbone, small_model(cutoffs=(5, 11), div_val=2)
    lstm, shallow = small_model(kind="lstm"), small_model(n_layer=2)
    sliding = Sliding(model, 4)
    memory, state = model(ids, ids, None, CALL)[1], lstm(ids, ids, None, CALL)[1]
    cache, windows = model.empty_cache(2, CALL), sliding.empty_memory(2, lengths(3))
    padded = backbone.empty_memory(2, CALL, torch.tensor([-1, 0]))
    single = Memory(tuple(y.float() for y in memory.layers))
    calls: list[tuple[str, Callable[[], Any]]] = []

    def step(past: Any = None, of: Any = backbone) -> VectorStep:
        return VectorStep(of, of.empty_memory(2, CALL) if past is None else past, CALL)

    for each in (model, bands, lstm, sliding):
        calls.append(("ids", lambda m=each: m(ids[0], ids[0], None, CALL)))
        for given in (ids.double(), ids + 23, ids - 23):
            calls.append(("ids", lambda m=each, given=given: m(given, ids, None, CALL)))
        for targets in (ids[:, 1:], ids.double(), ids + 23):
            calls.append(("targets", lambda m=each, targets=targets: m(ids, targets, None, CALL)))
    for read in (model.hidden, model.log_probs):
        calls.append(("ids", lambda read=read: read(ids.double(), None, CALL)))
    narrow = Memory(tuple(y[..., 1:] for y in memory.layers))
    elsewhere = Memory(tuple(y.to("meta") for y in memory.layers))
    for each, past in (
        *((model, past) for past in (narrow, single, elsewhere, Memory(()), windows, model.empty_memory(3, CALL), [1])),
        *((shallow, past) for past in (memory, cache)),
        *((sliding, past) for past in (memory, sliding.empty_memory(3, lengths(3)))),
        *((lstm, past) for past in (memory, state.select(slice(1)))),
    ):
        calls.append(("memory", lambda m=each, past=past: m(ids, ids, past, CALL)))
    calls.append(("memory", lambda: model(ids[:1], ids[:1], cache, CALL)))
    calls.append(("memory", lambda: model(ids, ids, small_model(n_head=1, d_head=10).empty_cache(2, CALL), CALL)))
    for given in (ids, ids.double(), x[..., :9], x[0], x.float(), x.to("meta")):
        calls.append(("x", lambda given=given: backbone(given, None, CALL)))
    for given in (x[:, :2], x[:, 0], x[:1, :1], ids[:, :1]):
        calls.append(("x", lambda given=given: step()(given)))
    for past in (x, Memory(memory.layers[:2]), padded):
        calls.append(("memory", lambda past=past: step(past)))
    absolute = small_model(kind="vaswani"), small_model(kind="al-rfou", positions=9)
    for other in (small_backbone(train=True), absolute[0].backbone, lstm.backbone, model):
        calls.append(("backbone", lambda other=other: step(of=other)))
    for given in (torch.zeros(2, 5), torch.zeros(2) > 0, torch.zeros(2, 4) > 0):
        calls.append(("begins", lambda given=given: backbone(x, None, CALL, given)))
    for other in (*absolute, small_model(zero_memory=True)):
        calls.append(("begins", lambda other=other: other.backbone(x, None, CALL, torch.zeros(2, 5) > 0)))
    for other in absolute:
        calls.append(("clamp_len", lambda other=other: other.hidden(ids, None, lengths(5, clamp_len=3))))
    calls.append(("tgt_len", lambda: absolute[1].hidden(text(2, 10), None, CALL)))
    calls.append(("memory", lambda: small_model(ngrams=(2,))(ids, ids, memory, CALL)))
    calls.append(("train.recompute", lambda: build_model(small_config(kind="lstm"), recompute=True)))
    calls.append(("d_model", lambda: sinusoids(3, 5)))
    return {f"{what} {number}": call for number, (what, call) in enumerate(calls)}


@pytest.mark.unchecked
def test_wrong_arguments_raise_one_sentence() -> None:
    with torch.no_grad():
        for name, call in wrong_calls().items():
            with pytest.raises(Mistake, match=rf"^{name.split()[0]} must [^\n]*\.$"):
                call()
                pytest.fail(f"{name}: nothing was raised")
