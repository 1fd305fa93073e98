"""Scores each line of a text, with many lines per batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from ..config.settings import Lengths
from ..data.vocab import Vocab
from ..mistake import Mistake
from ..runtime.terminal import report_progress
from .measures import bits, perplexity
from .score import Scoring, device_of, figures_for_json, inference, ratio


class LineScore(NamedTuple):
    """The cost of one line in nats; `bytes` counts the UTF-8 of its targets, and is None for ids."""

    nats: float
    targets: int
    bytes: int | None

    @property
    def log_prob(self) -> float:
        return -self.nats

    @property
    def ppl(self) -> float:
        """Perplexity per target; nan for a line without targets."""
        return perplexity(ratio(self.nats, self.targets))

    @property
    def bits(self) -> float:
        return bits(self.nats)

    def to_json(self) -> dict[str, Any]:
        return figures_for_json(self, "log_prob", "targets", "bytes", "ppl", "bits")


def score_lines(
    model: Scoring,
    vocab: Vocab,
    lines: Iterable[str | bytes],
    lengths: Lengths,
    *,
    batch_tokens: int = 8192,
    precision: str = "fp32",
) -> list[LineScore]:
    """Score each line from a fresh memory, in the order given; the figure of a line does not depend on the others.

    The vocabulary's line end (`<eos>` for words, the newline for bytes and characters) is the context of the first
    token and the last target of each line. Without one (enwik8, newlines dropped) the first token is only context.
    Lines of similar length share a batch of about `batch_tokens` per segment, padded on the right, where causality
    makes padding harmless. The model reads at most two positions per target, padding included.
    """
    tokens = [_frame_line(vocab, line, number) for number, line in enumerate(lines, start=1)]
    token_sizes = vocab.token_sizes()
    nats = [0.0] * len(tokens)
    device = device_of(model)
    batches = list(_batches([len(ids) - 1 for ids in tokens], lengths.tgt_len, batch_tokens))
    with inference(model, precision) as model:
        for batch in report_progress(batches, "scoring lines"):
            costs = _batch_nats(model, [torch.from_numpy(tokens[i]) for i in batch], lengths, device)
            for i, cost in zip(batch, costs, strict=True):
                nats[i] = cost
    scored = [ids[1:] for ids in tokens]
    sizes = [None if token_sizes is None else int(token_sizes[ids].sum(dtype=np.int64)) for ids in scored]
    return [LineScore(cost, len(ids), size) for cost, ids, size in zip(nats, scored, sizes, strict=True)]


def _frame_line(vocab: Vocab, line: str | bytes, number: int) -> Int[np.ndarray, " n"]:
    """The ids of one line between its line ends."""
    ends = [] if vocab.line_end is None else [vocab.line_end]
    try:
        ids = vocab.encode(line.removesuffix("\n") if isinstance(line, str) else line.removesuffix(b"\n"))
    except ValueError as error:
        raise Mistake(f"Line {number}: {error}") from error
    return np.concatenate([ends, ids, ends]).astype(np.int64)


def _batches(targets: Sequence[int], tgt_len: int, batch_tokens: int) -> Iterator[list[int]]:
    """Indices of the lines that have targets, longest first. A batch's first segment holds about `batch_tokens`
    positions, and at least half of them are targets."""
    order = sorted((i for i, count in enumerate(targets) if count > 0), key=lambda i: (-targets[i], i))
    first = 0
    while first < len(order):
        width = min(targets[order[first]], tgt_len)
        rows = order[first : first + max(1, batch_tokens // width)]
        batch = [i for i in rows if 2 * targets[i] >= width]
        yield batch
        first += len(batch)


def _batch_nats(model: Scoring, lines: list[Tensor], lengths: Lengths, device: torch.device) -> list[float]:
    """Nats of each line; `lines` begins with the longest. A line that ends leaves the batch, so padding only fills its
    last segment."""
    nats = torch.zeros(len(lines), dtype=torch.float64, device=device)
    memory, rows = model.empty_cache(len(lines), lengths), len(lines)
    for start in range(0, len(lines[0]) - 1, lengths.tgt_len):
        parts = [line[start : start + lengths.tgt_len + 1] for line in lines[:rows] if len(line) - 1 > start]
        if len(parts) < rows:
            rows = len(parts)
            memory = memory.select(slice(rows))
        window = nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=-1).to(device)
        nll, memory = model(window[:, :-1].clamp(min=0), window[:, 1:], memory, lengths)
        nats[:rows] += nll.sum(dim=1, dtype=torch.float64)
    return nats.tolist()
