"""Fused kernels of relative attention for a GPU, in Triton. `ops/triton.py` launches them.

Query i scores key j with row T - 1 - i + j of r (the last row is distance 0), so a square tile of scores needs a
strip of r two tiles long. The strip's product is computed tile by tile on the tensor cores. Then each row moves left by
its own distance inside the tile. Two neighbouring tiles hold the BLOCK entries that it needs, in different columns, so
one selection and one rotation (`_slide`) are enough, and both stay in registers. The example of Appendix B, BLOCK = 2,
only the columns needed:

    first | second        selected        rotated by 1 - i
    . a   | b .           b a             a b
    c d   | . .           c d             c d

The softmax is computed online and keeps the logarithm of its sum, from which backward computes the probabilities again.
Backward has four launches: delta, the sum of each query's probabilities times their gradients; keys with the values,
which write the scores' gradients to memory; queries with the biases, and distances, which read them. Query i's entries
of one distance lie in column i plus a constant of its row, so reading them by distance needs no rotation. Nothing is
added atomically, so a run repeats bit by bit. Dropout's masks are a function of (seed, row, head, query, key), computed
where they are needed.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

# S grows with memory, so a kernel specialised for multiples of 16 would be compiled twice. Triton reads the source of
# kernels, so a type checker must not wrap them.
_jit = triton.jit(do_not_specialize=["begin", "end_row", "T", "S", "window", "ahead", "threshold"])


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
def _slide(first, second, by, BLOCK: tl.constexpr):
    """The BLOCK entries of row i that begin at by[i] along two neighbouring tiles."""
    return _rotate(tl.where(tl.arange(0, BLOCK)[None, :] >= by, first, second), by, BLOCK)


@triton.jit
@no_type_check
def _rotate(x, by, BLOCK: tl.constexpr):
    """Row i of `x`, rotated left by by[i].

    A warp that has multiplied 16 rows holds each 8 columns in 4 lanes, two neighbours in each. So the lowest bit of
    `by` exchanges registers of a lane, the next two move values between 4 lanes, and the others exchange registers. The
    order of axes below is the one in which the compiler needs no shared memory for this; any other gives the same
    numbers.
    """
    WARPS: tl.constexpr = BLOCK // 16
    CHUNKS: tl.constexpr = BLOCK // 8
    by = tl.reshape(tl.permute(tl.reshape(by, [WARPS, 2, 8]), [1, 0, 2]), [BLOCK, 1])
    x = tl.permute(tl.reshape(x, [WARPS, 2, 8, CHUNKS, 4, 2]), [3, 1, 0, 2, 4, 5])
    even, odd = tl.split(tl.reshape(x, [CHUNKS, BLOCK, 4, 2]))
    is_odd = (by & 1)[None, :, :] != 0
    pairs = (by >> 1) & 3
    even, odd = tl.where(is_odd, odd, even), tl.where(is_odd, even, odd)
    even = _rotate_pairs(even, by >> 3, pairs, BLOCK)
    odd = _rotate_pairs(odd, by >> 3, pairs + (by & 1), BLOCK)
    x = tl.reshape(tl.join(even, odd), [CHUNKS, 2, WARPS, 8, 4, 2])
    return tl.reshape(tl.permute(x, [2, 1, 3, 0, 4, 5]), [BLOCK, BLOCK])


@triton.jit
@no_type_check
def _rotate_pairs(x, chunks, by, BLOCK: tl.constexpr):
    """`x` [chunk, row, lane], each row rotated left by `chunks` chunks and `by` lanes, at most 4."""
    CHUNKS: tl.constexpr = BLOCK // 8
    SIZE: tl.constexpr = BLOCK * 4
    lane = tl.arange(0, 4)[None, :]
    chunks = tl.reshape(chunks + (lane < by).to(tl.int32), [1, SIZE])
    x = _rotate_chunks(tl.reshape(x, [CHUNKS, SIZE]), chunks, 1, CHUNKS, SIZE)
    if CHUNKS > 2:
        x = _rotate_chunks(x, chunks, 2, CHUNKS, SIZE)
    if CHUNKS > 4:
        x = _rotate_chunks(x, chunks, 4, CHUNKS, SIZE)
    lane = tl.reshape((lane + by) & 3, [1, 2, BLOCK // 16, 8, 4])
    lane = tl.reshape(tl.broadcast_to(lane, [CHUNKS, 2, BLOCK // 16, 8, 4]), [CHUNKS * 2, BLOCK // 16, 8, 4])
    x = tl.gather(tl.reshape(x, [CHUNKS * 2, BLOCK // 16, 8, 4]), lane, 3)
    return tl.reshape(x, [CHUNKS, BLOCK, 4])


@triton.jit
@no_type_check
def _rotate_chunks(x, chunks, STEP: tl.constexpr, CHUNKS: tl.constexpr, SIZE: tl.constexpr):
    """`x` [CHUNKS, SIZE], each column rotated by STEP chunks where this bit of its `chunks` is set."""
    first, second = _halves(x, STEP, CHUNKS, SIZE)
    moved = tl.reshape(tl.broadcast_to((chunks & STEP) != 0, [STEP, SIZE]), [1, STEP * SIZE])
    after = _next_chunks(first, STEP, CHUNKS // 2, SIZE)
    return _joined(tl.where(moved, second, first), tl.where(moved, after, second), STEP, CHUNKS, SIZE)


@triton.jit
@no_type_check
def _next_chunks(x, STEP: tl.constexpr, CHUNKS: tl.constexpr, SIZE: tl.constexpr):
    """`x` [CHUNKS / STEP, STEP * SIZE], rotated by one."""
    if CHUNKS == STEP:
        return x
    else:
        first, second = _halves(x, STEP, CHUNKS, SIZE)
        x = _joined(second, _next_chunks(first, STEP, CHUNKS // 2, SIZE), STEP, CHUNKS, SIZE)
        return tl.reshape(x, [CHUNKS // STEP, STEP * SIZE])


@triton.jit
@no_type_check
def _halves(x, STEP: tl.constexpr, CHUNKS: tl.constexpr, SIZE: tl.constexpr):
    """The chunks whose bit STEP is 0, and the others."""
    return tl.split(tl.permute(tl.reshape(x, [CHUNKS // (2 * STEP), 2, STEP * SIZE]), [0, 2, 1]))


@triton.jit
@no_type_check
def _joined(first, second, STEP: tl.constexpr, CHUNKS: tl.constexpr, SIZE: tl.constexpr):
    return tl.reshape(tl.permute(tl.join(first, second), [0, 2, 1]), [CHUNKS, SIZE])


@triton.jit
@no_type_check
def _keep_mask(seed, head, i, j, threshold):
    """Whether dropout keeps query i's probability of key j.

    Philox gives each query two random numbers, and a hash of two multiplications mixes the key's index into them,
    because Philox for each element would cost more than the products.
    """
    zero = i * 0
    seed = tl.load(seed)
    key, other_key, _, _ = tl.philox(seed, i, zero + head.to(tl.int32), zero, zero)
    x = j.to(tl.uint32) * 0x9E3779B9 + key
    x = (x ^ (x >> 16)) * 0x7FEB352D ^ other_key
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return (x >> 1).to(tl.int32) >= threshold


@triton.jit
@no_type_check
def _program(length, begin, H, BLOCK: tl.constexpr):
    """This program's index among all heads of all rows, its row, from `begin` on, and head, in 64 bits, and the start
    of its block."""
    blocks = tl.cdiv(length, BLOCK)
    head = (begin * H + tl.program_id(0) // blocks).to(tl.int64)
    return head, head // H, head % H, tl.program_id(0) % blocks * BLOCK


@triton.jit
@no_type_check
def _product(rows, columns, PRECISION: tl.constexpr):
    """`rows` by `columns`, transposed.

    In fp32 a thread holds whole rows in registers. Heads of 128 have too many numbers for that, so their product is a
    sum of four.
    """
    if (rows.dtype == tl.float32 and PRECISION == "ieee") and rows.shape[1] == 128:
        rows = tl.permute(tl.reshape(rows, [rows.shape[0], 4, 32]), [1, 0, 2])
        columns = tl.permute(tl.reshape(columns, [columns.shape[0], 4, 32]), [1, 2, 0])
        return tl.sum(tl.dot(rows, columns, input_precision=PRECISION), 0)
    else:
        return tl.dot(rows, tl.trans(columns), input_precision=PRECISION)


@triton.jit
@no_type_check
def _queries(lows, highs, begin, H, T, S, window, ahead, BOTH: tl.constexpr, BLOCK: tl.constexpr):
    """A program's block of queries: `_program`, and the keys [low, high) that some of them see."""
    head, b, h, first = _program(T, begin, H, BLOCK)
    first = (tl.cdiv(T, BLOCK) - 1) * BLOCK - first  # the longest rows start first
    low, _ = _seen_keys(lows, None, b, first, T, S, window, ahead, BOTH)
    _, high = _seen_keys(None, highs, b, tl.minimum(first + BLOCK, T) - 1, T, S, window, ahead, BOTH)
    return head, b, h, first, tl.maximum(low, 0), high


