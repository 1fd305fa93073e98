"""Relative attention on a GPU: fused kernels, forward and backward, that never hold the scores in device memory.

Query i scores key j with row T - 1 - i + j of r (the last row is distance 0), so a square tile of scores needs a
strip of r two tiles long. The strip's product is computed tile by tile on the tensor cores. Then each row moves left by
its own distance inside the tile. Two neighbouring tiles hold the BLOCK entries that it needs, in different columns, so
one selection and one rotation (`_slide`) are enough. The example of Appendix B, BLOCK = 2, only the columns needed:

    first | second        selected        rotated by 1 - i
    . a   | b .           b a             a b
    c d   | . .           c d             c d

The softmax is computed online and keeps the logarithm of its sum, from which backward computes the probabilities again.
Backward has three launches, one for each result (queries, keys, distances). Nothing is added atomically, so a run
repeats bit by bit. Dropout's masks are a function of (seed, row, head, query, key), computed where they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from .masks import Mask, without_padding

MAX_HEAD_SIZE = 128
DTYPES = torch.float32, torch.bfloat16, torch.float16

# S grows with memory, so a kernel specialised for multiples of 16 would be compiled twice. Triton reads the source of
# kernels, so a type checker must not wrap them.
_jit = triton.jit(do_not_specialize=["T", "S", "window", "ahead", "seed", "threshold"])


@triton.jit
@no_type_check
def _load(base, first, low, high, stride, BLOCK: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows first, ..., first + BLOCK - 1 of a matrix; rows outside [low, high) are 0 and not read."""
    row = first + tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK_K)[None, :]
    inside = (row >= low) & (row < high) & (column < K)
    return tl.load(base + row.to(tl.int64) * stride + column, mask=inside, other=0.0)


@triton.jit
@no_type_check
def _store(base, first, high, stride, values, BLOCK: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    row = first + tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK_K)[None, :]
    at = base + row.to(tl.int64) * stride + column
    tl.store(at, values.to(base.dtype.element_ty), mask=(row < high) & (column < K))


@triton.jit
@no_type_check
def _slide(first, second, by, index, passed, axis: tl.constexpr, BLOCK: tl.constexpr):
    """The BLOCK entries that begin at `by` along two neighbouring tiles; `index` counts along `axis`.

    `passed`, a multiple of BLOCK, changes no number. It makes the compiler compute masks and indices in each iteration.
    Otherwise the compiler would keep two more tiles of them, for which there are no registers.
    """
    index += passed
    return tl.gather(tl.where(index >= by + passed, first, second), (index + by) & (BLOCK - 1), axis)


@triton.jit
@no_type_check
def _keep_mask(seed, head, i, j, threshold):
    """Whether dropout keeps query i's probability of key j.

    Philox gives each query two random numbers, and a hash of two multiplications mixes the key's index into them,
    because Philox for each element would cost more than the products.
    """
    zero = i * 0
    key, other_key, _, _ = tl.philox(seed, i, zero + head, zero, zero)
    x = j.to(tl.uint32) * 0x9E3779B9 + key
    x = (x ^ (x >> 16)) * 0x7FEB352D ^ other_key
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return (x >> 1).to(tl.int32) >= threshold


