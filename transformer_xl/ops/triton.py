"""Relative attention on a GPU: operators that launch fused kernels.

Forward holds no scores in device memory. Backward holds the scores' gradients of a few rows of the batch
(`SCORE_BYTES`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, no_type_check

import torch
import torch.nn.functional as F
import triton
from jaxtyping import Float
from torch import Tensor

from . import fused_step, fused_sublayer, kernels, tiles
from .call import Call
from .fused_sublayer import new_seed
from .masks import without_padding

MAX_HEAD_SIZE = 128
DTYPES = torch.float32, torch.bfloat16, torch.float16

KERNELS: dict[str, Any] = {
    "forward": kernels.forward,
    "delta": kernels.backward_delta,
    "keys": kernels.backward_keys,
    "queries": kernels.backward_queries,
    "distances": kernels.backward_distances,
}
"""The launches, in their order."""

SCORE_BYTES = 2**29
"""Bytes of the scores' gradients that backward holds at once: those of as many rows as fit, at least one row."""
PARTS = 8
"""The gradients of the distances are sums over this many groups of rows, added up at the end."""

BRANCHING = (90, 100)
"""Capabilities for which a branch around the mask saves a sixth of forward's instructions. Elsewhere the scores would
go through shared memory."""
_SMALL = (86, 89, 120)
"""Capabilities with 99 KiB of shared memory per program and 100 KiB per multiprocessor."""
_READERS = ("queries", "distances")
"""Launches that read the tiles which "keys" wrote, so they have its BLOCK."""
_TILES: list[tuple[tuple[str, ...], int, int, tuple[int, ...], tuple[int, int, int]]] = [
    # launches, bytes per number, largest head, targets (none: all others), (BLOCK, warps, stages)
    (("forward",), 2, 64, (), (64, 4, 2)),
    (("delta",), 2, 128, (), (64, 4, 2)),
    (_READERS, 2, 64, _SMALL, (32, 4, 2)),
    (_READERS, 2, 64, (), (64, 4, 2)),
    (("keys",), 2, 64, (100,), (64, 8, 2)),  # products accumulate in tensor memory, so 8 warps have registers enough
    (("keys",), 2, 64, _SMALL, (32, 2, 2)),  # tiles of 64 take 74 KiB, and two programs must fit
    (("keys",), 2, 64, (80,), (64, 4, 1)),  # two stages would spill 136 bytes
    (("keys",), 2, 64, (), (64, 4, 2)),
    (("forward",), 2, 128, (90,), (64, 4, 2)),
    (("forward", "keys", *_READERS), 2, 128, (), (32, 4, 2)),
    # In fp32 a thread multiplies whole rows, which it holds in registers. Without tensor cores small tiles lose little.
    (tuple(KERNELS), 4, 32, (), (32, 8, 2)),
    (("forward",), 4, 64, (), (32, 8, 1)),
    (("delta", "keys", *_READERS), 4, 64, (), (32, 8, 2)),
    (("delta", "keys", *_READERS), 4, 128, (), (16, 8, 2)),
    (("forward",), 4, 128, (), (16, 8, 1)),
]
"""The tile of each launch. It spills at most 96 bytes per thread and fits the shared memory, twice if a smaller one
would fit twice. The first row that matches counts.

`python -m benchmarks kernels` checks this from the binaries. Tiles are fixed, not tuned at run time: another tile
changes the order of sums, and a run must repeat.
"""


def tile_of(name: str, dtype: torch.dtype, head_size: int, target: int) -> dict[str, int]:
    """The tile of a launch on a card of a compute capability, for instance 90."""
    for names, size, largest, targets, tile in _TILES:
        if name in names and dtype.itemsize == size and head_size <= largest and target in (targets or (target,)):
            return dict(zip(("BLOCK", "num_warps", "num_stages"), tile, strict=True))
    raise ValueError(f"no tile for {name}, {dtype} and heads of {head_size}")


def _target(device: torch.device) -> int:
    """The compute capability, for instance 80; 100 for a B300 (103), and 120 for a GB10 (121), which have the same
    limits."""
    if device.type != "cuda":
        return 90  # the interpreter
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + (minor if major < 10 else 0)


