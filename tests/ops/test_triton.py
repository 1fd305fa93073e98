"""The fused kernels: the contract in Triton's interpreter, or on a GPU if there is one.

The interpreter must be chosen before Triton is imported, and other tests must not use it. Without a GPU this file
therefore runs itself again in a separate process. The interpreter keeps bf16 numbers as integers and adds and
multiplies them as such, and it cuts fp32 to bf16 instead of rounding. `true_bf16` replaces these three operations.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from amount import ALL
from small_models import small_model
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

triton = pytest.importorskip("triton", reason="needs pip install triton")

from benchmarks import kernels  # noqa: E402
from transformer_xl.config.settings import Lengths  # noqa: E402
from transformer_xl.model import step, sublayer  # noqa: E402
from transformer_xl.model.transformer_xl import TransformerXL  # noqa: E402
from transformer_xl.ops import relative_attention  # noqa: E402
from transformer_xl.ops import triton as fused  # noqa: E402
from transformer_xl.ops.choice import doubt, triton_refusal  # noqa: E402
from transformer_xl.ops.fused_step import assert_step  # noqa: E402
from transformer_xl.ops.fused_sublayer import assert_sublayer  # noqa: E402
from transformer_xl.ops.testing import (  # noqa: E402
    CASES,
    NAMES,
    ON_A_CARD,
    Case,
    assert_contract,
    assert_dropout,
    make_inputs,
    masks,
)
from transformer_xl.train.half import rounded_weights  # noqa: E402
from transformer_xl.train.objective import Objective  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FEW = INTERPRETED and not ALL
DEVICE = "cpu" if INTERPRETED else "cuda"
ALL_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def smaller(case: Case) -> Case:
    return case if case.strided else replace(case, heads=1, batch=len(case.valid) if case.valid else 1)


# The interpreter takes 10 ms per tile. With tiles of 16 the contract's small cases already have two blocks of keys, and
# these cases replace its large ones: several blocks of queries and keys, the last ones not full.
if INTERPRETED:
    fewer = {"both directions, padding", "both directions, a row of padding", "look-ahead and window"}
    CASES = {n: smaller(c) for n, c in CASES.items() if c.queries < 16 and (c.causal or n in fewer)} | {
        "beyond a block": Case(queries=19, memory=29, batch=1, head_size=37, strided=True),
        "steep": Case(queries=19, memory=23, batch=2, heads=1, head_size=13, scale=3.0, valid=(3, -2)),
        "beyond a block, all masks": Case(37, 19, attn_len=23, valid=(19, 3, -21), heads=1, head_size=17),
        "both directions, beyond a block": Case(37, 19, causal=False, valid=(19, -21), end=(37, 29), batch=2, heads=1),
        "look-ahead beyond a block": Case(37, 19, causal=False, look_ahead=18, attn_len=23, batch=1, heads=1),
    }
else:
    CASES = CASES | ON_A_CARD

# Products in fp32 have another form then. The head is not full.
CASES = CASES | {"heads above 64": Case(queries=19, memory=29, batch=1, heads=1, head_size=101)}
# Cases that the interpreter runs in fp32 and in bf16; it runs one in fp16.
WHOLE = set(CASES if ALL else list(CASES)[::2]) | {"beyond a block, all masks", "heads above 64"}
HALF = {"strided views", "beyond a block, all masks"}
if ALL:
    HALF |= {"memory", "both directions, padding"} | {name for name in CASES if "beyond a block" in name}

STEPS: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "norms first": {"pre_lnorm": True, "untie_r": True},
    "norms first and last": {"pre_lnorm": True, "final_norm": True, "relu_output": True},
    "normalised queries": {"qk_norm": True, "final_norm": True},
    "attended zeros": {"zero_memory": True, "share_position_projection": True},
}
WRITTEN = [*STEPS][2:] if FEW else [*STEPS]
ROWS = 1 if FEW else 2
PREPARED: set[str] = set()
"""Modules whose functions the interpreter has called from a kernel."""

runs = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="runs in the interpreter or a GPU")
compiles = pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(fused, "tile_of", lambda *_: {"BLOCK": 16, "num_warps": 4, "num_stages": 2})


@pytest.fixture(autouse=True)
def true_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter multiply and add bf16 in fp32, and round to the nearest.

    It would also prepare the language for each call of a function from a kernel, compute for each sum of integers
    whether it overflows, without a use of the answer, and list the data types anew in each operation: a half of its
    time. What the first does to `triton.language.core` stays.
    """
    if not INTERPRETED:
        return
    from triton import language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpretedFunction, TensorHandle, _patch_lang
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    def called(self: Any, *args: Any, **named: Any) -> Any:
        if self.fn.__module__ not in PREPARED:
            PREPARED.add(self.fn.__module__)
            _patch_lang(self.fn)
        return self.rewrite()(*args, **named)

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle(torch.from_numpy(x.data.copy()).view(torch.bfloat16).float().numpy(), tl.float32)

    def rounded(x: Any) -> Any:
        return TensorHandle(torch.from_numpy(x.data.copy()).bfloat16().view(torch.uint16).numpy(), tl.bfloat16)

    def cast(before: Any) -> Any:
        def replaced(self: Any, x: Any, kind: Any, *rest: Any) -> Any:
            to_bf16 = x.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16
            return rounded(x) if to_bf16 else before(self, x, kind, *rest)

        return replaced

    add, dot = Builder.create_fadd, Builder.create_dot
    monkeypatch.setattr(Builder, "create_dot", lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest))
    monkeypatch.setattr(
        Builder,
        "create_fadd",
        lambda self, a, b: (rounded if a.dtype.scalar == tl.bfloat16 else lambda x: x)(
            add(self, widened(a), widened(b))
        ),
    )
    monkeypatch.setattr(InterpretedFunction, "__call__", called)
    monkeypatch.setattr(
        interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(sanitize_overflow=False)
    )
    of_numbers = cache(of_any := interpreter._get_np_dtype)
    monkeypatch.setattr(
        interpreter, "_get_np_dtype", lambda kind: (of_any if kind.scalar.is_ptr() else of_numbers)(kind.scalar)
    )
    for name in ("cast_impl", "create_fp_to_fp"):
        monkeypatch.setattr(Builder, name, cast(getattr(Builder, name)))


