"""FlexAttention with the position term materialised, for CUDA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from .ours import Op


class FlexOp(Op):
    """The scores by distance are a full tensor [B H T S], which the fused kernel adds to the content scores."""

    def __init__(self, job: dict[str, Any]) -> None:
        try:
            super().__init__(job)
        except Exception as error:  # its compiler raises what it likes, and the others' times must not be lost
            raise NotImplementedError(f"{type(error).__name__}: {error}".splitlines()[0][:200]) from error

    def attention(self, job: dict[str, Any]) -> Callable[..., Tensor]:
        queries, memory = job["tgt_len"], job["mem_len"]
        sees = lambda b, h, i, j: j <= i + memory  # noqa: E731
        mask = create_block_mask(sees, None, None, queries, queries + memory, device=job["device"])
        return partial(torch.compile(_attend, dynamic=False), mask=mask)


def _attend(q, k, v, r, content_bias, position_bias, mask):
    (queries, size), keys = q.shape[2:], k.shape[2]
    by_distance = (q + position_bias[:, None]) @ r.mT * size**-0.5
    shifted = F.pad(by_distance, (1, 0)).flatten(2)[:, :, queries:].unflatten(2, (queries, keys))

    def add(score, b, h, i, j):
        return score + shifted[b, h, i, j]

    return flex_attention(q + content_bias[:, None], k, v, score_mod=add, block_mask=mask)
