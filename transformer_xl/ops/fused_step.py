"""One token at a time on a GPU: attention over a ring of the past, in Triton.

A token does too little work to fill a GPU, so it takes as long as its kernels take to start. These and `fused_sublayer`
replace all operators between two products. Scores are those of `model.step`:

    score_j = scale * ((q + u) . k_j + (q + v) . r_d),    d = (slot - j) mod W,    seen while d <= count

The keys of a head are divided into parts of `PART`, each for one program, so one row keeps many multiprocessors busy. A
part gives its largest score, the sum of the softmax and the sum of the values; a second kernel adds up the parts. The
length of a part never changes, so a row's bits do not depend on the other rows.
"""

from __future__ import annotations

import math
from typing import no_type_check

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from .fused_sublayer import launch

PART = 128
"""Keys of a program."""
BLOCK = 32
"""Keys, or parts, that a program reads at once."""
_LEAST = tl.constexpr(-1e30)
"""Below every score. The difference of two of them is 0, that of infinities is not a number."""


@triton.jit
@no_type_check
def _normalised(x, inside, K: tl.constexpr):
    """Mean 0 and variance 1, as `F.layer_norm`."""
    x = tl.where(inside, x - tl.sum(x) / K, 0.0)
    return x * tl.rsqrt(tl.sum(x * x) / K + 1e-5)


@triton.jit
@no_type_check
def _add(score, seen, values, largest, out):
    """The largest score and the sum of the values [K] with a block more; its weights, and what scales earlier sums."""
    score = tl.where(seen, score, _LEAST)
    new = tl.maximum(largest, tl.max(score))
    weight = tl.where(seen, tl.exp2(score - new), 0.0)
    before = tl.exp2(largest - new)
    return new, out * before + tl.sum(weight[:, None] * values, 0), weight, before


