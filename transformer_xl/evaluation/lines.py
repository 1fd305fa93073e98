"""Scores each line of a text, with many lines per batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from ..config.settings import Lengths
from ..data.vocab import Vocab
from ..mistake import Mistake
from .measures import bits, perplexity
from .score import Scoring, figures_for_json, ratio
from .sequences import BATCH_TOKENS, score_sequences


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
    batch_tokens: int = BATCH_TOKENS,
    precision: str = "fp32",
) -> list[LineScore]:
    """Score each line from a fresh memory, in the order given; the figure of a line does not depend on the others.

    The vocabulary's line end (`<eos>` for words, the newline for bytes and characters) is the context of the first
    token and the last target of each line. Without one (enwik8, newlines dropped) the first token is only context.
    `score_sequences` makes batches of about `batch_tokens` per segment.
    """
    tokens = [_frame_line(vocab, line, number) for number, line in enumerate(lines, start=1)]
    nats = score_sequences(
        model, tokens, lengths, batch_tokens=batch_tokens, precision=precision, title="scoring lines"
    )
    token_sizes = vocab.token_sizes()
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
