"""A step's forward and backward as one CUDA graph: the host starts about a thousand kernels with one call.

    replay = Replay()
    nll, memory = replay(objective, precision, 1, (ids, targets, memory, lengths), counts, progress)

is `forward_backward`, and the numbers are the same.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..config.settings import TrainConfig
from ..model.transformer_xl import TransformerXL
from ..runtime.device import autocast
from .objective import Counts

USUAL_CALLS = 2
"""Calls of one shape that run kernel by kernel first, because they compile what they need."""


def forward_backward(
    objective: nn.Module, precision: str, factor: int, call: tuple[Any, ...], counts: Counts, progress: float
) -> tuple[Float[Tensor, "B T"], Any]:
    """Add the gradients of `factor` times the loss; the nats of each target, and the memory after the segment."""
    ids = call[0]
    with autocast(precision, ids.device):
        loss, nll, memory = objective(*call, counts=counts, progress=progress)
    (loss * factor).backward()
    return nll.detach(), memory


def can_replay(model: nn.Module, config: TrainConfig, ranks: int) -> bool:
    """Whether the steps of a compiled training are replayed: on one GPU, where nothing waits for the device or depends
    on the step."""
    return (
        config.compile
        and type(model) is TransformerXL
        and next(model.parameters()).is_cuda
        and not (model.config.cutoffs or model.config.intermediate_losses or config.random_tgt_len)
        and config.batch_chunk == ranks == 1
    )


class _Captured(NamedTuple):
    graph: Any
    inputs: list[Tensor]
    results: Any
    gradients: dict[nn.Parameter, Tensor]


class Replay:
    """`forward_backward`, captured for each shape of a segment. Gradients must be None before a call."""

    def __init__(self) -> None:
        self.calls: Counter[Any] = Counter()
        self.captured: dict[Any, _Captured] = {}

    def __call__(self, objective: nn.Module, *arguments: Any) -> tuple[Float[Tensor, "B T"], Any]:
        *rest, progress = arguments
        leaves, tree = pytree.tree_flatten(tuple(rest))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        self.calls[key] += 1
        if self.calls[key] <= USUAL_CALLS:
            return forward_backward(objective, *arguments)
        if key not in self.captured:
            own = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = forward_backward(objective, *pytree.tree_unflatten(own, tree), progress)
            gradients = {p: p.grad for p in objective.parameters() if p.grad is not None}
            inputs = [leaf for leaf in own if isinstance(leaf, Tensor)]
            self.captured[key] = _Captured(graph, inputs, results, gradients)
        found = self.captured[key]
        torch._foreach_copy_(found.inputs, tensors)
        found.graph.replay()
        for parameter, gradient in found.gradients.items():
            parameter.grad = gradient
        # A copy, because the next replay writes there, and a skipped step keeps the memory that it was given.
        return pytree.tree_map_only(Tensor, torch.clone, found.results)
