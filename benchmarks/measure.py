"""How long something takes and how much memory at most, in a fresh process, so that nothing before it counts."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from transformer_xl.analysis.peak import peak_memory


class Measured(NamedTuple):
    """What one call gave, and what it took."""

    value: Any
    seconds: float
    peak_bytes: int
    """The most memory its process held, the interpreter and its libraries included."""


def measured(function: Callable[..., Any], *arguments: Any) -> Measured:
    """Call `function` in a process of its own; it and its arguments must be things that can be pickled."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_call, function, arguments).result()


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Measured:
    start = time.perf_counter()
    value = function(*arguments)
    return Measured(value, time.perf_counter() - start, peak_memory())
