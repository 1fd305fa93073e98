"""Laws of the fused kernels: the contract through Triton's interpreter, or on a GPU where there is one.

The interpreter must be chosen before Triton is imported, and other tests must not meet it: without a GPU this file
runs itself once more in a process of its own. The interpreter's bf16 products are wrong, so bf16 needs a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import CASES, NAMES, Case, assert_contract, make_inputs, masks, plain, visible

triton = pytest.importorskip("triton", reason="needs pip install transformer-xl[triton]")

from transformer_xl import ops  # noqa: E402
from transformer_xl.ops import relative_attention  # noqa: E402
from transformer_xl.ops import triton as fused  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = {"fp32": torch.float32} if INTERPRETED else {"fp32": torch.float32, "bf16": torch.bfloat16}
KERNELS = ("_forward", "_backward_queries", "_backward_keys", "_backward_distances")

runs = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="runs in the interpreter or a GPU")
compiles = pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ops.BACKENDS, "triton", fused.attend)


@compiles
def test_laws_through_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parent.parent
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-1000:]


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_contract(case: str, dtype: str) -> None:
    assert_contract("triton", CASES[case], DTYPES[dtype], DEVICE)


@runs
def test_dropout() -> None:
    """Dropout repeats under a seed, scales what it keeps, forgets its share, and backward uses the forward's mask."""
    case = Case(queries=37, memory=17, attn_len=43, valid=(17, 5, -2), head_size=59)
    inputs = make_inputs(case, torch.float32, DEVICE)
    identity = torch.eye(case.memory + case.queries, case.head_size, device=DEVICE).expand_as(inputs["v"])
    dropout_p = 0.3

    def attend(x: dict[str, Any], dropout_p: float = dropout_p, seed: int = 5) -> torch.Tensor:
        torch.manual_seed(seed)
        return relative_attention(**x, **masks(case, DEVICE), dropout_p=dropout_p, backend="triton")

    # With the identity as values the output is the probability of each key, dropped or kept.
    width = case.memory + case.queries
    kept = attend(inputs | {"v": identity}).detach()[..., :width]
    whole = attend(inputs | {"v": identity}, dropout_p=0.0).detach()[..., :width]
    seen = visible(case, DEVICE)[:, None].expand_as(kept)
    drop = torch.where(seen & (kept != 0), 1 / (1 - dropout_p), 0.0)
    torch.testing.assert_close(kept, whole * drop)
    share, count = float((kept[seen] == 0).double().mean()), int(seen.sum())
    assert abs(share - dropout_p) < 5 * (dropout_p * (1 - dropout_p) / count) ** 0.5, f"dropped a share of {share}"
    assert not torch.equal(drop[:, 0], drop[:, 1]), "two heads share one mask"
    assert not torch.equal(drop[0], drop[1]), "two rows share one mask"
    assert not torch.equal(kept, attend(inputs | {"v": identity}, seed=6)[..., :width]), "two seeds give one mask"

    cotangent = torch.randn(inputs["q"].shape, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    expected = torch.autograd.grad(plain(exact, case, drop.double()), [exact[n] for n in NAMES], cotangent.double())
    found = torch.autograd.grad(attend(inputs), [inputs[n] for n in NAMES], cotangent)
    for name, value, truth in zip(NAMES, found, expected, strict=True):
        # Float32 sums of a hundred products of unit size.
        torch.testing.assert_close(value.double(), truth, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@runs
def test_a_run_repeats_bit_by_bit() -> None:
    case = Case(queries=37, memory=41)
    inputs = make_inputs(case, torch.float32, DEVICE)
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        out = relative_attention(**inputs, dropout_p=0.2, backend="triton")
        results.append([out, *torch.autograd.grad(out.square().sum(), [inputs[n] for n in NAMES])])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@runs
def test_keys_outside_the_window_are_not_read() -> None:
    case = Case(queries=5, memory=223, attn_len=7, batch=2, valid=(223, 3))
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
    inputs = make_inputs(Case(), torch.float32, DEVICE)
    out = relative_attention(**inputs, backend="triton")
    (gradient,) = torch.autograd.grad(out.square().sum(), inputs["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_refusal() -> None:
    assert fused.refusal(torch.device("cuda"), torch.bfloat16, 128) is None
    assert "float64" in (fused.refusal(torch.device("cuda"), torch.float64, 64) or "")
    assert "129" in (fused.refusal(torch.device("cuda"), torch.float32, 129) or "")
    on_cpu = fused.refusal(torch.device("cpu"), torch.float32, 64)
    assert on_cpu is None if INTERPRETED else "cpu" in (on_cpu or "")


def compiled(name: str, capability: int, dtype: torch.dtype, head_size: int, masked: bool) -> Any:
    """A kernel for a real GPU, made without one."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(fused, name)
    options = fused._tile(dtype, head_size)
    padded = max(16, triton.next_power_of_2(head_size))
    constants = {"PRECISION": "ieee", "DROPOUT": masked, "K": head_size, "BLOCK_K": padded}
    constants |= {"BLOCK": options.pop("BLOCK")} | ({} if masked else {"start": None})
    kinds = dict.fromkeys(("factor", "keep_scale", "scale"), "fp32") | {"start": "*i32"}
    kinds |= dict.fromkeys(("lse", "delta", "d_r", "d_content_bias", "d_position_bias"), "*fp32")
    pointers = (*NAMES, "out", "d_out", "d_q", "d_k", "d_v")
    kinds |= dict.fromkeys(pointers, "*bf16" if dtype == torch.bfloat16 else "*fp32")
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in kernel.arg_names}
    aligned = [
        n for n, name in enumerate(kernel.arg_names) if name in pointers or name[-2:] in ("_b", "_h", "_t", "_s")
    ]
    source = ASTSource(kernel, signature, constants, {(n,): [["tt.divisibility", 16]] for n in aligned})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@compiles
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_compile_for_a_gpu(kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    hopper = compiled(kernel, 90, torch.bfloat16, 64, masked=True)
    assert "wgmma" in hopper.asm["ptx"], "the products of bf16 must be on the tensor cores"
    assert hopper.metadata.shared <= 114 * 1024, "two programs must fit a multiprocessor of 228 KiB"
    ampere = compiled(kernel, 80, torch.bfloat16, 41, masked=False)
    assert ampere.metadata.shared <= 99 * 1024, "a card of capability 8.6 has 99 KiB"
