"""The shapes that many modules name, a linear layer that is faster on a CPU, and a list of one kind of layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn

from ..ops.masks import Bounds

Ids = Integer[Tensor, "B T"]
Vectors = Float[Tensor, "B T D"]
Queries = Float[Tensor, "B H T K"]
Keys = Float[Tensor, "B H S K"]
"""Keys or values of memory and segment."""
Valid = Int[Tensor, " B"] | None
"""Positions of memory that count in each row; None: all. See `Memory`."""
First = Bounds
"""The first key that each query sees, or all queries of a row; None: 0. See `ops.relative_attention`."""
Layer = TypeVar("Layer", bound=nn.Module)

ROWS = 16
"""In bfloat16 on a CPU the rows of a product above this number are padded to a multiple of it."""


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module does more than its `forward`."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


class RowLinear(nn.Linear):
    """PyTorch's linear layer, with other products in bfloat16 on a CPU.

    For a single row PyTorch's matrix-vector product is faster than its matrix product. For each other number of rows
    oneDNN makes a kernel (1 ms) and keeps it (0.7 MB). Texts have any length, so without gradients the input is padded
    to a multiple of `ROWS`.
    """

    def forward(self, x: Float[Tensor, "*B I"]) -> Float[Tensor, "*B O"]:
        weight, rows = self.weight, x.numel() // self.in_features
        if not weight.is_cpu or weight.dtype != torch.bfloat16 or torch.compiler.is_compiling():
            return super().forward(x)
        if rows == 1 and (x.dtype == weight.dtype or torch.is_autocast_enabled("cpu")):
            row = x.reshape(-1).to(weight.dtype)
            out = torch.mv(weight, row) if self.bias is None else torch.addmv(self.bias, weight, row)
            return out.view(*x.shape[:-1], -1)
        if rows < ROWS or rows % ROWS == 0 or torch.is_grad_enabled():
            return super().forward(x)
        padded = F.pad(x.reshape(rows, -1), (0, 0, 0, -rows % ROWS))
        return super().forward(padded)[:rows].view(*x.shape[:-1], -1)


class Layers(nn.ModuleList, Generic[Layer]):
    """PyTorch's list of modules. Type checkers know what is in it."""

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Layer]: ...
