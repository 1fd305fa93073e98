"""The fused kernels: the contract in Triton's interpreter, or on a GPU if there is one.

The interpreter must be chosen before Triton is imported, and other tests must not use it. Without a GPU this file
therefore runs itself again in a separate process. The interpreter's bf16 products are wrong, so bf16 needs a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs pip install triton")

from benchmarks.contract import CASES, NAMES, Case, assert_contract, make_inputs, masks, plain, visible  # noqa: E402
from transformer_xl.ops import relative_attention, triton_refusal  # noqa: E402
from transformer_xl.ops import triton as fused  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = {"fp32": torch.float32} if INTERPRETED else {"fp32": torch.float32, "bf16": torch.bfloat16}
KERNELS = {
    "forward": (fused._forward, {}),
    "queries": (fused._backward_queries, {}),
    "keys": (fused._backward_rows, {"DISTANCES": False}),
    "distances": (fused._backward_rows, {"DISTANCES": True}),
}


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

runs = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="runs in the interpreter or a GPU")
compiles = pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(fused, "_tile", lambda dtype, head_size: {"BLOCK": 16, "num_warps": 4, "num_stages": 2})


@compiles
@pytest.mark.timeout(400)
def test_laws_through_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-1000:]


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_contract(case: str, dtype: str) -> None:
    assert_contract("triton", CASES[case], DTYPES[dtype], DEVICE)


@runs
def test_dropout() -> None:
    """Dropout repeats bit by bit under a seed, scales what it keeps, and backward uses the forward's mask."""
    case = Case(queries=19, memory=13, attn_len=29, valid=(13, -2), batch=2, head_size=32)
    inputs = make_inputs(case, torch.float32, DEVICE)
    identity = {"v": torch.eye(case.head_size, device=DEVICE).expand_as(inputs["v"])}

    def attend(x: dict[str, Any], dropout_p: float = 0.3, seed: int = 5) -> torch.Tensor:
        torch.manual_seed(seed)
        return relative_attention(**x, **masks(case, DEVICE), dropout_p=dropout_p, backend="triton")

    with torch.no_grad():  # with the identity as values the output is the probability of each key, dropped or kept
        kept, other, whole = (attend(inputs | identity, *choice) for choice in ((0.3, 5), (0.3, 6), (0.0, 5)))
    seen = visible(case, DEVICE)[:, None].expand_as(kept)
    drop = torch.where(seen & (kept != 0), 1 / 0.7, 0.0)
    torch.testing.assert_close(kept, whole * drop)
    share = float((kept[seen] == 0).double().mean())
    assert abs(share - 0.3) < 5 * (0.3 * 0.7 / int(seen.sum())) ** 0.5, f"dropped a share of {share}"
    for axis, name in enumerate(("rows", "heads", "queries")):
        first, second = ((kept == 0).movedim(axis, 0)[n] for n in (-1, -2))
        both = seen.movedim(axis, 0)[-1] & seen.movedim(axis, 0)[-2]
        assert not torch.equal(first[both], second[both]), f"two {name} share one mask"
    assert not torch.equal(kept == 0, other == 0), "two seeds give one mask"

    cotangent = torch.randn(inputs["q"].shape, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    expected = torch.autograd.grad(plain(exact, case, drop.double()), [exact[n] for n in NAMES], cotangent.double())
    found, again = (torch.autograd.grad(attend(inputs), [inputs[n] for n in NAMES], cotangent) for _ in range(2))
    assert all(map(torch.equal, found, again)), "a run does not repeat bit by bit"
    for name, value, truth in zip(NAMES, found, expected, strict=True):
        # Float32 sums of a hundred products of unit size.
        torch.testing.assert_close(value.double(), truth, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


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
def test_offsets_beyond_32_bits() -> None:
    """Strides that reach 2^31 elements apart: two rows of an expanded, hardly touched allocation."""
    if DEVICE == "cpu" or torch.cuda.get_device_properties(0).total_memory < 24 * 2**30:
        pytest.skip("needs 24 GiB of GPU memory")
    far = torch.zeros(2, 2**31 + 64, dtype=torch.bfloat16, device=DEVICE)
    k = far[:, -64 * 16 :].view(2, 1, 64, 16).normal_()
    q = torch.randn(2, 1, 64, 16, dtype=torch.bfloat16, device=DEVICE)
    r, bias = torch.randn(1, 64, 16, dtype=q.dtype, device=DEVICE), torch.zeros(1, 16, dtype=q.dtype, device=DEVICE)
    found, expected = (relative_attention(q, x, x, r, bias, bias, backend="triton") for x in (k, k.clone()))
    assert torch.equal(found, expected)


@pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="memory is measured on a GPU")
def test_memory_is_linear_in_length() -> None:
    peaks = []
    for length in (2048, 4096):
        case = Case(queries=length, memory=length, batch=1, heads=2, head_size=64)
        inputs = make_inputs(case, torch.bfloat16, DEVICE)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        relative_attention(**inputs, backend="triton").sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 2.2 * peaks[0], f"twice the length takes {peaks[1] / peaks[0]:.2f} times the memory"


@runs
def test_no_second_derivative() -> None:
    inputs = make_inputs(Case(batch=1, heads=1), torch.float32, DEVICE)
    out = relative_attention(**inputs, backend="triton")
    (gradient,) = torch.autograd.grad(out.square().sum(), inputs["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_unsupported_calls_are_refused() -> None:
    assert triton_refusal(torch.device("cuda"), torch.bfloat16, 128) is None
    assert "float64" in (triton_refusal(torch.device("cuda"), torch.float64, 64) or "")
    assert "129" in (triton_refusal(torch.device("cuda"), torch.float32, 129) or "")
    on_cpu = triton_refusal(torch.device("cpu"), torch.float32, 64)
    assert on_cpu is None if INTERPRETED else "cpu" in (on_cpu or "")


def compiled(
    kernel: Any, choices: dict[str, bool], capability: int, head_size: int, masked: bool, both: bool = False
) -> Any:
    """A kernel for bf16 and a real GPU, made without one."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = fused._tile(torch.bfloat16, head_size)
    padded = max(16, triton.next_power_of_2(head_size))
    constants = {"PRECISION": "ieee", "DROPOUT": masked, "BOTH": both, "K": head_size, "BLOCK_K": padded} | choices
    constants |= {"BLOCK": options.pop("BLOCK")} | ({} if masked else {"start": None})
    constants |= {} if both else {"end": None}
    pointers = dict.fromkeys((*NAMES, "out", "d_out", "d_q", "d_v"), "*bf16")
    pointers["d_rows"] = "*fp32" if choices.get("DISTANCES") else "*bf16"
    kinds = dict.fromkeys(("factor", "keep_scale", "scale"), "fp32") | {"start": "*i32", "end": "*i32"} | pointers
    kinds |= dict.fromkeys(("lse", "delta", "d_bias"), "*fp32")
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in kernel.arg_names}
    strides = ("_b", "_h", "_t", "_s")
    aligned = [n for n, name in enumerate(kernel.arg_names) if name in pointers or name.endswith(strides)]
    source = ASTSource(kernel, signature, constants, {(n,): [["tt.divisibility", 16]] for n in aligned})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@compiles
@pytest.mark.parametrize("both", [False, pytest.param(True, marks=pytest.mark.outside)], ids=["causal", "both"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_a_gpu(name: str, both: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    hopper = compiled(*KERNELS[name], 90, 64, masked=True, both=both)
    assert "wgmma" in hopper.asm["ptx"], "the products of bf16 must be on the tensor cores"
    assert hopper.metadata.shared <= 114 * 1024, "two programs must fit a multiprocessor of 228 KiB"


@compiles
def test_the_largest_kernel_fits_a_small_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ampere = compiled(*KERNELS["distances"], 80, 64, masked=False)
    assert ampere.metadata.shared <= 99 * 1024, "a card of capability 8.6 has 99 KiB"
