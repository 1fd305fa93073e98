"""Half precision in training: the weights of a step's products are rounded at once.

Autocast starts a kernel for each weight, and one for its gradient: 186 of 1,029 in a step of `enwik8-12l`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..ops.call import product_dtype
from .objective import Objective


@contextmanager
def rounded_weights(objective: nn.Module) -> Iterator[None]:
    """Inside, linear layers have the weights that their products use in the caller's autocast. Gradients reach the
    weights themselves, all together at the end of backward.

    With several ranks nothing changes: DDP sends each gradient as soon as it is known, and FSDP2 gathers shards.
    """
    alone = isinstance(objective, Objective)
    owners = [module._parameters for module in objective.modules() if alone and isinstance(module, nn.Linear)]
    found = [(owner, name, owner.get(name)) for owner in owners for name in ("weight", "bias")]
    exact = [(owner, name, weight) for owner, name, weight in found if weight is not None and _is_rounded(weight)]
    rounded: Any = _Rounded.apply(*(weight for *_, weight in exact)) if exact else ()
    try:
        for (owner, name, _), weight in zip(exact, rounded, strict=True):
            owner[name] = weight
        yield
    finally:
        for owner, name, weight in exact:
            owner[name] = weight


def _is_rounded(weight: Tensor) -> bool:
    return weight.requires_grad and not isinstance(weight, DTensor) and product_dtype(weight) != weight.dtype


class _Rounded(torch.autograd.Function):
    """fp32 tensors in the dtype of products."""

    @staticmethod
    def forward(ctx: Any, *exact: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return _copies(exact, product_dtype(exact[0]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        exact = iter(_copies([gradient for gradient in gradients if gradient is not None], torch.float32))
        return tuple(None if gradient is None else next(exact) for gradient in gradients)


def _copies(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, tensors)  # type: ignore[attr-defined]
    return tuple(copies)
