"""Fused kernels of relative attention for a GPU, in Triton, made of `tiles`. `ops/triton.py` launches them.

The softmax is computed online and keeps the logarithm of its sum, from which backward computes the probabilities again.
Backward has four launches: delta, the sum of each query's probabilities times their gradients; keys with the values,
which write the scores' gradients to memory; queries with the biases, and distances, which read them. Query i's entries
of one distance lie in column i plus a constant of its row, so reading them by distance needs no rotation. Nothing is
added atomically, so a run repeats bit by bit.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from .tiles import (
    block_of_queries,
    count_below,
    hides,
    keep_mask,
    load,
    product,
    program,
    row_keys,
    seen_keys,
    slide,
    store,
    stored_gradients,
)

# S grows with memory, so a kernel specialised for multiples of 16 would be compiled twice. Triton reads the source of
# kernels, so a type checker must not wrap them.
_jit = triton.jit(do_not_specialize=["begin", "end_row", "T", "S", "window", "ahead", "threshold"])


@_jit
@no_type_check
def forward(
    q, k, v, r, content_bias, position_bias, lows, highs, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, r_h, r_s,
    begin, end_row, H, T, S, window, ahead, factor, seed, threshold, keep_scale, out, lse,
    BOTH: tl.constexpr, PRECISION: tl.constexpr, BRANCH: tl.constexpr,
    DROPOUT: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head: `out` [B, T, H, K] and `lse` [B, H, T], in base 2."""
    head, b, h, first, low, high = block_of_queries(lows, highs, begin, H, T, S, window, ahead, BOTH, BLOCK)
    q, k, v, r = q + b * q_b + h * q_h, k + b * k_b + h * k_h, v + b * v_b + h * v_h, r + h * r_h
    q_rows = load(q, first, 0, T, q_t, BLOCK, K, BLOCK_K)
    content_q = (q_rows + load(content_bias, h, 0, H, K, 1, K, BLOCK_K)).to(q_rows.dtype)
    position_q = (q_rows + load(position_bias, h, 0, H, K, 1, K, BLOCK_K)).to(q_rows.dtype)
    # The strip begins at the row of r of the last query and the first key: T - 1 - (first + BLOCK - 1) + low.
    r_rows = load(r, T - BLOCK - first + low, 0, S + ahead, r_s, BLOCK, K, BLOCK_K)
    near = product(position_q, r_rows, PRECISION)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    result = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    for key in range(low, high, BLOCK):
        k_rows = load(k, key, low, high, k_s, BLOCK, K, BLOCK_K)
        r_rows = load(r, T - first + key, 0, S + ahead, r_s, BLOCK, K, BLOCK_K)
        far = product(position_q, r_rows, PRECISION)
        score = slide(near, far, BLOCK - 1 - tl.arange(0, BLOCK)[:, None], BLOCK)
        score += product(content_q, k_rows, PRECISION)
        near = far
        i = first + tl.arange(0, BLOCK)[:, None]
        j = key + tl.arange(0, BLOCK)[None, :]
        score *= factor
        if hides(lows, highs, b, first, key, T, S, window, ahead, BOTH, BLOCK) if BRANCH else True:
            begin_keys, end_keys = seen_keys(lows, highs, b, i, T, S, window, ahead, BOTH)
            score = tl.where((j >= begin_keys) & (j < end_keys), score, float("-inf"))
        before = largest
        largest = tl.maximum(largest, tl.max(score, 1))
        shift = tl.where(largest == float("-inf"), 0.0, largest)  # a row that has seen no key yet
        probability = tl.exp2(score - shift[:, None])
        shrink = tl.exp2(before - shift)
        total = total * shrink + tl.sum(probability, 1)
        if DROPOUT:
            probability = tl.where(keep_mask(seed, head, i, j, threshold), probability, 0.0)
        v_rows = load(v, key, low, high, v_s, BLOCK, K, BLOCK_K)
        result = tl.dot(probability.to(v_rows.dtype), v_rows, result * shrink[:, None], input_precision=PRECISION)
    sees_none = total == 0
    total = tl.where(sees_none, 1.0, total)
    result *= (keep_scale / total)[:, None]
    store(out + (b * T * H + h) * K, first, T, H * K, result, BLOCK, K, BLOCK_K)
    query = first + tl.arange(0, BLOCK)
    logarithm = tl.where(sees_none, 0.0, largest + tl.log2(total))
    tl.store(lse + head * T + query, logarithm, mask=query < T)


