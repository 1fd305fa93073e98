"""Scores each line of a text, with lines of similar length in one batch.

A line is read once, in segments of `tgt_len`. Padding is on the right, where causality makes it harmless, so the figure
of a line does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..config.settings import Lengths
from ..data.vocab import Vocab
from ..mistake import Mistake
from ..run.checkpoint import LoadedModel
from ..runtime.device import sums_on
from ..runtime.terminal import report_progress
from .score import EvalResult, Scoring, device_of, inference

BATCH_TOKENS = 8192
"""Number of positions in a segment of a batch, by default."""


def score_lines(
    loaded: LoadedModel,
    lines: Iterable[str | bytes],
    lengths: Lengths,
    *,
    batch_tokens: int = BATCH_TOKENS,
    precision: str = "fp32",
) -> list[EvalResult]:
    """Score each line from a fresh memory, in the order given.

    The vocabulary's line end (`<eos>` for words, the newline for bytes and characters) is the context of the first
    token and the last target of each line. Without one (enwik8, newlines dropped) the first token is only context.
    The first segment of a batch has about `batch_tokens` positions. At least half of all positions are targets,
    without the context that is read again.
    """
    vocab, config = loaded.vocab, loaded.config
    tokens = [_frame_line(vocab, line, number) for number, line in enumerate(lines, start=1)]
    nats = torch.zeros(len(tokens), dtype=torch.float64)
    batches = list(_batches([len(ids) - 1 for ids in tokens], lengths.tgt_len, batch_tokens))
    with inference(loaded.model, precision) as reader:
        for batch in report_progress(batches, "scoring lines"):
            nats[batch] = _score_batch(reader, [tokens[i] for i in batch], lengths, config.context_len(lengths))
    token_sizes = vocab.token_sizes(config.model.document_end)
    found = []
    for cost, ids in zip(nats.tolist(), tokens, strict=True):
        scored = ids[1:]
        size = None if token_sizes is None else int(token_sizes[scored].sum(dtype=np.int64))
        found.append(EvalResult(cost, len(scored), 0.0, lengths, size, vocab.unit))
    return found


def _frame_line(vocab: Vocab, line: str | bytes, number: int) -> Int[np.ndarray, " n"]:
    """The ids of one line between its line ends."""
    ends = [] if vocab.line_end is None else [vocab.line_end]
    try:
        ids = vocab.encode(line.removesuffix("\n") if isinstance(line, str) else line.removesuffix(b"\n"))
    except ValueError as error:
        raise Mistake(f"Line {number}: {error}") from error
    return np.concatenate([ends, ids, ends]).astype(np.int64)


def _batches(targets: Sequence[int], tgt_len: int, batch_tokens: int) -> Iterator[list[int]]:
    """Indices of the lines that have targets, longest first."""
    order = sorted((i for i, count in enumerate(targets) if count > 0), key=lambda i: (-targets[i], i))
    first = 0
    while first < len(order):
        width = min(targets[order[first]], tgt_len)
        rows = order[first : first + max(1, batch_tokens // width)]
        batch = [i for i in rows if 2 * targets[i] >= width]
        yield batch
        first += len(batch)


def _score_batch(
    model: Scoring, lines: list[Int[np.ndarray, " _"]], lengths: Lengths, context_len: int
) -> Float[Tensor, " B"]:
    """The nats of each line; the longest is first. Lines that have ended leave the batch."""
    device = device_of(model)
    nats = torch.zeros(len(lines), dtype=torch.float64, device=sums_on(device))
    state, rows = model.empty_cache(len(lines), lengths), len(lines)
    for start in range(0, len(lines[0]) - 1, lengths.tgt_len):
        first, end = max(start - context_len, 0), start + lengths.tgt_len + 1
        going = [torch.from_numpy(ids[first:end]) for ids in lines if len(ids) - 1 > start]
        if len(going) < rows:
            rows = len(going)
            state = state.select(slice(rows))
        window = nn.utils.rnn.pad_sequence(going, batch_first=True, padding_value=-1).to(device)
        nll, state = model(window[:, :-1].clamp(min=0), window[:, 1:], state, lengths)
        nll = nll[:, start - first :]
        nats[:rows] += nll.to(nats.device).sum(dim=1, dtype=torch.float64)
    return nats.cpu()
