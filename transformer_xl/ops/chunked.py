"""Training on a CPU: attention in blocks of a few heads and queries, so small that their scores stay in the cache.

A block (heads, rows, queries) uses the keys from the first to the last that its queries see, so most masked scores are
never computed. Nothing of size T x S is kept: backward computes the probabilities of each block again.

A block's position term is a product with the encodings of its distances. A view with rows one element shorter shifts it
(as in `strided`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..mistake import Mistake
from .call import Call, first_derivative
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
    q_HBTK = (q * scale).transpose(0, 1)
    content_q = q_HBTK + (content_bias * scale)[:, None, None]
    position_q = q_HBTK + (position_bias * scale)[:, None, None]
    seed = int(torch.randint(1 << 62, ())) if dropout_p else 0
    r = r[:, r.shape[1] - k.shape[2] - mask.ahead :]
    k, v, options = k.transpose(0, 1), v.transpose(0, 1), _Options(mask, dropout_p, seed)
    return _ChunkedAttention.apply(content_q, position_q, k, v, r, options).transpose(0, 1)


class _Options(NamedTuple):
    mask: Mask
    dropout_p: float
    seed: int
    """The seed of the first block's dropout mask. Block i uses `seed + i`."""


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

    def by_head(self, x: Tensor) -> Tensor:
        """The block's queries of `H B L K` as `h l K`: all rows of a head in one axis."""
        return x[self.heads, self.rows, self.queries].flatten(1, 2)

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Write the results of the block's queries into `H B L K`."""
        target = whole[self.heads, self.rows, self.queries]
        target.copy_(part.view_as(target))


def _blocks(H: int, B: int, T: int, S: int, mask: Mask) -> Iterator[_Block]:
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
    """Attention by blocks. All inputs but `r` are `H B L K`; queries are scaled and have their biases added."""

    @staticmethod
    def forward(ctx, content_q, position_q, k, v, r, options: _Options):
        content_q, position_q, k, v = (x.contiguous() for x in (content_q, position_q, k, v))
        mask = options.mask
        r = with_spare(r, next_multiple(r.shape[1]) + (ALIGNED if mask.ahead else 0))
        ctx.save_for_backward(content_q, position_q, k, v, r)
        ctx.options = options
        out = torch.empty_like(content_q)
        work = _Work(content_q, position_q, k, r, options)
        for number, block in enumerate(work.blocks):
            probability = work.apply_dropout(work.probability(block), work.keep(block, number))
            block.put(torch.bmm(probability, block.cut(v, block.keys)), out)
        out = out if options.dropout_p == 0 else out.mul_(1 / (1 - options.dropout_p))
        return without_padding(out, k.shape[2] - out.shape[2], mask)

    @staticmethod
    @first_derivative
    def backward(ctx, d_out: Tensor):
        content_q, position_q, k, v, r = ctx.saved_tensors
        mask = ctx.options.mask
        d_out = without_padding(d_out / (1 - ctx.options.dropout_p), k.shape[2] - d_out.shape[2], mask)
        d_content_q, d_position_q = torch.empty_like(content_q), torch.empty_like(position_q)
        d_k, d_v, d_r = (x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (k, v, r))
        work = _Work(content_q, position_q, k, r, ctx.options)
        for number, block in enumerate(work.blocks):
            d_attended, content = block.cut(d_out, block.queries), block.cut(content_q, block.queries)
            position = block.by_head(position_q)
            keys = block.heads, block.rows, block.keys

            probability, keep = work.probability(block), work.keep(block, number)
            d_probability = work.buffer("score", probability.shape)
            torch.bmm(d_attended, block.cut(v, block.keys).mT, out=d_probability)
            used = work.apply_dropout(probability, keep)
            if keep is not None:
                d_probability.mul_(keep)
            d_v[keys] += torch.bmm(used.mT, d_attended).view_as(d_v[keys])
            d_score = work.buffer("d_score", probability.shape)
            torch.ops.aten._softmax_backward_data.out(d_probability, probability, -1, k.dtype, grad_input=d_score)
            block.put(torch.bmm(d_score, block.cut(k, block.keys)), d_content_q)
            d_k[keys] += torch.bmm(d_score.mT, content).view_as(d_k[keys])
            d_product = work.product(block)  # 0 at distances that no key of the block has
            shifted_view(d_product.zero_(), d_score.shape, block.memory, block.ahead).copy_(d_score)
            distances = work.distances(block)
            block.put(torch.bmm(d_product, r[block.heads, distances]), d_position_q)
            d_r[block.heads, distances] += torch.bmm(d_product.mT, position)
        d_r = d_r[:, -k.shape[2] - mask.ahead :]
        return d_content_q, d_position_q, d_k.to(k.dtype), d_v.to(v.dtype), d_r.to(r.dtype), None


