"""Get and set a model's weights by name. Tied weights have one name, and setting needs all weights to fit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..config.values import listing
from ..mistake import Mistake


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A model's weights by name. Tied weights have only the first of their names."""
    state = model.state_dict(keep_vars=True)
    return {name: state[name] for name in dict.fromkeys(first_names(state).values())}


WEIGHT_TYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64
"""Types of weights in a file. Integers and float8 are weights that were divided by scales, which a model lacks."""


def set_weights(model: nn.Module, stored: Mapping[str, Tensor], source: str) -> None:
    """Do the work of `load_weights` with tensors that were read from `source`."""
    state = model.state_dict(keep_vars=True)
    names = first_names(state)
    stored = {names.get(name, name): value for name, value in stored.items()}
    wanted = {name: state[name] for name in names.values()}
    wrong = [
        f"{name} is {dimensions(stored[name].shape)} in the file and {dimensions(value.shape)} in the model"
        for name, value in wanted.items()
        if name in stored and stored[name].shape != value.shape
    ]
    types = [
        f"{name} is {str(stored[name].dtype).removeprefix('torch.')}"
        for name, value in wanted.items()
        if name in stored and stored[name].dtype not in WEIGHT_TYPES
    ]
    faults = {
        "missing": [name for name in wanted if name not in stored],
        "unexpected": [name for name in stored if name not in wanted],
        "wrong shape": wrong,
        "wrong type": types,
    }
    problems = [f"{kind}: {listing(names)}" for kind, names in faults.items() if names]
    if problems:
        raise Mistake(f"{source} does not fit the model: {'; '.join(problems)}. Use the config it was saved with.")
    with torch.no_grad():
        for name, value in wanted.items():
            value.copy_(stored[name])


def first_names(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Each name, mapped to the first name of the same parameter."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(value), name) for name, value in state.items()}


def dimensions(shape: torch.Size) -> str:
    """A shape in words: 2x3."""
    return "x".join(map(str, shape)) or "a scalar"
