"""Checks of a call's ids and targets, of any integer dtype, and of vectors.

They read no values, so the host never waits for a device, and torch.compile sees no branch on data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from ..mistake import Mistake


def as_ids(ids: Integer[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Ids as int64, which embeddings need. A vocabulary's `encode` returns the smallest dtype that holds them."""
    return _as_int64(ids, ids.ndim == 2, "ids must have the shape [rows, positions]")


def as_targets(targets: Integer[Tensor, "*B"], shape: Sequence[int]) -> Int[Tensor, "*B"]:
    """Targets as int64; `shape` is the shape of the ids."""
    return _as_int64(targets, targets.shape == tuple(shape), f"targets must have the shape of ids, {list(shape)},")


def check_vectors(x: Tensor, like: Float[Tensor, " D"]) -> None:
    """Raise a `Mistake` unless `x` is vectors for a backbone with the weight `like`. Autocast converts the dtype."""
    fits = x.ndim == 3 and x.shape[2] == len(like) and x.device == like.device
    is_cast = x.is_floating_point() and torch.is_autocast_enabled(like.device.type)
    if not fits or (x.dtype != like.dtype and not is_cast):
        raise Mistake(
            f"x must be vectors of the shape [rows, positions, {len(like)}], {like.dtype} on {like.device}, got "
            f"{list(x.shape)} {x.dtype} on {x.device}. Project vectors of another width, and embed ids."
        )


def as_marks(rows: Bool[Tensor, " B"], like: Tensor) -> Bool[Tensor, " B"]:
    """Marks of rows as booleans on the device of `like`, which has a row for each; also from lists and arrays."""
    marks = torch.as_tensor(rows)
    if marks.dtype != torch.bool or marks.shape != like.shape[:1]:
        raise Mistake(
            f"rows must be true or false for each of {len(like)} rows, got {list(marks.shape)} {marks.dtype}. "
            "Numbers of rows are no marks."
        )
    return marks.to(like.device)


def _as_int64(x: Tensor, fits: bool, rule: str) -> Tensor:
    if not fits or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise Mistake(f"{rule} and an integer dtype, got {list(x.shape)} and {x.dtype}.")
    return x.long()
