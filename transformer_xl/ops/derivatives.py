"""Autograd functions with first derivatives only, which say so."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from torch.autograd.function import once_differentiable

from ..mistake import Mistake


def first_derivative(backward: Callable[..., object]) -> Callable[..., object]:
    """PyTorch's `once_differentiable`, which refuses `create_graph=True`.

    PyTorch's own would return a gradient that is a constant for the graph, so a gradient penalty would have no effect.
    """
    once = once_differentiable(backward)

    @wraps(backward)
    def checked(*arguments: object) -> object:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise Mistake(
                "create_graph must be False: the attention backends chunked and native, and the losses and embeddings "
                'of a model, have first derivatives only. For attention give backend="strided".'
            )
        return once(*arguments)

    return checked