class _Work:
    """Computes the probabilities of one block after another, in a few buffers that all blocks use."""

    def __init__(self, content_q: Tensor, position_q: Tensor, k: Tensor, r: Tensor, options: _Options):
        self.content_q, self.position_q, self.k, self.r, self.options = content_q, position_q, k, r, options
        H, B, T, _ = content_q.shape
        self.blocks = tuple(_blocks(H, B, T, k.shape[2], options.mask))
        self._buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, shape: Sequence[int]) -> Tensor:
        """A buffer of this shape; the previous one of this name is overwritten."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < prod(shape):
            buffer = self._buffers[name] = self.k.new_empty(prod(shape))
        return buffer[: prod(shape)].view(shape)

    def distances(self, block: _Block) -> slice:
        """The rows of `r` that a block needs, with spare ones in front."""
        # The table ends at distance -mask.ahead, and those of the block at -block.ahead.
        end = self.r.shape[1] - self.options.mask.ahead + block.ahead
        return slice(end - next_multiple(block.memory + block.queries.stop - block.queries.start + block.ahead), end)

    def product(self, block: _Block) -> Tensor:
        """A buffer of each head for the product of a block's queries and its distances."""
        heads, rows, queries, distances = (
            part.stop - part.start for part in (block.heads, block.rows, block.queries, self.distances(block))
        )
        return self.buffer("product", (heads, rows * queries, distances))

    def probability(self, block: _Block) -> Tensor:
        """The block's probabilities, `G t s`."""
        content, k = block.cut(self.content_q, block.queries), block.cut(self.k, block.keys)
        score = torch.bmm(content, k.mT, out=self.buffer("score", (len(content), content.shape[1], k.shape[1])))
        product = self.product(block)
        torch.bmm(block.by_head(self.position_q), self.r[block.heads, self.distances(block)].mT, out=product)
        # torch.compile cannot compile these buffers, and stops at the offset, which is no tensor
        score += shifted_view(product, score.shape, block.memory, block.ahead, int(product.storage_offset()))
        rows = product.shape[1] // score.shape[1]
        mask = self.options.mask.part(block.keys.start, block.rows, block.queries)
        if mask.first is not None and mask.first.max() <= 0:  # it hides none of the block's keys
            mask = mask._replace(first=None)
        hide_scores(score.unflatten(0, (-1, rows)), block.memory, mask)
        return torch.softmax(score, -1, out=self.buffer("probability", score.shape))

    def apply_dropout(self, probability: Tensor, keep: Tensor | None) -> Tensor:
        if keep is None:
            return probability
        return torch.mul(probability, keep, out=self.buffer("d_score", probability.shape))

    def keep(self, block: _Block, number: int) -> Tensor | None:
        """The block's dropout mask, which is the same in forward and backward."""
        if not self.options.dropout_p:
            return None
        shape = (len(block.cut(self.k, block.keys)), *(part.stop - part.start for part in (block.queries, block.keys)))
        generator = torch.Generator().manual_seed(self.options.seed + number)
        return keep_mask(shape, self.options.dropout_p, generator)
