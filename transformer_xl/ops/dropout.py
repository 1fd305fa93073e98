"""Dropout whose masks are cheap to draw on a CPU, where PyTorch draws them one number an element in one thread."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

_STEPS = 1 << 16


def dropout(x: Float[Tensor, "*shape"], p: float) -> Float[Tensor, "*shape"]:
    """Zero each element with probability `p` and divide the others by 1 - p.

    On a CPU four elements share one 64-bit random number, so the probability is `p` to the nearest 1 / 65,536.
    Elsewhere this is PyTorch's own.
    """
    if p == 0:
        return x
    if x.device.type != "cpu":
        return F.dropout(x, p)
    return x * keep_mask(x.shape, p).to(x.dtype).div_(1 - p)


def keep_mask(shape: Sequence[int], p: float, generator: torch.Generator | None = None) -> Bool[Tensor, "*shape"]:
    """What dropout keeps on a CPU; four elements share one 64-bit random number."""
    numbers = torch.empty(-(-prod(shape) // 4), dtype=torch.int64).random_(-(1 << 63), None, generator=generator)
    return numbers.view(torch.int16)[: prod(shape)].view(shape) >= round(p * _STEPS) - _STEPS // 2


class Dropout(nn.Module):
    """`dropout` while training."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return dropout(x, self.p) if self.training else x

    def extra_repr(self) -> str:
        return f"p={self.p}"
