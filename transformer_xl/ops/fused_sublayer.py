"""What a sublayer does after its products on a GPU, in Triton: norm(x + dropout(y)), and dropout with a ReLU.

One kernel reads x and y and writes the norm twice: in fp32, which the next sublayer adds to, and rounded, which its
product reads. PyTorch starts four kernels for it, and eight for the gradients, which here are one and a sum. No mask is
stored: backward draws it again from the same seed.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor, nn

from .call import first_derivative
from .tiles import keep_mask

TILE = 4096
"""Numbers of a tensor that a program of training holds at once: whole rows, at least one."""
TILES = 4
"""Tiles of a program of backward. Their gradients of the norm's weights are added in it."""
_RELU, _NORM = 2, 3
"""Which random numbers of a seed each kernel draws."""

# Triton would make a number of 1 a constant without a dtype.
_jit = triton.jit(do_not_specialize=["rows", "number", "threshold"])


@_jit
@no_type_check
def add_norm(
    x, y, y_bias, weight, bias, total, normed, rounded, rows, epsilon, seed, number, threshold, keep_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """`ROWS` rows of `total` = x + y and its norm, in fp32 and `rounded`. What is None is not read or not written."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    inside, at = (row < rows) & (column < D), row.to(tl.int64) * D + column
    update = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    if y_bias is not None:
        update += tl.load(y_bias + column, mask=column < D, other=0.0)
    if RELU:
        update = tl.where(update < 0, 0.0, update)  # NaN stays NaN
    if seed is not None:
        update = tl.where(keep_mask(seed, number, row, column, threshold), update * keep_scale, 0.0)
    added = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + update
    centred, spread = _centred(added, column, epsilon, D)
    norm = centred * spread * tl.load(weight + column, mask=column < D) + tl.load(bias + column, mask=column < D)
    if total is not None:
        tl.store(total + at, added, mask=inside)
    if normed is not None:
        tl.store(normed + at, norm, mask=inside)
    if rounded is not None:
        tl.store(rounded + at, norm, mask=inside)


@_jit
@no_type_check
def add_norm_backward(
    d_normed, d_rounded, total, weight, d_x, d_y, parts, rows, epsilon, seed, number, threshold, keep_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """`TILES` times `ROWS` rows of the gradients of x and y, and their `parts` [3, D] of those of the norm's weight,
    the norm's bias and the bias of y."""
    column = tl.arange(0, BLOCK_D)[None, :]
    gain = tl.load(weight + column, mask=column < D, other=0.0)
    d_weight, d_bias = tl.zeros([BLOCK_D], tl.float32), tl.zeros([BLOCK_D], tl.float32)
    d_y_bias = tl.zeros([BLOCK_D], tl.float32)
    for tile in range(TILES):
        row = (tl.program_id(0) * TILES + tile) * ROWS + tl.arange(0, ROWS)[:, None]
        inside, at = (row < rows) & (column < D), row.to(tl.int64) * D + column
        given = tl.zeros([ROWS, BLOCK_D], tl.float32)
        if d_normed is not None:
            given += tl.load(d_normed + at, mask=inside, other=0.0)
        if d_rounded is not None:
            given += tl.load(d_rounded + at, mask=inside, other=0.0).to(tl.float32)
        centred, spread = _centred(tl.load(total + at, mask=inside, other=0.0), column, epsilon, D)
        unit = centred * spread
        d_weight += tl.sum(given * unit, 0)
        d_bias += tl.sum(given, 0)
        given *= gain
        change = given - (tl.sum(given, 1) / D)[:, None] - unit * (tl.sum(given * unit, 1) / D)[:, None]
        change *= spread
        tl.store(d_x + at, change, mask=inside)
        if seed is not None:
            change = tl.where(keep_mask(seed, number, row, column, threshold), change * keep_scale, 0.0)
        tl.store(d_y + at, change, mask=inside)
        d_y_bias += tl.sum(change, 0)
    parts += tl.program_id(0).to(tl.int64) * 3 * D + column
    tl.store(parts, d_weight[None, :], mask=column < D)
    tl.store(parts + D, d_bias[None, :], mask=column < D)
    tl.store(parts + 2 * D, d_y_bias[None, :], mask=column < D)


@triton.jit
@no_type_check
def _centred(x, column, epsilon, D: tl.constexpr):
    """Rows with mean 0, and what makes their variance 1."""
    x = tl.where(column < D, x - (tl.sum(x, 1) / D)[:, None], 0.0)
    return x, tl.rsqrt(tl.sum(x * x, 1) / D + epsilon)[:, None]


@_jit
@no_type_check
def drop_relu(
    x, out, rows, seed, number, threshold, keep_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`ROWS` rows of dropout(ReLU(x))."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    inside, at = (row < rows) & (column < D), row.to(tl.int64) * D + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    kept = keep_mask(seed, number, row, column, threshold) & ~(value < 0)
    tl.store(out + at, tl.where(kept, value * keep_scale, 0.0), mask=inside)


def launch(kernel: Any, grid: tuple[int, ...], like: Tensor, *args: Any, **constants: Any) -> None:
    """Start a kernel on the device of `like`. Triton 3.9 warns if nothing says whether sums are fused with products,
    and 3.10 does not fuse them by default."""
    with torch.cuda.device_of(like):
        kernel[grid](*args, enable_fp_fusion=True, **constants)


def _sizes(x: Tensor) -> tuple[int, dict[str, int]]:
    """The rows of a tensor, and a program's tile."""
    width = x.shape[-1]
    block: Any = triton.next_power_of_2(width)
    return x.numel() // width, {"D": width, "BLOCK_D": block, "ROWS": max(1, TILE // block)}


def new_seed(device: torch.device) -> Int[Tensor, " 1"]:
    """A random seed on the device, so that each replay of a CUDA graph draws another."""
    return torch.randint(2**31 - 1, (1,), dtype=torch.int32, device=device)


def dropped_relu(x: Float[Tensor, "*B D"], p: float, seed: Int[Tensor, " 1"]) -> Float[Tensor, "*B D"]:
    """dropout(ReLU(x), p), without gradients. `seed` determines the mask; that of `dropout_norm` is another one."""
    x = x.contiguous()
    out, (rows, sizes) = torch.empty_like(x), _sizes(x)
    programs = -(-rows // sizes["ROWS"])
    launch(drop_relu, (programs,), x, x, out, rows, seed, _RELU, int(p * 2**31), 1 / (1 - p), **sizes)
    return out


def dropout_norm(
    x: Float[Tensor, "*B D"],
    y: Float[Tensor, "*B D"],
    norm: nn.LayerNorm,
    bias: Float[Tensor, " D"] | None = None,
    p: float = 0.0,
    seed: Int[Tensor, " 1"] | None = None,
    *,
    rounds: bool = True,
) -> tuple[Float[Tensor, "*B D"], Float[Tensor, "*B D"] | None]:
    """norm(x + dropout(y + bias, p)) in fp32, and if it `rounds` in the dtype of y; first derivatives only.

    `seed` determines the mask. Weights are fp32.
    """
    return _DropoutNorm.apply(x, y, bias, norm.weight, norm.bias, norm.eps, p, seed, rounds)


class _DropoutNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, y_bias, weight, bias, epsilon, p, seed, rounds):
        ctx.set_materialize_grads(False)
        x, y = x.contiguous(), y.contiguous()
        total = torch.empty_like(x, dtype=torch.float32)
        normed, rounded = torch.empty_like(total), torch.empty_like(y) if rounds else None
        rows, sizes = _sizes(x)
        ctx.numbers = rows, epsilon, seed if p else None, _NORM, int(p * 2**31), 1 / (1 - p)
        tensors = x, y, y_bias, weight, bias, total, normed, rounded
        launch(add_norm, (-(-rows // sizes["ROWS"]),), x, *tensors, *ctx.numbers, RELU=False, **sizes)
        ctx.save_for_backward(total, weight)
        ctx.dtypes, ctx.has_bias = (x.dtype, y.dtype), y_bias is not None
        return normed, rounded

    @staticmethod
    @first_derivative
    def backward(ctx, d_normed, d_rounded):
        total, weight = ctx.saved_tensors
        d_normed, d_rounded = (None if d is None else d.contiguous() for d in (d_normed, d_rounded))
        d_x, d_y = (torch.empty_like(total, dtype=dtype) for dtype in ctx.dtypes)
        rows, sizes = _sizes(total)
        programs = -(-rows // (sizes["ROWS"] * TILES))
        parts = total.new_empty(programs, 3, sizes["D"])
        tensors = d_normed, d_rounded, total, weight, d_x, d_y, parts
        launch(add_norm_backward, (programs,), total, *tensors, *ctx.numbers, TILES=TILES, **sizes)
        d_weight, d_bias, d_y_bias = parts.sum(0)
        return d_x, d_y, d_y_bias if ctx.has_bias else None, d_weight, d_bias, *(None,) * 4


@torch.no_grad()
def add_and_norm(
    x: Float[Tensor, "B D"], y: Float[Tensor, "B D"], norm: nn.LayerNorm, *, relu: bool = False, pre: bool = False
) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B D"]]:
    """Of one token of each row: what the next sublayer adds to, fp32, and what its product reads, in the dtype of y.

    The second is norm(x + y), with `relu` norm(x + ReLU(y)); the first is the same, or the sum with `pre`.
    """
    residual, rounded, (rows, sizes) = torch.empty_like(x), torch.empty_like(y), _sizes(x)
    total, normed = (residual, None) if pre else (None, residual)
    tensors = x, y, None, norm.weight, norm.bias, total, normed, rounded
    launch(add_norm, (rows,), x, *tensors, rows, norm.eps, None, 0, 0, 1.0, RELU=relu, **(sizes | {"ROWS": 1}))
    return residual, rounded


def assert_sublayer(dtype: torch.dtype, device: str = "cpu") -> None:
    """Check that these kernels are as close to float64 as rounding to `dtype` allows, repeat bit by bit, and drop the
    share that they should."""
    from .testing import assert_rate  # not needed otherwise

    generator, unit = torch.Generator().manual_seed(0), torch.finfo(dtype).eps

    def draw(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, kind)

    rows, D, p = 161, 93, 0.3  # more rows than a program has, and not as many as two
    norm, seed = nn.LayerNorm(D, device=device), torch.tensor([5], dtype=torch.int32, device=device)
    with torch.no_grad():
        norm.weight.add_(draw(D))
    x, bias, given = (draw(rows, D), draw(rows, D, kind=dtype)), draw(D), (draw(rows, D), draw(rows, D, kind=dtype))
    leaves = [*(each.requires_grad_() for each in x), bias.requires_grad_(), norm.weight, norm.bias]
    for share in (0.0, p):
        found = []
        for _ in range(2):
            outputs: Any = dropout_norm(*x, norm, bias, share, seed)
            found.append([*outputs, *torch.autograd.grad(outputs, leaves, given)])
        for each, again in zip(*found, strict=True):
            assert torch.equal(each, again), "a sublayer's kernels do not repeat bit by bit"
        kept = (found[0][3] != 0).double()
        truth = [each.detach().double().requires_grad_() for each in leaves]
        joined = truth[0] + kept * (truth[1] + truth[2]) / (1 - share)
        expected = F.layer_norm(joined, (D,), truth[3], truth[4], norm.eps)
        gradients = torch.autograd.grad([expected, expected], truth, [each.double() for each in given])
        for each, exact in zip(found[0], [expected, expected, *gradients], strict=True):
            rtol = unit if each.dtype == dtype else 1e-5
            torch.testing.assert_close(each.double(), exact, rtol=rtol, atol=1e-4)
    assert_rate(kept == 0, torch.ones_like(kept), p, "y")
    other, kept = kept, dropped_relu(torch.ones(rows, D, dtype=dtype, device=device), p, seed)
    assert not torch.equal(kept > 0, other > 0), "the ReLU and the sum drop the same"
    torch.testing.assert_close(kept.double(), (kept > 0).double() / (1 - p), rtol=unit, atol=0)
    assert_rate(kept == 0, torch.ones_like(kept), p, "the ReLU")
    values = draw(rows, D, kind=dtype)
    assert torch.equal(dropped_relu(values, p, seed) > 0, (kept > 0) & (values > 0)), "another mask, or no ReLU"
    for choice in (False, True):
        total = x[0].double() + (x[1].double().relu() if choice else x[1].double())
        truth = F.layer_norm(total, (D,), norm.weight.double(), norm.bias.double(), norm.eps)
        residual, rounded = add_and_norm(*x, norm, relu=choice, pre=choice)
        torch.testing.assert_close(residual.double(), total if choice else truth, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rounded.double(), truth, rtol=unit, atol=1e-5)
