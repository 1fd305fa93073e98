"""From a text to its ids and its vocabulary in one pass.

A vocabulary is ordered by frequency, which is known only at the end. So symbols are first numbered as they come, and a
table from these numbers to ids is made when all is counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable
from itertools import count

import numpy as np
from jaxtyping import Int, Integer

from .bpe import BytePairs, renumber, train_bpe
from .vocab import Newlines, Vocab, split_words


class Counting(ABC):
    """Numbers and counts the symbols of a text that comes in pieces."""

    def __init__(self, newlines: Newlines):
        self.newlines: Newlines = newlines
        self._counts = np.zeros(0, np.int64)

    def encode(self, piece: bytes) -> Int[np.ndarray, " T"]:
        """The numbers of one piece, cut where no symbol is."""
        numbers = self._number(piece.decode())
        before, self._counts = self._counts, np.bincount(numbers, minlength=len(self._counts))
        self._counts[: len(before)] += before
        return numbers

    @abstractmethod
    def vocab(self, *, min_count: int, closed: bool) -> tuple[Vocab, Integer[np.ndarray, " N"]]:
        """The vocabulary of all pieces, and the id of each number in it."""

    @abstractmethod
    def _number(self, piece: str) -> Int[np.ndarray, " T"]: ...


class WordCounting(Counting):
    """Words, numbered in the order they first occur: the one that decides between words of the same frequency."""

    def __init__(self, newlines: Newlines):
        super().__init__(newlines)
        self._numbers: defaultdict[str, int] = defaultdict(count().__next__)

    def vocab(self, *, min_count: int, closed: bool) -> tuple[Vocab, Integer[np.ndarray, " N"]]:
        counts = dict(zip(self._numbers, self._counts.tolist(), strict=True))
        vocab = Vocab.from_counts("word", counts, newlines=self.newlines, min_count=min_count, closed=closed)
        return vocab, vocab.ids_of(self._numbers).astype(vocab.dtype)

    def _number(self, piece: str) -> Int[np.ndarray, " T"]:
        words = split_words(piece, self.newlines)
        return np.fromiter(map(self._numbers.__getitem__, words), np.int32, len(words))


class PairCounting(Counting):
    """Byte pairs: a tokenizer made from the text, whose symbols are then ordered by frequency."""

    def __init__(self, newlines: Newlines, texts: Iterable[str], size: int):
        super().__init__(newlines)
        self._tokenizer = train_bpe(texts, size)
        self._pairs = BytePairs(self._tokenizer)

    def vocab(self, *, min_count: int, closed: bool) -> tuple[Vocab, Integer[np.ndarray, " N"]]:
        counts = np.zeros(len(self._pairs.symbols), np.int64)
        counts[: len(self._counts)] = self._counts
        order = np.argsort(-counts, kind="stable")
        vocab = Vocab.of_tokenizer(renumber(self._tokenizer, order.tolist()), self.newlines)
        return vocab, np.argsort(order).astype(vocab.dtype)

    def _number(self, piece: str) -> Int[np.ndarray, " T"]:
        return self._pairs.encode(piece.replace("\n", "") if self.newlines == "drop" else piece)
