"""One call of the op, as the backends get it, and what several of them do."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from ..mistake import Mistake
from .masks import Mask

Function = TypeVar("Function", bound=Callable[..., Any])

NO_TRANSFORM = "it has no derivatives in torch.func or in forward mode"
"""Why an autograd function without `setup_context` cannot serve."""


class Call(NamedTuple):
    """What `relative_attention` was called with: shapes are checked, and r has the dtype of q, but for `triton` the
    biases may have another one."""

    q: Float[Tensor, "B H T K"]
    k: Float[Tensor, "B H S K"]
    v: Float[Tensor, "B H S K"]
    r: Float[Tensor, "H R K"]
    """The encodings of the distances R - 1 - `mask.ahead`, ..., -`mask.ahead`."""
    content_bias: Float[Tensor, "H K"]
    position_bias: Float[Tensor, "H K"]
    mask: Mask
    dropout_p: float
    scale: float


def in_autocast(like: Tensor) -> bool:
    """Whether the caller is in the autocast of this tensor's device."""
    return like.device.type != "meta" and torch.is_autocast_enabled(like.device.type)


def product_dtype(like: Tensor) -> torch.dtype:
    """The dtype in which matrix products read `like`: autocast's, if the caller is in one."""
    mixed = in_autocast(like) and like.dtype != torch.float64
    return torch.get_autocast_dtype(like.device.type) if mixed else like.dtype


def in_transform() -> bool:
    """Whether all derivatives are needed: in a transform of torch.func or in forward-mode differentiation."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def constant(function: Function) -> Function:
    """Make torch.compile keep the function's result instead of tracing it.

    This is `torch.compiler.assume_constant_result` without its import of torch._dynamo, which takes as long as torch.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


def first_derivative(backward: Callable[..., object]) -> Callable[..., object]:
    """PyTorch's `once_differentiable`, which refuses `create_graph=True`.

    PyTorch's own would return a gradient that is a constant for the graph, so a gradient penalty would have no effect.
    """
    once = once_differentiable(backward)

    @wraps(backward)
    def checked(*arguments: object) -> object:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise Mistake(
                "create_graph must be False: the attention backends chunked, native and triton, and the losses and "
                'embeddings of a model, have first derivatives only. For attention give backend="strided".'
            )
        return once(*arguments)

    return checked
