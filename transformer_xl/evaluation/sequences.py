"""Scores many sequences of ids, each from an empty memory, with sequences of similar length in one batch.

A sequence is read once, in segments of `tgt_len`, and its first id is only context. Padding is on the right, where
causality makes it harmless, so the figure of a sequence does not depend on the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int, Integer
from torch import Tensor, nn

from ..config.settings import Lengths
from ..runtime.terminal import report_progress
from .score import Scoring, device_of, inference

BATCH_TOKENS = 8192
"""Number of positions in a segment of a batch, by default."""


class _Segment(NamedTuple):
    """One segment of a batch."""

    rows: list[int]
    """Indices of the sequences that still have targets; the longest one is first."""
    start: int
    window: Int[Tensor, "R T"]
    """The ids of the segment and the next one, which is only a target; -1 is padding."""
    fewer: bool
    """Whether the segment before has more rows. They were last."""

    def memory(self, model: Any, before: Any, lengths: Lengths) -> Any:
        """The state of these rows; `before` is the state after the segment before."""
        if self.start == 0:
            return model.empty_cache(len(self.rows), lengths)
        return before.select(slice(len(self.rows))) if self.fewer else before


def score_sequences(
    model: Scoring,
    sequences: Sequence[Integer[np.ndarray, " _"]],
    lengths: Lengths,
    *,
    batch_tokens: int = BATCH_TOKENS,
    precision: str = "fp32",
    title: str = "scoring",
) -> list[float]:
    """The nats of each sequence. The model reads at most two positions per target, padding included."""
    device, memory = device_of(model), None
    nats = torch.zeros(len(sequences), dtype=torch.float64, device=device)
    with inference(model, precision) as model:
        for segment in _segments(sequences, lengths.tgt_len, batch_tokens, title):
            memory = segment.memory(model, memory, lengths)
            window = segment.window.to(device)
            nll, memory = model(window[:, :-1].clamp(min=0), window[:, 1:], memory, lengths)
            nats[segment.rows] += nll.sum(dim=1, dtype=torch.float64)
    return nats.tolist()


def batches_of(targets: Sequence[int], tgt_len: int, batch_tokens: int) -> Iterator[list[int]]:
    """Indices of the sequences that have targets, longest first. A batch's first segment holds about `batch_tokens`
    positions, and at least half of them are targets."""
    order = sorted((i for i, count in enumerate(targets) if count > 0), key=lambda i: (-targets[i], i))
    first = 0
    while first < len(order):
        width = min(targets[order[first]], tgt_len)
        rows = order[first : first + max(1, batch_tokens // width)]
        batch = [i for i in rows if 2 * targets[i] >= width]
        yield batch
        first += len(batch)


def _segments(
    sequences: Sequence[Integer[np.ndarray, " _"]], tgt_len: int, batch_tokens: int, title: str
) -> Iterator[_Segment]:
    """The segments of all batches, with a report of progress."""
    targets = [len(ids) - 1 for ids in sequences]
    batches = list(batches_of(targets, tgt_len, batch_tokens))
    total = sum(math.ceil(targets[batch[0]] / tgt_len) for batch in batches)
    parts = (segment for batch in batches for segment in _segments_of(sequences, batch, tgt_len))
    return report_progress(parts, title, total)


def _segments_of(
    sequences: Sequence[Integer[np.ndarray, " _"]], batch: Sequence[int], tgt_len: int
) -> Iterator[_Segment]:
    rows = list(batch)
    ids = {i: torch.from_numpy(np.asarray(sequences[i], np.int64)) for i in rows}
    for start in range(0, len(ids[rows[0]]) - 1, tgt_len):
        before, rows = len(rows), [i for i in rows if len(ids[i]) - 1 > start]
        parts = [ids[i][start : start + tgt_len + 1] for i in rows]
        window = nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=-1)
        yield _Segment(rows, start, window, fewer=len(rows) < before)
