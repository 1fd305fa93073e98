"""Half precision in training: the weights of a step's products are rounded together, and the loss is scaled.

Autocast starts a kernel for each weight, and one for its gradient. `python -m benchmarks launches` counts them.

In fp16 a gradient below 3e-8 would become 0, so the gradient of a multiple of the loss is computed. Gradients are
divided by the scale before they are clipped and used. The scale is a power of two, so this changes no bit. The rule is
that of `torch.amp.GradScaler` with its default values: half of the scale after an overflow, twice the scale after
`GROWTH_STEPS` steps without one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _has_any_global_hook

from ..model.modules import Rounded, RowLinear, has_hooks, versions, weights_of
from ..ops.call import product_dtype
from .objective import Objective

FIRST_SCALE = 2.0**16
GROWTH_STEPS = 2000


@contextmanager
def rounded_weights(objective: nn.Module) -> Iterator[None]:
    """Inside, each `RowLinear` computes with its `rounded` weights, for products in the caller's autocast. Gradients
    reach the weights themselves, all together at the end of backward.

    With several ranks nothing changes: DDP sends each gradient as soon as it is known, and FSDP2 gathers shards.
    """
    alone = isinstance(objective, Objective)
    linears = [m for m in objective.modules() if alone and type(m) is RowLinear and _is_rounded(m)]
    unseen = alone and not _has_any_global_hook() and all(map(_is_ours, objective.modules()))
    weights = [weight for linear in linears for weight in weights_of(linear)]
    tails = [tail for linear in linears for tail in (linear.tail, 0)[: len(weights_of(linear))]]
    rounded = iter(_Rounded.apply(tails, *weights) if linears else ())
    try:
        for linear in linears:
            weight, tail = next(rounded), next(rounded) if linear.tail else None
            bias = None if linear.bias is None else next(rounded)
            exact = linear.weight, linear.bias
            linear.rounded = Rounded(weight, bias, tail, exact, versions(linear), unseen)
        yield
    finally:
        for linear in linears:
            linear.rounded = None


def _is_ours(module: nn.Module) -> bool:
    """Whether a module is of this package or PyTorch, and nobody gets what it computes."""
    package = type(module).__module__.partition(".")[0]
    return package in ("torch", __name__.partition(".")[0]) and not has_hooks(module)


def _is_rounded(linear: RowLinear) -> bool:
    """Whether products use it alone, and autocast would round all of its weights."""
    weights = weights_of(linear)
    own = not has_hooks(linear) and all(w.requires_grad and not isinstance(w, DTensor) for w in weights)
    return own and all(product_dtype(w) != w.dtype for w in weights)


class _Rounded(torch.autograd.Function):
    """fp32 tensors in the dtype of products, and after each its rows from `tails` on, if that is not 0."""

    @staticmethod
    def forward(ctx: Any, tails: Sequence[int], *exact: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.tails = tails
        copies = zip(_copies(exact, product_dtype(exact[0])), tails, strict=True)
        return tuple(part for copy, tail in copies for part in ([copy, copy[tail:]] if tail else [copy]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [gradient for gradient in gradients if gradient is not None]
        again = torch.is_grad_enabled()  # for a gradient of gradients
        exact = iter([gradient.float() for gradient in given] if again else _copies(given, torch.float32))
        found = iter([None if gradient is None else next(exact) for gradient in gradients])
        whole, rows = [], []
        for tail in ctx.tails:
            whole.append(next(found))
            if tail and (own := next(found)) is not None:
                if whole[-1] is None:
                    whole[-1] = own.new_zeros(tail + len(own), own.shape[1])
                rows.append((whole[-1][tail:], own))
        if rows:
            torch._foreach_add_(*zip(*rows, strict=True))  # type: ignore[attr-defined]
        return None, *whole


def _copies(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, tensors)  # type: ignore[attr-defined]
    return tuple(copies)


@dataclass
class LossScale:
    """The number that the loss is multiplied with. It is part of a run's state."""

    value: float = 1.0
    steps: int = 0
    """Steps since it last changed."""

    def update(self, overflowed: bool) -> None:
        """Count a step; `overflowed`: its gradient was not finite, and its loss was."""
        self.steps += 1
        if overflowed:
            self.value, self.steps = max(self.value / 2, 1.0), 0
        elif self.steps == GROWTH_STEPS:
            self.value, self.steps = self.value * 2, 0


def unscale(gradients: Iterable[Tensor | None], scale: float) -> None:
    """Divide gradients by the scale, in place: a CUDA graph writes the next ones into the same memory."""
    if scale == 1:
        return
    # A sparse tensor that is multiplied in place gets other memory.
    found = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients if gradient is not None]
    torch._foreach_mul_(found, 1 / scale)  # type: ignore[attr-defined]


def zero_if_finite(gradient: Tensor | None) -> Tensor:
    """0, or nan if a number of the gradient is not finite."""
    if gradient is None:
        return torch.zeros(())
    return ((gradient._values() if gradient.is_sparse else gradient) * 0).sum()
