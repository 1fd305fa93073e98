"""A step's forward and backward as one CUDA graph: the host starts hundreds of kernels with one call.

    replay = Replay()
    nll, memory = replay(objective, precision, factor, (ids, targets, memory, lengths), counts, progress)

is `forward_backward`, with the same numbers: 2.2 times as many steps of `enwik8-12l` per second (H100, 22 rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..config.settings import Lengths
from ..model.memory import Memory
from ..runtime.device import autocast
from .half import rounded_weights
from .objective import Counts

Call = tuple[Integer[Tensor, "B T"], Integer[Tensor, "B T"], Memory, Lengths]
"""Ids, targets, memory and lengths of a call."""
USUAL_CALLS = 2
"""Calls of one shape that run kernel by kernel first, because they compile what they need."""


def forward_backward(
    objective: nn.Module, precision: str, factor: Float[Tensor, ""], call: Call, counts: Counts, progress: float
) -> tuple[Float[Tensor, "B T"], Memory]:
    """Add the gradients of `factor` times the loss; the nats of each target, and the memory after the segment."""
    ids = call[0]
    with autocast(precision, ids.device), rounded_weights(objective):
        loss, nll, memory = objective(*call, counts=counts, progress=progress)
    (loss * factor).backward()
    return nll.detach(), memory


@dataclass
class _Shape:
    """What is known of the calls of one shape; the graph reads `inputs` and writes `results` and `gradients`."""

    calls: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    inputs: Sequence[object] = ()
    results: tuple[Tensor, Memory] | None = None
    gradients: dict[nn.Parameter, Tensor] = field(default_factory=dict)


class Replay:
    """`forward_backward`, recorded for each shape of a segment. Gradients must be None before a call.

    The objective may not depend on `progress`: a graph repeats that of its recording.
    """

    def __init__(self) -> None:
        self.shapes: dict[tuple[object, ...], _Shape] = {}
        self.stream: torch.cuda.Stream | None = None
        """The stream of all recordings, on the device of the first. PyTorch's own stream may be on another device."""
        self.pool: Any = None
        """The memory of all recordings. They can share it, because no replay reads what another one wrote."""

    def __call__(
        self,
        objective: nn.Module,
        precision: str,
        factor: Float[Tensor, ""],
        call: Call,
        counts: Counts,
        progress: float,
    ) -> tuple[Float[Tensor, "B T"], Memory]:
        given, tree = pytree.tree_flatten((factor, call, counts))
        key = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in given)
        shape = self.shapes.setdefault(key, _Shape())
        shape.calls += 1
        if shape.graph is None:
            # Of the same strides in each call, or a compiled objective would be compiled again in the recording.
            whole = torch.contiguous_format
            inputs = [x.clone(memory_format=whole) if isinstance(x, Tensor) else x for x in given]
            factor, call, counts = pytree.tree_unflatten(inputs, tree)
            if shape.calls <= USUAL_CALLS:
                return forward_backward(objective, precision, factor, call, counts, 0.0)
            shape.inputs, shape.graph = inputs, torch.cuda.CUDAGraph()
            if self.stream is None:
                self.stream, self.pool = torch.cuda.Stream(factor.device), torch.cuda.graph_pool_handle()
            recording = torch.cuda.graph(shape.graph, pool=self.pool, stream=self.stream)
            # Entering waits for the current device: another one would get a context, if it has memory left.
            with torch.compiler.set_stance("fail_on_recompile"), torch.cuda.device_of(factor), recording:
                shape.results = forward_backward(objective, precision, factor, call, counts, 0.0)
            shape.gradients = {p: p.grad for p in objective.parameters() if p.grad is not None}
        for own, new in zip(shape.inputs, given, strict=True):
            if isinstance(own, Tensor):
                own.copy_(new)
        shape.graph.replay()
        for parameter, gradient in shape.gradients.items():
            parameter.grad = gradient
        # A copy, because the next replay writes there, and a skipped step keeps the memory that it was given.
        return pytree.tree_map_only(Tensor, torch.clone, shape.results)
