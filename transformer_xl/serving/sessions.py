"""Texts that were read, as values, and the store of those that later requests continue."""

from __future__ import annotations

import mmap
import secrets
import threading
import time
from collections import OrderedDict
from dataclasses import replace
from typing import NamedTuple

import torch

from ..config.settings import Lengths
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
    return replace(lengths, mem_len=mem_len, attn_len=min(mem_len, reach_of(lengths)) + 1)


class Session(NamedTuple):
    """A text that is kept, and when it goes."""

    past: Past
    end: float


class Sessions:
    """Texts by owner and id. The least recently used go first when they are too large; an unused one goes after
    `seconds`.

    A text is a value, so it can be continued any number of times. Only its owner can reach it: another one gets the
    answer of an id that does not exist.
    """

    def __init__(self, *, seconds: float, most_bytes: int) -> None:
        self.seconds: float = seconds
        self.most_bytes: int = most_bytes
        self.nbytes: int = 0
        self._lock = threading.Lock()
        self._texts: OrderedDict[tuple[str, str], Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, name: str, past: Past, owner: str = "") -> None:
        """Keep a text under an id of `new_id`, unless it alone is too large."""
        with self._lock:
            if past.nbytes <= self.most_bytes:
                self._texts[owner, name] = Session(past.to_keep(), time.monotonic() + self.seconds)
                self.nbytes += past.nbytes
            self._trim()

    def get(self, name: str, owner: str = "") -> Past | None:
        """The text of an id; None if there is none (any more) for this owner. Its time begins again."""
        with self._lock:
            self._trim()
            session = self._texts.get((owner, name))
            if session is None:
                return None
            self._texts[owner, name] = session._replace(end=time.monotonic() + self.seconds)
            self._texts.move_to_end((owner, name))
            return session.past

    def trim(self) -> None:
        """Forget the texts whose time is over."""
        with self._lock:
            self._trim()

    def _trim(self) -> None:
        """The order of use is also the order of the ends."""
        now = time.monotonic()
        while self._texts:
            name, session = next(iter(self._texts.items()))
            if session.end > now and self.nbytes <= self.most_bytes:
                return
            del self._texts[name]
            self.nbytes -= session.past.nbytes


def new_id() -> str:
    """An id that nobody can guess."""
    return f"cmpl-{secrets.token_urlsafe(24)}"
