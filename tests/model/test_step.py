"""The step, in PyTorch and in C++: the numbers of `Memory` in a ring that never moves, for rows that come and go."""

from __future__ import annotations

import gc
import weakref
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import DOCUMENTS, VARIANTS, lengths, read, small_backbone, small_model, text
from torch import Tensor, nn

from transformer_xl.config.settings import Lengths
from transformer_xl.mistake import Mistake
from transformer_xl.model.attention import RelativeMultiheadAttention
from transformer_xl.model.kernels import MOST_ROWS, can_step, includes_head
from transformer_xl.model.memory import Memory
from transformer_xl.model.step import Step, VectorStep, step_state
from transformer_xl.model.transformer_xl import TransformerXL

KINDS: dict[str, dict[str, Any]] = {
    **VARIANTS,
    "n-grams": DOCUMENTS,
    "attended zeros": {"zero_memory": True},
    "shared projection": {"share_position_projection": True},
}
NATIVE: dict[str, dict[str, Any]] = {
    **{name: kind for name, kind in KINDS.items() if "gate" not in kind},
    "ReLU of each output": {"relu_output": True, "pre_lnorm": True},
    "odd sizes": {"d_model": 70, "d_inner": 133, "n_head": 3, "d_head": 37, "init_std": 0.1, "untie_r": True},
    "a wide head": {"d_model": 36, "n_head": 1, "d_head": 161, "init_std": 0.1, "qk_norm": True},
}
BOTH = [pytest.param(False, kind, id=f"PyTorch, {name}") for name, kind in KINDS.items()]
BOTH += [pytest.param(True, kind, id=f"C++, {name}") for name, kind in NATIVE.items()]
each_native = pytest.mark.parametrize("kind", NATIVE.values(), ids=NATIVE)
each_precision = pytest.mark.parametrize("precision", ["fp32", "bf16"])
by_example = settings(max_examples=examples(12))


@pytest.fixture
def engine(native: bool, request: pytest.FixtureRequest) -> None:
    """With the kernels in C++, or without."""
    if native:
        request.getfixturevalue("built")


def mixed(precision: str) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


def inference_model(precision: str = "fp32", **kind: Any) -> TransformerXL:
    return small_model(dtype=torch.float32, **kind).for_inference(precision)


def begin(model: TransformerXL, prompt: Tensor, call: Lengths, valid: Tensor | None = None) -> tuple[Step, Any]:
    """A step and a memory after the same prompt."""
    states = [model.empty_cache(len(prompt), call, valid), model.empty_memory(len(prompt), call, valid)]
    cache, memory = (model.log_probs(prompt, state, call)[1] for state in states)
    return Step(model, cache, call), memory


def follow(model: TransformerXL, ids: Tensor, memory: Any, call: Lengths) -> tuple[Tensor, Any]:
    """The results with the paper's memory, one token at a time, or at once with the window that gives the same."""
    window = replace(call, attn_len=min(call.attn_len or call.mem_len + 1, call.mem_len + 1))
    found = []
    for tokens in ids.split(ids.shape[1] if call.mem_len else 1, dim=1):
        log_probs, memory = model.log_probs(tokens, memory, window)
        found.append(log_probs)
    return torch.cat(found, 1), memory


def steps(step: Step, ids: Tensor) -> Tensor:
    return torch.stack([step(token) for token in ids.split(1, dim=1)], 1)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """In fp32, sums in another order."""
    options = {"rtol": 1e-4, "atol": 2e-4} if found.dtype == torch.float32 else {}
    torch.testing.assert_close(found, expected, **options)


