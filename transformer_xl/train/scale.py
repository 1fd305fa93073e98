"""Loss scaling: in fp16 a gradient below 3e-8 would become 0, so the gradient of a multiple of the loss is computed.

Gradients are divided by the scale before they are clipped and used. The scale is a power of two, so this changes no
bit. The rule is that of `torch.amp.GradScaler` with its default values: half of the scale after an overflow, twice the
scale after `GROWTH_STEPS` steps without one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

FIRST_SCALE = 2.0**16
GROWTH_STEPS = 2000


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
    """Divide gradients by the scale, in place."""
    if scale == 1:
        return
    found = [gradient for gradient in gradients if gradient is not None]
    torch._foreach_mul_(found, 1 / scale)  # type: ignore[attr-defined]


def zero_if_finite(gradient: Tensor | None) -> Tensor:
    """0, or nan if a number of the gradient is not finite."""
    if gradient is None:
        return torch.zeros(())
    return ((gradient._values() if gradient.is_sparse else gradient) * 0).sum()