@_jit
@no_type_check
def backward_delta(
    q, k, v, r, content_bias, position_bias, lows, highs, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, r_h, r_s,
    begin, end_row, H, T, S, window, ahead, factor, seed, threshold, keep_scale,
    lse, d_out, o_b, o_h, o_t, delta, scale, d_scores, width, out, BOTH: tl.constexpr,
    PRECISION: tl.constexpr, DROPOUT: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of queries: `delta` [B, H, T], the sum of the result times its gradient."""
    head, b, h, first = program(T, begin, H, BLOCK)
    d_rows = load(d_out + b * o_b + h * o_h, first, 0, T, o_t, BLOCK, K, BLOCK_K)
    out_rows = load(out + (b * T * H + h) * K, first, 0, T, H * K, BLOCK, K, BLOCK_K)
    # Computed by the same product as d_probability, so where one key has all the probability, they are equal.
    every = product(d_rows, out_rows, PRECISION)
    own = tl.arange(0, BLOCK)[:, None] == tl.arange(0, BLOCK)[None, :]
    query = first + tl.arange(0, BLOCK)
    tl.store(delta + head * T + query, tl.sum(tl.where(own, every, 0.0), 1), mask=query < T)


@_jit
@no_type_check
def backward_keys(
    q, k, v, r, content_bias, position_bias, lows, highs, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, r_h, r_s,
    begin, end_row, H, T, S, window, ahead, factor, seed, threshold, keep_scale,
    lse, d_out, o_b, o_h, o_t, delta, scale, d_scores, width, d_k, d_v, BOTH: tl.constexpr,
    PRECISION: tl.constexpr, DROPOUT: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of keys: `d_k` and `d_v` [B, S, H, K], and its tiles of `d_scores` [rows, H, T, width].

    The tiles are those of `backward_queries` and have its size. All of a tile is written, also what is hidden; `width`
    is a multiple of BLOCK.
    """
    head, b, h, first = program(S, begin, H, BLOCK)
    q, k, v, r = q + b * q_b + h * q_h, k + b * k_b + h * k_h, v + b * v_b + h * v_h, r + h * r_h
    d_out += b * o_b + h * o_h
    lse, delta = lse + head * T, delta + head * T
    d_scores += (head - begin * H) * T * width
    oldest, newest = row_keys(lows, highs, b, T, S)
    # The queries that may see these keys: i >= j - (S - T) - ahead of the first, i < j - (S - T) + window of the last.
    low = tl.maximum(tl.maximum(first, oldest) - (S - T) - (ahead if BOTH else 0), 0)
    high = tl.minimum(first + BLOCK - 1 - (S - T) + window, T)
    if lows is not None:  # documents that begin later do not see this block
        high = count_below(lows + b * T, first + BLOCK, T, BLOCK)
    if highs is not None:  # nor do those that end before it
        low = count_below(highs + b * T, first + 1, T, BLOCK)
    low = low // BLOCK * BLOCK
    k_rows = load(k, first, oldest, newest, k_s, BLOCK, K, BLOCK_K)
    v_rows = load(v, first, oldest, newest, v_s, BLOCK, K, BLOCK_K)
    row = tl.arange(0, BLOCK)[:, None]
    j = first + tl.arange(0, BLOCK)[None, :]
    d_key = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    d_value = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    content_bias_row = load(content_bias, h, 0, H, K, 1, K, BLOCK_K).to(tl.float32)
    position_bias_row = load(position_bias, h, 0, H, K, 1, K, BLOCK_K).to(tl.float32)
    for query in range(low, high, BLOCK):
        q_rows = load(q, query, 0, T, q_t, BLOCK, K, BLOCK_K)
        # In fp32 and times `factor`, because the compiler then keeps these tiles in shared memory, not in registers.
        content_q = ((q_rows + content_bias_row) * factor).to(q.dtype.element_ty)
        position_q = ((q_rows + position_bias_row) * factor).to(q.dtype.element_ty)
        d_out_rows = load(d_out, query, 0, T, o_t, BLOCK, K, BLOCK_K)
        i = query + row
        strip = T - BLOCK + first - query
        R = S + ahead
        near = product(position_q, load(r, strip, 0, R, r_s, BLOCK, K, BLOCK_K), PRECISION)
        far = product(position_q, load(r, strip + BLOCK, 0, R, r_s, BLOCK, K, BLOCK_K), PRECISION)
        score = slide(near, far, BLOCK - 1 - row, BLOCK) + product(content_q, k_rows, PRECISION)
        d_probability = product(d_out_rows, v_rows, PRECISION)
        lse_row = tl.load(lse + i, mask=i < T, other=float("inf"))
        score -= lse_row
        if hides(lows, highs, b, query, first, T, S, window, ahead, BOTH, BLOCK):
            begin_keys, end_keys = seen_keys(lows, highs, b, i, T, S, window, ahead, BOTH)
            score = tl.where((j >= begin_keys) & (j < end_keys), score, float("-inf"))
        probability = tl.exp2(score)
        dropped = probability
        if DROPOUT:
            kept = keep_mask(seed, head, i, j, threshold)
            d_probability = tl.where(kept, d_probability * keep_scale, 0.0)
            dropped = tl.where(kept, probability * keep_scale, 0.0)
        d_value = tl.dot(tl.trans(dropped.to(d_out_rows.dtype)), d_out_rows, d_value, input_precision=PRECISION)
        delta_row = tl.load(delta + i, mask=i < T, other=0.0)
        d_score = (probability * (d_probability - delta_row)).to(content_q.dtype)
        tl.store(d_scores + i.to(tl.int64) * width + j, d_score, mask=i < T)
        d_key = tl.dot(tl.trans(d_score), content_q, d_key, input_precision=PRECISION)
    own = (b * S * H + h) * K
    # The queries were multiplied by `factor`, which is scale / log(2).
    store(d_k + own, first, S, H * K, d_key * 0.6931471805599453, BLOCK, K, BLOCK_K)
    store(d_v + own, first, S, H * K, d_value, BLOCK, K, BLOCK_K)


@_jit
@no_type_check
def backward_queries(
    q, k, v, r, content_bias, position_bias, lows, highs, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, r_h, r_s,
    begin, end_row, H, T, S, window, ahead, factor, seed, threshold, keep_scale,
    lse, d_out, o_b, o_h, o_t, delta, scale, d_scores, width, d_q, d_bias, BOTH: tl.constexpr,
    PRECISION: tl.constexpr, DROPOUT: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of queries: `d_q` [B, T, H, K], and a part of the biases' gradients, `d_bias` [B, H, blocks, 2, K]."""
    head, b, h, first, low, high = block_of_queries(lows, highs, begin, H, T, S, window, ahead, BOTH, BLOCK)
    k, r = k + b * k_b + h * k_h, r + h * r_h
    d_scores += (head - begin * H) * T * width
    R = S + ahead
    i = first + tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    d_content = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    d_position = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    for key in range(low // BLOCK * BLOCK, tl.where(low < high, high, 0), BLOCK):
        d_score = tl.load(d_scores + i.to(tl.int64) * width + key + column, mask=i < T, other=0.0)
        k_rows = load(k, key, low, high, k_s, BLOCK, K, BLOCK_K)
        d_content = tl.dot(d_score, k_rows, d_content, input_precision=PRECISION)
    oldest, newest = seen_keys(lows, highs, b, i, T, S, window, ahead, BOTH)
    for distance in range(T - BLOCK - first + low, tl.minimum(T - 1 - first + high, R), BLOCK):
        j = distance + column - (T - 1) + i  # the key that query i has at this row of r
        d_score = stored_gradients(d_scores, i, j, oldest, newest, T, width)
        r_rows = load(r, distance, 0, R, r_s, BLOCK, K, BLOCK_K)
        d_position = tl.dot(d_score, r_rows, d_position, input_precision=PRECISION)
    own = (b * T * H + h) * K
    store(d_q + own, first, T, H * K, (d_content + d_position) * scale, BLOCK, K, BLOCK_K)
    blocks = tl.cdiv(T, BLOCK)
    part = 2 * (head * blocks + first // BLOCK)  # the caller adds these up in a fixed order
    parts = 2 * end_row * H * blocks
    store(d_bias, part, parts, K, tl.sum(d_content * scale, 0)[None, :], 1, K, BLOCK_K)
    store(d_bias, part + 1, parts, K, tl.sum(d_position * scale, 0)[None, :], 1, K, BLOCK_K)


@_jit
@no_type_check
def backward_distances(
    q, k, v, r, content_bias, position_bias, lows, highs, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, r_h, r_s,
    begin, end_row, H, T, S, window, ahead, factor, seed, threshold, keep_scale,
    lse, d_out, o_b, o_h, o_t, delta, scale, d_scores, width, d_r, parts, BOTH: tl.constexpr,
    PRECISION: tl.constexpr, DROPOUT: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of distances, from every row of the batch whose index is the program's modulo `parts`: a part of their
    gradient, `d_r` [parts, R, H, K]."""
    R = S + ahead
    _, part, h, first = program(R, 0, H, BLOCK)
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    d_row = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    bias_row = load(position_bias, h, 0, H, K, 1, K, BLOCK_K)
    for each in range(begin + part, end_row, parts):
        b = tl.cast(each, tl.int64)
        scores = d_scores + ((b - begin) * H + h) * T * width
        oldest, newest = row_keys(lows, highs, b, T, S)
        # Row c of r is key j = c - (T - 1) + i of query i. If all distances are beyond the window, there is no query.
        low = tl.maximum(oldest + T - BLOCK - first, 0)
        high = tl.where(first + BLOCK <= S - window, low, tl.minimum(newest + T - 1 - first, T) if BOTH else T)
        for query in range(low, high, BLOCK):
            i = query + row
            q_rows = load(q + b * q_b + h * q_h, query, low, high, q_t, BLOCK, K, BLOCK_K)
            position_q = (q_rows + bias_row).to(q_rows.dtype)
            j = first + column - (T - 1) + i
            begin_keys, end_keys = seen_keys(lows, highs, b, i, T, S, window, ahead, BOTH)
            d_score = stored_gradients(scores, i, j, begin_keys, end_keys, T, width)
            d_row = tl.dot(tl.trans(d_score), position_q, d_row, input_precision=PRECISION)
    store(d_r + (part * R * H + h) * K, first, R, H * K, d_row * scale, BLOCK, K, BLOCK_K)
