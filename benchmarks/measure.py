"""The time and peak memory of a call in a new process, so earlier work does not count."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from .peak import peak_memory


class Measured(NamedTuple):
    """The result of a call, its duration and its peak memory."""

    value: Any
    seconds: float
    peak_bytes: int
    """The peak of its process, including the interpreter and its libraries."""


def measure_call(function: Callable[..., Any], *arguments: Any) -> Measured:
    """Call `function` in a new process. The function and its arguments must be picklable."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_call, function, arguments).result()


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Measured:
    start = time.perf_counter()
    value = function(*arguments)
    return Measured(value, time.perf_counter() - start, peak_memory())
