"""Measurements of how fast this machine multiplies and reads; bounds are computed from these rates.

Operands stay in the cache if they fit. Each measurement takes the fastest of several layouts or methods.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from transformer_xl.runtime.device import PRECISIONS

from .measure import seconds_each

_SECONDS = 0.01
"""The minimum duration of a measurement."""


def _times(call: Callable[[], Any]) -> int:
    call()
    return max(1, round(_SECONDS / max(seconds_each(call, 2), 1e-7)))


class Products:
    """Measures the seconds of a list of `bound.Product`."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.products: list[tuple[Callable[[], Any], int, float]] = []
        cache: dict[tuple[int, ...], Callable[[], Any]] = {}
        for _, *shape, count in job["products"]:
            key = tuple(shape)
            if key not in cache:
                cache[key] = _fastest(key, PRECISIONS[job["precision"]], job["device"])
            self.products.append((cache[key], _times(cache[key]), count))

    def seconds(self) -> float:
        return sum(count * seconds_each(call, times) for call, times, count in self.products)


def _fastest(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Callable[[], Any]:
    """The faster of x @ w and x @ w.T, by a short trial of each."""
    batch, m, k, n = shape
    x, w = torch.randn(batch, m, k, device=device).to(dtype), torch.randn(batch, k, n, device=device).to(dtype)
    out = torch.empty(batch, m, n, device=device, dtype=dtype)
    if batch == 1:
        x, w, out = x[0], w[0], out[0]
    ways = [partial(torch.matmul, x, layout, out=out) for layout in (w, w.mT.contiguous().mT)]
    for way in ways:
        way()
    return min(ways, key=lambda way: min(seconds_each(way, 1) for _ in range(2)))


class Bandwidth:
    """Measures the seconds to read a byte, by summing a large array."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.array: torch.Tensor = torch.ones(job.get("bytes", 1 << 29) // 4, device=job["device"])

    def seconds(self) -> float:
        return min(seconds_each(self.array.sum, 1) for _ in range(3)) / (self.array.numel() * 4)
