"""Training on a CPU: attention in blocks of a few heads and queries, so small that their scores stay in the cache.

A block (heads, rows, queries) uses the keys from the first to the last that its queries see, so most masked scores are
never computed. Nothing of size T x S is kept: backward computes the probabilities of each block again.

A block's position term is a product with the encodings of its distances. A view with rows one element shorter shifts it
(as in `strided`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..mistake import Mistake
from .dropout import keep_mask
from .masks import mask_wrapped, next_multiple, shifted_view, with_spare, without_padding

SCORES = 1 << 20
"""Maximum number of scores in a block."""
QUERIES = 256
"""Maximum number of queries in a block. Shorter blocks skip more masked scores but need more calls."""


def attend(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B H S K"],
    v: Float[Tensor, "B H S K"],
    r: Float[Tensor, "H R K"],
    content_bias: Float[Tensor, "H K"],
    position_bias: Float[Tensor, "H K"],
    *,
    attn_len: int | None,
    valid: Int[Tensor, " B"] | None,
    dropout_p: float,
    scale: float,
) -> Float[Tensor, "B H T K"]:
    """See `relative_attention`. Inside, the first axis is heads: one product with `r` per head then covers all rows."""
    if q.device.type == "cuda":
        raise Mistake("backend chunked cannot serve this call: it is for the CPU, got cuda. Use auto or strided.")
    q_HBTK = (q * scale).transpose(0, 1)
    content_q = q_HBTK + (content_bias * scale)[:, None, None]
    position_q = q_HBTK + (position_bias * scale)[:, None, None]
    seed = int(torch.randint(1 << 62, ())) if dropout_p else 0
    masks = _Masks(attn_len, valid, dropout_p, seed)
    r = r[:, r.shape[1] - k.shape[2] :]
    return _Attention.apply(content_q, position_q, k.transpose(0, 1), v.transpose(0, 1), r, masks).transpose(0, 1)


class _Masks(NamedTuple):
    attn_len: int | None
    valid: Tensor | None
    dropout_p: float
    seed: int
    """The seed of the first block's dropout mask. Block i uses `seed + i`."""


class _Block(NamedTuple):
    """Some heads, rows and queries, and the keys from the first to the last that any of these queries sees."""

    heads: slice
    rows: slice
    queries: slice
    keys: slice

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


def _blocks(H: int, B: int, T: int, S: int, attn_len: int | None) -> Iterator[_Block]:
    t = min(T, QUERIES)
    fit = max(1, SCORES // (t * (S if attn_len is None else min(S, t + attn_len - 1))))
    h, b = max(1, fit // B), min(B, fit)
    for head in range(0, H, h):
        for row in range(0, B, b):
            for query in range(0, T, t):
                end = min(query + t, T)
                first = 0 if attn_len is None else max(0, S - T + query + 1 - attn_len)
                heads, rows = slice(head, min(head + h, H)), slice(row, min(row + b, B))
                yield _Block(heads, rows, slice(query, end), slice(first, S - T + end))


class _Attention(torch.autograd.Function):
    """Attention by blocks. All inputs but `r` are `H B L K`; queries are scaled and have their biases added."""

    @staticmethod
    def forward(ctx: Any, content_q, position_q, k, v, r, masks: _Masks):
        content_q, position_q, k, v = (x.contiguous() for x in (content_q, position_q, k, v))
        r = with_spare(r, next_multiple(r.shape[1]))
        ctx.save_for_backward(content_q, position_q, k, v, r)
        ctx.masks = masks
        out = torch.empty_like(content_q)
        work = _Work(content_q, position_q, k, r, masks)
        for number, block in enumerate(work.blocks):
            probability = work.apply_dropout(work.probability(block), work.keep(block, number))
            block.put(torch.bmm(probability, block.cut(v, block.keys)), out)
        return without_padding(out if masks.dropout_p == 0 else out.mul_(1 / (1 - masks.dropout_p)), masks.valid)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor):
        content_q, position_q, k, v, r = ctx.saved_tensors
        d_out = without_padding(d_out / (1 - ctx.masks.dropout_p), ctx.masks.valid)
        d_content_q, d_position_q = torch.empty_like(content_q), torch.empty_like(position_q)
        d_k, d_v, d_r = (x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (k, v, r))
        work = _Work(content_q, position_q, k, r, ctx.masks)
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
            d_product = work.product(block)
            shifted_view(d_product.zero_(), d_score.shape).copy_(d_score)
            distances = slice(-d_product.shape[2], None)
            block.put(torch.bmm(d_product, r[block.heads, distances]), d_position_q)
            d_r[block.heads, distances] += torch.bmm(d_product.mT, position)
        d_r = d_r[:, -k.shape[2] :]
        return d_content_q, d_position_q, d_k.to(k.dtype), d_v.to(v.dtype), d_r.to(r.dtype), None


class _Work:
    """Computes the probabilities of one block after another, in a few buffers that all blocks use."""

    def __init__(self, content_q: Tensor, position_q: Tensor, k: Tensor, r: Tensor, masks: _Masks):
        self.content_q, self.position_q, self.k, self.r, self.masks = content_q, position_q, k, r, masks
        H, B, T, _ = content_q.shape
        self.blocks = tuple(_blocks(H, B, T, k.shape[2], masks.attn_len))
        self._buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, shape: Sequence[int]) -> Tensor:
        """A buffer of this shape; the previous one of this name is overwritten."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < prod(shape):
            buffer = self._buffers[name] = self.k.new_empty(prod(shape))
        return buffer[: prod(shape)].view(shape)

    def product(self, block: _Block) -> Tensor:
        """A buffer for a block's queries times its distances, for each head, with spare columns in front."""
        heads, rows, queries, keys = (part.stop - part.start for part in block)
        return self.buffer("product", (heads, rows * queries, next_multiple(keys)))

    def probability(self, block: _Block) -> Tensor:
        """The block's probabilities, `G t s`."""
        content, k = block.cut(self.content_q, block.queries), block.cut(self.k, block.keys)
        score = torch.bmm(content, k.mT, out=self.buffer("score", (len(content), content.shape[1], k.shape[1])))
        product = self.product(block)
        torch.bmm(block.by_head(self.position_q), self.r[block.heads, -product.shape[2] :].mT, out=product)
        score += shifted_view(product, score.shape)
        rows, start = product.shape[1] // score.shape[1], block.queries.start
        valid = None if self.masks.valid is None else self.masks.valid[block.rows] + start
        mask_wrapped(score.unflatten(0, (-1, rows)), attn_len=self.masks.attn_len, valid=valid)
        return torch.softmax(score, -1, out=self.buffer("probability", score.shape))

    def apply_dropout(self, probability: Tensor, keep: Tensor | None) -> Tensor:
        if keep is None:
            return probability
        return torch.mul(probability, keep, out=self.buffer("d_score", probability.shape))

    def keep(self, block: _Block, number: int) -> Tensor | None:
        """The block's dropout mask, which is the same in forward and backward."""
        if not self.masks.dropout_p:
            return None
        shape = (len(block.cut(self.k, block.keys)), *(part.stop - part.start for part in (block.queries, block.keys)))
        generator = torch.Generator().manual_seed(self.masks.seed + number)
        return keep_mask(shape, self.masks.dropout_p, generator)
