"""Ids and targets of a call, checked: any integer dtype serves, and a mistake gets one sentence.

Nothing here reads a value, so no device is waited for and torch.compile sees no branch on data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int, Integer
from torch import Tensor

from ..mistake import Mistake

_INTEGERS = {getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}


def as_ids(ids: Integer[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Ids as int64, which embeddings read. A vocabulary's `encode` gives the smallest dtype that holds them."""
    if ids.ndim != 2 or ids.dtype not in _INTEGERS:
        raise Mistake(
            f"ids must have the shape [rows, positions] and an integer dtype, got {list(ids.shape)} and {ids.dtype}."
        )
    return ids.long()


def as_targets(targets: Integer[Tensor, "*B"], shape: Sequence[int]) -> Int[Tensor, "*B"]:
    """Targets as int64; `shape` is that of the ids."""
    if targets.shape != tuple(shape) or targets.dtype not in _INTEGERS:
        raise Mistake(
            f"targets must have the shape of ids, {list(shape)}, and an integer dtype, got {list(targets.shape)} and "
            f"{targets.dtype}."
        )
    return targets.long()