@triton.jit
@no_type_check
def _program(length, H, BLOCK: tl.constexpr):
    """This program's index among all heads of all rows, its row and head in 64 bits, and the start of its block."""
    blocks = tl.cdiv(length, BLOCK)
    head = tl.program_id(0) // blocks
    return head, (head // H).to(tl.int64), (head % H).to(tl.int64), tl.program_id(0) % blocks * BLOCK


@triton.jit
@no_type_check
def _distances(S, ahead, BOTH: tl.constexpr):
    """The number of rows of r."""
    return S + ahead if BOTH else S


@triton.jit
@no_type_check
def _queries(
    q, content_bias, position_bias, start, end, q_b, q_h, q_t, H, T, S, window, ahead,
    BOTH: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program's block of queries: `_program`, the keys [low, high) that they may see, and queries plus each bias."""
    head, b, h, first = _program(T, H, BLOCK)
    first = (tl.cdiv(T, BLOCK) - 1) * BLOCK - first  # the longest rows start first
    low = tl.maximum(S - T + first - window + 1, 0)
    if start is not None:
        low = tl.maximum(low, tl.load(start + b))
    high = S - T + first + BLOCK
    if BOTH:
        high += ahead
        if end is not None:
            high = tl.minimum(high, tl.load(end + b))
    rows = _load(q + b * q_b + h * q_h, first, 0, T, q_t, BLOCK, K, BLOCK_K)
    content_q = rows + _load(content_bias, h, 0, H, K, 1, K, BLOCK_K)
    position_q = rows + _load(position_bias, h, 0, H, K, 1, K, BLOCK_K)
    return head, b, h, first, low, tl.minimum(high, S), content_q, position_q


@triton.jit
@no_type_check
def _scores(
    content_q, position_q, near, k_rows, r, r_s, first, key, low, high, T, S, window, ahead, factor,
    BOTH: tl.constexpr, PRECISION: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of scores in base 2 (-inf: hidden), the indices of its queries and keys, and the strip's far tile."""
    r_rows = _load(r, T - first + key, 0, _distances(S, ahead, BOTH), r_s, BLOCK, K, BLOCK_K)
    far = tl.dot(position_q, tl.trans(r_rows), input_precision=PRECISION)
    index = tl.arange(0, BLOCK)[None, :]
    i = tl.arange(0, BLOCK)[:, None]
    score = _slide(near, far, BLOCK - 1 - i, index, key - low, 1, BLOCK)
    score += tl.dot(content_q, tl.trans(k_rows), input_precision=PRECISION)
    i += first
    j = key + index
    if BOTH:
        seen = (j <= S - T + i + ahead) & (j > S - T + i - window) & (j < high)
    else:
        seen = (j <= S - T + i) & (j > S - T + i - window)
    return tl.where(seen, score * factor, float("-inf")), i, j, far


@triton.jit
@no_type_check
def _move_rows(
    base, first, low, high, stride, rows, by, passed,
    PRECISION: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiply two blocks of a matrix by `rows`; return each column's BLOCK entries that begin at `by`."""
    rows = tl.trans(rows)
    near = tl.dot(_load(base, first, low, high, stride, BLOCK, K, BLOCK_K), rows, input_precision=PRECISION)
    far = tl.dot(_load(base, first + BLOCK, low, high, stride, BLOCK, K, BLOCK_K), rows, input_precision=PRECISION)
    return _slide(near, far, by, tl.arange(0, BLOCK)[:, None], passed, 0, BLOCK)


@_jit
@no_type_check
def _forward(
    q, k, v, r, content_bias, position_bias, start, end, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, r_h, r_s,
    H, T, S, window, ahead, factor, seed, threshold, keep_scale, out, lse,
    BOTH: tl.constexpr,
    PRECISION: tl.constexpr, DROPOUT: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head: `out` [B, T, H, K] and `lse` [B, H, T], in base 2."""
    head, b, h, first, low, high, content_q, position_q = _queries(
        q, content_bias, position_bias, start, end, q_b, q_h, q_t, H, T, S, window, ahead, BOTH, K, BLOCK_K, BLOCK
    )
    k, v, r = k + b * k_b + h * k_h, v + b * v_b + h * v_h, r + h * r_h
    r_rows = tl.trans(_load(r, T - BLOCK - first + low, 0, _distances(S, ahead, BOTH), r_s, BLOCK, K, BLOCK_K))
    near = tl.dot(position_q, r_rows, input_precision=PRECISION)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    result = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    for key in range(low, high, BLOCK):
        k_rows = _load(k, key, low, high, k_s, BLOCK, K, BLOCK_K)
        score, i, j, near = _scores(
            content_q, position_q, near, k_rows, r, r_s, first, key, low, high,
            T, S, window, ahead, factor, BOTH, PRECISION, K, BLOCK_K, BLOCK,
        )  # fmt: skip
        before = largest
        largest = tl.maximum(largest, tl.max(score, 1))
        shift = tl.where(largest == float("-inf"), 0.0, largest)  # a row that has seen no key yet
        probability = tl.exp2(score - shift[:, None])
        shrink = tl.exp2(before - shift)
        total = total * shrink + tl.sum(probability, 1)
        if DROPOUT:
            probability = tl.where(_keep_mask(seed, head, i, j, threshold), probability, 0.0)
        v_rows = _load(v, key, low, high, v_s, BLOCK, K, BLOCK_K)
        result = tl.dot(probability.to(v_rows.dtype), v_rows, result * shrink[:, None], input_precision=PRECISION)
    sees_none = total == 0
    total = tl.where(sees_none, 1.0, total)
    result *= (keep_scale / total)[:, None]
    _store(out + (b * T * H + h) * K, first, T, H * K, result, BLOCK, K, BLOCK_K)
    query = first + tl.arange(0, BLOCK)
    logarithm = tl.where(sees_none, 0.0, largest + tl.log2(total))
    tl.store(lse + head.to(tl.int64) * T + query, logarithm, mask=query < T)


@_jit
@no_type_check
def _backward_queries(
    q, k, v, r, content_bias, position_bias, start, end, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, r_h, r_s,
    H, T, S, window, ahead, factor, seed, threshold, keep_scale, lse, d_out, o_b, o_h, o_t, delta, scale, out, d_q,
    BOTH: tl.constexpr,
    PRECISION: tl.constexpr, DROPOUT: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of queries: `d_q` [B, T, H, K] and `delta` [B, H, T]."""
    head, b, h, first, low, high, content_q, position_q = _queries(
        q, content_bias, position_bias, start, end, q_b, q_h, q_t, H, T, S, window, ahead, BOTH, K, BLOCK_K, BLOCK
    )
    k, v, r = k + b * k_b + h * k_h, v + b * v_b + h * v_h, r + h * r_h
    strip = T - BLOCK - first
    R = _distances(S, ahead, BOTH)
    own = (b * T * H + h) * K
    d_rows = _load(d_out + b * o_b + h * o_h, first, 0, T, o_t, BLOCK, K, BLOCK_K)
    out_rows = _load(out + own, first, 0, T, H * K, BLOCK, K, BLOCK_K)
    index = tl.arange(0, BLOCK)[None, :]
    by = BLOCK - 1 - tl.arange(0, BLOCK)[:, None]
    # Computed by the same product as d_probability, so where one key has all the probability, they are equal.
    every = tl.dot(d_rows, tl.trans(out_rows), input_precision=PRECISION)
    delta_row = tl.sum(tl.where(by + index == BLOCK - 1, every, 0.0), 1)
    query = first + tl.arange(0, BLOCK)
    tl.store(delta + head.to(tl.int64) * T + query, delta_row, mask=query < T)
    lse_row = tl.load(lse + head.to(tl.int64) * T + query, mask=query < T, other=float("inf"))
    r_rows = _load(r, strip + low, 0, R, r_s, BLOCK, K, BLOCK_K)
    near = tl.dot(position_q, tl.trans(r_rows), input_precision=PRECISION)
    d_near = tl.zeros([BLOCK, BLOCK], tl.float32)
    d_query = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    for key in range(low, high, BLOCK):
        k_rows = _load(k, key, low, high, k_s, BLOCK, K, BLOCK_K)
        score, i, j, near = _scores(
            content_q, position_q, near, k_rows, r, r_s, first, key, low, high,
            T, S, window, ahead, factor, BOTH, PRECISION, K, BLOCK_K, BLOCK,
        )  # fmt: skip
        probability = tl.exp2(score - lse_row[:, None])
        v_rows = _load(v, key, low, high, v_s, BLOCK, K, BLOCK_K)
        d_probability = tl.dot(d_rows, tl.trans(v_rows), input_precision=PRECISION)
        if DROPOUT:
            d_probability = tl.where(_keep_mask(seed, head, i, j, threshold), d_probability * keep_scale, 0.0)
        d_score = probability * (d_probability - delta_row[:, None])
        d_query = tl.dot(d_score.to(k_rows.dtype), k_rows, d_query, input_precision=PRECISION)
        # Undo `_slide`: the gradient for the first tile of r is complete, the rest waits for the next keys.
        passed = key - low
        rotated = tl.gather(d_score, (index + passed - by) & (BLOCK - 1), 1)
        ready = tl.where(index + passed >= by + passed, rotated, 0.0)
        d_near += ready
        r_rows = _load(r, strip + key, 0, R, r_s, BLOCK, K, BLOCK_K)
        d_query = tl.dot(d_near.to(r_rows.dtype), r_rows, d_query, input_precision=PRECISION)
        d_near = rotated - ready
    last = strip + low + tl.cdiv(tl.maximum(high - low, 0), BLOCK) * BLOCK
    r_rows = _load(r, last, 0, R, r_s, BLOCK, K, BLOCK_K)
    d_query = tl.dot(d_near.to(r_rows.dtype), r_rows, d_query, input_precision=PRECISION)
    _store(d_q + own, first, T, H * K, d_query * scale, BLOCK, K, BLOCK_K)


@_jit
@no_type_check
def _backward_rows(
    q, k, v, r, content_bias, position_bias, start, end, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, r_h, r_s,
    H, T, S, window, ahead, factor, seed, threshold, keep_scale, lse, d_out, o_b, o_h, o_t, delta, scale,
    d_rows, d_v, d_bias, DISTANCES: tl.constexpr, BOTH: tl.constexpr,
    PRECISION: tl.constexpr, DROPOUT: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of one block of keys or distances, and a part of the gradient of their bias.

    Results are [B, S, H, K], of distances [B, R, H, K]. Keys: tiles are keys by queries, and r's product is moved.
    Distances: tiles are distances by queries, and the products of the keys and the values are moved; the caller adds up
    `d_rows` over B.
    """
    R = _distances(S, ahead, BOTH)
    length = R if DISTANCES else S
    head, b, h, first = _program(length, H, BLOCK)
    q, k, v, r = q + b * q_b + h * q_h, k + b * k_b + h * k_h, v + b * v_b + h * v_h, r + h * r_h
    d_out += b * o_b + h * o_h
    lse, delta = lse + head.to(tl.int64) * T, delta + head.to(tl.int64) * T
    oldest = 0
    if start is not None:
        oldest = tl.load(start + b)
    newest = S
    if end is not None:
        newest = tl.load(end + b)
    index = tl.arange(0, BLOCK)[:, None]
    by = tl.arange(0, BLOCK)[None, :]
    if DISTANCES:
        low = tl.maximum(oldest + T - BLOCK - first, 0)
        high = tl.where(first + BLOCK <= S - window, low, tl.minimum(newest + T - 1 - first, T) if BOTH else T)
        rows = _load(r, first, 0, R, r_s, BLOCK, K, BLOCK_K)
        seen_row = (first + index < R) & (first + index >= S - window)
    else:
        low = tl.maximum(tl.maximum(first, oldest) - (S - T) - (ahead if BOTH else 0), 0)
        hidden = (first + BLOCK <= oldest) | (first >= newest) if BOTH else first + BLOCK <= oldest
        high = tl.where(hidden, low, tl.minimum(first + BLOCK - 1 - (S - T) + window, T))
        rows = _load(k, first, oldest, newest, k_s, BLOCK, K, BLOCK_K)
        v_rows = _load(v, first, oldest, newest, v_s, BLOCK, K, BLOCK_K)
        by = BLOCK - 1 - by
        strip = T - BLOCK + first
    d_row = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    d_sum = tl.zeros([BLOCK, 1], tl.float32)
    d_value = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    content_bias_row = _load(content_bias, h, 0, H, K, 1, K, BLOCK_K)
    position_bias_row = _load(position_bias, h, 0, H, K, 1, K, BLOCK_K)
    for query in range(low, high, BLOCK):
        q_rows = _load(q, query, low, high, q_t, BLOCK, K, BLOCK_K)
        content_q = q_rows + content_bias_row
        position_q = q_rows + position_bias_row
        d_out_rows = _load(d_out, query, low, high, o_t, BLOCK, K, BLOCK_K)
        i = query + tl.arange(0, BLOCK)[None, :]
        own_q = position_q if DISTANCES else content_q
        if DISTANCES:
            key = first - (T - 1) + query
            j = key + index + by
            seen = seen_row & (j >= oldest) & (j < newest) if BOTH else seen_row & (j >= oldest)
            score = _move_rows(k, key, oldest, newest, k_s, content_q, by, query - low, PRECISION, K, BLOCK_K, BLOCK)
            d_probability = _move_rows(
                v, key, oldest, newest, v_s, d_out_rows, by, query - low, PRECISION, K, BLOCK_K, BLOCK
            )
        else:
            j = first + index
            seen = (j <= S - T + i + (ahead if BOTH else 0)) & (j > S - T + i - window) & (j >= oldest)
            if BOTH:
                seen = seen & (j < newest)
            score = _move_rows(r, strip - query, 0, R, r_s, position_q, by, query - low, PRECISION, K, BLOCK_K, BLOCK)
            d_probability = tl.dot(v_rows, tl.trans(d_out_rows), input_precision=PRECISION)
        score += tl.dot(rows, tl.trans(own_q), input_precision=PRECISION)
        lse_row = tl.load(lse + i, mask=i < high, other=float("inf"))
        probability = tl.exp2(tl.where(seen, score * factor - lse_row, float("-inf")))
        dropped = probability
        if DROPOUT:
            kept = _keep_mask(seed, head, i, j, threshold)
            d_probability = tl.where(kept, d_probability * keep_scale, 0.0)
            dropped = tl.where(kept, probability * keep_scale, 0.0)
        if not DISTANCES:
            d_value = tl.dot(dropped.to(d_out_rows.dtype), d_out_rows, d_value, input_precision=PRECISION)
        delta_row = tl.load(delta + i, mask=i < high, other=0.0)
        d_score = probability * (d_probability - delta_row)
        d_sum += tl.sum(d_score, 1)[:, None]
        d_row = tl.dot(d_score.to(own_q.dtype), own_q, d_row, input_precision=PRECISION)
    own = (b * length * H + h) * K
    _store(d_rows + own, first, length, H * K, d_row * scale, BLOCK, K, BLOCK_K)
    if not DISTANCES:
        _store(d_v + own, first, S, H * K, d_value, BLOCK, K, BLOCK_K)
    d_bias_row = tl.sum(d_sum * rows * scale, 0)[None, :]  # the caller adds these up in a fixed order
    _store(d_bias, tl.program_id(0), tl.num_programs(0), K, d_bias_row, 1, K, BLOCK_K)


def _tile(dtype: torch.dtype, head_size: int) -> dict[str, int]:
    """The largest tiles that compile for compute capabilities 8.0 to 9.0 with few registers spilled.

    They are fixed, not tuned at run time: another tile changes the order of sums, and a run must repeat. Shared memory
    stays below the 99 KiB of the small cards of 8.6, and below half of the 227 KiB of 9.0.
    """
    wide = head_size > 64
    if dtype == torch.float32:
        return {"BLOCK": 16 if wide else 32, "num_warps": 4 if wide else 8, "num_stages": 2}
    return {"BLOCK": 32 if wide else 64, "num_warps": 4, "num_stages": 2}


def _launch(kernel: Any, length: int, inputs: Sequence[Any], numbers: tuple[Any, ...], *rest: Any) -> None:
    """Run `kernel` once for each head of each row and each block of `length`."""
    q, k, v, r = inputs[:4]
    B, H, _, K = q.shape
    tile = _tile(q.dtype, K)
    exact = torch.get_float32_matmul_precision() == "highest"
    both = numbers[4] > 0 or inputs[7] is not None
    constants = {"PRECISION": "ieee" if exact else "tf32", "DROPOUT": numbers[-1] != 1, "BOTH": both, "K": K}
    constants |= {"BLOCK_K": max(16, triton.next_power_of_2(K))} | tile
    strides = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *r.stride()[:2]
    programs = B * H * triton.cdiv(length, tile["BLOCK"])
    with torch.cuda.device_of(q):
        kernel[(programs,)](*inputs, *strides, *numbers, *rest, **constants)


class _Attention(torch.autograd.Function):
    """The kernels as an autograd function. First derivatives only."""

    @staticmethod
    def forward(ctx: Any, q, k, v, r, content_bias, position_bias, start, end, window, scale, dropout_p, seed):
        q, k, v, r = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, r))
        inputs = q, k, v, r, content_bias.contiguous(), position_bias.contiguous(), start, end
        B, H, T, K = q.shape
        ahead = r.shape[1] - k.shape[2]
        dropped = seed, int(dropout_p * 2**31), 1 / (1 - dropout_p)
        numbers = H, T, k.shape[2], window, ahead, scale / math.log(2), *dropped
        out = q.new_empty(B, T, H, K)
        lse = q.new_empty(B, H, T, dtype=torch.float32)
        _launch(_forward, T, inputs, numbers, out, lse)
        ctx.save_for_backward(*inputs, out, lse)
        ctx.numbers, ctx.scale = numbers, float(scale)
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out):
        *inputs, out, lse = ctx.saved_tensors
        q, k = inputs[:2]
        (B, H, T, K), S, R = q.shape, k.shape[2], inputs[3].shape[1]
        d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
        d_q = torch.empty_like(out)
        d_k, d_v = q.new_empty(2, B, S, H, K).unbind()
        d_r = q.new_empty(B, R, H, K, dtype=torch.float32)
        blocks = (triton.cdiv(length, _tile(q.dtype, K)["BLOCK"]) for length in (S, R))
        d_biases = [q.new_empty(B, H, block, K, dtype=torch.float32) for block in blocks]
        delta = torch.empty_like(lse)
        shared = lse, d_out, *d_out.stride()[:3], delta, ctx.scale
        _launch(_backward_queries, T, inputs, ctx.numbers, *shared, out, d_q)  # first, because it writes delta
        _launch(_backward_rows, S, inputs, ctx.numbers, *shared, d_k, d_v, d_biases[0], False)
        _launch(_backward_rows, R, inputs, ctx.numbers, *shared, d_r, None, d_biases[1], True)
        d_u, d_w = (each.sum((0, 2)).to(q.dtype) for each in d_biases)
        d_q, d_k, d_v = (x.transpose(1, 2) for x in (d_q, d_k, d_v))
        return d_q, d_k, d_v, d_r.sum(0).transpose(0, 1).to(q.dtype), d_u, d_w, None, None, None, None, None, None


def attend(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B H S K"],
    v: Float[Tensor, "B H S K"],
    r: Float[Tensor, "H R K"],
    content_bias: Float[Tensor, "H K"],
    position_bias: Float[Tensor, "H K"],
    *,
    mask: Mask,
    dropout_p: float,
    scale: float,
) -> Float[Tensor, "B H T K"]:
    """See `relative_attention`."""
    S = k.shape[2]
    r, memory = r[:, r.shape[1] - S - mask.ahead :], S - q.shape[2]
    start = None if mask.valid is None else (memory - mask.valid).to(torch.int32).contiguous()
    end = None if mask.end is None else (memory + mask.end).to(torch.int32).contiguous()
    window = S if mask.attn_len is None else min(mask.attn_len, S)
    # From the CPU's generator, so that `torch.manual_seed` repeats a run and the host waits for no device.
    seed = int(torch.randint(2**31, (), device="cpu")) if dropout_p else 0
    out = _Attention.apply(q, k, v, r, content_bias, position_bias, start, end, window, scale, dropout_p, seed)
    # A causal query that is padding on the left sees no key, and its result is 0 already.
    return without_padding(out.transpose(0, 1), mask).transpose(0, 1) if mask.ahead or end is not None else out
