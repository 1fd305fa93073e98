"""Dropout whose masks are cheap to draw on a CPU, where PyTorch draws them one number an element in one thread."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
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
    numbers = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(1 << 63), None)
    keep = numbers.view(torch.int16)[: x.numel()].view(x.shape) >= round(p * _STEPS) - _STEPS // 2
    return x * (keep.to(x.dtype) / (1 - p))


class Dropout(nn.Module):
    """`dropout` while training."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return dropout(x, self.p) if self.training else x

    def extra_repr(self) -> str:
        return f"p={self.p}"
