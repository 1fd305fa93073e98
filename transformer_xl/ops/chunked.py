"""Training on a CPU: attention in blocks of a few heads and queries, so small that their scores stay in the cache.

A block (heads, rows, queries) uses the keys from the first to the last that its queries see, so most masked scores are
never computed. Nothing of size T x S is kept: backward computes the probabilities of each block again.

A block's position term is a product with the encodings of its distances. A view with rows one element shorter shifts it
(as in `strided`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..mistake import Mistake
from .call import NO_TRANSFORM, Call, first_derivative, in_transform
from .dropout import keep_mask
from .masks import ALIGNED, Mask, hide_scores, next_multiple, shifted_view, with_spare, without_padding

SCORES = 1 << 20
"""Maximum number of scores in a block."""
QUERIES = 256
"""Maximum number of queries in a block. Shorter blocks skip more masked scores but need more calls."""


def attend(call: Call) -> Float[Tensor, "B H T K"]:
    """See `relative_attention`. Inside, the first axis is heads: one product with `r` per head then covers all rows."""
    q, k, v, r, content_bias, position_bias, mask, dropout_p, scale = call
    if q.device.type == "cuda":
        raise Mistake("backend chunked cannot serve this call: it is for the CPU, got cuda. Use auto or strided.")
    if in_transform():
        raise Mistake(f"backend chunked cannot serve this call: {NO_TRANSFORM}. Use auto or strided.")
    q_HBTK = (q * scale).transpose(0, 1)
    content_q = q_HBTK + (content_bias * scale)[:, None, None]
    position_q = q_HBTK + (position_bias * scale)[:, None, None]
    seed = int(torch.randint(1 << 62, (), device="cpu")) if dropout_p else 0
    r = r[:, r.shape[1] - k.shape[2] - mask.ahead :]
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    return _ChunkedAttention.apply(content_q, position_q, k, v, r, mask, dropout_p, seed).transpose(0, 1)


class _Block(NamedTuple):
    """Some heads, rows and queries, and the keys from the first to the last that any of these queries sees."""

    heads: slice
    rows: slice
    queries: slice
    keys: slice
    memory: int
    """The number of these keys before the first query's own."""
    ahead: int
    """The number of these keys that the first query sees after its own: the farthest distance ahead is -`ahead`."""

    def cut(self, x: Tensor, along: slice) -> Tensor:
        """This block's part of `H B L K` as `G l K`, where G is the number of heads times rows."""
        return x[self.heads, self.rows, along].flatten(0, 1)

    def distances(self, r: Tensor, mask: Mask) -> slice:
        """The rows of `r`, which ends at distance -`mask.ahead`, that this block needs, with spare ones in front."""
        end = r.shape[1] - mask.ahead + self.ahead
        return slice(end - next_multiple(self.memory + self.queries.stop - self.queries.start + self.ahead), end)

    def by_head(self, x: Tensor) -> Tensor:
        """The block's queries of `H B L K` as `h l K`: all rows of a head in one axis."""
        return x[self.heads, self.rows, self.queries].flatten(1, 2)

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Write the results of the block's queries into `H B L K`."""
        target = whole[self.heads, self.rows, self.queries]
        target.copy_(part.view_as(target))


