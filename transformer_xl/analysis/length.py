"""Scores of a model at each attention length (Dai et al. 2019, Table 6), and the shortest length that is enough.

With a memory every query sees exactly `attn_len` keys, itself included, so figures do not depend on where segments end.
Models without such a memory (Vaswani, Al-Rfou, LSTM, QRNN) read each window from an empty state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..config.settings import EvalConfig, Lengths, RunConfig
from ..config.shape import ABSOLUTE, RECURRENT
from ..data.corpus import Split
from ..data.loader import StreamLoader
from ..evaluation.score import EvalResult, Scoring, evaluate
from ..evaluation.sliding import Sliding
from ..mistake import Mistake
from ..run.checkpoint import LoadedModel
from ..runtime.terminal import report_progress

TOLERANCE = 0.001
"""A figure within this share of the best one counts as equally good."""

_CALL = 1024
"""Targets per call when windows are read."""
STRIDE = 8
"""Targets per window, so a target sees up to 7 tokens fewer than the attention length."""


@dataclass(frozen=True)
class Sweep:
    """Results of one model by attention length, the shortest first."""

    results: Mapping[int, EvalResult]
    description: str
    """How the model read the text."""

    @property
    def figures(self) -> dict[int, float]:
        """Perplexities (words, byte pairs) or bits per character (bytes, characters)."""
        return {attn_len: result.headline[1] for attn_len, result in self.results.items()}

    @property
    def best(self) -> int:
        """The length with the lowest figure; of equal figures, the shortest one."""
        return min(self.figures, key=self.figures.__getitem__)

    @property
    def shortest(self) -> int:
        """The shortest length whose figure is within `TOLERANCE` of the best."""
        most = self.figures[self.best] * (1 + TOLERANCE)
        return next(attn_len for attn_len, figure in self.figures.items() if figure <= most)


def attention_lengths(configs: Sequence[RunConfig]) -> list[int]:
    """The default lengths, from a quarter of the longest training segment to eight times its length."""
    tgt_len = max(config.train.tgt_len for config in configs)
    return sorted({max(1, tgt_len * quarters // 4) for quarters in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)})


def sweep(
    loaded: LoadedModel, split: Split, attn_lens: Sequence[int], *, how: EvalConfig, precision: str = "fp32"
) -> Sweep:
    """Score the first `how.max_tokens` targets of a split (0: all) at each length that the model's positions allow.

    Windows are read in one stream, segments in `how.batch_size` streams.
    """
    model, vocab, config = loaded
    kind, tgt_len = config.model.base_kind, config.train.tgt_len
    fit = [length for length in sorted(set(attn_lens)) if kind not in ABSOLUTE or length <= tgt_len]
    if not fit:
        raise Mistake(
            f"--attn-len must be at most {tgt_len:,} for a model of kind {kind}, which has no positions beyond its "
            f"tgt_len; got {', '.join(map(str, attn_lens))}."
        )
    windows = kind in ABSOLUTE + RECURRENT
    streams, call = (1, _CALL) if windows else (how.batch_size, tgt_len)
    loader = StreamLoader(split, batch_size=streams, tgt_len=call, max_tokens=how.max_tokens)
    description = f"segments of {tgt_len:,} after a memory"
    if windows:
        description = f"windows from an empty state, for {STRIDE} targets each"
    if config.model.matches:
        description += f"; matches are found in the last {config.model.match_window:,} tokens at every length"
    results, sizes = {}, vocab.token_sizes(config.model.document_end)
    for length in fit:
        reader: Scoring = model
        lengths = Lengths(tgt_len=tgt_len, mem_len=length, attn_len=length, clamp_len=config.eval_lengths.clamp_len)
        if windows:
            reader, lengths = Sliding(model, length, min(STRIDE, length)), Lengths(tgt_len=length, mem_len=0)
        segments = report_progress(loader, f"scoring with an attention length of {length:,}")
        results[length] = evaluate(reader, segments, lengths, precision=precision, unit=vocab.unit, token_sizes=sizes)
    return Sweep(results, description)
