"""Training on a CPU: `strided` in blocks of a few heads, rows and queries, whose scores stay in the cache.

A block uses the keys from the first to the last that its queries see, so most masked scores are never computed. Nothing
of size T x S is kept: backward computes each block again.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..mistake import Mistake
from . import strided
from .call import Call

SCORES = 1 << 20
"""Maximum number of scores in a block."""
QUERIES = 256
"""Maximum number of queries in a block. Shorter blocks skip more masked scores but need more calls."""


def attend(call: Call) -> Float[Tensor, "B H T K"]:
    """See `relative_attention`."""
    if call.q.device.type == "cuda":
        raise Mistake("backend chunked cannot serve this call: it is for the CPU, got cuda. Use auto or strided.")
    (B, _, T, _), S, attn_len = call.q.shape, call.k.shape[2], call.mask.attn_len
    t = T if call.mask.ahead else min(T, QUERIES)
    # So many pairs of a head and a row fit: all rows of several heads, or some rows of one head.
    fit = max(1, SCORES // (t * (S if attn_len is None else min(S, t + attn_len - 1))))
    h, b = max(1, fit // B), min(B, fit)
    found = []
    for q, k, v, r, *biases in zip(*(x.split(h, 1) for x in call[:3]), *(x.split(h) for x in call[3:6]), strict=True):
        part = call._replace(q=q, k=k, v=v, r=r, content_bias=biases[0], position_bias=biases[1])
        found.append(_attend_heads(part, b, t))
    return torch.cat(found, 1)


def _attend_heads(call: Call, b: int, t: int) -> Float[Tensor, "B h T K"]:
    """The result of a few heads, in blocks of `b` rows and `t` queries."""
    rows, found = range(0, len(call.q), b), []
    for row, q, k, v in zip(rows, *(x.split(b) for x in call[:3]), strict=True):
        part = call._replace(q=q, k=k, v=v, mask=call.mask.part(0, slice(row, row + b)))
        blocks = _blocks(part, t)
        found.append(torch.cat([checkpoint(strided.attend, block, use_reentrant=False) for block in blocks], 2))
    return torch.cat(found)


def _blocks(call: Call, t: int) -> Iterator[Call]:
    """A call of `t` queries after the other, each with the keys that some of them see."""
    T, memory, mask = call.q.shape[2], call.k.shape[2] - call.q.shape[2], call.mask
    for start in range(0, T, t):
        end = min(start + t, T)
        first = 0 if mask.attn_len is None else max(0, memory + start + 1 - mask.attn_len)
        k, v = (x[:, :, first : memory + end] for x in call[1:3])
        part = mask.part(first, queries=slice(start, end))
        yield call._replace(q=call.q[:, :, start:end], k=k, v=v, mask=part)
