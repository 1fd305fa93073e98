"""Texts that were read, as values, and the store of those that later requests continue."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from dataclasses import replace
from typing import NamedTuple

from ..config.settings import Lengths
from ..model.inference import KVCache

LEAST = 1 << 15
"""Bytes that a kept text counts for at least."""


class Past(NamedTuple):
    """A text that was read, as a value: to continue it does not change it."""

    cache: KVCache
    """Keys and values of all tokens but the last."""
    tail: list[int]
    """The last tokens, at most three, in which a character may begin. The very last one is read with the next text."""
    lengths: Lengths

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.cache.buffers)

    def to_keep(self) -> Past:
        """The text without encoded distances."""
        return self._replace(cache=replace(self.cache, positions=(), reach=0))


def reach_of(lengths: Lengths) -> int:
    """The number of earlier positions that a token sees if the text is read one token at a time."""
    return lengths.mem_len if lengths.attn_len is None else lengths.attn_len - 1


def shorter_memory(lengths: Lengths, mem_len: int) -> Lengths:
    """Lengths at which each token sees exactly the `mem_len` tokens before it, however the text is cut."""
    return replace(lengths, mem_len=mem_len, attn_len=min(mem_len, reach_of(lengths)) + 1)


class Session(NamedTuple):
    """A text that is kept, who keeps it, when it goes, and the bytes that it counts for."""

    past: Past
    client: str
    end: float
    nbytes: int


class Sessions:
    """Texts by owner and id. An unused one goes after `seconds`. When all are too large, the least recently used text
    of the client that keeps most goes first.

    A text is a value, so it can be continued any number of times. Only its owner can reach it: another one gets the
    answer of an id that does not exist.
    """

    def __init__(self, *, seconds: float, most_bytes: int) -> None:
        self.seconds: float = seconds
        self.most_bytes: int = most_bytes
        self.nbytes: int = 0
        self._lock = threading.RLock()
        self._texts: OrderedDict[tuple[str, str], Session] = OrderedDict()
        """The least recently used first, so the order is also that of the ends."""
        self._held: Counter[str] = Counter()
        """The bytes of each client."""

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, name: str, past: Past, owner: str = "", client: str = "") -> None:
        """Keep a text of `Past.to_keep` under an id that nobody can guess, unless it alone is too large."""
        nbytes = max(past.nbytes, LEAST)
        with self._lock:
            if nbytes <= self.most_bytes:
                self._texts[owner, name] = Session(past, client, time.monotonic() + self.seconds, nbytes)
                self._held[client] += nbytes
                self.nbytes += nbytes
            self.trim()

    def get(self, name: str, owner: str = "") -> Past | None:
        """The text of an id; None if there is none (any more) for this owner. Its time begins again."""
        with self._lock:
            self.trim()
            session = self._texts.pop((owner, name), None)
            if session is None:
                return None
            self._texts[owner, name] = session._replace(end=time.monotonic() + self.seconds)
            return session.past

    def trim(self) -> None:
        """Forget the texts whose time is over, and those for which there is no room."""
        with self._lock:
            now = time.monotonic()
            while self._texts and next(iter(self._texts.values())).end <= now:
                self._forget(next(iter(self._texts)))
            while self.nbytes > self.most_bytes:
                most = max(self._held, key=self._held.__getitem__)
                self._forget(next(key for key, each in self._texts.items() if each.client == most))

    def _forget(self, key: tuple[str, str]) -> None:
        session = self._texts.pop(key)
        self._held[session.client] -= session.nbytes
        if not self._held[session.client]:  # a difference of counters would look at all clients
            del self._held[session.client]
        self.nbytes -= session.nbytes
