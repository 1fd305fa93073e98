"""The step in C++: the model's numbers in a ring, bits that depend on the row alone, and what PyTorch keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from amount import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_build import build_or_skip, without_build
from small_models import VARIANTS, lengths, small_backbone, small_model, text
from torch import Tensor, nn

from transformer_xl.config.settings import Lengths
from transformer_xl.model import native
from transformer_xl.model.inference import KVCache
from transformer_xl.model.native import MOST_ROWS, can_step, includes_head
from transformer_xl.model.step import Step, VectorStep, step_state
from transformer_xl.model.transformer_xl import TransformerXL

KINDS: dict[str, dict[str, Any]] = {
    **{name: kind for name, kind in VARIANTS.items() if "gate" not in kind},
    "attended zeros": {"zero_memory": True},
    "shared projection": {"share_position_projection": True},
    "ReLU of each output": {"relu_output": True, "pre_lnorm": True},
    "odd sizes": {"d_model": 70, "d_inner": 133, "n_head": 3, "d_head": 37, "init_std": 0.1, "untie_r": True},
    "a wide head": {"d_model": 36, "n_head": 1, "d_head": 161, "init_std": 0.1, "qk_norm": True},
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
each_precision = pytest.mark.parametrize("precision", ["fp32", "bf16"])


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from without_build(monkeypatch)


@pytest.fixture(autouse=True)
def built(switched_on: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    return build_or_skip(monkeypatch)


def mixed(precision: str) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


def inference_model(precision: str = "fp32", **kind: Any) -> TransformerXL:
    return small_model(dtype=torch.float32, **kind).for_inference(precision)


def begin(model: TransformerXL, prompt: Tensor, call: Lengths, valid: Tensor | None = None) -> tuple[Step, Any]:
    """A step in C++ and a memory after the same prompt."""
    states = [model.empty_cache(len(prompt), call, valid), model.empty_memory(len(prompt), call, valid)]
    cache, memory = (model.log_probs(prompt, state, call)[1] for state in states)
    assert can_step(model.backbone, cache.buffers[0])
    return Step(model, cache, call, compiled=False), memory


def follow(model: TransformerXL, ids: Tensor, memory: Any, call: Lengths) -> tuple[Tensor, Any]:
    found = []
    for token in ids.split(1, dim=1):
        log_probs, memory = model.log_probs(token, memory, call)
        found.append(log_probs[:, -1])
    return torch.stack(found, 1), memory


def steps(step: Step, ids: Tensor) -> Tensor:
    return torch.stack([step(token) for token in ids.split(1, dim=1)], 1)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Sums in another order."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)


@each_kind
@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@torch.no_grad()
def test_it_gives_the_numbers_of_memory(kind: dict, data: st.DataObject) -> None:
    model = inference_model(**kind)
    mem_len, rows = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 9))
    call = lengths(
        mem_len, data.draw(st.none() | st.integers(1, mem_len + 1)), data.draw(st.none() | st.integers(1, 50))
    )
    size = data.draw(st.integers(1, 30))
    valid = st.lists(st.integers(1 - size, 0), min_size=rows, max_size=rows).map(torch.tensor)
    late = None if kind.get("zero_memory") else data.draw(st.none() | valid)
    step, memory = begin(model, text(rows, size), call, late)
    ids = text(rows, 2 * mem_len + 5, seed=1)
    assert_close(steps(step, ids), follow(model, ids, memory, call)[0])


@each_kind
@torch.no_grad()
def test_in_bf16_it_is_as_close_to_fp32_as_the_model(kind: dict) -> None:
    call, prompt, ids = lengths(29), text(5, 17), text(5, 50, seed=1)
    errors = []
    exact = inference_model(**kind)
    expected = follow(exact, ids, exact.log_probs(prompt, exact.empty_memory(5, call), call)[1], call)[0]
    with mixed("bf16"):
        model = inference_model("bf16", **kind)
        step, memory = begin(model, prompt, call)
        for found in (steps(step, ids), follow(model, ids, memory, call)[0]):
            errors.append(float((found - expected).square().mean().sqrt()))
    assert errors[0] < 1.1 * errors[1], errors


@pytest.mark.parametrize("window", [1, 16, 17, 255, 256, 257, 300, 530])
@torch.no_grad()
def test_windows_of_several_pieces(window: int) -> None:
    """Rows begin at different times, and the ring is filled more than once."""
    model, call = inference_model(**KINDS["odd sizes"]), lengths(window - 1, window)
    step, memory = begin(model, text(3, 40), call, torch.tensor([0, -3, -37]))
    for seed, size in enumerate((3, window // 2 + 1, window + 1)):
        ids = text(3, size, seed=seed)
        found, (expected, memory) = steps(step, ids), model.log_probs(ids, memory, call)
        assert_close(found, expected)


@each_precision
@each_kind
@torch.no_grad()
def test_the_bits_of_a_row_are_its_own(kind: dict, precision: str) -> None:
    """They depend neither on the other rows nor on the number of threads."""
    model, call, prompt = inference_model(precision, **kind), lengths(270), text(11, 265)
    choices = (1, range(11)), (2, range(11)), (3, [4, 9, 2, 7, 0, 10]), (2, [10, 4]), (1, [7])
    before, found = torch.get_num_threads(), []
    with mixed(precision):
        cache = model.log_probs(prompt, model.empty_cache(11, call), call)[1]
        x = model.embedding(text(11, 12, seed=1))
        chosen = [torch.tensor(list(rows)) for _, rows in choices]
        head = model.softmax if includes_head(model.backbone, model.softmax) else None
        readers = [VectorStep(model.backbone, cache.fork(rows), call, head=head) for rows in chosen]
        try:
            for (threads, _), rows, step in zip(choices, chosen, readers, strict=True):
                torch.set_num_threads(threads)
                found.append(torch.stack([step(one) for one in x[rows].split(1, dim=1)], 1))
        finally:
            torch.set_num_threads(before)
    for rows, out in zip(chosen, found, strict=True):
        assert torch.equal(out, found[0][rows]), f"rows {rows.tolist()}"


@pytest.mark.parametrize("kind", ["post-norm", "attended zeros"])
@torch.no_grad()
def test_reset_and_selected_rows(kind: str) -> None:
    model, call = inference_model(**KINDS[kind]), lengths(5)
    step, memory = begin(model, text(4, 7), call)
    for rows, ended in (([3, 0, 2], [False, True, False]), ([2, 1], [True, False])):
        step, memory = step.select(torch.tensor(rows)), memory.select(torch.tensor(rows))
        step.reset(torch.tensor(ended))
        memory, ids = memory.reset(torch.tensor(ended)), text(len(rows), 9, seed=len(rows))
        expected, memory = follow(model, ids, memory, call)
        assert_close(steps(step, ids), expected)


@torch.no_grad()
def test_a_step_uses_it_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    made = native.native_step
    monkeypatch.setattr("transformer_xl.model.step.native_step", lambda *a: calls.append(a) or made(*a))
    model, call = inference_model(), lengths(5)

    def cache(rows: int = 2) -> KVCache:
        return model.log_probs(text(rows, 3), model.empty_cache(rows, call), call)[1]

    state = step_state(model, cache(), call)
    assert isinstance(state, Step) and not state.vectors.compiled
    state(text(2, 1))
    assert len(calls) == 1
    many = cache(MOST_ROWS + 1)
    assert step_state(model, many, call) is many
    monkeypatch.setenv("TXL_NATIVE", "0")
    off = cache()
    assert step_state(model, off, call) is off


@torch.no_grad()
def test_what_it_leaves_to_pytorch() -> None:
    def serves(backbone: Any, dtype: torch.dtype = torch.float32, rows: int = 1, device: str = "cpu") -> bool:
        return can_step(backbone, torch.empty(rows, 2, 2, 7, 5, dtype=dtype, device=device))

    backbone = small_backbone(dtype=torch.float32)
    assert serves(backbone)
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
    first.feed_forward.inner = nn.Sequential(first.feed_forward.inner)
    assert not serves(backbone)


@each_precision
@torch.no_grad()
def test_which_softmax_it_computes(precision: str) -> None:
    def included(model: TransformerXL) -> bool:
        return includes_head(model.backbone, model.softmax)

    model, call = inference_model(precision), lengths(7)
    assert included(model)
    assert not includes_head(model.backbone, model.softmax.log_probs) and not includes_head(model.backbone, None)
    assert not included(inference_model(precision, cutoffs=(5,)))
    assert not included(inference_model(precision, d_embed=6))
    assert included(inference_model()) and not includes_head(
        inference_model("bf16").backbone, inference_model().softmax
    )
    x = torch.randn(3, 1, 14)
    with mixed(precision):
        for head in (model.softmax, model.softmax.log_probs):
            step = VectorStep(model.backbone, model.empty_cache(3, call), call, head=head)
            found = [step(x) for _ in range(3)]
            assert_close(found[-1].exp().sum(1), torch.ones(3))
            again = VectorStep(model.backbone, model.empty_cache(3, call), call)
            expected = [model.softmax(again(x)) for _ in range(3)]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 if precision == "fp32" else 0.05)
        model.softmax.register_forward_hook(lambda *_: torch.zeros(3, 5))
        assert not included(model)
        assert not VectorStep(model.backbone, model.empty_cache(3, call), call, head=model.softmax)(x).any()


@torch.no_grad()
def test_a_number_that_is_not_finite_shows() -> None:
    backbone, call = small_backbone(dtype=torch.float32), lengths(4)
    step = VectorStep(backbone, backbone.empty_memory(2, call), call)
    x = torch.randn(2, 1, 14)
    x[1, 0, 3] = float("nan")
    assert step(x).isnan().all(1).tolist() == [False, True]
    assert step(torch.randn(2, 1, 14)).isnan().any(1).tolist() == [False, True]


@each_precision
@torch.no_grad()
def test_the_bits_of_a_row_do_not_depend_on_when_it_came(precision: str) -> None:
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
            assert can_step(model.backbone, step.rings[0])
    assert all(torch.equal(each, found[0]) for each in found)
