"""What the engine computes: a prompt and its continuations, the events on the way, and the queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

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


class Turns(list[Item]):
    """A queue in which clients take turns, so one with many items does not delay the others."""

    def __init__(self, client_of: Callable[[Item], str]) -> None:
        super().__init__()
        self._client_of: Callable[[Item], str] = client_of

    def of(self, client: str) -> int:
        """The number of items of a client."""
        return list(map(self._client_of, self)).count(client)

    def put_back(self, item: Item) -> None:
        """Add an item before the others of its client."""
        clients = [*map(self._client_of, self), self._client_of(item)]
        self.insert(clients.index(clients[-1]), item)

    def first(self, load: Callable[[str], int] = lambda client: 0) -> Item:
        """The first item of the client with the least load; among several, of the one that waits longest."""
        clients = list(map(self._client_of, self))
        return self[clients.index(min(dict.fromkeys(clients), key=load))]

    def next(self, load: Callable[[str], int] = lambda client: 0) -> Item:
        """Remove `first`. Its client goes to the end."""
        item = self.first(load)
        client = self._client_of(item)
        self.remove(item)
        self[:] = sorted(self, key=lambda each: self._client_of(each) == client)
        return item

    def keep(self, chosen: Callable[[Item], bool]) -> None:
        """Forget the other items."""
        self[:] = filter(chosen, self)


def has_room(most: int, held: int, own: int, new: int) -> bool:
    """Whether a client that holds `own` of all `held` may have `new` more: at most as much as is free afterwards.

    So one client alone gets a half, and there is always room for another.
    """
    return own + new <= most - held - new
