"""Masks of the keys that a query may see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Mask(NamedTuple):
    """The keys that each query sees; see `relative_attention`."""

    attn_len: int | None = None
    valid: Int[Tensor, " B"] | None = None
    ahead: int = 0
    """Number of keys after its own that a query sees; 0: causal."""
    end: Int[Tensor, " B"] | None = None

    def window(self, keys: int) -> int:
        """The number of keys up to its own that a query sees, of all `keys`."""
        return keys if self.attn_len is None else min(self.attn_len, keys)

    def bounds(self, memory: int) -> tuple[Tensor | None, Tensor | None]:
        """Of each row the first key that is no padding, and the first of the padding on the right; None: no padding."""
        start = None if self.valid is None else memory - self.valid
        return start, None if self.end is None else memory + self.end

    def from_query(self, start: int, rows: slice) -> Mask:
        """The mask of the queries from `start` on, for some rows."""
        valid = None if self.valid is None else self.valid[rows] + start
        end = None if self.end is None else self.end[rows] - start
        return self._replace(valid=valid, end=end)


def visible(
    queries: int, keys: int, mask: Mask, *, device: torch.device | str | None = None
) -> Bool[Tensor, "#B 1 T S"]:
    """Which of S = M + T keys each of T queries sees; for T = 3 after M = 2, plain, with attn_len 2, with ahead 1:

        1 1 1 0 0        0 1 1 0 0        1 1 1 1 0
        1 1 1 1 0        0 0 1 1 0        1 1 1 1 1
        1 1 1 1 1        0 0 0 1 1        1 1 1 1 1

    `valid` and `end` hide padding, which also sees no key itself.
    """
    memory = keys - queries
    i = torch.arange(queries, device=device)[:, None] + memory
    j = torch.arange(keys, device=device)
    seen = j <= i + mask.ahead
    if mask.attn_len is not None:
        seen = seen & (j > i - mask.attn_len)
    seen = seen[None, None]
    start, end = (each if each is None else each[:, None, None, None] for each in mask.bounds(memory))
    if start is not None:
        seen = seen & (j >= start) & (i >= start)
    if end is not None:
        seen = seen & (j < end) & (i < end)
    return seen


def without_padding(out: Float[Tensor, "H B T K"], mask: Mask) -> Float[Tensor, "H B T K"]:
    """`out` with 0 where a row's first or last tokens are padding."""
    i = torch.arange(out.shape[2], device=out.device)
    start, end = mask.bounds(0)
    if start is not None:
        out = out.masked_fill((i < start[:, None])[:, :, None], 0.0)
    if end is not None:
        out = out.masked_fill((i >= end[:, None])[:, :, None], 0.0)
    return out


@torch.no_grad()  # hidden scores have probability 0, so their gradient is 0 without autograd
def mask_wrapped(shifted: Float[Tensor, "H B T S"], memory: int, mask: Mask) -> None:
    """Set hidden scores to the lowest number of the dtype, in place; `memory` keys are before the first query's own."""
    T, S = shifted.shape[2:]
    lowest, device = torch.finfo(shifted.dtype).min, shifted.device
    later = shifted[..., memory + mask.ahead + 1 :]
    if later.shape[-1]:
        hidden = torch.ones(later.shape[-2:], dtype=torch.bool, device=device).triu_()
        later.masked_fill_(hidden, lowest)
    if mask.attn_len is not None and mask.attn_len < memory + T:
        edge = shifted[..., : memory + T - mask.attn_len]
        hidden = torch.ones(edge.shape[-2:], dtype=torch.bool, device=device).tril_(memory - mask.attn_len)
        edge.masked_fill_(hidden, lowest)
    j = torch.arange(S, device=device)
    start, end = mask.bounds(memory)
    if start is not None:
        shifted.masked_fill_((j < start[:, None])[:, None], lowest)
    if end is not None:
        shifted.masked_fill_((j >= end[:, None])[:, None], lowest)


ALIGNED = 32
"""bfloat16 products are faster on a CPU if their rows start at multiples of this many numbers."""


def next_multiple(keys: int) -> int:
    """The next multiple of `ALIGNED` above `keys`, so that at least one is spare."""
    return keys + ALIGNED - keys % ALIGNED


def with_spare(r: Float[Tensor, "H R K"], rows: int) -> Float[Tensor, "H _ K"]:
    """The last `rows` rows of `r`; missing rows are added in front and never read."""
    return r[:, r.shape[1] - rows :] if r.shape[1] >= rows else F.pad(r, (0, 0, rows - r.shape[1], 0))


def shifted_view(
    product: Float[Tensor, "H N W"], shape: Sequence[int], memory: int, ahead: int = 0
) -> Float[Tensor, "G T S"]:
    """A product of queries and W encodings as scores: row i of each T begins i to the left.

    The last column is distance -`ahead`, and key `memory` is the first query's own. This is the same memory, read in
    rows of W - 1.
    """
    (_, T, _), W = shape, product.shape[2]
    return product.as_strided(tuple(shape), (T * W, W - 1, 1), product.storage_offset() + W - 1 - ahead - memory)
