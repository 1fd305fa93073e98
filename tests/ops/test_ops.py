"""`relative_attention`: the equation by hand, the contract of every backend, masks and windows."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import Made
from torch import Tensor
from torch.autograd import forward_ad

from transformer_xl import ops
from transformer_xl.config.settings import TrainConfig, TransformerXLConfig
from transformer_xl.mistake import Mistake
from transformer_xl.ops import choice, chunked, relative_attention, resolve_backend, strided, testing
from transformer_xl.ops.call import Call
from transformer_xl.ops.dropout import Dropout, dropout, dropout_relu, keep_mask
from transformer_xl.ops.testing import (
    CASES,
    NAMES,
    Case,
    assert_contract,
    assert_dropout,
    fault_of,
    make_inputs,
    masks,
    with_roundings,
)
from transformer_xl.train.choices import choices

BACKENDS = ["auto", *sorted(ops.BACKENDS.keys() - {"triton", "native"})]  # tested in test_triton.py and test_native.py
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}

each_backend = pytest.mark.parametrize("backend", BACKENDS)


def by_hand(inputs: dict[str, Any], case: Case) -> np.ndarray:
    """The paper's equation, one query and one key at a time."""
    q, k, v, r, u, w = (inputs[name].detach().double().numpy() for name in NAMES)
    n_batch, n_head, n_query, size = q.shape
    memory = k.shape[2] - n_query
    scale = 1 / math.sqrt(size) if case.scale is None else case.scale
    out = np.zeros_like(q)
    for b, h, i in np.ndindex(n_batch, n_head, n_query):
        own = memory + i
        first = memory - (memory if case.valid is None else case.valid[b])
        end = memory + (n_query if case.end is None else case.end[b])
        oldest = first if case.attn_len is None else max(first, own - case.attn_len + 1)
        ahead = (n_query if case.look_ahead is None else case.look_ahead) if not case.causal else 0
        keys = range(max(oldest, 0), min(own + ahead + 1, end)) if first <= own < end else range(0)
        weight = []
        for j in keys:
            distance = own - j
            position = r[h, r.shape[1] - 1 - case.later - distance]
            terms = q[b, h, i] @ k[b, h, j], q[b, h, i] @ position, u[h] @ k[b, h, j], w[h] @ position
            weight.append(math.exp(scale * sum(terms)))
        for j, share in zip(keys, weight, strict=True):
            out[b, h, i] += share / sum(weight) * v[b, h, j]
    return out


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the fields of a `Case`, not a `Case`: the type checker would then draw random numbers in a strategy."""
    queries, memory, batch = draw(st.integers(1, 6)), draw(st.integers(0, 7)), draw(st.integers(1, 3))
    rows = st.lists(st.integers(-queries, memory), min_size=batch, max_size=batch).map(tuple)
    ends = st.lists(st.integers(0, queries), min_size=batch, max_size=batch).map(tuple)
    causal = draw(st.booleans())
    return {
        "causal": causal,
        "look_ahead": None if causal else draw(st.none() | st.integers(0, queries + 1)),
        "end": draw(st.none() | ends),
        "queries": queries,
        "memory": memory,
        "batch": batch,
        "heads": draw(st.integers(1, 3)),
        "head_size": draw(st.integers(1, 4)),
        "attn_len": draw(st.none() | st.integers(1, queries + memory + 2)),
        "valid": draw(st.none() | rows),
        "strided": draw(st.booleans()),
        "scale": draw(st.none() | st.floats(0.1, 3)),
        "spare": draw(st.integers(0, 3)),
    }


@each_backend
@settings(max_examples=examples(40))
@given(sizes=sizes(), seed=st.integers(0, 99))
def test_equation_by_hand(backend: str, sizes: dict[str, Any], seed: int) -> None:
    case = Case(**sizes)
    inputs = make_inputs(case, torch.float64, seed=seed)
    out = relative_attention(**inputs, **masks(case), backend=backend)
    torch.testing.assert_close(out.detach(), torch.from_numpy(by_hand(inputs, case)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_contract(backend: str, case: Case, dtype: str) -> None:
    assert_contract(backend, case, DTYPES[dtype])


def test_the_tolerance_comes_from_the_same_equations() -> None:
    """Without roundings they equal the reference, and the error is as large as the roundings."""
    for case in CASES.values():
        inputs = make_inputs(case, torch.float64)
        cotangent = torch.randn_like(inputs["q"])
        out = relative_attention(**inputs, **masks(case), backend="reference")
        gradients = torch.autograd.grad(out, [inputs[name] for name in NAMES], cotangent)
        exact, *moved = (
            with_roundings(inputs, case, cotangent, unit, unit, torch.Generator().manual_seed(0))
            for unit in (0.0, 1e-9, 1e-7)
        )
        torch.testing.assert_close(list(exact.values()), [out.detach(), *gradients])
        for name, value in exact.items():
            little, much = ((run[name] - value).square().mean().sqrt() for run in moved)
            assert 10 * little < much < 1000 * little, name


def break_backend(fault: str, call: Call) -> Tensor:
    """`strided` with one fault."""
    attend, (q, k, v, _, _, _, mask, _, scale) = ops.BACKENDS["strided"], call
    match fault:
        case "a scale that is 1e-4 off":
            call = call._replace(scale=scale * (1 + 1e-4))
        case "a key in bf16":
            call = call._replace(k=k.bfloat16().to(k.dtype))
        case "one key's gradient missing":
            own = torch.arange(k.shape[2])[:, None] == k.shape[2] - q.shape[2]
            call = call._replace(k=torch.where(own, k.detach(), k))
        case "sums over queries in the dtype of the inputs":
            memory, outs = k.shape[2] - q.shape[2], []
            for i in range(q.shape[2]):  # autograd adds the gradients of these calls one by one
                keys = slice(0, memory + i + 1)
                own = call._replace(q=q[:, :, i : i + 1], k=k[:, :, keys], v=v[:, :, keys])
                outs.append(attend(own._replace(mask=mask.part(0, queries=slice(i, i + 1)))))
            return torch.cat(outs, 2)
    return attend(call)


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [
        *product(("a scale that is 1e-4 off", "a key in bf16"), ("fp64", "fp32")),
        *product(["one key's gradient missing"], DTYPES),
        ("sums over queries in the dtype of the inputs", "bf16"),
    ],
)
def test_the_contract_finds_faults(fault: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly uniform attention over many keys has long sums; in other cases bfloat16 hides errors of the sums."""
    even = Case(queries=257, memory=11, batch=1, valid=(11,), scale=0.01)
    case = even if fault.startswith("sums") else CASES["beyond a block, all masks"]
    monkeypatch.setitem(ops.BACKENDS, "broken", lambda call: break_backend(fault, call))
    with pytest.raises(AssertionError, match="rounding makes"):
        assert_contract("broken", case, DTYPES[dtype])
    monkeypatch.setitem(ops.BACKENDS, "broken", lambda call: break_backend("", call))
    assert_contract("broken", case, DTYPES[dtype])


