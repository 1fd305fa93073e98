"""`KVCache` gives the same numbers as `Memory` in constant space, for any segmentation and any other rows."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import BASELINES, DOCUMENTS, VARIANTS, lengths, read, score, small_model, text
from torch import nn

from transformer_xl.config.settings import Lengths
from transformer_xl.mistake import Mistake
from transformer_xl.model.inference import KVCache
from transformer_xl.model.modules import ROWS, RowLinear
from transformer_xl.model.step import VectorStep
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.ops.masks import next_multiple
from transformer_xl.runtime.device import PRECISIONS, autocast

KINDS: dict[str, dict[str, Any]] = {
    **VARIANTS,
    **BASELINES,
    "n-grams": DOCUMENTS,
    "attended zeros": {"zero_memory": True, "pre_lnorm": True},
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@torch.no_grad()
def empty(model: TransformerXL, batch: int, call: Lengths, valid: list[int] | None = None) -> KVCache:
    return model.empty_cache(batch, call, None if valid is None else torch.tensor(valid))


@torch.no_grad()
def step(model: TransformerXL, ids: torch.Tensor, state: Any, call: Lengths) -> tuple[torch.Tensor, Any]:
    return model.hidden(ids, state, call)


@each_kind
@settings(max_examples=examples(12))
@given(data=st.data())
@torch.no_grad()
def test_it_gives_the_same_numbers_as_memory(kind: dict, data: st.DataObject) -> None:
    """Rows may begin with padding, and between calls begin anew, change their order or end."""
    model, ids = small_model(**kind), text(3, 17)
    mem_len = data.draw(st.integers(0, 9))
    attn_len = data.draw(st.none() | st.integers(1, mem_len + 1))
    clamp_len = data.draw(st.none() | st.integers(1, 9)) if kind.get("kind") in (None, "shaw") else None
    call = lengths(mem_len, attn_len, clamp_len, tgt_len=3)
    padding = st.lists(st.integers(-4, 0), min_size=3, max_size=3).map(torch.tensor)
    late = None if kind.get("zero_memory") else data.draw(st.none() | padding)
    memory, cache = model.empty_memory(3, call, late), model.empty_cache(3, call, late)
    assert cache.buffers[0].shape[3] <= mem_len, "a cache of nothing is short"
    if data.draw(st.booleans(), "distances are encoded ahead"):
        reach = next_multiple(mem_len + 17)
        cache.keep_positions(model.backbone.positions(reach, call.clamp_len, model.backbone.like), reach)
    pieces = data.draw(st.sampled_from([[1] * 17, [3] * 5 + [2], [2, 13, 1, 1]]))  # tgt_len is 3
    for part in ids.split(pieces, dim=1):
        rows = len(memory.counts)
        cache.fork().reset(torch.ones(rows, dtype=torch.bool))  # a fork has its own buffers
        expected, memory = model.hidden(part[:rows], memory, call)
        found, cache = model.hidden(part[:rows], cache, call)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(cache.counts, memory.counts)
        ended = data.draw(st.none() | st.integers(0, rows - 1))
        marks = torch.tensor([row == ended for row in range(rows)])
        memory, cache = memory.reset(marks), cache.reset(marks)
        if rows == 3 and data.draw(st.booleans()):
            order = torch.tensor(data.draw(st.permutations(range(rows)))[:2])
            memory, cache = memory.select(order), cache.select(order)


@pytest.mark.parametrize(
    "kind", [*KINDS.values(), {"share_position_projection": True}, {"kind": "lstm"}, {"kind": "qrnn"}], ids=str
)
def test_a_call_without_tokens_changes_nothing(kind: dict) -> None:
    model, call, none, ids = small_model(**kind), lengths(6, tgt_len=4), text(2, 0), text(2, 4)
    model(none, none, None, call)[0].sum().backward()
    memory = read(model, text(2, 9), call).memory
    for state in (None, memory, model.empty_cache(2, call), model.cached(memory, call)):
        expected, _ = step(model, ids, state.fork() if isinstance(state, KVCache) else state, call)
        out, after = step(model, none, state, call)
        assert out.shape == (2, 0, 14)
        torch.testing.assert_close(step(model, ids, after, call)[0], expected)
        if isinstance(state, KVCache):
            with pytest.raises(RuntimeError, match="has used this KVCache"):
                step(model, none, state, call)


@torch.no_grad()
def test_a_cache_grows_by_zeros_that_count_as_a_memory_does() -> None:
    model, before, after = small_model(zero_memory=True), text(2, 4), text(2, 5, seed=1)
    memory = step(model, before, model.empty_memory(2, lengths(3)), lengths(3))[1]
    cache = step(model, before, empty(model, 2, lengths(3)), lengths(3))[1]
    expected = step(model, after, memory, lengths(9))[0]
    torch.testing.assert_close(step(model, after, cache.fork(), lengths(9))[0], expected)
    both = [step(model, before[row, None], empty(model, 1, lengths(n)), lengths(n))[1] for row, n in enumerate((3, 5))]
    alone = [step(model, row[None], part.fork(), lengths(5))[0] for row, part in zip(after, both, strict=True)]
    torch.testing.assert_close(step(model, after, KVCache.cat(both), lengths(5))[0], torch.cat(alone))
    one = VectorStep(model.backbone, cache, lengths(9))
    torch.testing.assert_close(one(model.embedding(after[:, :1])), expected[:, 0])


def test_nothing_grows_after_the_window_is_full() -> None:
    model, call = small_model(), lengths(8, tgt_len=4)
    state = empty(model, 2, call)
    addresses = set()
    for i in range(60):
        _, state = step(model, text(2, 1 if i % 7 else 4, seed=i), state, call)
        if i > 20:
            addresses.add(tuple(kv.data_ptr() for kv in state.buffers))
            assert state.buffers[0].shape[3] <= 2 * 8 + 4
            assert state.positions[0].r.shape[1] <= 32
    assert len(addresses) == 1, "the buffers stay where they are"


def test_a_call_consumes_the_cache_and_a_fork_is_independent() -> None:
    model, call = small_model(), lengths(5, tgt_len=3)
    _, before = step(model, text(3, 8), empty(model, 3, call), call)
    twin = before.fork(torch.tensor([2, 0]))
    out, after = step(model, text(3, 3, seed=1), before, call)
    marks = torch.tensor([True, False, False])
    reuses = (before.fork, lambda: before.reset(marks), lambda: KVCache.cat([before, before]))
    for use in (lambda: step(model, text(3, 3, seed=1), before, call), *reuses):
        with pytest.raises(RuntimeError, match="fork"):
            use()
    other, _ = step(model, text(3, 3, seed=2)[[2, 0]], twin.fork(), call)
    same, _ = step(model, text(3, 3, seed=1)[[2, 0]], twin, call)
    torch.testing.assert_close(same, out[[2, 0]])
    assert not torch.isclose(other, same).all()
    again = step(model, text(3, 2), after, call)[1]
    for spend in (lambda cache: cache.reset(marks), lambda cache: cache.newest(2)):
        spend(again)
        with pytest.raises(RuntimeError, match="fork"):
            step(model, text(3, 2), again, call)
        again = KVCache(again.buffers, call, again.length)


@pytest.mark.parametrize("parts", [((2, [0]), (9, [0, 0])), ((4, [0]), (4, [-2]))], ids=["lengths", "padding"])
def test_rows_of_several_caches_can_be_joined(parts: Any) -> None:
    """Padding stays padding, also where all caches have as many positions."""
    model, call, caches, alone = small_model(), lengths(6, tgt_len=4), [], []
    ids = [text(len(valid), 4, seed=seed) for seed, (_, valid) in enumerate(parts)]
    for own, (size, valid) in zip(ids, parts, strict=True):
        state = empty(model, len(valid), call, valid if any(valid) else None)
        caches.append(step(model, text(len(valid), size, seed=size), state, call)[1])
        alone.append(step(model, own, caches[-1].fork(), call)[0])
    torch.testing.assert_close(step(model, torch.cat(ids), KVCache.cat(caches), call)[0], torch.cat(alone))


def test_training_with_a_cache_is_refused() -> None:
    model, call = small_model(), lengths(4)
    with pytest.raises(Mistake, match="no_grad"):
        model.hidden(text(1, 3), empty(model, 1, call), call)


@pytest.mark.parametrize("kind", ["bands", "gated", *BASELINES])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_copy_for_inference_gives_the_same_numbers_and_keeps_the_model(kind: str, precision: str) -> None:
    model = small_model(train=True, dtype=torch.float32, dropout=0.5, **KINDS[kind])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    copied = model.for_inference(precision)
    call, ids = lengths(6, tgt_len=4), text(2, 12)
    with torch.no_grad(), autocast(precision, torch.device("cpu")):
        found = score(copied, ids, call, pieces=[4] * 3, memory=copied.empty_cache(2, call))
        model.eval()
        expected = score(model, ids, call, pieces=[4] * 3)
    rough = {"bf16": {"rtol": 5e-2, "atol": 5e-2}, "fp16": {"rtol": 7e-3, "atol": 7e-3}}
    torch.testing.assert_close(found, expected, **rough.get(precision, {}))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    shared = {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in copied.parameters()}
    assert len(shared) == len(list(model.parameters())) if precision == "fp32" else shared
    assert not any(module.training for module in copied.modules())
    copied.register_forward_hook(lambda *_: None)
    assert not model._forward_hooks
    if precision != "fp32":
        half = PRECISIONS[precision]
        dtypes = {name: weight.dtype for name, weight in copied.named_parameters()}
        products = [n for n in dtypes if n.endswith(("qkv.weight", "inner.weight", "outer.weight", "output.weight"))]
        assert {dtypes[name] for name in products} == {half} and len(products) == 4 * 3
        assert {weight.dtype for n, weight in copied.softmax.named_parameters() if "table" in n} == {half}
        assert {dtypes[n] for n in dtypes if n.startswith("embedding.tables") or "norm" in n} == {torch.float32}
        assert all(dtypes[n] == (torch.float32 if n.endswith("gate_bias") else half) for n in dtypes if "join" in n)


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_products_in_bfloat16_have_few_numbers_of_rows(bias: bool) -> None:
    """Whatever the length of a prompt, because oneDNN keeps a kernel for each number of rows."""
    layer = RowLinear(24, 8, bias).bfloat16()
    with patch.object(nn.Linear, "forward", autospec=True, side_effect=nn.Linear.forward) as product:
        for length in (1, 2, ROWS - 1, ROWS, ROWS + 1, 100, 299):
            x = torch.randn(1, length, 24, dtype=torch.bfloat16)
            whole = nn.functional.linear(x.float(), layer.weight.float(), layer.bias.float() if bias else None)
            torch.testing.assert_close(layer(x).float(), whole, atol=2e-2, rtol=2e-2)
    seen = {call.args[1].numel() // 24 for call in product.call_args_list}
    assert seen and all(rows < ROWS or rows % ROWS == 0 for rows in seen)
