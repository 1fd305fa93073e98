"""Which keys a query may see."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
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
