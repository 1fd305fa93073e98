"""Where the first number that is not finite comes from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ..config.settings import TrainConfig
from ..model.memory import Memory
from ..runtime.device import autocast
from ..runtime.ranks import Ranks
from .objective import Objective
from .parallel import whole

Chunk = tuple[Int[Tensor, "B T"], Int[Tensor, "B T"], Memory]
"""Ids, targets and memory of a call."""


def not_finite(
    objective: Objective, chunks: Sequence[Chunk], memory: Memory, config: TrainConfig, progress: float, ranks: Ranks
) -> str:
    """What gives the first nan or infinity when the calls of a step are made once more: a weight, the memory, what a
    module returns, the loss, or the gradient of a weight, taken from the loss down. All ranks have to call this."""
    model = objective.model
    with torch.no_grad():
        found = [f"the weight {name}" for name, weight in model.named_parameters() if not _finite(weight)]
        found += [f"the memory of layer {i}" for i, layer in enumerate(memory.layers) if not _finite(layer)]
    device = next(model.parameters()).device
    model.zero_grad()
    for ids, targets, past in chunks:
        with _watched(model) as seen, torch.compiler.set_stance("force_eager"), autocast(config.precision, device):
            loss, _, _ = objective(ids.to(device), targets.to(device), past, config.lengths, progress=progress)
        found += [f"what {name} returns" for name in seen] + ([] if _finite(loss) else ["the loss"])
        loss.backward()
    [guilty] = ranks.total([bool(found)])
    if not guilty:
        gradients = reversed([(name, weight.grad) for name, weight in model.named_parameters()])
        found = [f"the gradient of {name}" for name, gradient in gradients if not _finite(gradient)]
        [guilty] = ranks.total([bool(found)])
    return next(iter(found), "what another rank reads" if guilty else "dropout or the sum, for not when done again")


def _finite(value: Any) -> bool:
    return not isinstance(value, Tensor) or bool(whole(value.detach()).isfinite().all())


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[str]]:
    """The names of the modules that return what is not finite, in the order in which they do so."""
    seen: list[str] = []

    def watching(name: str):
        def look(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if not all(map(_finite, output if isinstance(output, tuple | list) else [output])):
                seen.append(name or "the model")

        return look

    handles = [module.register_forward_hook(watching(name)) for name, module in model.named_modules()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