@pytest.mark.parametrize(("native", "kind"), BOTH)
@by_example
@given(data=st.data())
@torch.no_grad()
def test_it_gives_the_numbers_of_memory(engine: None, native: bool, kind: dict, data: st.DataObject) -> None:
    model = inference_model(**kind) if native else small_model(**kind)
    mem_len, rows = data.draw(st.integers(0, 40 if native else 7)), data.draw(st.integers(1, 9 if native else 3))
    call = lengths(
        mem_len, data.draw(st.none() | st.integers(1, mem_len + 1)), data.draw(st.none() | st.integers(1, 9))
    )
    size = data.draw(st.integers(1, 11))
    valid = st.lists(st.integers(1 - size, 0), min_size=rows, max_size=rows).map(torch.tensor)
    late = None if kind.get("zero_memory") else data.draw(st.none() | valid)
    step, memory = begin(model, text(rows, size), call, late)
    assert can_step(model.backbone, step.rings[0]) == native
    ids = text(rows, 2 * mem_len + 5, seed=1)
    assert_close(steps(step, ids), follow(model, ids, memory, call)[0])


@pytest.mark.parametrize(("native", "kind"), BOTH)
@by_example
@given(data=st.data())
@torch.no_grad()
def test_rows_come_and_go(engine: None, native: bool, kind: dict, data: st.DataObject) -> None:
    """Each row equals a memory of its own length, whenever others are put, taken, left out or reset, also in a copy."""
    model = inference_model(**kind) if native else small_model(**kind)
    call = lengths(data.draw(st.integers(1, 7)), tgt_len=4)
    step, own = Step(model, model.empty_cache(3, call), call), [(model.empty_memory(1, call), call) for _ in range(3)]
    for seed in range(data.draw(st.integers(1, 6))):
        row, size = data.draw(st.integers(0, len(own) - 1)), data.draw(st.integers(1, 9))
        changes = ["a new text", "its own past"] if step.rows is None else []
        what = data.draw(st.sampled_from([*changes, "fewer rows", "a copy", "nothing"]))
        memory, short = own[row]
        if what == "a new text":
            prompt, reach = text(1, size, seed=seed), data.draw(st.integers(1, call.mem_len))
            short = lengths(reach, reach + 1)
            step.put(row, model.log_probs(prompt, model.empty_cache(1, short), short)[1], reach=reach)
            own[row] = model.log_probs(prompt, model.empty_memory(1, short), short)[1], short
        elif what == "its own past":
            kept = step.take(row)
            assert kept.length <= short.mem_len
            step.put(row, model.log_probs(text(1, 7, seed=2), model.empty_cache(1, call), call)[1])
            step.put(row, kept, reach=short.mem_len)
        elif what == "fewer rows":
            whole, order = step, data.draw(st.permutations(range(len(own))))[: size % len(own) + 1]
            step, own = step.select(torch.tensor(order)), [own[i] for i in order]
            assert step._readers is whole._readers, "a CUDA graph would be recorded for each selection"
        elif what == "a copy":
            before, step = step, deepcopy(step)
            steps(before, text(len(own), size))
        else:
            step.reset(torch.arange(len(own)) == row)
            own[row] = memory.reset(torch.tensor([True])), short
        ids = text(len(own), data.draw(st.integers(1, 2 * call.mem_len)), seed=9 + seed)
        found = steps(step, ids)
        for other, (memory, short) in enumerate(own):
            expected, memory = follow(model, ids[other : other + 1], memory, short)
            own[other] = memory, short
            assert_close(found[other : other + 1], expected)


@torch.no_grad()
def test_a_step_stays_in_the_precision_in_which_it_began() -> None:
    backbone, lengths = inference_model().backbone, Lengths(tgt_len=1, mem_len=4)
    x = torch.randn(1, 1, backbone.config.d_model)
    for begins in (True, False):
        with mixed("bf16" if begins else "fp32"):
            step = VectorStep(backbone, backbone.empty_memory(1, lengths), lengths)
        with mixed("fp32" if begins else "bf16"), pytest.raises(Mistake, match="precision"):
            step(x)


