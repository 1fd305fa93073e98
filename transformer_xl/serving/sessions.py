"""Stores texts that later requests continue. Ids are random, and time and memory are limited."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from .texts import Past


class Session(NamedTuple):
    """A text, who may continue it, and when it goes."""

    past: Past
    owner: str
    end: float


class Sessions:
    """Texts by id. The least recently used go first when there are too many; an unused one goes after `seconds`.

    A text is a value, so it can be continued any number of times. Only its owner can reach it: another one gets the
    answer of an id that does not exist.
    """

    def __init__(
        self, *, seconds: float, most: int, most_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds: float = seconds
        self.most: int = most
        self.most_bytes: int = most_bytes
        self._clock = clock
        self.nbytes: int = 0
        self._lock = threading.Lock()
        self._texts: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, name: str, past: Past, owner: str = "") -> None:
        """Keep a text under an id of `new_id`, unless it alone is too large."""
        with self._lock:
            if past.nbytes <= self.most_bytes and self.most:
                self._texts[name] = Session(past.to_keep(), owner, self._clock() + self.seconds)
                self.nbytes += past.nbytes
            self._trim()

    def get(self, name: str, owner: str = "") -> Past | None:
        """The text of an id; None if there is none (any more) for this owner. Its time begins again."""
        with self._lock:
            self._trim()
            session = self._texts.get(name)
            if session is None or not secrets.compare_digest(session.owner, owner):
                return None
            self._texts[name] = session._replace(end=self._clock() + self.seconds)
            self._texts.move_to_end(name)
            return session.past

    def trim(self) -> None:
        """Forget the texts whose time is over."""
        with self._lock:
            self._trim()

    def _trim(self) -> None:
        """The order of use is also the order of the ends."""
        now = self._clock()
        while self._texts:
            name, session = next(iter(self._texts.items()))
            if session.end > now and len(self._texts) <= self.most and self.nbytes <= self.most_bytes:
                return
            del self._texts[name]
            self.nbytes -= session.past.nbytes


def new_id() -> str:
    """An id that nobody can guess."""
    return f"cmpl-{secrets.token_urlsafe(24)}"