class Numbers(NamedTuple):
    """What all kernels take after the strides; in this order."""

    begin: int
    end_row: int
    """The rows [begin, end_row) of the batch."""
    heads: int
    queries: int
    keys: int
    window: int
    ahead: int
    factor: float
    seed: Tensor | None
    threshold: int
    keep_scale: float


def _launch(name: str, length: int, inputs: Sequence[Any], numbers: Numbers, *rest: Any) -> None:
    """Run a kernel once for each head of each row and each block of `length`."""
    q, k, v, r = inputs[:4]
    K = q.shape[3]
    tile = tile_of(name, q.dtype, K, _target(q.device))
    exact = torch.backends.cuda.matmul.fp32_precision != "tf32"  # whichever of its two ways set it
    both = numbers.ahead > 0 or inputs[7] is not None
    constants = {"PRECISION": "ieee" if exact else "tf32", "DROPOUT": numbers.seed is not None, "BOTH": both, "K": K}
    constants |= {"BLOCK_K": max(16, triton.next_power_of_2(K))} | tile
    if name == "forward":
        constants["BRANCH"] = _target(q.device) in BRANCHING
    strides = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *r.stride()[:2]
    rows = rest[-1] if name == "distances" else numbers.end_row - numbers.begin
    programs = rows * numbers.heads * -(-length // tile["BLOCK"])
    fused_sublayer.launch(KERNELS[name], (programs,), q, *inputs, *strides, *numbers, *rest, **constants)


SOURCES = b"".join(
    Path(file).read_bytes()
    for file in (__file__, kernels.__file__, tiles.__file__, fused_sublayer.__file__, fused_step.__file__)
)
_OWN = hashlib.sha256(__name__.encode() + SOURCES).hexdigest()[:16]
"""Part of the operators' names. If two copies of these files registered one name, PyTorch would call the second for
both, without a warning: for instance an exported folder of another version."""


def _numbers(
    q: Tensor, k: Tensor, r: Tensor, window: int, scale: float, dropout_p: float, seed: Tensor | None
) -> Numbers:
    (B, H, T, _), S = q.shape, k.shape[2]
    dropped = seed, int(dropout_p * 2**31), 1 / (1 - dropout_p)
    return Numbers(0, B, H, T, S, window, r.shape[1] - S, scale / math.log(2), *dropped)


def _even(x: Tensor) -> Tensor:
    """`x` with neighbouring elements in its last axis."""
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op(f"transformer_xl_{_OWN}::attend", mutates_args=())
@no_type_check
def _attend(
    q: Tensor, k: Tensor, v: Tensor, r: Tensor, content_bias: Tensor, position_bias: Tensor,
    first: Tensor | None, until: Tensor | None, seed: Tensor | None, window: int, scale: float, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result [B, T, H, K], and the logarithms of the softmax's sums [B, H, T]."""
    inputs = *map(_even, (q, k, v, r)), content_bias.contiguous(), position_bias.contiguous(), first, until
    out, lse = _empty_results(q)
    _launch("forward", q.shape[2], inputs, _numbers(q, k, r, window, scale, dropout_p, seed), out, lse)
    return out, lse


def _empty_results(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    B, H, T, K = q.shape
    return q.new_empty(B, T, H, K), q.new_empty(B, H, T, dtype=torch.float32)


@torch.library.custom_op(f"transformer_xl_{_OWN}::attend_backward", mutates_args=())
@no_type_check
def _attend_backward(
    d_out: Tensor, out: Tensor, lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, r: Tensor, content_bias: Tensor, position_bias: Tensor,
    first: Tensor | None, until: Tensor | None, seed: Tensor | None, window: int, scale: float, dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v [B, _, H, K], of r [R, H, K], and of the biases [H, 2, K], the last two in fp32."""
    inputs = *map(_even, (q, k, v, r)), content_bias.contiguous(), position_bias.contiguous(), first, until
    (B, H, T, K), S, R = q.shape, k.shape[2], r.shape[1]
    d_out = _even(d_out.transpose(1, 2))
    d_q, d_k, d_v, d_r, _ = _empty_gradients(d_out, out, lse, q, k, v, r)
    block = tile_of("keys", q.dtype, K, _target(q.device))["BLOCK"]
    d_biases = q.new_empty(B, H, triton.cdiv(T, block), 2, K, dtype=torch.float32)
    width = triton.cdiv(S, block) * block
    rows = max(1, SCORE_BYTES // (H * T * width * q.itemsize))
    d_scores, delta = q.new_empty(min(rows, B), H, T, width), torch.empty_like(lse)
    shared = lse, d_out, *d_out.stride()[:3], delta, scale, d_scores, width
    for begin in range(0, B, rows):
        numbers = _numbers(q, k, r, window, scale, dropout_p, seed)._replace(begin=begin, end_row=min(begin + rows, B))
        parts = d_r.new_empty(min(PARTS, numbers.end_row - begin), *d_r.shape)
        _launch("delta", T, inputs, numbers, *shared, out)
        _launch("keys", S, inputs, numbers, *shared, d_k, d_v)
        _launch("queries", T, inputs, numbers, *shared, d_q, d_biases)
        _launch("distances", R, inputs, numbers, *shared, parts, len(parts))
        d_r = parts.sum(0) if begin == 0 else d_r.add_(parts.sum(0))
    return d_q, d_k, d_v, d_r, d_biases.sum((0, 2))


def _empty_gradients(d_out, out, lse, q, k, v, r, *_: object) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (B, H, _, K), S, R = q.shape, k.shape[2], r.shape[1]
    d_k, d_v = q.new_empty(B, S, H, K), q.new_empty(B, S, H, K)
    d_r = q.new_empty(R, H, K, dtype=torch.float32)
    return torch.empty_like(out), d_k, d_v, d_r, d_r.new_empty(H, 2, K)


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output, *inputs[:9])
    ctx.numbers = inputs[9:]
    ctx.set_materialize_grads(False)


def _gradients(ctx, d_out: Tensor | None, d_lse: None) -> tuple[Tensor | None, ...]:
    """First derivatives only: the backward operator has none itself."""
    if d_out is None:
        return (None,) * 12
    saved = ctx.saved_tensors  # a checkpoint gives them once
    d_q, d_k, d_v, d_r, d_biases = _attend_backward(d_out, *saved, *ctx.numbers)
    d_q, d_k, d_v = (x.transpose(1, 2) for x in (d_q, d_k, d_v))
    return d_q, d_k, d_v, d_r.transpose(0, 1).to(saved[2].dtype), *d_biases.to(saved[6].dtype).unbind(1), *(None,) * 6


_attend.register_fake(_empty_results)
_attend.register_autograd(_gradients, setup_context=_keep)
_attend_backward.register_fake(_empty_gradients)


def attend(call: Call) -> Float[Tensor, "B H T K"]:
    """See `relative_attention`."""
    *tensors, mask, dropout_p, scale = call
    K = tensors[0].shape[3]
    if short := -K % 16:  # or Triton would not know that rows are aligned, and read number by number
        tensors = [F.pad(x, (0, short)) for x in tensors]
    q, k, v, r, content_bias, position_bias = tensors
    T, S = q.shape[2], k.shape[2]
    r, window = r[:, r.shape[1] - S - mask.ahead :], mask.window(S)
    first, until = mask.first, mask.until
    if first is not None or until is not None:  # for each query all bounds together
        own = torch.arange(S - T, S, device=q.device)
        first = None if first is None else torch.maximum(first, own - (window - 1)).to(torch.int32)
        until = None if until is None else torch.minimum(until, (own + (mask.ahead + 1)).clamp(max=S)).to(torch.int32)
    seed = new_seed(q.device) if dropout_p else None
    out, _ = _attend(q, k, v, r, content_bias, position_bias, first, until, seed, window, scale, dropout_p)
    out = out.transpose(1, 2)[..., :K]
    if not mask.ahead and until is None:  # a causal query that is padding on the left sees no key, and its result is 0
        return out
    return without_padding(out.transpose(0, 1), S - T, mask).transpose(0, 1)
