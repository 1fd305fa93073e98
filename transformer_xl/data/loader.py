"""`StreamLoader`: read a split as `batch_size` streams in parallel, segment by segment.

The first of n tokens is only context; the other n - 1 are targets. The last target of stream b - 1 is the first context
of stream b, so every target is scored once. Four streams over 11 tokens in segments of two targets (a dot is not
scored):

    a b c d e f g h i j k    segment 0   a b > b c    d e > e f    g h > h i    i j > j k
                             segment 1   c > d        f > g        . > .        . > .

With a context of one token, segment 1 reads that token again and does not score it:

                             segment 1   b c > . d    e f > . g    . . > . .    . . > . .
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor

from ..config.settings import MOST_STREAMS
from ..mistake import Mistake
from .corpus import Split

_TURN = 64
"""Number of segments in a turn of one of two paired streams."""
_PIECE = 1 << 24
"""Number of tokens in which to search for line ends at a time."""


class Segment(NamedTuple):
    """The input of one call of the model. After the end of a row's text, targets are -1 and ids are arbitrary."""

    ids: Int[Tensor, "B T"]
    targets: Int[Tensor, "B T"]
    """-1: not scored."""
    reset: Bool[Tensor, " B"] | None
    """Rows whose memory is emptied before this segment; None if there are none."""


class Rearranged:
    """Pieces of a text in another order. They are read by slices, like an array."""

    def __init__(
        self, tokens: Integer[np.ndarray, " N"], starts: Int[np.ndarray, " P"], sizes: Int[np.ndarray, " P"]
    ) -> None:
        self._tokens, self._starts, self._sizes = tokens, starts, sizes
        self._ends = np.cumsum(sizes)
        """The position at which each piece ends in the new order."""

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, part: slice) -> Integer[np.ndarray, " n"]:
        start, stop, _ = part.indices(len(self))
        found = [self._tokens[:0]]
        piece = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            left = int(self._ends[piece]) - start
            begin = int(self._starts[piece]) + int(self._sizes[piece]) - left
            found.append(self._tokens[begin : begin + min(left, stop - start)])
            start += left
            piece += 1
        return np.concatenate(found)


def shuffled_lines(tokens: Integer[np.ndarray, " N"], line_end: int, seed: Sequence[int]) -> Rearranged:
    """The lines of a text in a random order. The first line stays first, because the first token is only context; so
    every epoch has the same targets. A last line without an end stays last."""
    pieces = range(0, len(tokens), _PIECE)
    ends = [np.flatnonzero(tokens[start : start + _PIECE] == line_end) + start + 1 for start in pieces]
    starts = np.unique(np.concatenate([[0], *ends]))
    starts = starts[starts < len(tokens)]
    whole = len(starts) - 1 if tokens[-1] != line_end and len(starts) > 1 else len(starts)
    order = np.arange(len(starts))
    order[1:whole] = 1 + np.random.default_rng(seed).permutation(whole - 1)
    return Rearranged(tokens, starts[order], np.diff(starts, append=len(tokens))[order])


def shifted_copies(tokens: Integer[np.ndarray, " N"], copies: int, seed: int) -> Rearranged:
    """Copies of a text one after another, each from a random token on and around its end, as the original TensorFlow
    code reads a text (`num_passes`): streams begin at other positions in every copy."""
    begins = np.random.default_rng(seed).integers(len(tokens), size=copies)
    starts = np.stack([begins, np.zeros_like(begins)], axis=1)
    return Rearranged(tokens, starts.ravel(), np.stack([len(tokens) - begins, begins], axis=1).ravel())


def random_cuts(targets: int, tgt_len: int, seed: Sequence[int]) -> Int[np.ndarray, " n"]:
    """The ends of segments of random lengths (Merity et al. 2018). The last end is `targets`.

    A length is drawn from a normal distribution, rounded down, and at least 5. The standard deviation is 5. The mean is
    `tgt_len`, or with probability 1/20 half of `tgt_len`.
    """
    rng = np.random.default_rng(seed)
    count = targets // 5 + 1
    mean = np.where(rng.random(count) < 0.95, tgt_len, tgt_len / 2)
    ends = np.cumsum(np.maximum(rng.normal(mean, 5).astype(np.int64), 5))
    return np.append(ends[ends < targets], targets)


def _shares(count: int, parts: int) -> Iterator[tuple[int, int]]:
    """Start and size of each of `parts` consecutive shares of `count`; the first ones have one more."""
    size, extra = divmod(count, parts)
    return ((i * size + min(i, extra), size + (i < extra)) for i in range(parts))