def _blocks(q: Tensor, k: Tensor, mask: Mask) -> Iterator[_Block]:
    (H, B, T, _), S = q.shape, k.shape[2]
    t, attn_len = min(T, QUERIES), mask.attn_len
    # So many pairs of a head and a row fit: all rows of several heads, or some rows of one head.
    fit = max(1, SCORES // (t * (S if attn_len is None else min(S, t + attn_len - 1 + mask.ahead))))
    h, b = max(1, fit // B), min(B, fit)
    for head in range(0, H, h):
        for row in range(0, B, b):
            for query in range(0, T, t):
                own, end = S - T + query, min(query + t, T)
                first = 0 if attn_len is None else max(0, own + 1 - attn_len)
                heads, rows = slice(head, min(head + h, H)), slice(row, min(row + b, B))
                bound = mask.part(0, rows, slice(query, end)).first
                first = first if bound is None else max(first, min(own, int(bound.min())))
                keys = slice(first, min(S - T + end + mask.ahead, S))
                yield _Block(heads, rows, slice(query, end), keys, own - first, min(mask.ahead, T - 1 - query))


class _ChunkedAttention(torch.autograd.Function):
    """Attention by blocks. All inputs but `r` are `H B L K`; queries are scaled and have their biases added. Block i
    draws its dropout mask from `seed + i`."""

    @staticmethod
    def forward(ctx, content_q, position_q, k, v, r, mask, dropout_p, seed):
        content_q, position_q, k, v = (x.contiguous() for x in (content_q, position_q, k, v))
        r = with_spare(r, next_multiple(r.shape[1]) + (ALIGNED if mask.ahead else 0))
        ctx.save_for_backward(content_q, position_q, k, v, r)
        ctx.options = mask, dropout_p, seed
        out = torch.empty_like(content_q)
        for number, block in enumerate(_blocks(content_q, k, mask)):
            probability, _ = _probability(block, content_q, position_q, k, r, mask)
            keep = _keep(probability, dropout_p, seed + number)
            used = probability if keep is None else probability.mul_(keep)
            block.put(torch.bmm(used, block.cut(v, block.keys)), out)
        out = out if dropout_p == 0 else out.mul_(1 / (1 - dropout_p))
        return without_padding(out, k.shape[2] - out.shape[2], mask)

    @staticmethod
    @first_derivative
    def backward(ctx, d_out: Tensor):
        content_q, position_q, k, v, r = ctx.saved_tensors
        mask, dropout_p, seed = ctx.options
        d_out = without_padding(d_out / (1 - dropout_p), k.shape[2] - d_out.shape[2], mask)
        d_content_q, d_position_q = torch.empty_like(content_q), torch.empty_like(position_q)
        d_k, d_v, d_r = (x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (k, v, r))
        for number, block in enumerate(_blocks(content_q, k, mask)):
            d_attended, content = block.cut(d_out, block.queries), block.cut(content_q, block.queries)
            keys, distances = (block.heads, block.rows, block.keys), block.distances(r, mask)

            probability, product = _probability(block, content_q, position_q, k, r, mask)
            keep = _keep(probability, dropout_p, seed + number)
            d_probability = torch.bmm(d_attended, block.cut(v, block.keys).mT)
            used = probability
            if keep is not None:
                used, d_probability = probability * keep, d_probability.mul_(keep)
            d_v[keys] += torch.bmm(used.mT, d_attended).view_as(d_v[keys])
            d_score = d_probability  # in place, because the system allocates tensors of this size anew in each block
            torch.ops.aten._softmax_backward_data.out(d_probability, probability, -1, k.dtype, grad_input=d_score)
            block.put(torch.bmm(d_score, block.cut(k, block.keys)), d_content_q)
            d_k[keys] += torch.bmm(d_score.mT, content).view_as(d_k[keys])
            product.zero_()  # 0 at distances that no key of the block has
            shifted_view(product, d_score.shape, block.memory, block.ahead).copy_(d_score)
            block.put(torch.bmm(product, r[block.heads, distances]), d_position_q)
            d_r[block.heads, distances] += torch.bmm(product.mT, block.by_head(position_q))
        d_r = d_r[:, -k.shape[2] - mask.ahead :]
        return d_content_q, d_position_q, d_k.to(k.dtype), d_v.to(v.dtype), d_r.to(r.dtype), None, None, None


def _probability(
    block: _Block, content_q: Tensor, position_q: Tensor, k: Tensor, r: Tensor, mask: Mask
) -> tuple[Tensor, Tensor]:
    """The block's probabilities, `G t s`, and the product of its queries and its distances, `h n w`."""
    score = torch.bmm(block.cut(content_q, block.queries), block.cut(k, block.keys).mT)
    product = torch.bmm(block.by_head(position_q), r[block.heads, block.distances(r, mask)].mT)
    # torch.compile would write code for each block, for minutes; it stops at the offset, which is no tensor
    score += shifted_view(product, score.shape, block.memory, block.ahead, int(product.storage_offset()))
    own = mask.part(block.keys.start, block.rows, block.queries)
    if own.first is not None and own.first.max() <= 0:  # it hides none of the block's keys
        own = own._replace(first=None)
    hide_scores(score.unflatten(0, (product.shape[0], -1)), block.memory, own)
    return torch.softmax(score, -1, out=score), product


def _keep(probability: Tensor, dropout_p: float, seed: int) -> Tensor | None:
    """The block's dropout mask, which is the same in forward and backward."""
    return keep_mask(probability.shape, dropout_p, torch.Generator().manual_seed(seed)) if dropout_p else None
