"""What the engine computes: a prompt and its continuations, the events on the way, and the queue."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Integer

from ..config.settings import Lengths
from ..evaluation.generate import Sampling
from .sessions import Past

Top = list[tuple[int, float]]
"""The likeliest tokens with their log-probabilities, the likeliest first."""


class Scored(NamedTuple):
    """Some tokens of the prompt were read: their log-probabilities, and what was likely instead."""

    log_probs: Float[np.ndarray, " n"]
    tops: list[Top]


class Wrote(NamedTuple):
    """One more token of a continuation. `text` may be empty, if it could be the start of a stop string."""

    index: int
    token: int
    text: str
    log_prob: float
    top: Top


class Ended(NamedTuple):
    """A continuation is complete; `text` is its rest."""

    index: int
    text: str
    reason: str
    past: Past


class Failed(NamedTuple):
    """Nothing more comes."""

    error: Exception


Event = Scored | Wrote | Ended | Failed


@dataclass(eq=False, kw_only=True)
class Job:
    """One prompt and its continuations. The engine calls `emit` in its own thread, and drops a job with `cancelled`."""

    ids: Integer[np.ndarray, " T"]
    """At least one token. With a past, the first is the last token of it."""
    past: Past | None
    lengths: Lengths
    sampling: Sampling
    max_tokens: int
    emit: Callable[[Event], None]
    n: int = 1
    echo: bool = False
    """Whether to score the prompt."""
    top: int = 0
    """Number of likeliest tokens in the events."""
    client: str = ""
    """Clients take turns."""
    cancelled: bool = field(default=False, init=False)

    @property
    def draws(self) -> tuple[float, int, float, int]:
        """Jobs with the same value draw alike, each with its own random numbers."""
        return self.sampling.temperature, self.sampling.top_k, self.sampling.top_p, self.top


class Turns:
    """A queue in which clients take turns, so one with many jobs does not delay the others."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, deque[Job]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def add(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._clients.setdefault(job.client, deque()).append(job)

    def next(self) -> Job | None:
        """Remove the next job that was not cancelled; None if there is none. Its client goes to the end."""
        while self._clients:
            client, jobs = self._clients.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._clients[client] = jobs
            if not job.cancelled:
                return job
        return None