class StreamLoader:
    """The segments of a split in order. `segment(index)` depends only on the index, so one integer resumes training.

    Iterating yields one epoch.

    Args:
        split: a `Split`, or ids alone.
        batch_size: number of streams in the whole batch. Their lengths differ by at most one target. If there are more
            streams than targets, some are empty.
        tgt_len: targets of a segment; the last segment of an epoch may be shorter.
        documents: start positions of documents, the first 0. A document goes to the stream with the fewest segments so
            far and begins a segment with `reset`; its first token is only context. None takes the split's own.
        max_tokens: score only the first `max_tokens` targets; 0 scores all.
        shuffle: the id that ends a line, and a seed: shuffle the lines in each epoch. None keeps their order.
        context_len: repeat at most this many tokens of the same span before each segment, with targets of -1.
        passes: read this many `shifted_copies` as one epoch.
        seed: of the shifts.
        random_seed: draw new segment lengths by `random_cuts` in each epoch, so the number of segments differs between
            epochs. None: all lengths are `tgt_len`.
        rows: the streams that this rank reads; None reads all. Slices that partition `range(batch_size)` give the same
            number of segments with the same width, and their rows together are all rows. An empty slice gives no
            segments.
    """

    def __init__(
        self,
        split: Split | Integer[np.ndarray, " N"],
        *,
        batch_size: int,
        tgt_len: int,
        documents: Sequence[int] | Int[np.ndarray, " D"] | None = None,
        max_tokens: int = 0,
        shuffle: tuple[int, int] | None = None,
        context_len: int = 0,
        passes: int = 1,
        seed: int = 0,
        random_seed: int | None = None,
        rows: slice | None = None,
    ) -> None:
        least = (("batch_size", batch_size, 1), ("tgt_len", tgt_len, 1), ("max_tokens", max_tokens, 0))
        for setting, value, bound in (*least, ("context_len", context_len, 0), ("passes", passes, 1)):
            if value < bound:
                raise Mistake(f"{setting} must be at least {bound}, got {value}.")
        if batch_size > MOST_STREAMS:
            raise Mistake(f"batch_size must be at most {MOST_STREAMS:,}, got {batch_size}.")
        if isinstance(split, Split):
            documents = split.documents if documents is None else documents
        self._tokens: Any = np.asarray(split.ids if isinstance(split, Split) else split)
        if len(self._tokens) < 2:
            name = f"{split.name} split" if isinstance(split, Split) else "text"
            raise Mistake(f"The {name} must have at least 2 tokens, the first is context; got {len(self._tokens)}.")
        if shuffle is not None and (documents is not None or passes > 1):
            raise Mistake("shuffle must be None with documents or several passes. Leave one of them out.")
        if passes > 1:
            if documents is not None:
                raise Mistake(f"passes must be 1 where documents start segments of their own, got {passes}.")
            self._tokens = shifted_copies(self._tokens, passes, seed % 2**63)
        if documents is not None and random_seed is not None:
            raise Mistake("random_tgt_len must be false where documents start segments of their own.")
        self.batch_size: int = batch_size
        self.tgt_len: int = tgt_len
        self.context_len: int = context_len
        self._shuffle, self._shuffled = shuffle, (-1, self._tokens)
        self._limit = max_tokens or len(self._tokens)
        self._documents = None if documents is None else np.asarray(documents)
        self._chosen = slice(None) if rows is None else rows
        self._seed, self._cuts = random_seed, (-1, np.zeros(0, np.int64))
        self._begins = [0]
        """With random lengths: the index of the first segment of each epoch, as far as computed."""
        self._arrange(paired=False)

    def _arrange(self, *, paired: bool) -> None:
        """Distribute the text to the streams."""
        rows = self._streams(paired) if self._documents is None else self._streams_of_documents(self._documents)
        self._all: list[Int[np.ndarray, "S 3"]] = [np.array(row, np.int64).reshape(-1, 3) for row in rows]
        """Each stream as spans of tokens that are read one after another: of each the index of its first segment, its
        start and its number of targets. A text may have millions, so they are in arrays."""
        self._rows = self._all[self._chosen]
        self.targets: int = sum(int(row[:, 2].sum()) for row in self._rows)
        """Number of targets in the chosen rows in an epoch."""
        self._segments = max(int(row[-1, 0] + -(-row[-1, 2] // self.tgt_len)) for row in self._all if len(row))

    def short(self) -> StreamLoader:
        """A loader with twice as many streams and half of `tgt_len`, for all rows.

        Without documents both have read the same text after every 64 segments: streams 2i and 2i + 1 share the text of
        stream i; of each 128 segments the first reads 64, the second the next 64. Each turn starts with `reset`.
        """
        assert self._seed is None and self.tgt_len > 1, "these lengths are not halved"
        short = copy(self)
        short.batch_size, short.tgt_len, short._chosen = 2 * self.batch_size, self.tgt_len // 2, slice(None)
        short._arrange(paired=True)
        return short

    def __len__(self) -> int:
        """Number of segments in an epoch (with random lengths, in epoch 0). It does not depend on `rows`."""
        return self._segments if self._seed is None else len(self._cuts_of(0))

    def __iter__(self) -> Iterator[Segment]:
        return map(self.segment, range(len(self) if self._rows else 0))

    def segment(self, index: int) -> Segment:
        """Segment `index`, counted from 0 over all epochs. The first one of an epoch resets the memory of every row."""
        if index < 0:
            raise Mistake(f"Segments count from 0, got {index}.")
        epoch, index = divmod(index, len(self)) if self._seed is None else self._epoch_of(index)
        tokens = self._tokens_of(epoch)
        windows = [self._window(row, epoch, index) for row in self._all]
        width = max(count + min(done, self.context_len) for _, count, done in windows if count)
        ids = np.zeros((len(self._rows), width), np.int64)
        targets, reset = np.full_like(ids, -1), np.full(len(self._rows), index == 0)
        for i, (start, count, done) in enumerate(windows[self._chosen]):
            if count:
                again = min(done, self.context_len)
                part = tokens[start - again : start + count + 1]
                ids[i, : len(part)] = part[:width]
                targets[i, again : again + count] = part[again + 1 :]
                reset[i] |= done == 0
        emptied = torch.from_numpy(reset) if reset.any() else None
        return Segment(torch.from_numpy(ids), torch.from_numpy(targets), emptied)

    def _window(self, row: Int[np.ndarray, "S 3"], epoch: int, index: int) -> tuple[int, int, int]:
        """A row's part of a segment: where it starts, its number of targets, and that of its span before them."""
        if not len(row):
            return 0, 0, 0
        if self._seed is None:
            first, start, targets = row[bisect_right(row[:, 0], index) - 1].tolist()
            begin = (index - first) * self.tgt_len
            end = begin + self.tgt_len
        else:
            [(_, start, targets)], cuts = row.tolist(), self._cuts_of(epoch)
            begin, end = int(cuts[index - 1]) if index else 0, int(cuts[index])
        return start + begin, max(min(end, targets) - begin, 0), begin

    def _epoch_of(self, index: int) -> tuple[int, int]:
        """With random lengths: the epoch of a segment, and its index in that epoch."""
        while self._begins[-1] <= index:
            self._begins.append(self._begins[-1] + len(self._cuts_of(len(self._begins) - 1)))
        epoch = bisect_right(self._begins, index) - 1
        return epoch, index - self._begins[epoch]

    def _cuts_of(self, epoch: int) -> Int[np.ndarray, " n"]:
        if self._cuts[0] != epoch:
            longest = int(self._all[0][0, 2])
            self._cuts = epoch, random_cuts(longest, self.tgt_len, ((self._seed or 0) % 2**63, epoch, 1))
        return self._cuts[1]

    def _tokens_of(self, epoch: int) -> Any:
        if self._shuffle is None:
            return self._tokens
        if self._shuffled[0] != epoch:
            line_end, seed = self._shuffle
            self._shuffled = epoch, shuffled_lines(self._tokens, line_end, (seed % 2**63, epoch))
        return self._shuffled[1]

    def _streams(self, paired: bool) -> list[array[int]]:
        targets = min(len(self._tokens) - 1, self._limit)
        if not paired:
            return [array("q", (0, start, count)) for start, count in _shares(targets, self.batch_size)]
        rows = [array("q") for _ in range(self.batch_size)]
        block = 2 * _TURN * self.tgt_len
        for i, (begin, count) in enumerate(_shares(targets, self.batch_size // 2)):
            for done in range(0, count, block):
                for j, (start, turn) in enumerate(_shares(min(block, count - done), 2)):
                    rows[2 * i + j].extend((done // block * _TURN, begin + done + start, turn))
        return rows

    def _streams_of_documents(self, starts: Int[np.ndarray, " D"]) -> list[array[int]]:
        targets = np.diff(starts, append=len(self._tokens)) - 1
        if starts[0] or targets.min() < 0:
            raise Mistake("documents must start at 0 and increase within the text.")
        if not targets.any():
            raise Mistake("Every document is a single token, which is context only; there is nothing to score.")
        before = np.cumsum(targets) - targets
        targets = np.clip(self._limit - before, 0, targets)
        rows = [array("q") for _ in range(self.batch_size)]
        shortest = [(0, b) for b in range(self.batch_size)]
        for start, count in zip(starts.tolist(), targets.tolist(), strict=True):
            if count:
                segments, b = shortest[0]
                rows[b].extend((segments, start, count))
                heapq.heapreplace(shortest, (segments + -(-count // self.tgt_len), b))
        return rows
