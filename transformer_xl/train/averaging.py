"""A running average of weights, as in averaged SGD (Polyak & Juditsky 1992; Merity et al. 2018)."""

from __future__ import annotations

from copy import deepcopy
from typing import Generic, TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


class Average(Generic[Model]):
    """The mean of `model`'s weights at each `update`, as a separate model, to evaluate and to save."""

    def __init__(self, model: Model, count: int = 0):
        self.model: Model = deepcopy(model).eval()
        self.count: int = count
        """Number of weights in the mean; with 0 the model is no average yet."""

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Add the current weights to the mean."""
        self.count += 1
        for mean, weight in zip(self.model.parameters(), model.parameters(), strict=True):
            mean.lerp_(weight, 1 / self.count)
