"""Scores many sequences of ids, each from an empty memory, with sequences of similar length in one batch.

A sequence is read once, in segments of `tgt_len`, and its first id is only context. Padding is on the right, where
causality makes it harmless, so the figure of a sequence does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Integer
from numpy import ndarray
from torch import Tensor, nn

from ..config.settings import Lengths
from ..runtime.terminal import report_progress
from .score import MOST_SCORES, Scoring, device_of, inference

Score = TypeVar("Score")
BATCH_TOKENS = 8192
"""Number of positions in a segment of a batch, by default."""


class Continuation(NamedTuple):
    """The score of a continuation after its context."""

    log_prob: float
    """The sum over its ids, in nats."""
    greedy: bool
    """Whether each of its ids is the likeliest one there."""


def score_sequences(
    model: Scoring,
    sequences: Sequence[Integer[ndarray, " _"]],
    lengths: Lengths,
    *,
    batch_tokens: int = BATCH_TOKENS,
    precision: str = "fp32",
    title: str = "scoring",
) -> list[float]:
    """The nats of each sequence. The model reads at most two positions per target, padding included."""

    def nats_of(model: Any, batch: Sequence[int]) -> list[float]:
        return _nats(model, [_tensor(sequences[i]) for i in batch], lengths)

    counts = [len(ids) - 1 for ids in sequences]
    found = _by_batch(model, batches_of(counts, lengths.tgt_len, batch_tokens), nats_of, precision, title)
    return [found.get(i, 0.0) for i in range(len(sequences))]


def score_continuations(
    model: Scoring,
    pairs: Sequence[tuple[Integer[ndarray, " _"], Integer[ndarray, " _"]]],
    lengths: Lengths,
    *,
    batch_tokens: int = BATCH_TOKENS,
    precision: str = "fp32",
    title: str = "scoring",
) -> list[Continuation]:
    """Score the second part of each pair after the first, which holds at least one id."""
    assert all(len(context) for context, _ in pairs), "a context must hold at least one id"

    def continuations_of(model: Any, batch: Sequence[int]) -> list[Continuation]:
        sequences = [torch.cat([*map(_tensor, pairs[i])]) for i in batch]
        return _continuations(model, sequences, [len(pairs[i][0]) for i in batch], lengths)

    counts = [len(context) + len(rest) - 1 for context, rest in pairs]
    found = _by_batch(model, batches_of(counts, lengths.tgt_len, batch_tokens), continuations_of, precision, title)
    return [found.get(i, Continuation(0.0, True)) for i in range(len(pairs))]


def _by_batch(
    model: Scoring,
    batches: Iterable[list[int]],
    score: Callable[[Any, Sequence[int]], Sequence[Score]],
    precision: str,
    title: str,
) -> dict[int, Score]:
    """The score of each sequence by its index, without those that are in no batch."""
    found: dict[int, Score] = {}
    with inference(model, precision) as model:
        for batch in report_progress(list(batches), title):
            found |= zip(batch, score(model, batch), strict=True)
    return found


def _nats(model: Any, sequences: Sequence[Int[Tensor, " _"]], lengths: Lengths) -> list[float]:
    """The nats of each sequence of a batch, which begins with the longest."""
    device, rows = device_of(model), len(sequences)
    nats = torch.zeros(rows, dtype=torch.float64, device=device)
    memory = model.empty_cache(rows, lengths)
    for _, window in _windows(sequences, lengths.tgt_len):
        rows, memory = _keep_rows(memory, rows, len(window))
        window = window.to(device)
        nll, memory = model(window[:, :-1].clamp(min=0), window[:, 1:], memory, lengths)
        nats[:rows] += nll.sum(dim=1, dtype=torch.float64)
    return nats.tolist()


def _continuations(
    model: Any, sequences: Sequence[Int[Tensor, " _"]], begins: Sequence[int], lengths: Lengths
) -> list[Continuation]:
    """The score of each sequence of a batch from position `begins` on; the batch begins with the longest."""
    device, rows = device_of(model), len(sequences)
    log_probs = torch.zeros(rows, dtype=torch.float64, device=device)
    greedy = torch.ones(rows, dtype=torch.bool, device=device)
    first = torch.tensor(begins, device=device)[:, None]
    memory = model.empty_cache(rows, lengths)
    for start, window in _windows(sequences, lengths.tgt_len):
        rows, memory = _keep_rows(memory, rows, len(window))
        ids, targets = window[:, :-1].clamp(min=0).to(device), window[:, 1:].to(device)
        hidden, memory = model.hidden(ids, memory, lengths)
        position = start + 1 + torch.arange(targets.shape[1], device=device)
        scores, likeliest = _judge(model, hidden, targets, (targets >= 0) & (position >= first[:rows]))
        log_probs[:rows] += scores.sum(dim=1)
        greedy[:rows] &= likeliest.all(dim=1)
    return [Continuation(*each) for each in zip(log_probs.tolist(), greedy.tolist(), strict=True)]


def _keep_rows(memory: Any, rows: int, kept: int) -> tuple[int, Any]:
    """The number of rows to keep, and their memory. It is copied only if rows leave the batch."""
    return kept, memory if kept == rows else memory.select(slice(kept))


def _judge(
    model: Any, hidden: Float[Tensor, "B T D"], targets: Int[Tensor, "B T"], wanted: Bool[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """For each wanted target its log-probability, and whether it is the likeliest. Others have 0 and True."""
    log_probs = torch.zeros(targets.shape, dtype=torch.float64, device=targets.device)
    likeliest = torch.ones_like(wanted)
    rows = max(MOST_SCORES // model.config.vocab_size, 1)
    for positions in wanted.nonzero().split(rows):
        at = positions.unbind(1)
        scores = model.softmax.log_probs(hidden[at])
        log_probs[at] = scores.gather(1, targets[at][:, None])[:, 0].double()
        likeliest[at] = scores.argmax(dim=1) == targets[at]
    return log_probs, likeliest


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


def _windows(sequences: Sequence[Int[Tensor, " _"]], tgt_len: int) -> Iterator[tuple[int, Int[Tensor, "R T"]]]:
    """The start of each segment, and the ids of the rows that still have targets, padded by -1; the last id of a row
    is only a target. `sequences` begins with the longest, so a row that ends leaves at the end of the batch."""
    for start in range(0, len(sequences[0]) - 1, tgt_len):
        parts = [ids[start : start + tgt_len + 1] for ids in sequences if len(ids) - 1 > start]
        yield start, nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=-1)


def _tensor(ids: Integer[ndarray, " n"]) -> Int[Tensor, " n"]:
    return torch.from_numpy(ids.astype("int64"))
