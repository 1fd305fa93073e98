"""The tiles of the fused kernels: a square of queries by keys, read, multiplied, aligned, masked and dropped out.

Query i scores key j with row T - 1 - i + j of r (row S - 1 is distance 0, later rows are keys ahead), so a square tile
of scores needs a strip of r two tiles long. The strip's product is computed tile by tile on the tensor cores. Then each
row moves left by its own distance inside the tile. Two neighbouring tiles hold the BLOCK entries that it needs, in
different columns, so one selection and one rotation (`slide`) are enough, and both stay in registers. The example of
Appendix B, BLOCK = 2, only the columns needed:

    first | second        selected        rotated by 1 - i
    . a   | b .           b a             a b
    c d   | . .           c d             c d

Dropout's masks are a function of (seed, row, head, query, key), computed where they are needed.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def load(base, first, low, high, stride, BLOCK: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows first, ..., first + BLOCK - 1 of a matrix; rows outside [low, high) are 0 and not read."""
    row = first + tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK_K)[None, :]
    inside = (row >= low) & (row < high) & (column < K)
    return tl.load(base + row.to(tl.int64) * stride + column, mask=inside, other=0.0)


@triton.jit
@no_type_check
def store(base, first, high, stride, values, BLOCK: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    row = first + tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK_K)[None, :]
    at = base + row.to(tl.int64) * stride + column
    tl.store(at, values.to(base.dtype.element_ty), mask=(row < high) & (column < K))


@triton.jit
@no_type_check
def slide(first, second, by, BLOCK: tl.constexpr):
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
def keep_mask(seed, head, i, j, threshold):
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
def program(length, begin, H, BLOCK: tl.constexpr):
    """This program's index among all heads of all rows, its row, from `begin` on, and head, in 64 bits, and the start
    of its block."""
    blocks = tl.cdiv(length, BLOCK)
    head = (begin * H + tl.program_id(0) // blocks).to(tl.int64)
    return head, head // H, head % H, tl.program_id(0) % blocks * BLOCK


@triton.jit
@no_type_check
def product(rows, columns, PRECISION: tl.constexpr):
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
def block_of_queries(lows, highs, begin, H, T, S, window, ahead, BOTH: tl.constexpr, BLOCK: tl.constexpr):
    """A program's block of queries: `program`, and the keys [low, high) that some of them see."""
    head, b, h, first = program(T, begin, H, BLOCK)
    first = (tl.cdiv(T, BLOCK) - 1) * BLOCK - first  # the longest rows start first
    low, _ = seen_keys(lows, None, b, first, T, S, window, ahead, BOTH)
    _, high = seen_keys(None, highs, b, tl.minimum(first + BLOCK, T) - 1, T, S, window, ahead, BOTH)
    return head, b, h, first, tl.maximum(low, 0), high


@triton.jit
@no_type_check
def seen_keys(lows, highs, b, i, T, S, window, ahead, BOTH: tl.constexpr):
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
def hides(
    lows, highs, b, query, key, T, S, window, ahead, BOTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Whether in the tile from this query and key on some query does not see some key. Most tiles need no mask. In
    forward it depends on the card, BRANCH, whether a branch is worth it.
    """
    low, _ = seen_keys(lows, None, b, tl.minimum(query + BLOCK, T) - 1, T, S, window, ahead, BOTH)
    _, high = seen_keys(None, highs, b, query, T, S, window, ahead, BOTH)
    return (key < low) | (key + BLOCK > high)


@triton.jit
@no_type_check
def row_keys(lows, highs, b, T, S):
    """Keys [oldest, newest): no query of the row sees others."""
    oldest, newest = 0, S
    if lows is not None:
        oldest = tl.maximum(tl.load(lows + b * T), 0)
    if highs is not None:
        newest = tl.load(highs + b * T + T - 1)
    return oldest, newest


@triton.jit
@no_type_check
def count_below(numbers, below, T, BLOCK: tl.constexpr):
    """How many of T numbers are less than `below`."""
    count = 0
    for start in range(0, T, BLOCK):
        i = start + tl.arange(0, BLOCK)
        count += tl.sum((tl.load(numbers + i, mask=i < T, other=below) < below).to(tl.int32), 0)
    return count


@triton.jit
@no_type_check
def stored_gradients(d_scores, i, j, low, high, T, width):
    """Elements of what `backward_keys` wrote, 0 where a query does not see a key: it sees [low, high)."""
    seen = (j >= tl.maximum(low, 0)) & (j < high) & (i < T)
    return tl.load(d_scores + i.to(tl.int64) * width + j, mask=seen, other=0.0)