@torch.no_grad()
def test_nothing_grows_or_moves() -> None:
    model, call, seen = small_model(), lengths(4), set()
    step, _ = begin(model, text(2, 9), call)
    for number, token in enumerate(text(2, 40).split(1, dim=1)):
        step(token)
        step.reset(torch.tensor([number % 7 == 0, number % 11 == 0]))
        held = (*step.rings, step.slots, step.counts, *(p.r for p in step.positions))
        seen.add(tuple((kept.data_ptr(), kept.shape) for kept in held))
    assert len(seen) == 1


@torch.no_grad()
def test_a_recorded_lookup_of_ngrams_has_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph has one shape, so rows that were not selected are looked up too."""
    shapes = set()

    def record(run: Any, like: Tensor) -> Any:
        shapes.add(like.shape)
        return lambda x: run(x) if x.shape == like.shape else pytest.fail("a graph has one shape")

    monkeypatch.setattr("transformer_xl.model.step._capture_graph", record)
    model, call, ids = small_model(ngrams=(2, 4), ngram_rows=97, matches=(2,)), lengths(5), text(3, 7, seed=1)
    found = []
    for graph in (False, True):
        step = Step(model, model.empty_cache(3, call), call)
        step.graph = graph
        out = [step(ids[:, i : i + 1]) for i in range(4)]
        some = step.select(torch.tensor([2, 0]))
        found.append(torch.cat([*out, *(some(ids[[2, 0], i : i + 1]) for i in range(4, 7))]))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)
    assert len(shapes) == 2, "of tokens and of vectors"


@torch.no_grad()
def test_ngrams_need_the_tokens_of_a_past() -> None:
    """A backbone's state has none, and that of a call without memory has no columns for them."""
    model, call, ids = small_model(**VARIANTS["n-grams"]), lengths(5), text(2, 7, seed=1)
    backbone = model.backbone
    expected = steps(Step(model, model.empty_cache(2, call), call), ids)
    for empty in (backbone.cached(backbone.empty_memory(2, call), call), model.empty_cache(2, lengths(0))):
        step = Step(model, empty.fork(), call)
        assert torch.equal(steps(step, ids), expected)
        for row in range(2):
            step.put(row, empty.fork(slice(row, row + 1)))
        assert_close(steps(step, ids), expected)
    memory = model.hidden(ids, None, call)[1]
    tokens = memory.tokens.clone()
    step = Step(model, model.cached(memory, call), call)
    step.put(0, model.empty_cache(1, call))
    assert torch.equal(memory.tokens, tokens), "they were of the memory, too"
    with pytest.raises(Mistake, match="the last tokens of each row"):
        Step(model, backbone.cached(Memory(memory.layers), call), call)


@pytest.mark.unchecked
@torch.no_grad()
def test_an_attention_of_the_users_own_is_never_replaced() -> None:
    """A step would compute the paper's scores instead of these, and say nothing."""

    class Doubled(RelativeMultiheadAttention):
        def attend(self, *args: Any) -> Tensor:
            return 2 * super().attend(*args)

    model, call = small_model(), lengths(5)
    for layer in model.backbone.layers:
        layer.attention.__class__ = Doubled
    cache = model.empty_cache(2, call)
    assert step_state(model, cache, call) is cache
    with pytest.raises(Mistake, match="its own attention"):
        VectorStep(model.backbone, model.backbone.empty_memory(2, call), call)


@pytest.mark.parametrize("native", [False, True])
@torch.no_grad()
def test_a_cache_becomes_a_step_where_that_is_faster(engine: None, native: bool) -> None:
    model, call = inference_model(), lengths(5)
    cache, memory = model.empty_cache(2, call), model.empty_memory(2, call)
    assert step_state(model, memory, call) is memory
    assert step_state(object(), cache, call) is cache
    many = model.empty_cache(MOST_ROWS + 1, call)
    assert step_state(model, many, call) is many
    state = step_state(model, cache, call)
    assert (state is not cache) == native
    if isinstance(state, Step):
        assert step_state(model, state, call) is state
        state(text(2, 1))


