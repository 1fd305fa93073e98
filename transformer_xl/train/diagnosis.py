"""Finds the first number that is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

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
    """Repeat a step's calls and name the source of the first nan or infinity: a weight, the memory, the output of a
    module, the loss, or the gradient of a weight, beginning at the last weight. All ranks have to call this."""
    model, device = objective.model, next(objective.model.parameters()).device
    with torch.no_grad():
        found = [f"the weight {name}" for name, weight in model.named_parameters() if not _finite(weight)]
        found += [f"the memory of layer {i}" for i, layer in enumerate(memory.layers) if not _finite(layer)]

    def look(name: str, _module: nn.Module, _inputs: object, output: object) -> None:
        if not all(map(_finite, output if isinstance(output, tuple | list) else [output])):
            found.append(f"the output of {name or 'the model'}")

    model.zero_grad()
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(partial(look, name)))
        for ids, targets, past in chunks:
            with torch.compiler.set_stance("force_eager"), autocast(config.precision, device):
                loss, _, _ = objective(ids.to(device), targets.to(device), past, config.lengths, progress=progress)
            found += [] if _finite(loss) else ["the loss"]
            loss.backward()
    [guilty] = ranks.total([bool(found)])
    if not guilty:
        gradients = reversed([(name, weight.grad) for name, weight in model.named_parameters()])
        found = [f"the gradient of {name}" for name, gradient in gradients if not _finite(gradient)]
        [guilty] = ranks.total([bool(found)])
    return next(iter(found), "the data of another rank" if guilty else "dropout or the sum")


def _finite(value: object) -> bool:
    if isinstance(value, Tensor) and value.is_sparse:
        value = value.coalesce().values()
    return not isinstance(value, Tensor) or bool(whole(value.detach()).isfinite().all())