DROPPED = Case(queries=13, memory=17, attn_len=19, valid=(17, 5, -2), head_size=30)
BIDIRECTIONAL = {"causal": False, "look_ahead": 5, "end": (13, 9, 13)}


@each_backend
@pytest.mark.parametrize("changes", [{}, BIDIRECTIONAL], ids=["causal", "both directions"])
def test_dropout(backend: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that each block has another mask."""
    monkeypatch.setattr(chunked, "SCORES", 60)
    monkeypatch.setattr(chunked, "QUERIES", 4)
    assert_dropout(backend, replace(DROPPED, **changes))


@each_backend
@pytest.mark.parametrize("frozen", [None, *NAMES])
def test_inputs_may_be_frozen(backend: str, frozen: str | None) -> None:
    """The gradient that comes in has no strides."""
    case = CASES["window and short rows"]
    inputs = make_inputs(case, torch.float64)
    wanted = [value for name, value in inputs.items() if name != frozen]
    given = inputs | ({frozen: inputs[frozen].detach()} if frozen else {})
    found, expected = (
        torch.autograd.grad(relative_attention(**x, **masks(case), backend=name).sum(), wanted)
        for x, name in ((given, backend), (inputs, "reference"))
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("scores", [1, 200, 3000])
@pytest.mark.parametrize(
    "name",
    [
        *("beyond a block", "steep", "beyond a block, all masks", "window and short rows"),
        *("both directions, beyond a block", "look-ahead beyond a block", "look-ahead and window"),
    ],
)
def test_small_blocks_change_nothing(name: str, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "SCORES", scores)
    monkeypatch.setattr(chunked, "QUERIES", 5)
    case = CASES[name]
    for dtype in DTYPES.values():
        assert_contract("chunked", case, dtype)


def test_auto_takes_the_fused_kernels_only_on_a_card_where_they_passed(monkeypatch, tmp_path) -> None:
    pytest.importorskip("triton")
    card = SimpleNamespace(name="A card", major=9, minor=0)
    monkeypatch.setenv("TXL_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    cuda, bf16 = torch.device("cuda", 0), torch.bfloat16
    file = choice.verdict_file(choice.card(cuda))
    file.parent.mkdir()

    def chosen(dtype: torch.dtype = bf16, *, training: bool = True, queries: int = 512) -> tuple[str, str]:
        choice.read_verdict.cache_clear()
        return resolve_backend("auto", cuda, dtype, 64, training=training, scores=1, queries=queries)

    for content, word in ((None, "not been tried"), ('{"why": "d q"}', "(d q)")):
        if content:
            file.write_text(content)
        name, why = chosen()
        assert name == "strided" and word in why and "txl env --check" in why
        assert chosen(training=False)[0] == "sdpa"
    file.write_text('{"why": null}')
    assert chosen()[0] == chosen(training=False)[0] == chosen(torch.float32)[0] == "triton"
    assert chosen(training=False, queries=1)[0] == chosen(torch.float32, training=False)[0] == "sdpa"
    card.name = "Another card"
    assert chosen()[0] == "strided"
    choice.read_verdict.cache_clear()


def test_a_card_passes_only_with_right_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """`txl env --check`, here with other backends on the CPU and smaller cases."""
    monkeypatch.setattr(testing, "ON_A_CARD", {"heads of 64": Case(head_size=64), "heads of 41": Case(head_size=41)})
    monkeypatch.setitem(ops.BACKENDS, "triton", strided.attend)
    tried = []
    for check in ("fused_step.assert_step", "fused_sublayer.assert_sublayer"):
        monkeypatch.setattr(f"transformer_xl.ops.{check}", lambda dtype, device: tried.append(dtype))
    assert fault_of("triton", "cpu") is None and tried == [torch.bfloat16] * 2 + [torch.float16] * 2

    def broken(call: Call) -> Tensor:
        return strided.attend(call) * (1 if call.q.shape[-1] != 41 or call.q.dtype != torch.bfloat16 else 1.02)

    monkeypatch.setitem(ops.BACKENDS, "triton", broken)
    assert (fault_of("triton", "cpu") or "").startswith("heads of 41, bf16: AssertionError: out")


def test_auto_counts_the_scores_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    for name in ("strided", "chunked"):
        monkeypatch.setitem(ops.BACKENDS, name, lambda call, name=name: used.append(name) or call.q)
    case = Case()
    monkeypatch.setattr(choice, "STRIDED_SCORES", case.batch * case.heads * case.queries * (case.memory + case.queries))
    for batch in (case.batch, case.batch + 1):
        relative_attention(**make_inputs(replace(case, batch=batch), torch.float32))
        model = TransformerXLConfig(vocab_size=0, n_head=case.heads)
        lengths = {"tgt_len": case.queries, "mem_len": case.memory}
        config = TrainConfig(device="cpu", batch_size=2 * batch, batch_chunk=2, **lengths)
        used.append(choices(config, model)["backend"]["name"])
    assert used == ["strided"] * 2 + ["chunked"] * 2


def test_chunked_never_keeps_all_scores() -> None:
    case = Case(queries=1024, memory=1024, batch=1, heads=4, head_size=4)
    inputs = make_inputs(case, torch.float32)
    with Made() as made:
        relative_attention(**inputs, backend="chunked").sum().backward()
    assert made.of(chunked.SCORES // 2) and not made.of(int(1.1 * chunked.SCORES))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.25, 0.9])
def test_dropout_draws_elements_independently_at_its_rate(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    x = torch.ones(397, 1009, dtype=dtype, requires_grad=True)  # no multiple of four
    out = dropout(x, p)
    dropped = (out == 0).double().mean().item()
    error = (p * (1 - p) / x.numel()) ** 0.5
    assert abs(dropped - p) < 5 * error + 2**-17
    for apart in (1, 2, 3, 4):  # four elements share a random number
        both = ((out == 0)[:, :-apart] & (out == 0)[:, apart:]).double().mean().item()
        assert abs(both - p * p) < 5 * (p * p * (1 - p * p) / x.numel()) ** 0.5 + 2**-17
    kept = out[out != 0]
    assert kept.unique().numel() == 1
    torch.testing.assert_close(kept[0].item(), 1 / (1 - p), rtol=2 * torch.finfo(dtype).eps, atol=0)
    out.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, out)


def test_dropout_of_nearly_all_keeps_nearly_none() -> None:
    """The share of what is kept is rounded to a step of 1 / 65,536, which must not become that of all."""
    assert (dropout(torch.ones(1 << 16), 1 - 1e-6) != 0).sum() < 20


@pytest.mark.parametrize("causal", [True, False])
@each_backend
def test_a_call_of_no_queries_has_no_results(backend: str, causal: bool) -> None:
    for rows, queries, keys in ((2, 0, 4), (2, 0, 0), (0, 4, 4)):
        shapes = [(rows, 3, queries, 8), *[(rows, 3, keys, 8)] * 2, (3, keys + queries, 8), (3, 8), (3, 8)]
        inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
        out = relative_attention(*inputs, causal=causal, backend=backend)
        assert out.shape == shapes[0]
        for x, gradient in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
            assert torch.equal(gradient, torch.zeros_like(x))


def test_dropout_keeps_one_byte_per_element_for_backward() -> None:
    x, kept = torch.randn(37, 101, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.untyped_storage().nbytes()) or x, lambda x: x
    ):
        dropout(x, 0.3)
    assert sum(kept) <= x.numel() + 8  # part of the last random number is unused


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_dropout_is_a_product_with_the_scaled_mask(dtype: torch.dtype) -> None:
    x = torch.randn(37, 101, dtype=dtype, requires_grad=True)
    torch.manual_seed(3)
    out = dropout(x, 0.3)
    torch.manual_seed(3)
    scaled = keep_mask(x.shape, 0.3).to(dtype) / (1 - 0.3)
    assert torch.equal(out, x * scaled)
    cotangent = torch.randn_like(x)
    first, again = (torch.autograd.grad(y, x, cotangent, create_graph=True)[0] for y in (out, x * scaled))
    assert torch.equal(first, again)
    assert torch.autograd.gradgradcheck(lambda x: torch.manual_seed(3) and dropout(x, 0.3).square(), x.double()[:3, :5])


@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore")  # of torch.compile itself
def test_compiled_dropout_is_one_graph_and_each_call_draws_a_mask() -> None:
    """PyTorch's compiler joins equal calls of an operator, also of one that draws random numbers."""
    x, shares = torch.full((64, 101), 3.0, requires_grad=True), []
    compiled: Any = torch.compile(lambda x: dropout(x, 0.5) + 2 * dropout(x, 0.5), backend="aot_eager", fullgraph=True)
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        out = compiled(x)
        torch.testing.assert_close(*torch.autograd.grad(out.sum(), x), out / 3)
        shares.append(out.detach() / 6)
    assert torch.equal(shares[0], shares[1]) and not torch.equal(shares[0], shares[2])
    assert all(0.2 < (shares[0] == count).double().mean() < 0.3 for count in range(4)), "the masks are not independent"


def six() -> list[Tensor]:
    """The six tensors of a small call."""
    return list(make_inputs(Case(queries=5, memory=4, batch=1, head_size=4), torch.float64).values())


@pytest.mark.parametrize("backend", [*BACKENDS, "native"])
def test_second_derivatives_are_right_or_refused(backend):
    """A gradient that were a constant for the graph would make a gradient penalty an addition of nothing."""
    inputs = six() if backend != "native" else [x.detach().float().requires_grad_() for x in six()]

    def penalty(name: str, tensors: list[Tensor]) -> list[Tensor]:
        out = relative_attention(*tensors, backend=name)
        first = torch.autograd.grad(out.sum(), tensors, create_graph=True)
        return list(torch.autograd.grad(sum(x.square().sum() for x in first), tensors))  # type: ignore[arg-type]

    if backend in ("chunked", "native"):
        if backend == "native" and choice.native_refusal(inputs[0].device, inputs[0].dtype):
            pytest.skip("the kernels are not built")
        with pytest.raises(Mistake, match=r'first derivatives only\. For attention give backend="strided"'):
            penalty(backend, inputs)
        torch.autograd.grad(relative_attention(*inputs, backend=backend).sum(), inputs)  # the first ones stay
        return
    for found, expected in zip(penalty(backend, inputs), penalty("reference", six()), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_in_autocast_computes_in_its_dtype(backend: str) -> None:
    inputs = make_inputs(CASES["memory"], torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_attention(**inputs, backend=backend).dtype == torch.bfloat16


@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore")  # of torch.compile itself
@pytest.mark.parametrize("backend", ["auto", "chunked"])
def test_a_compiled_call_has_the_same_numbers(backend: str) -> None:
    compiled: Any = torch.compile(relative_attention, backend="aot_eager", fullgraph=backend == "auto")
    for gradients, case in ((False, CASES["memory"]), (True, Case(queries=6, valid=(4, -2), batch=2))):  # other sizes
        inputs = make_inputs(case, torch.float64)
        given = {name: x.detach().requires_grad_(gradients) for name, x in inputs.items()} | masks(case)
        torch.testing.assert_close(compiled(**given, backend=backend), relative_attention(**inputs, **masks(case)))


def test_vmap_of_auto_has_gradients():
    """Inside vmap `requires_grad` is false for all tensors. In float32 the backend for inference has no derivative."""
    inputs, q = [x.detach().float() for x in six()], torch.randn(3, 2, 5, 4)
    if hasattr(relative_attention, "__wrapped__"):
        pytest.skip("checks of shapes do not know vmap")
    weight = torch.randn(2, 5, 4, requires_grad=True)
    out = torch.vmap(lambda each: relative_attention((each * weight)[None], *inputs[1:])[0])(q)
    [found] = torch.autograd.grad(out.square().sum(), weight)
    one_by_one = torch.stack([relative_attention((each * weight)[None], *inputs[1:])[0] for each in q])
    torch.testing.assert_close(found, torch.autograd.grad(one_by_one.square().sum(), weight)[0])


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("q", np.zeros((1, 2, 5, 4)), "4 dimensions, got ndarray"),
        ("q", torch.zeros(2, 5, 4), r"4 dimensions, got \(2, 5, 4\)"),
        ("k", torch.zeros(2, 9, 4), r"\(1, 2, 5, 4\) to fit q \(1, 2, 5, 4\), got \(2, 9, 4\)"),
        ("k", torch.zeros(1, 2, 4, 4), r"got \(1, 2, 4, 4\)"),
        ("v", torch.zeros(1, 2, 8, 4), r"\(1, 2, 9, 4\) to fit q"),
        ("r", None, "got NoneType"),
        ("r", torch.zeros(2, 8, 4), r"\(2, 9, 4\) to fit q"),
        ("content_bias", 0.0, "got float"),
        ("position_bias", torch.zeros(2, 3), r"got \(2, 3\)"),
        ("valid", 3, "got int"),
        ("valid", torch.tensor([1, 2]), r"\(1,\) to fit q"),
        ("end", [5], "got list"),
        ("first", torch.zeros(1, 5, dtype=torch.bool), "integers, got torch.bool"),
        ("attn_len", 0, "at least 1"),
        ("dropout_p", 1.5, "below 1"),
        ("look_ahead", 1, "None with causal=True"),
        ("causal", False, r"r must be a tensor \(2, 13, 4\)"),
        ("backend", "sideways", "auto or one of reference, strided"),
        ("backend", "triton", "CUDA.*strided"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, value: object, why: str) -> None:
    if hasattr(relative_attention, "__wrapped__"):
        pytest.skip("checks of types refuse it first")
    arguments = dict(zip(NAMES, six(), strict=True)) | {name: value}
    with pytest.raises(Mistake, match=why):
        relative_attention(**arguments)


@pytest.mark.parametrize("causal", [True, False])
def test_masks_may_be_small_integers(causal: bool) -> None:
    case = Case(queries=5, memory=200, causal=causal, head_size=4)
    inputs = {name: x.detach() for name, x in testing.make_inputs(case, torch.float32).items()}
    rows = {"valid": [100, 3, -2], "end": [1, 5, 0], "first": [[0, 3, 90, 90, 120]] * 3}
    for name, numbers in rows.items():
        calls: list[dict[str, Any]] = [{name: torch.tensor(numbers, dtype=kind)} for kind in (torch.int8, torch.int64)]
        found, expected = (relative_attention(**inputs, **own, causal=causal) for own in calls)
        torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # PyTorch's own call of it
@torch.no_grad()
def test_auto_keeps_the_tangents_of_forward_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """`native` would drop them."""
    monkeypatch.setattr(choice, "native_wins", lambda *_, **__: True)
    inputs = [x.detach().float() for x in six()]
    with forward_ad.dual_level():
        q = forward_ad.make_dual(inputs[0], torch.ones_like(inputs[0]))
        tangent = forward_ad.unpack_dual(relative_attention(q, *inputs[1:])).tangent
        assert forward_ad.unpack_dual(relative_attention(q, *inputs[1:], dropout_p=0.1)).tangent is not None
        assert forward_ad.unpack_dual(dropout_relu(q * 1, 0.1)).tangent is not None
        with pytest.raises(Mistake, match="forward mode"):
            relative_attention(q, *inputs[1:], backend="native")
    assert tangent is not None
    both = torch.func.jvp(lambda q: relative_attention(q, *inputs[1:]), (inputs[0],), (torch.ones_like(inputs[0]),))
    torch.testing.assert_close(tangent, both[1])


@torch.no_grad()
def test_an_exported_call_takes_any_sizes() -> None:
    class Attend(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor) -> Tensor:
            return relative_attention(q, k, v, r, u, w)

    def inputs(rows: int, queries: int) -> tuple[Tensor, ...]:
        case = Case(queries=queries, memory=0, batch=rows)
        return tuple(x.detach() for x in testing.make_inputs(case, torch.float32).values())

    rows, queries = torch.export.Dim("rows", min=1, max=64), torch.export.Dim("queries", min=2, max=500)
    sizes = *[{0: rows, 2: queries}] * 3, {1: queries}, {}, {}
    exported = torch.export.export(Attend(), inputs(2, 5), dynamic_shapes=sizes).module()
    torch.testing.assert_close(exported(*inputs(3, 40)), relative_attention(*inputs(3, 40)))


def test_an_export_in_training_needs_no_operator_of_this_package() -> None:
    program = torch.export.export(Dropout(0.5).train(), (torch.ones(4, 8),))
    assert "torch.ops.aten.dropout" in str(program.graph) and "transformer_xl" not in str(program.graph)


def test_in_fp16_a_padded_row_has_finite_gradients():
    """The lowest number plus a negative content score would be -inf, and a whole row of them has no gradient."""
    q, k = torch.full((2, 1, 4, 8), -4.0, dtype=torch.float16), torch.full((2, 1, 6, 8), 4.0, dtype=torch.float16)
    inputs = [q, k, torch.ones_like(k), torch.ones_like(k[0]), torch.ones_like(q[0, :, 0]), torch.ones_like(q[0, :, 0])]
    for each in inputs:
        each.requires_grad_()
    out = relative_attention(*inputs, valid=torch.tensor([-2, 2]), backend="strided")
    gradients = torch.autograd.grad(out.sum(), inputs)
    assert out.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)