@compiles
@pytest.mark.timeout(400)
def test_laws_through_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-1000:]


@runs
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_contract(case: str, dtype: str) -> None:
    if INTERPRETED and case not in {"fp32": WHOLE, "bf16": HALF, "fp16": ("memory",)}[dtype]:
        pytest.skip("the interpreter is slow")
    assert_contract("triton", CASES[case], ALL_DTYPES[dtype], DEVICE)


@runs
def test_dropout() -> None:
    queries = 5 if FEW else 19
    case = Case(queries, 32 - queries, attn_len=29, valid=(13, -2), batch=2, head_size=32)
    assert_dropout("triton", case, torch.float32, DEVICE)


@runs
def test_keys_outside_the_window_are_not_read() -> None:
    case = Case(queries=5, memory=223, attn_len=7, batch=2, heads=1, valid=(223, 3))
    inputs = make_inputs(case, torch.float32, DEVICE)
    poisoned = {name: x.detach().clone() for name, x in inputs.items()}
    beyond = case.memory - case.attn_len + 1
    poisoned["k"][:, :, :beyond] = poisoned["v"][:, :, :beyond] = float("nan")
    poisoned["r"][:, : case.memory + case.queries - case.attn_len - 64] = float("nan")
    found, expected = (relative_attention(**x, **masks(case, DEVICE), backend="triton") for x in (poisoned, inputs))
    assert torch.equal(found, expected)


@runs
def test_an_end_beyond_the_keys_is_their_end() -> None:
    """Nobody reads the numbers in a tensor before the launch, and what follows the keys in memory is not theirs."""
    case = Case(queries=3, memory=2, batch=1, heads=1, head_size=16, causal=False)
    inputs = make_inputs(case, torch.float32, DEVICE)
    for name in "kv":
        longer = torch.full((1, 1, 9, case.head_size), float("nan"), device=DEVICE)
        inputs[name] = longer[:, :, :5].copy_(inputs[name].detach())
    found, expected = (
        relative_attention(**inputs, causal=False, end=torch.tensor([end], device=DEVICE), backend="triton")
        for end in (9, case.queries)
    )
    assert torch.equal(found, expected)