# The step in C++


@each_native
@torch.no_grad()
def test_in_bf16_it_is_as_close_to_fp32_as_the_model(kind: dict, built: Path) -> None:
    call, prompt, ids = lengths(29), text(5, 17), text(5, 50, seed=1)
    exact = inference_model(**kind)
    expected = follow(exact, ids, exact.log_probs(prompt, exact.empty_memory(5, call), call)[1], call)[0]
    with mixed("bf16"):
        model = inference_model("bf16", **kind)
        step, memory = begin(model, prompt, call)
        ours, theirs = steps(step, ids), follow(model, ids, memory, call)[0]
    errors = [float((found - expected).square().mean().sqrt()) for found in (ours, theirs)]
    assert errors[0] < 1.1 * errors[1], errors


@pytest.mark.parametrize("window", [1, 16, 17, 255, 256, 257, 530])
@torch.no_grad()
def test_windows_of_several_pieces(window: int, built: Path) -> None:
    """Rows begin at different times, and the ring is filled more than once."""
    model, call = inference_model(**NATIVE["odd sizes"]), lengths(window - 1, window)
    step, memory = begin(model, text(3, 40), call, torch.tensor([0, -3, -37]))
    for seed, size in enumerate((3, window // 2 + 1, window + 1)):
        ids = text(3, size, seed=seed)
        found, (expected, memory) = steps(step, ids), model.log_probs(ids, memory, call)
        assert_close(found, expected)


@each_precision
@each_native
@torch.no_grad()
def test_the_bits_of_a_row_are_its_own(kind: dict, precision: str, built: Path) -> None:
    """They depend neither on the other rows nor on the number of threads."""
    model, call, prompt = inference_model(precision, **kind), lengths(270), text(11, 265)
    choices = (1, range(11)), (2, range(11)), (3, [4, 9, 2, 7, 0, 10]), (2, [10, 4]), (1, [7])
    before, found = torch.get_num_threads(), []
    with mixed(precision):
        cache = model.log_probs(prompt, model.empty_cache(11, call), call)[1]
        x = model.embedding(text(11, 12, seed=1))
        head = model.softmax if includes_head(model.backbone, model.softmax) else None
        chosen = [torch.tensor(list(rows)) for _, rows in choices]
        try:
            for (threads, _), rows in zip(choices, chosen, strict=True):
                torch.set_num_threads(before)  # PyTorch projects distances, whose bits may depend on it
                step = VectorStep(model.backbone, cache.fork(rows), call, head=head)
                torch.set_num_threads(threads)
                found.append(torch.stack([step(one) for one in x[rows].split(1, dim=1)], 1))
        finally:
            torch.set_num_threads(before)
    for rows, out in zip(chosen, found, strict=True):
        assert torch.equal(out, found[0][rows]), f"rows {rows.tolist()}"


@each_precision
@torch.no_grad()
def test_the_bits_of_a_row_do_not_depend_on_when_it_came(precision: str, built: Path) -> None:
    """Each row has a slot of its own, so its sums have the same order in every row of a step of any age."""
    model, call, ids = inference_model(precision), lengths(40), text(3, 60, seed=1)
    found = []
    with mixed(precision):
        x = model.embedding(ids)
        for age, row in ((1, 0), (7, 2), (59, 1)):
            step = VectorStep(model.backbone, model.empty_cache(3, call), call)
            for vector in x[:, :age].split(1, dim=1):
                step(vector)
            step.put(row, model.log_probs(text(1, 33), model.empty_cache(1, call), call)[1])
            own = x.clone()
            own[row] = x[0]
            found.append(torch.stack([step(vector)[row] for vector in own.split(1, dim=1)]))
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("native", [False, True])
@torch.no_grad()
def test_a_row_that_is_taken_out_and_put_back_keeps_its_bits(engine: None, native: bool) -> None:
    """With its slot, however long it was away and however full its window is."""
    model, call, ids = inference_model(), lengths(12), text(2, 60, seed=1)
    for age in (3, 11, 30):
        step = begin(model, text(2, 5), call)[0]
        steps(step, ids[:, :age])
        kept, slot = step.take(1), int(step.slots[1])
        expected = steps(step, ids[:, age : age + 20])[1]
        steps(step, ids[:, :7])
        step.put(1, kept, slot=slot)
        assert torch.equal(steps(step, ids[:, age : age + 20])[1], expected)


@torch.no_grad()
def test_a_step_of_vectors_has_no_tokens_to_grow_old() -> None:
    model, call = small_model(**VARIANTS["n-grams"]), lengths(6)
    cache = model.log_probs(text(1, 9), model.empty_cache(1, call), call)[1]
    assert cache.tokens is not None and VectorStep(model.backbone, cache, call).take(0).tokens is None


@torch.no_grad()
def test_what_it_leaves_to_pytorch(built: Path) -> None:
    def serves(backbone: Any, dtype: torch.dtype = torch.float32, rows: int = 1, device: str = "cpu") -> bool:
        return can_step(backbone, torch.empty(rows, 2, 2, 7, 5, dtype=dtype, device=device))

    backbone = small_backbone(dtype=torch.float32)
    assert serves(backbone, rows=MOST_ROWS) and not serves(backbone, rows=MOST_ROWS + 1)
    assert not serves(backbone, device="meta")
    assert not serves(small_backbone(), torch.float64)
    assert not serves(small_backbone(dtype=torch.bfloat16), torch.bfloat16)
    assert not serves(small_backbone(dtype=torch.float32, **VARIANTS["gated"]))
    rounded = inference_model("bf16").backbone
    assert not serves(rounded, torch.bfloat16), "without autocast PyTorch refuses it"
    with mixed("bf16"):
        assert serves(rounded, torch.bfloat16)
        assert not serves(backbone) and not serves(backbone, torch.bfloat16)
    first: Any = backbone.layers[0]
    handle = first.feed_forward.register_forward_hook(lambda *_: None)
    assert not serves(backbone)
    handle.remove()
    assert serves(backbone)
    join, first.attention.join = first.attention.join, torch.add
    assert not serves(backbone)
    first.attention.join = join
    first.feed_forward.inner = nn.Sequential(first.feed_forward.inner)
    assert not serves(backbone)


@each_precision
@torch.no_grad()
def test_which_softmax_it_computes(precision: str, built: Path) -> None:
    def included(model: TransformerXL) -> bool:
        return includes_head(model.backbone, model.softmax)

    model, call, x = inference_model(precision), lengths(7), torch.randn(3, 1, 14)
    assert included(model) and not includes_head(model.backbone, model.softmax.log_probs)
    assert not included(inference_model(precision, cutoffs=(5,)))
    assert not included(inference_model(precision, d_embed=6))
    with mixed(precision):
        for head in (model.softmax, model.softmax.log_probs):
            step = VectorStep(model.backbone, model.empty_cache(3, call), call, head=head)
            again = VectorStep(model.backbone, model.empty_cache(3, call), call)
            for _ in range(3):
                tolerance = 1e-5 if precision == "fp32" else 0.05
                torch.testing.assert_close(step(x), model.softmax(again(x)), rtol=0, atol=tolerance)
        model.softmax.register_forward_hook(lambda *_: torch.zeros(3, 5))
        assert not included(model)
        assert not VectorStep(model.backbone, model.empty_cache(3, call), call, head=model.softmax)(x).any()


@torch.no_grad()
def test_a_number_that_is_not_finite_shows(built: Path) -> None:
    backbone, call = small_backbone(dtype=torch.float32), lengths(4)
    step = VectorStep(backbone, backbone.empty_memory(2, call), call)
    x = torch.randn(2, 1, 14)
    x[1, 0, 3] = float("nan")
    assert step(x).isnan().all(1).tolist() == [False, True]
    assert step(torch.randn(2, 1, 14)).isnan().any(1).tolist() == [False, True]


@pytest.mark.filterwarnings("ignore:Full backward hook:UserWarning")  # of a projection of sinusoids
@pytest.mark.parametrize("training", [True, False])
def test_what_a_hook_keeps_is_not_overwritten(training: bool) -> None:
    model, kept = small_model().train(training), []
    for module in model.backbone.modules():
        module.register_forward_hook(lambda _, given, out: kept.append((out, deepcopy(out.detach()))) or None)
        module.register_full_backward_hook(lambda *_: None)
    x = torch.randn(2, 5, 14, dtype=torch.float64, requires_grad=True)
    model.backbone.layers[0](x, x[:, :0], next(iter(model.backbone.positions(5, None, x)))).sum().backward()
    assert kept
    for out, before in kept:
        torch.testing.assert_close(out.detach(), before, rtol=0, atol=0)


@pytest.mark.parametrize("changes", [{}, {"cutoffs": (5,)}, {"tie_weight": False}])
def test_a_hook_of_the_embedding_is_called_in_training(changes: dict[str, Any]) -> None:
    """One that changes nothing gives the same loss and gradients, also of tables that the softmax shares."""

    def loss_and_gradients(*hooks: Any) -> list[Tensor]:
        model = small_model(**changes)
        for hook in hooks:
            model.embedding.register_forward_hook(hook)
        nll, _ = model(text(2, 9), text(2, 9, seed=1), None, lengths(6))
        return [nll, *torch.autograd.grad(nll.sum(), [*model.parameters()])]

    plain, called = loss_and_gradients(), []
    torch.testing.assert_close(loss_and_gradients(lambda *_: called.append(1)), plain)
    assert called and not torch.equal(loss_and_gradients(lambda _, given, out: out + 1)[0], plain[0])


@torch.no_grad()
def test_hooks_are_called_or_refused() -> None:
    """A low-rank addition to `qkv` counts for memory and cache too; a step refuses what it would not call."""
    model, call = inference_model().double(), lengths(6, 7)
    ids = text(2, 9)
    for layer in model.backbone.layers:
        layer.attention.qkv.register_forward_hook(lambda module, given, out: out + 0.5 * given[0][..., :1])
    model.backbone.layers[0].attention.qkv = nn.Sequential(model.backbone.layers[0].attention.qkv)  # a wrapper
    whole = read(model, ids, call).hidden
    for memory in (None, model.empty_cache(2, call)):
        torch.testing.assert_close(read(model, ids, call, pieces=[4, 3, 2], memory=memory).hidden, whole)
    step, x = VectorStep(model.backbone, model.empty_cache(2, call), call), model.embedding(ids)
    torch.testing.assert_close(torch.stack([step(x[:, i : i + 1]) for i in range(9)], 1), whole)
    model.backbone.layers[1].attention.register_forward_hook(lambda module, given, out: out)
    cache = model.empty_cache(2, call)
    assert step_state(model, cache, call) is cache
    with pytest.raises(Mistake, match="no hooks"):
        VectorStep(model.backbone, cache, call)


@pytest.mark.parametrize("kind", [{}, {"gate": "input"}], ids=["native", "torch"])
@torch.no_grad()
def test_a_step_is_freed_with_its_last_name(kind: dict, built: Path) -> None:
    """Its rings may be large, and Python looks for cycles by the number of objects."""
    model, call = inference_model(**kind), lengths(6)
    step = VectorStep(model.backbone, model.backbone.empty_memory(1, call), call)
    step(torch.zeros(1, 1, model.config.d_model))
    ring = weakref.ref(step.rings[0])
    gc.disable()
    try:
        del step
        assert ring() is None
    finally:
        gc.enable()
