"""Masks of the keys that a query may see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

Bounds = Int[Tensor, "B #T"] | None
"""A key for each row, or for each query of each row; None: no bound."""


class Mask(NamedTuple):
    """The keys that each query sees. Keys count from 0, memory first."""

    attn_len: int | None = None
    """Number of keys up to its own that a query sees; None: all."""
    ahead: int = 0
    """Number of keys after its own that a query sees; 0: causal."""
    first: Bounds = None
    """The first key that counts. Queries before it are padding and see none."""
    until: Bounds = None
    """The key after the last that counts. Queries from it on are padding and see none."""

    @classmethod
    def of(
        cls,
        memory: int,
        attn_len: int | None = None,
        valid: Int[Tensor, " B"] | None = None,
        *,
        ahead: int = 0,
        end: Int[Tensor, " B"] | None = None,
        first: Bounds = None,
    ) -> Mask:
        """The mask of `relative_attention` with these arguments, after `memory` keys."""
        valid, end, first = (each if each is None else each.long() for each in (valid, end, first))  # an int8 overflows
        start: Bounds = None if valid is None else memory - valid[:, None]
        until: Bounds = None if end is None else memory + end[:, None]
        if first is not None:
            first = running_max(first) if first.shape[1] > 1 else first
            start = first if start is None else torch.maximum(first, start)
            if ahead and start.shape[1] > 1:
                # Keys end at the first query that does not see this one. `start` does not decrease, so searchsorted
                # counts the queries that do.
                own = torch.arange(memory, memory + start.shape[1], dtype=start.dtype, device=start.device)
                later = memory + torch.searchsorted(start, own.expand_as(start).contiguous(), right=True)
                until = later if until is None else torch.minimum(later, until)
        return cls(attn_len, ahead, start, until)

    def window(self, keys: int) -> int:
        """The number of keys up to its own that a query sees, of all `keys`."""
        return keys if self.attn_len is None else min(self.attn_len, keys)

    def part(self, key: int, rows: slice | None = None, queries: slice | None = None) -> Mask:
        """The mask of some rows and queries, or of all, and of the keys from `key` on."""
        rows, queries = rows or slice(None), queries or slice(None)  # torch 2.11 cannot compile them as defaults
        bounds = (
            each if each is None else each[rows, queries if each.shape[1] > 1 else slice(None)] - key
            for each in (self.first, self.until)
        )
        return Mask(self.attn_len, self.ahead, *bounds)


def visible(
    queries: int, keys: int, mask: Mask, memory: int | None = None, *, device: torch.device | str | None = None
) -> Bool[Tensor, "#B 1 T S"]:
    """Which of S = M + T keys each of T queries sees; for T = 3 after M = 2, plain, with attn_len 2, with ahead 1:

        1 1 1 0 0        0 1 1 0 0        1 1 1 1 0
        1 1 1 1 0        0 0 1 1 0        1 1 1 1 1
        1 1 1 1 1        0 0 0 1 1        1 1 1 1 1

    `first` and `until` hide padding and other documents. `memory` is M; None: S - T, without keys after the last query.
    """
    memory = keys - queries if memory is None else memory
    i = torch.arange(queries, device=device)[:, None] + memory
    j = torch.arange(keys, device=device)
    seen = j <= i + mask.ahead
    if mask.attn_len is not None:
        seen = seen & (j > i - mask.attn_len)
    seen = seen[None, None]
    if mask.first is not None:
        first = mask.first[:, None, :, None]
        seen = seen & (j >= first) & (i >= first)
    if mask.until is not None:
        until = mask.until[:, None, :, None]
        seen = seen & (j < until) & (i < until)
    return seen


def running_max(x: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """The largest number of each row up to each position. ONNX has no operator for it."""
    if not torch.compiler.is_exporting():
        return x.cummax(1).values
    positions = torch.arange(x.shape[1], device=x.device)
    return x[:, None].masked_fill(positions > positions[:, None], torch.iinfo(x.dtype).min).amax(-1)


def without_padding(out: Float[Tensor, "H B T K"], memory: int, mask: Mask) -> Float[Tensor, "H B T K"]:
    """`out` with 0 for queries that are padding; `memory` keys are before the first query's own."""
    own = torch.arange(memory, memory + out.shape[2], device=out.device)
    if mask.first is not None:
        out = out.masked_fill((own < mask.first)[..., None], 0.0)
    if mask.until is not None:
        out = out.masked_fill((own >= mask.until)[..., None], 0.0)
    return out


def hide_scores(shifted: Float[Tensor, "H B T S"], memory: int, mask: Mask) -> Float[Tensor, "H B T S"]:
    """Set hidden scores to half of the lowest number of their dtype. `memory` keys are before the first query's own.

    Use the result: in a transform of torch.func the scores do not change in place.
    """
    # Half of it, because the content score is added, and -inf in a whole row has no gradient.
    lowest, (T, S) = torch.finfo(shifted.dtype).min / 2, shifted.shape[2:]
    if torch._C._are_functorch_transforms_active():  # vmap may have many masks for the same scores
        return shifted.masked_fill(~visible(T, S, mask, memory, device=shifted.device)[:, 0], lowest)
    whole = mask.attn_len is not None or mask.first is not None or mask.until is not None
    # Every query sees the keys before the start. An exported graph has no branches on lengths.
    start = 0 if whole or torch.compiler.is_exporting() else min(memory + mask.ahead + 1, S)
    hidden = ~visible(T, S - start, mask.part(start), memory - start, device=shifted.device)[:, 0]
    with torch.no_grad():  # hidden scores have probability 0, so their gradient is 0 without autograd
        shifted[..., start:].masked_fill_(hidden, lowest)
    return shifted


ALIGNED = 32
"""bfloat16 products are faster on a CPU if their rows start at multiples of this many numbers."""


def next_multiple(keys: int) -> int:
    """The next multiple of `ALIGNED` above `keys`, so that at least one is spare."""
    return keys + ALIGNED - keys % ALIGNED


def with_spare(r: Float[Tensor, "H R K"], rows: int) -> Float[Tensor, "H _ K"]:
    """The last `rows` rows of `r`; missing rows are added in front and never read."""
    return r[:, r.shape[1] - rows :] if r.shape[1] >= rows else F.pad(r, (0, 0, rows - r.shape[1], 0))


def shifted_view(
    product: Float[Tensor, "H N W"], shape: Sequence[int], memory: int, ahead: int, offset: int = 0
) -> Float[Tensor, "G T S"]:
    """A product of queries and W encodings as scores: row i of each T begins i to the left.

    The last column is distance -`ahead`, and key `memory` is the first query's own. This is the same memory, read in
    rows of W - 1. It begins at `offset` of its storage.
    """
    (_, T, _), W = shape, product.shape[2]
    return product.as_strided(tuple(shape), (T * W, W - 1, 1), offset + W - 1 - ahead - memory)
