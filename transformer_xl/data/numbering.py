"""Make ids and a vocabulary of a text in one pass.

A vocabulary is ordered by frequency, which is known only at the end of the text. Tokens are therefore numbered first;
when the numbers are counted, a table turns them into ids.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import count

import numpy as np
from jaxtyping import Int, Integer

from .bpe import renumber, train_bpe
from .vocab import Newlines, Vocab, split_words


class WordNumbering:
    """Numbers words in the order in which they first occur, which also orders words of the same frequency."""

    def __init__(self, newlines: Newlines):
        self._newlines: Newlines = newlines
        self._numbers: defaultdict[str, int] = defaultdict(count().__next__)

    def encode(self, piece: bytes) -> Integer[np.ndarray, " T"]:
        """The numbers of a piece of text."""
        words = split_words(piece.decode("utf-8"), self._newlines)
        return np.fromiter(map(self._numbers.__getitem__, words), np.int32, len(words))

    def vocab(
        self, counts: Int[np.ndarray, " N"], *, min_count: int, closed: bool
    ) -> tuple[Vocab, Integer[np.ndarray, " _"]]:
        """The vocabulary of a text in which number i occurs `counts[i]` times, and the id of each number."""
        named = dict(zip(self._numbers, counts.tolist(), strict=True))
        vocab = Vocab.from_counts("word", named, newlines=self._newlines, min_count=min_count, closed=closed)
        return vocab, vocab.ids_of(self._numbers).astype(vocab.dtype)


class PairNumbering:
    """Trains a tokenizer of byte pairs on a text, and then orders its tokens by frequency."""

    def __init__(self, newlines: Newlines, texts: Iterable[str], size: int):
        self._tokenizer = train_bpe(texts, size)
        self._first = Vocab.of_tokenizer(self._tokenizer, newlines)

    def encode(self, piece: bytes) -> Integer[np.ndarray, " T"]:
        return self._first.encode(piece).astype(np.int32)

    def vocab(
        self, counts: Int[np.ndarray, " N"], *, min_count: int, closed: bool
    ) -> tuple[Vocab, Integer[np.ndarray, " _"]]:
        order = np.argsort(-np.pad(counts, (0, len(self._first) - len(counts))), kind="stable")
        vocab = Vocab.of_tokenizer(renumber(self._tokenizer, order.tolist()), self._first.newlines)
        return vocab, np.argsort(order).astype(vocab.dtype)


Numbering = WordNumbering | PairNumbering
