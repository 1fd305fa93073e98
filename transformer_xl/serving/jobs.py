"""What the engine computes: a prompt and its continuations, the events on the way, and the queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Integer

from ..config.settings import Lengths
from ..evaluation.generate import Sampling
from ..model.inference import KVCache
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
    """A continuation is complete; `text` is its rest, and `past` the whole text if its job asked for it."""

    index: int
    text: str
    reason: str
    past: Past | None


Event = Scored | Wrote | Ended | Exception
"""After an exception nothing more comes."""


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
    store: bool = True
    """Whether the text can be continued later."""
    client: str = ""
    """Clients take turns."""
    cancelled: bool = field(default=False, init=False)
    read: int = field(default=0, init=False)
    """Number of tokens that the engine has read, and the state after them while there are more."""
    state: KVCache | None = field(default=None, init=False)

    @property
    def tail(self) -> list[int]:
        """The last tokens of its text, as in `Past`."""
        return [*([] if self.past is None else self.past.tail[:-1]), *self.ids[-3:].tolist()][-3:]


Item = TypeVar("Item")


class Turns(Generic[Item]):
    """A queue in which clients take turns, so one with many items does not delay the others."""

    def __init__(self, client_of: Callable[[Item], str]) -> None:
        self._client_of: Callable[[Item], str] = client_of
        self._clients: dict[str, deque[Item]] = {}

    def __len__(self) -> int:
        """The number of items; may be asked in any thread."""
        return sum(map(len, list(self._clients.values())))

    def __iter__(self) -> Iterator[Item]:
        return chain.from_iterable(self._clients.values())

    def of(self, client: str) -> int:
        """The number of items of a client."""
        return len(self._clients.get(client, ()))

    def add(self, item: Item) -> None:
        self._clients.setdefault(self._client_of(item), deque()).append(item)

    def put_back(self, item: Item) -> None:
        """Add an item before the others of its client."""
        self._clients.setdefault(self._client_of(item), deque()).appendleft(item)

    def first(self, load: Callable[[str], int] = lambda client: 0) -> Item:
        """The first item of the client with the least load; among several, of the one that waits longest."""
        return self._clients[min(self._clients, key=load)][0]

    def next(self, load: Callable[[str], int] = lambda client: 0) -> Item:
        """Remove `first`. Its client goes to the end."""
        client = self._client_of(self.first(load))
        items = self._clients.pop(client)
        item = items.popleft()
        if items:
            self._clients[client] = items
        return item

    def keep(self, chosen: Callable[[Item], bool]) -> None:
        """Forget the other items."""
        kept = {client: deque(filter(chosen, items)) for client, items in self._clients.items()}
        self._clients = {client: items for client, items in kept.items() if items}


def has_room(most: int, held: int, own: int, new: int) -> bool:
    """Whether a client that holds `own` of all `held` may have `new` more: at most as much as is free afterwards.

    So one client alone gets a half, and there is always room for another.
    """
    return own + new <= most - held - new
