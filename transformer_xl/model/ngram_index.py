"""The n-grams and matches of one more token of each stream, with work that does not depend on the window.

`NgramEmbedding.rows_of` hashes and sorts a whole window in each call, which is fast for a segment and slow for a token.
`NgramIndex` keeps a hash table of n-grams instead, as match models of compressors do. A slot holds one n-gram, the
newest, so an older one of the same slot is forgotten.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from jaxtyping import Int16, Int32, Int64, Integer, UInt32

from .ngrams import BASE, PRIME, NgramEmbedding

_MIX = np.uint64(0x9E3779B97F4A7C15)
"""An odd number; its product's upper bits depend on all bits of the key (Knuth, volume 3, section 6.4)."""


class NgramIndex:
    """Finds the rows of `ngrams.table` for one more token of each stream.

        index = NgramIndex(model.ngrams, streams)
        rows = index.add(ids)

    The rows are those of `rows_of`, except where slots collide, and except that a match of n tokens may be in any
    stream if n is in `shared`. The window counts the steps since then.
    """

    def __init__(self, ngrams: NgramEmbedding, streams: int, *, shared: Collection[int] = (), slot_bits: int = 20):
        longest = max(*ngrams.lengths, *ngrams.matches, 1)
        self.lengths: list[int] = [*ngrams.lengths, *ngrams.matches]
        self.own: int = len(ngrams.lengths)
        self.window: int = ngrams.window
        self.sizes: Int64[np.ndarray, " N"] = np.array(ngrams.sizes, np.int64)
        self.starts: Int64[np.ndarray, " N"] = np.cumsum(self.sizes) - self.sizes
        self.powers: Int64[np.ndarray, " L"] = np.array([pow(BASE, i + 1, PRIME) for i in range(longest)], np.int64)
        self.codes: Int64[np.ndarray, "B L"] = np.zeros((streams, longest), np.int64)
        """The last codes of each stream, newest first: ids plus one, 0 before the first token."""
        apart = np.array([n not in shared for n in ngrams.matches], np.int64)
        self.salt: Int64[np.ndarray, "B M"] = (np.arange(streams)[:, None] << 31) * apart
        """Added to a hash that finds matches in its own stream only."""
        self.shift: Any = np.uint64(64 - slot_bits)
        self.tables: Int64[np.ndarray, " M"] = np.arange(len(ngrams.matches)) << slot_bits
        slots = len(ngrams.matches) << slot_bits
        self.keys: UInt32[np.ndarray, " slots"] = np.zeros(slots, np.uint32)
        self.followers: Int16[np.ndarray, " slots"] = np.zeros(slots, np.int16)
        self.ends: Int32[np.ndarray, " slots"] = np.full(slots, -1 - self.window, np.int32)
        self.step: int = 0
        self.pending: tuple[Any, Any, Any] | None = None
        """The n-grams that ended at the last token, whose follower comes next: slots, keys, which streams have them."""

    def add(self, ids: Integer[np.ndarray, " B"]) -> Int64[np.ndarray, "B N"]:
        """Rows for the token of each stream: one of each n-gram, then one of each match."""
        self.codes[:, 1:] = self.codes[:, :-1].copy()
        self.codes[:, 0] = ids + 1
        hashes = (self.codes * self.powers % PRIME).cumsum(1)[:, [n - 1 for n in self.lengths]] % PRIME
        if self.own < len(self.lengths):
            hashes[:, self.own :] = self._followers(hashes[:, self.own :])
        self.step += 1
        return hashes % self.sizes + self.starts

    def _followers(self, hashes: Int64[np.ndarray, "B M"]) -> Int64[np.ndarray, "B M"]:
        """The code that followed each n-gram when it last occurred; 0 if it did not within the window."""
        if self.pending is not None:
            slots, keys, whole = self.pending
            followers = np.broadcast_to(self.codes[:, :1], slots.shape)
            self.keys[slots[whole]], self.followers[slots[whole]] = keys[whole], followers[whole]
            self.ends[slots[whole]] = self.step - 1
        mixed = (hashes | self.salt).astype(np.uint64) * _MIX
        slots = (mixed >> self.shift).astype(np.int64) + self.tables
        keys = (mixed & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        whole = self.codes[:, [n - 1 for n in self.lengths[self.own :]]] > 0
        self.pending = slots, keys, whole
        found = whole & (self.keys[slots] == keys) & (self.step - self.ends[slots] <= self.window)
        return np.where(found, self.followers[slots], 0).astype(np.int64)
