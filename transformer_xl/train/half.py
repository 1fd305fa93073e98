"""Half precision in training: the weights of a step's products are rounded together.

Autocast starts a kernel for each weight, and one for its gradient. `python -m benchmarks launches` counts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..model.modules import Rounded, RowLinear, has_hooks, versions, weights_of
from ..ops.call import product_dtype
from .objective import Objective


@contextmanager
def rounded_weights(objective: nn.Module) -> Iterator[None]:
    """Inside, each `RowLinear` computes with its `rounded` weights, for products in the caller's autocast. Gradients
    reach the weights themselves, all together at the end of backward.

    With several ranks nothing changes: DDP sends each gradient as soon as it is known, and FSDP2 gathers shards.
    """
    alone = isinstance(objective, Objective)
    linears = [m for m in objective.modules() if alone and type(m) is RowLinear and _is_rounded(m)]
    rounded = iter(_Rounded.apply(*(weight for linear in linears for weight in weights_of(linear))) if linears else ())
    try:
        for linear in linears:
            weight, bias = next(rounded), None if linear.bias is None else next(rounded)
            linear.rounded = Rounded(weight, bias, (linear.weight, linear.bias), versions(linear))
        yield
    finally:
        for linear in linears:
            linear.rounded = None


def _is_rounded(linear: RowLinear) -> bool:
    """Whether products use it alone, and autocast would round all of its weights."""
    weights = weights_of(linear)
    own = not has_hooks(linear) and all(w.requires_grad and not isinstance(w, DTensor) for w in weights)
    return own and all(product_dtype(w) != w.dtype for w in weights)


class _Rounded(torch.autograd.Function):
    """fp32 tensors in the dtype of products."""

    @staticmethod
    def forward(ctx: Any, *exact: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return _copies(exact, product_dtype(exact[0]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # for a gradient of gradients
            return tuple(None if gradient is None else gradient.float() for gradient in gradients)
        exact = iter(_copies([gradient for gradient in gradients if gradient is not None], torch.float32))
        return tuple(None if gradient is None else next(exact) for gradient in gradients)


def _copies(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, tensors)  # type: ignore[attr-defined]
    return tuple(copies)