@triton.jit
@no_type_check
def _seen_keys(lows, highs, b, i, T, S, window, ahead, BOTH: tl.constexpr):
    """The keys [low, high) that query i sees: as stored for each query, or else by the window and what is ahead. Both
    grow with the query. A query from T on sees none or has no influence."""
    low = S - T + i - window + 1
    if lows is not None:
        low = tl.load(lows + b * T + i, mask=i < T, other=S)
    high = S - T + i + 1
    if BOTH:
        high = tl.minimum(high + ahead, S)
        if highs is not None:
            high = tl.load(highs + b * T + i, mask=i < T, other=S)
    return low, high


@triton.jit
@no_type_check
def _hides(
    lows, highs, b, query, key, T, S, window, ahead, BOTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Whether in the tile from this query and key on some query does not see some key. Most tiles need no mask.

    Whether it is worth to ask, BRANCH, depends on the card.
    """
    low, _ = _seen_keys(lows, None, b, tl.minimum(query + BLOCK, T) - 1, T, S, window, ahead, BOTH)
    _, high = _seen_keys(None, highs, b, query, T, S, window, ahead, BOTH)
    return (key < low) | (key + BLOCK > high)


@triton.jit
@no_type_check
def _scores(
    content_q, position_q, near, k_rows, r, r_s, lows, highs, b, first, key, T, S, window, ahead, factor,
    BOTH: tl.constexpr, PRECISION: tl.constexpr, BRANCH: tl.constexpr,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of scores in base 2 (-inf: hidden), the indices of its queries and keys, and the strip's far tile."""
    r_rows = _load(r, T - first + key, 0, S + ahead, r_s, BLOCK, K, BLOCK_K)
    far = _product(position_q, r_rows, PRECISION)
    score = _slide(near, far, BLOCK - 1 - tl.arange(0, BLOCK)[:, None], BLOCK)
    score += _product(content_q, k_rows, PRECISION)
    i = first + tl.arange(0, BLOCK)[:, None]
    j = key + tl.arange(0, BLOCK)[None, :]
    score *= factor
    if _hides(lows, highs, b, first, key, T, S, window, ahead, BOTH, BLOCK) if BRANCH else True:
        low, high = _seen_keys(lows, highs, b, i, T, S, window, ahead, BOTH)
        score = tl.where((j >= low) & (j < high), score, float("-inf"))
    return score, i, j, far


@_jit
@no_type_check
def forward(
    q, k, v, r, content_bias, position_bias, lows, highs, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, r_h, r_s,
    begin, end_row, H, T, S, window, ahead, factor, seed, threshold, keep_scale, out, lse,
    BOTH: tl.constexpr, PRECISION: tl.constexpr, BRANCH: tl.constexpr,
    DROPOUT: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head: `out` [B, T, H, K] and `lse` [B, H, T], in base 2."""
    head, b, h, first, low, high = _queries(lows, highs, begin, H, T, S, window, ahead, BOTH, BLOCK)
    q, k, v, r = q + b * q_b + h * q_h, k + b * k_b + h * k_h, v + b * v_b + h * v_h, r + h * r_h
    q_rows = _load(q, first, 0, T, q_t, BLOCK, K, BLOCK_K)
    content_q = q_rows + _load(content_bias, h, 0, H, K, 1, K, BLOCK_K)
    position_q = q_rows + _load(position_bias, h, 0, H, K, 1, K, BLOCK_K)
    r_rows = _load(r, T - BLOCK - first + low, 0, S + ahead, r_s, BLOCK, K, BLOCK_K)
    near = _product(position_q, r_rows, PRECISION)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    result = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    for key in range(low, high, BLOCK):
        k_rows = _load(k, key, low, high, k_s, BLOCK, K, BLOCK_K)
        score, i, j, near = _scores(
            content_q, position_q, near, k_rows, r, r_s, lows, highs, b, first, key,
            T, S, window, ahead, factor, BOTH, PRECISION, BRANCH, K, BLOCK_K, BLOCK,
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
    head, b, h, first = _program(T, begin, H, BLOCK)
    d_rows = _load(d_out + b * o_b + h * o_h, first, 0, T, o_t, BLOCK, K, BLOCK_K)
    out_rows = _load(out + (b * T * H + h) * K, first, 0, T, H * K, BLOCK, K, BLOCK_K)
    # Computed by the same product as d_probability, so where one key has all the probability, they are equal.
    every = _product(d_rows, out_rows, PRECISION)
    own = tl.arange(0, BLOCK)[:, None] == tl.arange(0, BLOCK)[None, :]
    query = first + tl.arange(0, BLOCK)
    tl.store(delta + head * T + query, tl.sum(tl.where(own, every, 0.0), 1), mask=query < T)


@_jit
@no_type_check
def backward_keys(
    q, k, v, r, content_bias, position_bias, lows, highs, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, r_h, r_s,
    begin, end_row, H, T, S, window, ahead, factor, seed, threshold, keep_scale,
    lse, d_out, o_b, o_h, o_t, delta, scale, d_scores, width, d_k, d_v, BOTH: tl.constexpr,
    PRECISION: tl.constexpr, BRANCH: tl.constexpr,
    DROPOUT: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of keys: `d_k` and `d_v` [B, S, H, K], and its tiles of `d_scores` [rows, H, T, width].

    The tiles are those of `backward_queries` and have its size. All of a tile is written, also what is hidden; `width`
    is a multiple of BLOCK.
    """
    head, b, h, first = _program(S, begin, H, BLOCK)
    q, k, v, r = q + b * q_b + h * q_h, k + b * k_b + h * k_h, v + b * v_b + h * v_h, r + h * r_h
    d_out += b * o_b + h * o_h
    lse, delta = lse + head * T, delta + head * T
    d_scores += (head - begin * H) * T * width
    oldest, newest = _row_keys(lows, highs, b, T, S)
    low = tl.maximum(tl.maximum(first, oldest) - (S - T) - (ahead if BOTH else 0), 0)
    high = tl.minimum(first + BLOCK - 1 - (S - T) + window, T)
    if lows is not None:  # documents that begin later do not see this block
        high = _count(lows + b * T, first + BLOCK, T, BLOCK)
    if highs is not None:  # nor do those that end before it
        low = _count(highs + b * T, first + 1, T, BLOCK)
    low = low // BLOCK * BLOCK
    k_rows = _load(k, first, oldest, newest, k_s, BLOCK, K, BLOCK_K)
    v_rows = _load(v, first, oldest, newest, v_s, BLOCK, K, BLOCK_K)
    row = tl.arange(0, BLOCK)[:, None]
    j = first + tl.arange(0, BLOCK)[None, :]
    d_key = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    d_value = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    content_bias_row = _load(content_bias, h, 0, H, K, 1, K, BLOCK_K).to(tl.float32)
    position_bias_row = _load(position_bias, h, 0, H, K, 1, K, BLOCK_K).to(tl.float32)
    for query in range(low, high, BLOCK):
        q_rows = _load(q, query, 0, T, q_t, BLOCK, K, BLOCK_K)
        # In fp32 and times `factor`, because the compiler then keeps these tiles in shared memory, not in registers.
        content_q = ((q_rows + content_bias_row) * factor).to(q.dtype.element_ty)
        position_q = ((q_rows + position_bias_row) * factor).to(q.dtype.element_ty)
        d_out_rows = _load(d_out, query, 0, T, o_t, BLOCK, K, BLOCK_K)
        i = query + row
        strip = T - BLOCK + first - query
        R = S + ahead
        near = _product(position_q, _load(r, strip, 0, R, r_s, BLOCK, K, BLOCK_K), PRECISION)
        far = _product(position_q, _load(r, strip + BLOCK, 0, R, r_s, BLOCK, K, BLOCK_K), PRECISION)
        score = _slide(near, far, BLOCK - 1 - row, BLOCK) + _product(content_q, k_rows, PRECISION)
        d_probability = _product(d_out_rows, v_rows, PRECISION)
        lse_row = tl.load(lse + i, mask=i < T, other=float("inf"))
        score -= lse_row
        if _hides(lows, highs, b, query, first, T, S, window, ahead, BOTH, BLOCK) if BRANCH else True:
            begin_keys, end_keys = _seen_keys(lows, highs, b, i, T, S, window, ahead, BOTH)
            score = tl.where((j >= begin_keys) & (j < end_keys), score, float("-inf"))
        probability = tl.exp2(score)
        dropped = probability
        if DROPOUT:
            kept = _keep_mask(seed, head, i, j, threshold)
            d_probability = tl.where(kept, d_probability * keep_scale, 0.0)
            dropped = tl.where(kept, probability * keep_scale, 0.0)
        d_value = tl.dot(tl.trans(dropped.to(d_out_rows.dtype)), d_out_rows, d_value, input_precision=PRECISION)
        delta_row = tl.load(delta + i, mask=i < T, other=0.0)
        d_score = (probability * (d_probability - delta_row)).to(content_q.dtype)
        tl.store(d_scores + i.to(tl.int64) * width + j, d_score, mask=i < T)
        d_key = tl.dot(tl.trans(d_score), content_q, d_key, input_precision=PRECISION)
    own = (b * S * H + h) * K
    # The queries were multiplied by `factor`, which is scale / log(2).
    _store(d_k + own, first, S, H * K, d_key * 0.6931471805599453, BLOCK, K, BLOCK_K)
    _store(d_v + own, first, S, H * K, d_value, BLOCK, K, BLOCK_K)


@_jit
@no_type_check
def backward_queries(
    q, k, v, r, content_bias, position_bias, lows, highs, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, r_h, r_s,
    begin, end_row, H, T, S, window, ahead, factor, seed, threshold, keep_scale,
    lse, d_out, o_b, o_h, o_t, delta, scale, d_scores, width, d_q, d_bias, BOTH: tl.constexpr,
    PRECISION: tl.constexpr, DROPOUT: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of queries: `d_q` [B, T, H, K], and a part of the biases' gradients, `d_bias` [B, H, blocks, 2, K]."""
    head, b, h, first, low, high = _queries(lows, highs, begin, H, T, S, window, ahead, BOTH, BLOCK)
    k, r = k + b * k_b + h * k_h, r + h * r_h
    d_scores += (head - begin * H) * T * width
    R = S + ahead
    i = first + tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    d_content = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    d_position = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    for key in range(low // BLOCK * BLOCK, tl.where(low < high, high, 0), BLOCK):
        d_score = tl.load(d_scores + i.to(tl.int64) * width + key + column, mask=i < T, other=0.0)
        k_rows = _load(k, key, low, high, k_s, BLOCK, K, BLOCK_K)
        d_content = tl.dot(d_score, k_rows, d_content, input_precision=PRECISION)
    oldest, newest = _seen_keys(lows, highs, b, i, T, S, window, ahead, BOTH)
    for distance in range(T - BLOCK - first + low, tl.minimum(T - 1 - first + high, R), BLOCK):
        j = distance + column - (T - 1) + i
        d_score = _stored(d_scores, i, j, oldest, newest, T, width)
        r_rows = _load(r, distance, 0, R, r_s, BLOCK, K, BLOCK_K)
        d_position = tl.dot(d_score, r_rows, d_position, input_precision=PRECISION)
    own = (b * T * H + h) * K
    _store(d_q + own, first, T, H * K, (d_content + d_position) * scale, BLOCK, K, BLOCK_K)
    blocks = tl.cdiv(T, BLOCK)
    part = 2 * (head * blocks + first // BLOCK)  # the caller adds these up in a fixed order
    parts = 2 * end_row * H * blocks
    _store(d_bias, part, parts, K, tl.sum(d_content * scale, 0)[None, :], 1, K, BLOCK_K)
    _store(d_bias, part + 1, parts, K, tl.sum(d_position * scale, 0)[None, :], 1, K, BLOCK_K)


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
    _, part, h, first = _program(R, 0, H, BLOCK)
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    d_row = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    bias_row = _load(position_bias, h, 0, H, K, 1, K, BLOCK_K)
    for each in range(begin + part, end_row, parts):
        b = tl.cast(each, tl.int64)
        scores = d_scores + ((b - begin) * H + h) * T * width
        oldest, newest = _row_keys(lows, highs, b, T, S)
        low = tl.maximum(oldest + T - BLOCK - first, 0)
        high = tl.where(first + BLOCK <= S - window, low, tl.minimum(newest + T - 1 - first, T) if BOTH else T)
        for query in range(low, high, BLOCK):
            i = query + row
            position_q = _load(q + b * q_b + h * q_h, query, low, high, q_t, BLOCK, K, BLOCK_K) + bias_row
            j = first + column - (T - 1) + i
            begin_keys, end_keys = _seen_keys(lows, highs, b, i, T, S, window, ahead, BOTH)
            d_score = _stored(scores, i, j, begin_keys, end_keys, T, width)
            d_row = tl.dot(tl.trans(d_score), position_q, d_row, input_precision=PRECISION)
    _store(d_r + (part * R * H + h) * K, first, R, H * K, d_row * scale, BLOCK, K, BLOCK_K)


@triton.jit
@no_type_check
def _row_keys(lows, highs, b, T, S):
    """Keys [oldest, newest): no query of the row sees others."""
    oldest, newest = 0, S
    if lows is not None:
        oldest = tl.maximum(tl.load(lows + b * T), 0)
    if highs is not None:
        newest = tl.load(highs + b * T + T - 1)
    return oldest, newest


@triton.jit
@no_type_check
def _count(numbers, below, T, BLOCK: tl.constexpr):
    """How many of T numbers are less than `below`."""
    count = 0
    for start in range(0, T, BLOCK):
        i = start + tl.arange(0, BLOCK)
        count += tl.sum((tl.load(numbers + i, mask=i < T, other=below) < below).to(tl.int32), 0)
    return count


@triton.jit
@no_type_check
def _stored(d_scores, i, j, low, high, T, width):
    """Elements of what `backward_keys` wrote, 0 where a query does not see a key: it sees [low, high)."""
    seen = (j >= tl.maximum(low, 0)) & (j < high) & (i < T)
    return tl.load(d_scores + i.to(tl.int64) * width + j, mask=seen, other=0.0)