# A row of qkv is [3, H, K], of kv [2, H, W, K]. The result of a part has K + 2 numbers: the sum of the values, the
# largest score, the sum of the weights. Triton would make an argument of 1 a constant without a dtype.
@triton.jit(do_not_specialize=["H", "W", "parts"])
@no_type_check
def attend_part(
    qkv, kv, slots, counts, r, content_bias, position_bias, gain, out, H, W, parts, factor,
    K: tl.constexpr, BLOCK_K: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr, QK_NORM: tl.constexpr,
):  # fmt: skip
    """One part of the keys of one head of one row. The program that has the row's slot stores the new key and value."""
    head, part = tl.program_id(0), tl.program_id(1)
    b, h = (head // H).to(tl.int64), head % H
    column = tl.arange(0, BLOCK_K)
    inside = column < K
    new = qkv + (b * 3 * H + h) * K + column
    q = tl.load(new, mask=inside, other=0.0).to(tl.float32)
    new_k = tl.load(new + H * K, mask=inside, other=0.0)
    new_v = tl.load(new + 2 * H * K, mask=inside, other=0.0)
    if QK_NORM:
        q = _normalised(q, inside, K) * tl.load(gain).to(tl.float32)
        new_k = _normalised(new_k.to(tl.float32), inside, K).to(kv.dtype.element_ty)
    content_q = q + tl.load(content_bias + h * K + column, mask=inside, other=0.0).to(tl.float32)
    position_q = q + tl.load(position_bias + h * K + column, mask=inside, other=0.0).to(tl.float32)
    slot, count = tl.load(slots + b).to(tl.int32), tl.load(counts + b).to(tl.int32)
    keys = kv + (b * 2 * H + h) * W * K + column
    values, table = keys + H.to(tl.int64) * W * K, r + h.to(tl.int64) * W * K + column
    first = part * PART
    here = inside & (slot >= first) & (slot < first + PART)
    tl.store(keys + slot * K, new_k, mask=here)
    tl.store(values + slot * K, new_v, mask=here)

    largest, total = tl.full([], _LEAST, tl.float32), 0.0
    found = tl.zeros([BLOCK_K], tl.float32)
    for start in range(first, tl.minimum(first + PART, W), BLOCK):
        j = start + tl.arange(0, BLOCK)
        row = (j - slot - 1 + W) % W  # of r, whose first row is the farthest distance, W - 1
        seen = (j < W) & (W - 1 - row <= count)
        loaded = seen[:, None] & inside[None, :]  # what is not seen may be NaN
        is_new = (j == slot)[:, None]  # not from memory, where another thread has only now stored it
        k = tl.where(is_new, new_k[None, :], tl.load(keys[None, :] + j[:, None] * K, mask=loaded, other=0.0))
        v = tl.where(is_new, new_v[None, :], tl.load(values[None, :] + j[:, None] * K, mask=loaded, other=0.0))
        by_distance = tl.load(table[None, :] + row[:, None] * K, mask=loaded, other=0.0).to(tl.float32)
        score = tl.sum(k.to(tl.float32) * content_q[None, :] + by_distance * position_q[None, :], 1) * factor
        largest, found, weight, before = _add(score, seen, v.to(tl.float32), largest, found)
        total = total * before + tl.sum(weight)
    out += (head.to(tl.int64) * parts + part) * (K + 2)
    tl.store(out + column, found, mask=inside)
    tl.store(out + K, largest)
    tl.store(out + K + 1, total)


@triton.jit(do_not_specialize=["parts"])
@no_type_check
def add_parts(found, out, parts, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr):
    """The attention of one head of one row from its parts."""
    head, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_K)
    inside = column < K
    found += head * parts * (K + 2)
    largest, total = tl.full([], _LEAST, tl.float32), 0.0
    summed = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        at = found + part * (K + 2)
        real = part < parts
        values = tl.load(at[:, None] + column[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        score = tl.load(at + K, mask=real, other=_LEAST)
        largest, summed, weight, before = _add(score, real, values, largest, summed)
        total = total * before + tl.sum(weight * tl.load(at + K + 1, mask=real, other=0.0))
    tl.store(out + head * K + column, summed / total, mask=inside)


def attend_next(
    qkv: Float[Tensor, "B _"],
    kv: Float[Tensor, "B 2 H W K"],
    slots: Int[Tensor, " B"],
    counts: Int[Tensor, " B"],
    r: Float[Tensor, "H W K"],
    content_bias: Float[Tensor, "H K"],
    position_bias: Float[Tensor, "H K"],
    gain: Float[Tensor, ""] | None = None,
) -> Float[Tensor, "B H*K"]:
    """Store each row's new key and value in its slot, and attend to its last `counts` + 1 positions. A row of `qkv` is
    [3, H, K].

    `r` begins with the farthest distance. With the `gain` of normalised queries, queries and keys are normalised first.
    All are contiguous.
    """
    (B, _, H, W, K), parts = kv.shape, -(-kv.shape[3] // PART)
    found = qkv.new_empty(B * H, parts, K + 2, dtype=torch.float32)
    out = qkv.new_empty(B, H * K)
    sizes = {"K": K, "BLOCK_K": max(16, triton.next_power_of_2(K)), "BLOCK": BLOCK}
    inputs = qkv, kv, slots, counts, r, content_bias, position_bias, gain
    numbers = H, W, parts, K**-0.5 / math.log(2)
    launch(attend_part, (B * H, parts), kv, *inputs, found, *numbers, PART=PART, QK_NORM=gain is not None, **sizes)
    launch(add_parts, (B * H,), kv, found, out, parts, **sizes)
    return out


@torch.no_grad()
def assert_step(dtype: torch.dtype, device: str = "cpu") -> None:
    """Check that these kernels are as close to float64 as rounding to `dtype` allows, that a token is stored in its
    slot alone, and that what is not seen may be NaN."""
    generator, unit = torch.Generator().manual_seed(0), torch.finfo(dtype).eps
    B, W, K = 4, 2 * PART + 19, 41

    def draw(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, kind)

    slots, counts = (torch.tensor(each, device=device) for each in ([0, W - 1, 150, 31], [W - 1, 0, 200, 12]))
    distance = (slots[:, None] - torch.arange(W, device=device)) % W
    seen = distance <= counts[:, None]
    for H, gain in ((1, None), (2, torch.tensor(1.7, device=device))):
        qkv, r, u, v = draw(B, 3 * H * K), draw(H, W, K), draw(H, K), draw(H, K)
        kv = draw(B, 2, H, W, K).masked_fill_(~seen[:, None, None, :, None], torch.nan)
        expected = kv.clone()
        out = attend_next(qkv, kv, slots, counts, r, u, v, gain).double()
        q, *new = qkv.double().unflatten(1, (3, H, K)).unbind(1)
        if gain is not None:
            q, new[0] = gain * F.layer_norm(q, (K,)), F.layer_norm(new[0], (K,))
        expected[torch.arange(B), :, :, slots] = torch.stack(new, 1).to(dtype)
        torch.testing.assert_close(kv, expected, rtol=unit, atol=1e-6, equal_nan=True)
        keys, values = kv.double().nan_to_num().unbind(1)
        score = torch.einsum("bhk,bhwk->bhw", q + u, keys)
        score += torch.einsum("bhk,hbwk->bhw", q + v, r.double()[:, W - 1 - distance])
        truth = (score * K**-0.5).masked_fill(~seen[:, None], -torch.inf).softmax(-1)[:, :, None] @ values
        torch.testing.assert_close(out, truth.flatten(1), rtol=unit, atol=1e-4)
