"""Scores the same targets at several lengths, in a limited time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..config.settings import Lengths
from ..data.loader import Segment, StreamLoader
from ..runtime.terminal import report_progress
from .score import EvalResult, Scoring, evaluate

T = TypeVar("T")


def score_lengths(
    model: Scoring,
    loaders: Sequence[tuple[Lengths, StreamLoader]],
    end: float,
    *,
    precision: str = "fp32",
    unit: str = "byte",
    token_sizes: Int[np.ndarray, " V"] | None = None,
) -> tuple[list[EvalResult], int]:
    """Score the first segments of each loader at its lengths, until the time `end` (of `time.perf_counter`).

    All loaders must give the same targets. A pass has an equal share of the time that is left, so give the slowest
    first. Returns the results for the segments that all passes could score, and the number of these segments.
    """
    common = len(loaders[0][1])
    passes: list[tuple[EvalResult, list[_Cost]]] = []
    for done, (lengths, loader) in enumerate(loaders):
        now, costs = time.perf_counter(), _Costs(token_sizes)
        shown = report_progress(islice(loader, common), f"scoring with a memory of {lengths.mem_len:,}", common)
        timed = before(now + (end - now) / (len(loaders) - done), shown)
        result = evaluate(
            model, timed, lengths, precision=precision, unit=unit, token_sizes=token_sizes, dump=costs.append
        )
        passes.append((result, costs.parts))
        common = len(costs.parts)
    return [_first(result, parts[:common]) for result, parts in passes], common


_Cost = tuple[float, int, int]


class _Costs:
    """The nats, targets and bytes of each segment."""

    def __init__(self, token_sizes: Int[np.ndarray, " V"] | None):
        self.parts: list[_Cost] = []
        self._sizes = token_sizes

    def append(self, segment: Segment, nll: Float[Tensor, "B T"]) -> None:
        scored = segment.targets[segment.targets >= 0].numpy()
        size = 0 if self._sizes is None else int(self._sizes[scored].sum(dtype=np.int64))
        self.parts.append((nll.sum(dtype=torch.float64).item(), len(scored), size))


def _first(result: EvalResult, parts: Sequence[_Cost]) -> EvalResult:
    """The result for the first segments, whose costs are `parts`."""
    nats, targets, size = (sum(column) for column in zip(*parts, strict=True))
    seconds = result.seconds * targets / result.targets
    size = None if result.bytes is None else size
    return replace(result, nats=nats, targets=int(targets), bytes=size, seconds=seconds)


def before(end: float, items: Iterable[T]) -> Iterator[T]:
    """Yield the first item, and more while the pace so far allows to finish each before the time `end`."""
    begun = time.perf_counter()
    for done, item in enumerate(items):
        now = time.perf_counter()
        if done and now + (now - begun) / done > end:
            return
        yield item
