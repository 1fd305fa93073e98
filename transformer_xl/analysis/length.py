"""How well a model predicts at each attention length at test time (Dai et al. 2019, Table 6), and how short is enough.

Behind a memory every query sees just so many keys, itself included, so figures do not depend on where segments end. A
model without such a memory, by its positions (Vaswani, Al-Rfou) or its state (LSTM, QRNN), reads windows from nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..config.settings import EvalConfig, Lengths, RunConfig
from ..data.corpus import Split
from ..data.loader import StreamLoader
from ..data.vocab import Vocab
from ..evaluation.score import EvalResult, evaluate
from ..evaluation.sliding import Sliding
from ..mistake import Mistake
from ..runtime.terminal import followed
from .recl import ABSOLUTE, RECURRENT

TOLERANCE = 0.001
"""Share of the best figure by which another is as good."""

_CALL = 1024
"""Targets of a call where windows are read, many side by side."""


@dataclass(frozen=True)
class Sweep:
    """Figures of one model at attention lengths, which increase."""

    attn_lens: Sequence[int]
    results: Sequence[EvalResult]
    told: str
    """How the model read."""

    @property
    def figures(self) -> list[float]:
        """Perplexities or bits per symbol, as the unit of the text has it."""
        return [result.headline[1] for result in self.results]

    @property
    def best(self) -> int:
        """The place of the lowest figure, of equals the shorter length."""
        return self.figures.index(min(self.figures))

    @property
    def shortest(self) -> int:
        """The place of the shortest length whose figure is within `TOLERANCE` of the best."""
        most = min(self.figures) * (1 + TOLERANCE)
        return next(place for place, figure in enumerate(self.figures) if figure <= most)


def attention_lengths(configs: Sequence[RunConfig]) -> list[int]:
    """From a quarter of the longest training segment to eight of it."""
    tgt_len = max(config.train.tgt_len for config in configs)
    return sorted({max(1, tgt_len * quarters // 4) for quarters in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)})


def sweep(
    model: Any,
    config: RunConfig,
    split: Split,
    attn_lens: Sequence[int],
    vocab: Vocab,
    *,
    how: EvalConfig,
    clamp_len: int | None = None,
    stride: int = 8,
    precision: str = "fp32",
) -> Sweep:
    """Score the part of a split that `how` names at each length; those an absolute position cannot have are left out.

    `clamp_len` None is the run's own. Windows score `stride` targets each, so a target sees up to `stride` - 1 tokens
    fewer than the attention length. One stream reads them, and `how.batch_size` streams all else.

    Raises:
        ValueError: no length is left.
    """
    kind, tgt_len = config.model.kind, config.train.tgt_len
    fit = [length for length in sorted(set(attn_lens)) if kind not in ABSOLUTE or length <= tgt_len]
    if not fit:
        raise Mistake(
            f"attn_len must be at most {tgt_len:,} for a model of kind {kind}, which knows no positions beyond its "
            f"tgt_len; got {', '.join(map(str, attn_lens))}."
        )
    windows = kind in ABSOLUTE + RECURRENT
    clamp = config.eval_lengths.clamp_len if clamp_len is None else clamp_len
    streams, call = (1, _CALL) if windows else (how.batch_size, tgt_len)
    loader = StreamLoader(split, batch_size=streams, tgt_len=call, max_tokens=how.max_tokens)
    score = partial(evaluate, precision=precision, unit=vocab.unit, symbol_bytes=vocab.symbol_bytes())
    results = []
    for length in fit:
        segments = followed(loader, f"scoring with an attention length of {length:,}")
        if windows:
            results.append(
                score(Sliding(model, length, min(stride, length)), segments, lengths=Lengths(tgt_len=length, mem_len=0))
            )
        else:
            lengths = Lengths(tgt_len=tgt_len, mem_len=length, attn_len=length, clamp_len=clamp)
            results.append(score(model, segments, lengths=lengths))
    told = f"windows from nothing, for {stride} targets each" if windows else f"segments of {tgt_len:,} behind a memory"
    return Sweep(fit, results, told)
