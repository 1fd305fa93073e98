"""What the server computes: a prompt and its continuations, the text that was read, and the events on the way."""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Integer

from ..config.settings import Lengths
from ..evaluation.generate import Sampling
from ..model.inference import KVCache


class Past(NamedTuple):
    """A text that was read, as a value: to continue it does not change it."""

    cache: KVCache
    """Keys and values of all tokens but the last."""
    last: int
    """The last token, which is read with the next text."""
    lengths: Lengths

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.cache.buffers)

    @property
    def reach(self) -> int:
        """The number of earlier positions that a token sees."""
        return reach_of(self.lengths)

    def to_keep(self) -> Past:
        """The text without encoded distances, and on a CPU as a copy in memory of its own.

        The system gets that memory back when the text goes. Texts of many lengths leave holes in the C library's.
        """
        cache, buffers = replace(self.cache, positions=(), reach=0), self.cache.buffers
        if self.nbytes and buffers[0].is_cpu:
            memory = torch.frombuffer(mmap.mmap(-1, self.nbytes, access=mmap.ACCESS_COPY), dtype=buffers[0].dtype)
            torch.cat([buffer.flatten() for buffer in buffers], out=memory)
            parts = memory.split([buffer.numel() for buffer in buffers])
            cache.buffers = [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)]
        return self._replace(cache=cache)


def reach_of(lengths: Lengths) -> int:
    """The number of earlier positions that a token sees if the text is read one token at a time."""
    return lengths.mem_len if lengths.attn_len is None else lengths.attn_len - 1


def shorter_memory(lengths: Lengths, mem_len: int) -> Lengths:
    """Lengths at which each token sees exactly the `mem_len` tokens before it, however the text is cut."""
    return replace(lengths, mem_len=mem_len, attn_len=min(mem_len + 1, reach_of(lengths) + 1))


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
    def draws(self) -> tuple[Any, ...]:
        """Jobs with the same value draw alike, each with its own random numbers."""
        return self.sampling.temperature, self.sampling.top_k, self.sampling.top_p, self.top


class EventBuffer:
    """Events that the engine has not sent yet.

    To send costs the server about as much as to write a token, whatever it sends. So with many texts the events of
    several steps are sent together.
    """

    FEW: ClassVar[int] = 4
    """With fewer texts each token is sent at once."""
    SECONDS: ClassVar[float] = 0.02
    """With more texts, the time between two sendings."""

    def __init__(self) -> None:
        self._events: deque[tuple[Job, Event]] = deque()
        self._sent = 0.0

    def add(self, job: Job, event: Event) -> None:
        self._events.append((job, event))

    def send(self, texts: int = 0) -> None:
        """Send all events, or leave them for later, by the number of texts that the engine works on."""
        now = time.perf_counter()
        if texts < self.FEW or now - self._sent > self.SECONDS:
            self._sent = now
            while self._events:
                job, event = self._events.popleft()
                job.emit(event)
