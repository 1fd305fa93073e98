"""Where the first number that is not finite comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ..device import autocast
from ..distributed import whole
from ..memory import Memory
from ..settings import TrainConfig


def not_finite(
    model: Any,
    ids: Int[Tensor, "B T"],
    targets: Int[Tensor, "B T"],
    memory: Memory,
    config: TrainConfig,
    activity: Mapping[str, float],
) -> str:
    """What gives the first nan or infinity when this call is made once more: a weight, the memory, what a module
    returns, the loss, or the gradient of a weight, taken from the loss down."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not _finite(weight):
                return f"the weight {name}"
        for number, layer in enumerate(memory.layers):
            if not _finite(layer):
                return f"the memory of layer {number}"
    device = next(model.parameters()).device
    objective = (lambda *call: model.regularised(*call, **activity)) if activity else model.objective
    model.zero_grad()
    with _watched(model) as seen, torch.compiler.set_stance("force_eager"), autocast(config.precision, device):
        loss, _, _ = objective(ids.to(device), targets.to(device), memory, config.lengths)
    if seen:
        return f"what {seen[0]} returns"
    if not _finite(loss):
        return "the loss"
    loss.backward()
    named = reversed(list(model.named_parameters()))
    guilty = [name for name, weight in named if weight.grad is not None and not _finite(weight.grad)]
    return f"the gradient of {guilty[0]}" if guilty else "nothing when it is done again, so in dropout or in the sum"


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
