"""The model across segments: segmentation, visible tokens, and rows with different memories in one batch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from amount import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small_models import BASELINES, VARIANTS, lengths, read, score, small_model, text, used
from torch._dynamo.testing import CompileCounter

from transformer_xl.config.settings import Lengths
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.train.objective import Objective

MODELS = VARIANTS | BASELINES
each_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
each_model = pytest.mark.parametrize("variant", MODELS.values(), ids=MODELS)


@st.composite
def cuts(draw: st.DrawFn, length: int) -> list[int]:
    """Sizes of segments that add up to `length`."""
    inner = sorted(draw(st.sets(st.integers(1, length - 1))))
    return [b - a for a, b in pairwise([0, *inner, length])]


@pytest.mark.parametrize("variant", [*VARIANTS.values(), BASELINES["shaw"]], ids=[*VARIANTS, "shaw"])
@settings(max_examples=examples(8))
@given(data=st.data())
def test_with_a_window_the_segmentation_changes_nothing(variant: dict, data: st.DataObject) -> None:
    model, ids = small_model(**variant), text(2, 13)
    attn_len = data.draw(st.none() | st.integers(1, 7))
    longer = data.draw(st.integers(0, 3))
    mem_len = 12 + longer if attn_len is None else attn_len - 1 + longer
    assume(mem_len or not model.ngrams)  # without a memory, each segment begins without its last tokens
    call = lengths(mem_len, attn_len, data.draw(st.none() | st.integers(1, 9)), data.draw(st.integers(1, 13)))
    pieces = data.draw(cuts(13))
    whole, cut = read(model, ids, call), read(model, ids, call, pieces=pieces)
    torch.testing.assert_close(cut.hidden, whole.hidden)
    torch.testing.assert_close(score(model, ids, call, pieces=pieces), score(model, ids, call))
    torch.testing.assert_close(cut.memory.layers, whole.memory.layers)
    assert used(cut.memory) == used(whole.memory) == [min(mem_len, 13)] * 2


def first_influence(model: TransformerXL, ids: torch.Tensor, call: Lengths, pieces: list[int]) -> list[int]:
    """For each position, the first token whose change has an influence on it; later tokens must have none."""
    copies = ids.repeat(ids.shape[1], 1)
    changed = (copies + torch.eye(len(copies), dtype=torch.long)) % model.config.vocab_size  # row i has another token i
    before, after = (read(model, each, call, pieces=pieces).hidden for each in (copies, changed))
    differs = (after != before).any(-1)
    assert not differs.tril(-1).any(), "a token changes the past"
    assert differs.diagonal().all(), "a token does not change its own position"
    return differs.int().argmax(0).tolist()


@pytest.mark.parametrize(
    ("pieces", "mem_len", "attn_len"),
    [
        ([5, 5, 5, 5], 5, None),
        ([5, 5, 5, 5], 3, None),
        ([7, 1, 1, 5, 2, 3], 4, None),
        ([1] * 17, 2, None),
        ([5, 5, 5], 0, None),
        ([7, 1, 1, 5, 2, 3], 2, 3),
        ([1] * 17, 11, 5),
        ([19], 3, 4),
    ],
)
@pytest.mark.parametrize("variant", ["post-norm", "pre-norm", "n-grams"])
def test_reach(variant: str, pieces: list[int], mem_len: int, attn_len: int | None) -> None:
    model = small_model(**VARIANTS[variant])
    n_layer, total = 3, sum(pieces)
    starts = [sum(pieces[:number]) for number, size in enumerate(pieces) for _ in range(size)]

    def first_key(position: int) -> int:
        oldest = max(0, starts[position] - mem_len)
        return oldest if attn_len is None else max(oldest, position - attn_len + 1)

    expected = list(range(total))
    for _ in range(n_layer):
        expected = [first_key(position) for position in expected]
    if attn_len is not None:
        assert expected == [max(0, position - n_layer * (attn_len - 1)) for position in range(total)]
    if model.ngrams:  # the oldest token that is seen brings the three before it, but without a memory none of the past
        expected = [max(0 if mem_len else starts[position], expected[position] - 3) for position in range(total)]
    assert first_influence(model, text(1, total), lengths(mem_len, attn_len), pieces) == expected
    if pieces == [5, 5, 5, 5] and mem_len == 5 and attn_len is None and not model.ngrams:
        assert 19 - expected[19] == 3 * 5 + 5 - 1, "the paper's: N x M + T - 1"


@each_variant
def test_no_gradient_enters_memory(variant: dict) -> None:
    untied = {"tie_weight": False, "tie_projs": ()}
    model = small_model(train=True, **variant | untied)
    early, late = torch.tensor([[0, 6, 13, 3]]), torch.tensor([[1, 7, 14]])
    _, memory = model.hidden(early, None, lengths(5))
    assert not any(x.requires_grad for x in memory.layers)
    cut, _ = model.hidden(late, memory, lengths(5))
    whole, after = model.hidden(torch.cat([early, late], 1), None, lengths(5))
    assert not any(x.requires_grad for x in after.layers)
    for out, reached in ((cut, False), (whole[:, 4:], True)):  # in one segment the gradient reaches the early tokens
        model.zero_grad()
        (out * torch.arange(14)).sum().backward()
        rows = torch.cat([torch.as_tensor(x.grad).flatten(1).abs().sum(1) for x in model.embedding.tables])
        assert ((rows[early[0]] > 0) == reached).all()
        assert (rows[late[0]] > 0).all()


@pytest.mark.parametrize(
    "variant", [*MODELS.values(), {"kind": "lstm"}, {"kind": "qrnn"}], ids=[*MODELS, "lstm", "qrnn"]
)
@settings(max_examples=examples(8))
@given(data=st.data())
def test_reset_rows_equal_fresh_rows(variant: dict, data: st.DataObject) -> None:
    model, ids = small_model(**variant), text(3, 12)
    call = lengths(5, data.draw(st.none() | st.integers(1, 6)))
    rows = torch.tensor(data.draw(st.lists(st.booleans(), min_size=3, max_size=3)))
    first = read(model, ids[:, :4], call).memory
    found = read(model, ids[:, 4:], call, pieces=[3, 5], memory=first.reset(rows))
    for row in range(3):
        memory = None if rows[row] else first.select(torch.tensor([row]))
        alone = read(model, ids[row : row + 1, 4:], call, pieces=[3, 5], memory=memory)
        torch.testing.assert_close(found.hidden[row], alone.hidden[0])
        assert used(found.memory)[row] == used(alone.memory)[0]
    assert used(first) == [first.length] * 3, "a reset does not change its memory"


@each_model
@settings(max_examples=examples(8))
@given(data=st.data())
def test_a_batch_of_unequal_rows_equals_each_row_alone(variant: dict, data: st.DataObject) -> None:
    model = small_model(**variant)
    prompts = data.draw(st.lists(st.integers(0, 7), min_size=3, max_size=3))
    longest = max(*prompts, 1)
    mem_len = data.draw(st.integers(0, 9))
    call = lengths(mem_len, data.draw(st.none() | st.integers(1, mem_len + 1)))
    ids = text(3, longest + 5, seed=2)
    missing = torch.tensor([count - longest for count in prompts])
    found = read(model, ids, call, pieces=[longest, 2, 3], memory=model.empty_memory(3, call, valid=missing))
    assert found.hidden.isfinite().all()
    assert used(found.memory) == [min(mem_len, count + 5) for count in prompts]
    for row, count in enumerate(prompts):
        pieces = [count, 2, 3] if count else [2, 3]
        alone = read(model, ids[row : row + 1, longest - count :], call, pieces=pieces)
        torch.testing.assert_close(found.hidden[row, longest - count :], alone.hidden[0])


@each_model
def test_recompute_gives_the_same_gradients_with_less_memory(variant: dict) -> None:
    memory = read(small_model(**variant), text(2, 6), lengths(6)).memory

    def step(recompute: bool) -> tuple[list[torch.Tensor], int]:
        model, kept = small_model(train=True, dropout=0.3, dropatt=0.3, **variant), []
        model.backbone.recompute = recompute
        torch.manual_seed(5)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            loss, _, _ = Objective(model)(text(2, 7), text(2, 7, seed=1), memory, lengths(6))
            kept_in_forward = sum(kept)
            loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None], kept_in_forward

    (plain, much), (again, little) = step(False), step(True)
    torch.testing.assert_close(again, plain)
    assert little < much / 2


@pytest.mark.outside
@pytest.mark.unchecked  # checks of types cannot be compiled
@pytest.mark.filterwarnings("ignore")  # of torch.compile itself
def test_a_compiled_model_is_not_compiled_again_while_memory_grows() -> None:
    model, counter, call = small_model(train=True, n_layer=1, dropout=0.1), CompileCounter(), lengths(16)
    model.compile(backend=counter)
    memory, compiled = model.empty_memory(2, call), []
    for seed in range(6):
        ids = text(2, 4, seed)
        nll, memory = model(ids, ids, memory, call)
        nll.sum().backward()
        compiled.append(counter.frame_count)
    assert 0 < compiled[0] <= compiled[1] == compiled[5], "two steps show it that lengths differ; then it knows"
