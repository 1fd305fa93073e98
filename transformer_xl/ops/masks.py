"""Masks of the keys that a query may see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


def visible(
    queries: int, keys: int, *, attn_len: int | None = None, valid: Int[Tensor, " B"] | None = None, device: Any = None
) -> Bool[Tensor, "#B 1 T S"]:
    """The mask of T queries over S = M + T keys; for T = 3 after M = 2, plain and with attn_len = 2:

        1 1 1 0 0        0 1 1 0 0
        1 1 1 1 0        0 0 1 1 0
        1 1 1 1 1        0 0 0 1 1

    `valid[b]` is the number of newest memory positions that count; a negative -n also hides the row's first n tokens.
    """
    memory = keys - queries
    i = torch.arange(queries, device=device)[:, None] + memory
    j = torch.arange(keys, device=device)
    seen = j <= i
    if attn_len is not None:
        seen = seen & (j > i - attn_len)
    seen = seen[None, None]
    if valid is not None:
        seen = seen & (j >= memory - valid[:, None])[:, None, None]
    return seen


def without_padding(out: Float[Tensor, "H B T K"], valid: Int[Tensor, " B"] | None) -> Float[Tensor, "H B T K"]:
    """`out` with 0 where a row's first tokens are padding, because padding sees no key, not even its own."""
    if valid is None:
        return out
    padding = torch.arange(out.shape[2], device=out.device) < -valid[:, None]
    return out.masked_fill(padding[:, :, None], 0.0)


@torch.no_grad()  # hidden scores have probability 0, so their gradient is 0 without autograd
def mask_wrapped(
    shifted: Float[Tensor, "H B T S"], *, attn_len: int | None = None, valid: Int[Tensor, " B"] | None = None
) -> None:
    """Set hidden scores to the lowest number of the dtype, in place."""
    _, _, T, S = shifted.shape
    lowest, device = torch.finfo(shifted.dtype).min, shifted.device
    if T > 1:
        hidden = torch.ones(T, T, dtype=torch.bool, device=device).triu_(1)
        shifted[..., S - T :].masked_fill_(hidden, lowest)
    if attn_len is not None and attn_len < S:
        edge = shifted[..., : S - attn_len]
        hidden = torch.ones(edge.shape[-2:], dtype=torch.bool, device=device).tril_(S - T - attn_len)
        edge.masked_fill_(hidden, lowest)
    if valid is not None:
        unused = torch.arange(S, device=device) < (S - T - valid)[:, None]
        shifted.masked_fill_(unused[:, None], lowest)


@torch.no_grad()
def mask_distant(product: Float[Tensor, "H N W"], attn_len: int) -> None:
    """Hide the keys beyond a window before the shift, where each distance is a column. This is faster than
    `mask_wrapped`."""
    product[..., :-attn_len] = torch.finfo(product.dtype).min


ALIGNED = 32
"""bfloat16 products are faster on a CPU if their rows start at multiples of this many numbers."""


def next_multiple(keys: int) -> int:
    """The next multiple of `ALIGNED` above `keys`, so that at least one is spare."""
    return keys + ALIGNED - keys % ALIGNED


def with_spare(r: Float[Tensor, "H R K"], rows: int) -> Float[Tensor, "H _ K"]:
    """The last `rows` rows of `r`; missing rows are added in front and never read."""
    return r[:, r.shape[1] - rows :] if r.shape[1] >= rows else F.pad(r, (0, 0, rows - r.shape[1], 0))


def shifted_view(product: Float[Tensor, "H N W"], shape: Sequence[int]) -> Float[Tensor, "G T S"]:
    """A product of queries and W > S encodings as scores: row i of each T begins T - 1 - i further right.

    This is the same memory, read in rows of W - 1.
    """
    (_, T, S), W = shape, product.shape[2]
    return product.as_strided(tuple(shape), (T * W, W - 1, 1), product.storage_offset() + W - S + T - 1)
