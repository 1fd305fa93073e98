"""Which keys a query may see."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


def visible(
    queries: int, keys: int, *, attn_len: int | None = None, valid: Int[Tensor, " B"] | None = None, device=None
) -> Bool[Tensor, "#B 1 T S"]:
    """The mask of T queries over S = M + T keys; for T = 3 behind M = 2, plain and with attn_len = 2:

        1 1 1 0 0        0 1 1 0 0
        1 1 1 1 0        0 0 1 1 0
        1 1 1 1 1        0 0 0 1 1

    `valid[b]` says how many of the newest memory rows count; a negative one hides the row's first own tokens too.
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
    """0 where a row's own first tokens are padding: it sees nothing, not even itself, and gives nothing."""
    if valid is None:
        return out
    padding = torch.arange(out.shape[2], device=out.device) < -valid[:, None]
    return out.masked_fill(padding[:, :, None], 0.0)


@torch.no_grad()  # what is hidden has probability 0, so its gradient is 0 without autograd knowing
def mask_wrapped(
    shifted: Float[Tensor, "H B T S"], *, attn_len: int | None = None, valid: Int[Tensor, " B"] | None = None
) -> None:
    """Give scores that no query may see the lowest number there is, in place."""
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
    """`mask_wrapped` for what lies beyond a window alone, before the shift: there a distance is a column."""
    product[..., :-attn_len] = torch.finfo(product.dtype).min


ALIGNED = 32
"""Products whose rows start at multiples of so many numbers are faster on a CPU, in bfloat16."""


def aligned(keys: int) -> int:
    """The next multiple of `ALIGNED` above `keys`, so that at least one is spare."""
    return keys + ALIGNED - keys % ALIGNED


def with_spare(r: Float[Tensor, "H R K"], rows: int) -> Float[Tensor, "H _ K"]:
    """The last so many rows of `r`; what it lacks in front is never read."""
    return r[:, r.shape[1] - rows :] if r.shape[1] >= rows else F.pad(r, (0, 0, rows - r.shape[1], 0))


def shifted_view(product: Float[Tensor, "H N W"], shape: Sequence[int]) -> Float[Tensor, "G T S"]:
    """A product of queries and encodings, W > S of them, as scores: row i of each T begins T - 1 - i further right.

    It is the same memory, read in rows of W - 1.
    """
    (_, T, S), W = shape, product.shape[2]
    return product.as_strided(tuple(shape), (T * W, W - 1, 1), product.storage_offset() + W - S + T - 1)
