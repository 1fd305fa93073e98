"""Muon with all matrices of one shape in one batch: on a GPU a tenth of the kernels of `torch.optim.Muon`."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor


class Muon(torch.optim.Muon):
    """The optimizer of PyTorch, whose state it shares, with the adjustment "match_rms_adamw".

    It turns the momentum of each matrix into the nearest orthogonal one (Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon/). On a CPU, where kernels cost nothing to start, and for the shards of
    FSDP2, whose products PyTorch knows, it is PyTorch's own step.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if not all(p.is_cuda and not isinstance(p, DTensor) for p in group["params"]):
                return super().step(closure)
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            self.batched_step(group)
        return loss

    @torch.no_grad()
    def batched_step(self, group: dict[str, Any]) -> None:
        """One step of a group's matrices, shape by shape. A matrix and a transposed one of its size are one shape."""
        shapes: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for matrix in group["params"]:
            if matrix.grad is not None:
                self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix.grad))
                shapes[tuple(sorted(matrix.shape))].append(matrix)
        for (_, longest), matrices in shapes.items():
            gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
            buffers = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
            torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])  # type: ignore[attr-defined]
            updates = buffers
            if group["nesterov"]:
                updates = torch._foreach_lerp(gradients, buffers, group["momentum"])  # type: ignore[attr-defined]
            wide = torch.stack([_wide(update) for update in updates]).bfloat16()
            updates = orthogonal(wide, group["ns_coefficients"], group["ns_steps"], group["eps"]).unbind()
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])  # type: ignore[attr-defined]
            rate = group["lr"] * 0.2 * longest**0.5
            for matrix, update in zip(map(_wide, matrices), updates, strict=True):
                matrix.add_(update, alpha=-rate)


def _wide(matrix: Tensor) -> Tensor:
    """The matrix, or its transpose, with at least as many columns as rows."""
    return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix


def orthogonal(
    x: Float[Tensor, "N m n"], coefficients: tuple[float, float, float], steps: int, epsilon: float
) -> Float[Tensor, "N m n"]:
    """Matrices with the singular vectors of `x` and singular values near 1, by the iteration of Newton and Schulz."""
    a, b, c = coefficients
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=epsilon)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x
