"""Loss scaling: in fp16 a gradient below 6e-8 would become 0, so the gradient of a multiple of the loss is computed.

Gradients are divided by the scale before they are clipped and used. The scale is a power of two, so this changes no
bit. The rule is that of `torch.amp.GradScaler` with its default values: half of the scale after an overflow, twice the
scale after `GROWTH_STEPS` steps without one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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

    @classmethod
    def restored(cls, stored: Mapping[str, Any]) -> LossScale:
        """The scale that `asdict` made `stored` of; a `TypeError` or a `KeyError` if it is damaged."""
        value, steps = stored["value"], stored["steps"]
        if type(value) is not float or math.frexp(value)[0] != 0.5 or value < 1 or type(steps) is not int or steps < 0:
            raise TypeError("the scale of the loss must be a power of two")
        return cls(value, steps)

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
    torch._foreach_mul_([gradient for gradient in found if not gradient.is_sparse], 1 / scale)  # type: ignore[attr-defined]
    for gradient in found:
        if gradient.is_sparse:
            gradient.mul_(1 / scale)


def zero_if_finite(gradient: Tensor | None) -> Tensor:
    """0, or nan if a number of the gradient is not finite."""
    if gradient is None:
        return torch.zeros(())
    return ((gradient._values() if gradient.is_sparse else gradient) * 0).sum()