@runs
@pytest.mark.parametrize("axis", [-2, -3, -4] if ALL else [-4])
def test_offsets_beyond_32_bits(axis: int) -> None:
    """The third row, head or row of the batch is 2^31 elements away, in memory that is hardly touched.

    The stride alone fits 32 bits. Triton passes a larger one as 64 bits, and then no product can overflow.
    """
    rows, heads = 3 if axis == -4 else 1, 3 if axis == -3 else 1
    inputs = make_inputs(Case(queries=3, memory=0, batch=rows, heads=heads, head_size=16), torch.float16, DEVICE)
    far, moved = torch.empty(2**31 + 4096, dtype=torch.float16, device=DEVICE), {}
    for n, name in enumerate("qkvr"):
        x = inputs[name].detach()
        strides = [2**30 if position == x.ndim + axis else stride for position, stride in enumerate(x.stride())]
        moved[name] = far.as_strided(x.shape, strides, 1024 * n).copy_(x).requires_grad_()
    assert all(map(torch.equal, _run_all(inputs | moved), _run_all(inputs)))


def _run_all(inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    out = relative_attention(**inputs, backend="triton")
    return [out, *torch.autograd.grad(out.sum(), [inputs[name] for name in NAMES])]


@pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="memory is measured on a GPU")
def test_backward_holds_the_scores_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(queries=2048, memory=2048, batch=16, heads=2, head_size=64)
    inputs = make_inputs(case, torch.bfloat16, DEVICE)
    one_row = case.heads * case.queries * (case.queries + case.memory) * 2
    monkeypatch.setattr(fused, "SCORE_BYTES", one_row)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    relative_attention(**inputs, backend="triton").sum().backward()
    extra = torch.cuda.max_memory_allocated() - before
    assert extra < one_row + 4 * sum(x.nbytes for x in inputs.values()) < case.batch * one_row


@runs
def test_rows_may_be_taken_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (3, -2) if FEW else (13, 3, -2)
    case = Case(queries=19, memory=13, batch=len(rows), heads=1 if FEW else 2, head_size=16, valid=rows)
    inputs = make_inputs(case, torch.float32, DEVICE)

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(0)
        out = relative_attention(**inputs, **masks(case, DEVICE), dropout_p=0.3, backend="triton")
        return list(torch.autograd.grad(out.square().sum(), [inputs[name] for name in NAMES]))

    whole = gradients()
    monkeypatch.setattr(fused, "SCORE_BYTES", 1)
    for one, other in zip(whole, gradients(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_products_in_fp32_are_as_exact_as_pytorchs(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the user has set it in PyTorch's new way, beside which the old question is an error."""
    found: dict[str, Any] = {}
    monkeypatch.setitem(fused.KERNELS, "forward", {(3,): lambda *_, **constants: found.update(constants)})
    x, numbers = torch.zeros(1, 1, 1, 32), fused.Numbers(0, 1, 3, 1, 1, 1, 0, 1.0, None, 0, 1.0)
    before, products = torch.backends.cuda.matmul.fp32_precision, torch.backends.cuda.matmul
    products.fp32_precision = precision
    try:
        fused._launch("forward", 1, [x, x, x, x[0], *[None] * 4], numbers)
    finally:
        products.fp32_precision = before
    assert found["PRECISION"] == precision and found["enable_fp_fusion"]  # triton 3.10 would not fuse by itself


@runs
def test_no_second_derivative() -> None:
    inputs = make_inputs(Case(batch=1, heads=1), torch.float32, DEVICE)
    out = relative_attention(**inputs, backend="triton")
    (gradient,) = torch.autograd.grad(out.square().sum(), inputs["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        gradient.sum().backward()


def test_unsupported_calls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert triton_refusal(torch.device("cuda"), torch.bfloat16, 128) is None
    assert "float64" in (triton_refusal(torch.device("cuda"), torch.float64, 64) or "")
    assert "129" in (triton_refusal(torch.device("cuda"), torch.float32, 129) or "")
    on_cpu = triton_refusal(torch.device("cpu"), torch.float32, 64)
    assert on_cpu is None if INTERPRETED else "cpu" in (on_cpu or "")
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
        assert "8.0" in (triton_refusal(torch.device("cuda"), torch.float16, 64) or "")
        assert triton_refusal(torch.device("cuda"), torch.float32, 64) is None


@runs
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of the check itself in PyTorch 2.14
def test_the_operators_are_registered_as_pytorch_wants() -> None:
    starts = [7] if FEW else [0, 7]
    tensors = list(make_inputs(Case(batch=len(starts), heads=1), torch.float32, DEVICE).values())
    first = torch.tensor(starts, dtype=torch.int32, device=DEVICE)[:, None].repeat(1, Case.queries)
    rest = first, None, torch.tensor([5], dtype=torch.int32, device=DEVICE), 18, 0.5, 0.3
    torch.library.opcheck(fused._attend, (*tensors, *rest))
    with torch.no_grad():
        out, lse = fused._attend(*tensors, *rest)
        d_out = torch.randn_like(out)
        torch.library.opcheck(fused._attend_backward, (d_out, out, lse, *(x.detach() for x in tensors), *rest))


@runs
def test_copies_of_the_package_run_their_own_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exported folders hold copies of `ops`, perhaps of different versions, and one process may load several."""
    monkeypatch.syspath_prepend(tmp_path)
    package = Path(fused.__file__).parents[1]
    for factor, name in enumerate(("copy_a", "copy_b"), 2):
        (tmp_path / name).mkdir()
        shutil.copy(package / "mistake.py", tmp_path / name)
        shutil.copytree(package / "ops", tmp_path / name / "ops")
        source = tmp_path / name / "ops/kernels.py"
        before, after = "result *= (keep_scale", f"result *= ({factor} * keep_scale"
        text = source.read_text()
        assert before in text
        source.write_text(text.replace(before, after))
    copies = [importlib.import_module(f"{name}.ops").relative_attention for name in ("copy_a", "copy_b")]
    inputs = make_inputs(Case(batch=1, heads=1), torch.float32, DEVICE)
    outs = [attend(**inputs, backend="triton") for attend in (*copies, relative_attention, *copies)]
    for out, factor in zip(outs, (2, 3, 1, 2, 3), strict=True):
        torch.testing.assert_close(out, factor * outs[2])


@compiles
def test_what_is_read_by_tiles_was_written_by_tiles_of_that_size() -> None:
    for dtype, size, target in product(fused.DTYPES, (8, 64, 65, 128), kernels.SHARED):
        blocks = {fused.tile_of(name, dtype, size, target)["BLOCK"] for name in ("keys", "queries", "distances")}
        assert len(blocks) == 1, (dtype, size, target, blocks)


@pytest.mark.parametrize("found, first", [((8, 0), 80), ((10, 0), 100), ((10, 3), 100), ((12, 1), 120)])
def test_a_later_card_of_a_family_has_the_tiles_of_the_first(
    found: tuple[int, int], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With those of other cards the keys' launch of a B300 spills 304 bytes, and 184 on a GB10, whose shared memory
    fits it once."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: found)
    assert fused._target(torch.device("cuda")) == first


@compiles
@pytest.mark.parametrize("target", [80, 90] if ALL else [90])
@pytest.mark.parametrize("name", fused.KERNELS)
def test_kernels_for_real_gpus(name: str, target: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little spills, shared memory fits, products are on the tensor cores. `benchmarks kernels` checks the rest."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    binary = kernels.compile_op(target, torch.bfloat16, 64, masked=True, both=True)[name]
    assert kernels.faults(target, "bf16", kernels.usage(binary)) == []
    if name == "forward":
        assert target == 80 or "wgmma" in binary.asm["ptx"]
        assert binary.metadata.shared <= kernels.SHARED[target] * 1024 // 2, "two programs must fit a multiprocessor"


@compiles
def test_kernels_of_a_step_spill_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer versions of Triton put a few bytes of one kernel on the stack; spilled tiles are hundreds."""
    allowed = {"3.8": 16, "3.9": 8}.get(version("triton")[:3], 0)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert max(use["stack"] for use in kernels.step_kernels([90]).values()) <= allowed


@runs
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_kernels_of_a_step(dtype: str) -> None:
    assert_step(ALL_DTYPES[dtype], DEVICE)


@runs
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_kernels_of_a_sublayer(dtype: str) -> None:
    assert_sublayer(ALL_DTYPES[dtype], DEVICE)


def fused_model(backend: str, **changes: Any) -> TransformerXL:
    model = small_model(n_layer=2, **changes).float().to(DEVICE).train()
    for module in model.modules():
        if isinstance(module, sublayer.Sublayer):
            module.backend = backend
    return model


@runs
@pytest.mark.parametrize(
    "recompute, changes", [(False, {}), (True, {"cutoffs": (5,), "div_val": 2, "untie_r": True})], ids=["", "recompute"]
)
def test_a_model_trains_with_them(recompute: bool, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and gradients are as near to float64 as those of PyTorch's operators."""
    torch.manual_seed(0)
    call, results, used = Lengths(tgt_len=6, mem_len=6), list[list[torch.Tensor]](), list[bool]()
    ids = torch.randint(fused_model("auto", **changes).config.vocab_size, (ROWS, 13), device=DEVICE)
    end = sublayer.Sublayer.end
    monkeypatch.setattr(sublayer.Sublayer, "end", lambda *given: used.append(given[-1] is not None) or end(*given))
    for backend, kind in (("strided", torch.float64), ("strided", torch.bfloat16), ("triton", torch.bfloat16)):
        model = fused_model(backend, **changes).to(kind if kind == torch.float64 else torch.float32)
        model.backbone.recompute = recompute
        objective, found, memory = Objective(model), list[torch.Tensor](), None
        for start in (0, 6):
            part = ids[:, start : start + 7]
            used.clear()
            with torch.autocast(DEVICE, torch.bfloat16, enabled=kind != torch.float64), rounded_weights(objective):
                loss, nll, memory = objective(part[:, :-1], part[:, 1:], memory, call)
            model.zero_grad()
            loss.backward()
            found += [nll, *(p.grad for p in model.parameters() if p.grad is not None)]
            assert set(used) == {backend == "triton"} and len(used) >= 4
        if backend == "triton":
            d_bias = model.backbone.content_bias.grad
            assert not torch.equal(d_bias, d_bias.bfloat16().float()), "biases are read in fp32"
        results.append([each.detach().double() for each in found])
    truth, usual, fused = results
    errors = [
        sum(float((x - exact).norm() / exact.norm()) for x, exact in zip(each, truth, strict=True) if exact.any())
        for each in (usual, fused)
    ]
    assert 0 < errors[1] <= 2 * errors[0]


@runs
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pre_lnorm": True},
        {"gate": "gru"},
        {"pre_lnorm": True, "relu_output": True},
        {"dropout": 0.1, "locked_dropout": True},
        {"d_head": 130},
    ],
    ids=lambda changes: next(iter(changes), "plain"),
)
def test_where_the_kernels_of_a_sublayer_serve(changes: dict[str, Any]) -> None:
    first, *_ = fused_model("triton", **changes).backbone.layers
    x = torch.zeros(1, 2, len(first.feed_forward.norm.weight), device=DEVICE)

    def serves(dtype: torch.dtype = torch.bfloat16, **options: bool) -> bool:
        with torch.autocast(DEVICE, dtype, **options):
            found = {part.fused(x) is not None for part in (first.attention, first.feed_forward)}
        assert len(found) == 1
        return found.pop()

    assert serves() == serves(torch.float16) == (not changes)
    assert not serves(enabled=False)
    if not changes:
        inside = []
        torch.func.vmap(lambda row: inside.append(serves()) or row)(x)
        assert inside == [False] and serves()
        with forward_ad.dual_level():
            assert not serves(), "its kernels have no derivatives in forward mode"
        for name in ("norm", "dropout"):
            for part in (first.attention, first.feed_forward):
                getattr(part, name).register_full_backward_hook(lambda *_: None)
            assert not serves(), name
            for part in (first.attention, first.feed_forward):
                getattr(part, name)._backward_hooks.clear()
        for part in (first.attention, first.feed_forward):
            part.norm.bfloat16()
        assert not serves()
        for part in (first.attention, first.feed_forward):
            part.norm, part.backend = torch.nn.LayerNorm(len(part.norm.weight), device=DEVICE), "auto"
        assert serves() == (DEVICE == "cuda" and doubt(torch.device(DEVICE)) is None)


@runs
def test_dropout_of_a_sublayer_is_drawn_again_in_recompute_and_anew_in_a_call() -> None:
    model, call = fused_model("triton", dropout=0.4), Lengths(tgt_len=6, mem_len=6)
    x, found = torch.randn(ROWS, 6, model.config.d_model, device=DEVICE), list[list[torch.Tensor]]()
    for recompute, seed in ((False, 0), (True, 0), (False, 1)):
        model.backbone.recompute = recompute
        torch.manual_seed(seed)
        with torch.autocast(DEVICE, torch.bfloat16):
            outputs, _ = model.backbone(x, None, call)
        model.zero_grad()
        outputs[-1].square().sum().backward()
        found.append([outputs[-1], *(p.grad.clone() for p in model.backbone.parameters())])
    assert all(map(torch.equal, found[0], found[1])), "the same draws"
    assert not torch.equal(found[0][0], found[2][0])
    feed_forward, gradients = next(iter(model.backbone.layers)).feed_forward, []
    for reentrant in (None, False, True):  # a checkpoint of the user's own
        torch.manual_seed(0)
        given = outputs[0].detach().requires_grad_()
        with torch.autocast(DEVICE, torch.bfloat16):
            alone = reentrant is None
            y = feed_forward(given) if alone else checkpoint(feed_forward, given, use_reentrant=reentrant)
            assert not torch.equal(y, feed_forward(given)), "each call draws its own"
        y.square().sum().backward()
        gradients.append(given.grad)
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])
    with torch.inference_mode(), torch.autocast(DEVICE, torch.bfloat16):
        assert model.eval().backbone(x, None, call)[0][-1].isfinite().all()


class Kept(TransformerXL):
    """A model of a user's own, which keeps the outputs of its layers."""

    def read(self, *given: Any) -> Any:
        result = super().read(*given)
        self.outputs = result[0]
        return result


@runs
@pytest.mark.parametrize("way", ["no step", "own class", "hook", "global hook", "unseen"])
def test_whoever_gets_an_output_finds_its_whole_gradient(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kept, "__module__", "mine" if way == "own class" else "transformer_xl.kept")
    gradients = []
    for backend in ("strided", "triton"):
        model = fused_model(backend)
        model.__class__ = Kept
        hook = register_module_forward_hook(lambda *_: None) if way == "global hook" else None
        if way == "hook":
            next(iter(model.backbone.layers)).register_forward_hook(lambda *_: None)
        torch.manual_seed(0)
        ids = torch.randint(model.config.vocab_size, (ROWS, 6), device=DEVICE)
        objective = Objective(model)
        within = nullcontext() if way == "no step" else rounded_weights(objective)
        with torch.autocast(DEVICE, torch.bfloat16), within:
            loss, *_ = objective(ids, ids.roll(1), None, Lengths(tgt_len=6, mem_len=6))
        gradients += torch.autograd.grad(loss, model.outputs[0])
        if hook is not None:
            hook.remove()
    expected, found = gradients
    assert ((found - expected).norm() < 0.1 * expected.norm()) == (way != "unseen"), "there a part is not its own"


@runs
@pytest.mark.parametrize("name, precision", [*((name, "bf16") for name in WRITTEN), ("norms first", "fp16")])
@torch.no_grad()
def test_a_model_writes_with_them(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As near to float64 as the step of PyTorch's operators, while the ring turns and a row is emptied."""
    half = ALL_DTYPES[precision]
    model, call = small_model(n_layer=2, **STEPS[name]).to(DEVICE), Lengths(tgt_len=4, mem_len=4)
    x = torch.randn(2, 8, model.config.d_model, dtype=torch.float64, device=DEVICE)
    outputs, started, ours = [], [], step.fused_step
    monkeypatch.setattr(step, "fused_step", lambda *call: started.append(call) or ours(*call))
    for kernels_of_a_step, kind in ((False, torch.float64), (False, half), (True, half)):
        monkeypatch.setattr(step, "can_fuse", lambda *_, chosen=kernels_of_a_step: chosen)
        monkeypatch.setattr(step, "can_step", lambda *_: False)
        writer = model if kind == torch.float64 else model.float().for_inference(precision)
        with torch.autocast(DEVICE, half, enabled=kind == half):
            given = x if kind == torch.float64 else x.float()  # a step reads parts of it, which are not dense
            memory = writer.backbone.empty_memory(2, call)
            reader = step.VectorStep(writer.backbone, memory, call)
            read = []
            for i in range(x.shape[1]):
                if i == 6:
                    reader.reset(torch.tensor([False, True], device=DEVICE))
                read.append(reader(given[:, i : i + 1]))
        outputs.append(torch.stack(read).double())
        assert bool(started) == kernels_of_a_step
    truth, usual, found = outputs
    assert (found - truth).square().mean() <= 1.5 * (usual - truth).square().mean()
    assert (found - truth).abs().max() <= 3 * (usual - truth).abs().max()
