"""Score a split of a corpus with a trained model, and print the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ..config.settings import EvalConfig, Lengths
from ..data.corpus import Split
from ..data.loader import Segment, StreamLoader
from ..run.checkpoint import LoadedModel
from ..runtime.ranks import Ranks
from ..runtime.terminal import report_progress, show_table
from .score import EvalResult, evaluate


def score_split(
    loaded: LoadedModel,
    split: Split,
    lengths: Lengths,
    config: EvalConfig,
    *,
    precision: str,
    ranks: Ranks | None = None,
    stopped: Callable[[], bool] | None = None,
) -> EvalResult:
    """Score one split with one set of lengths.

    `config` gives the number of tokens and of streams. `ranks` share the streams. The first rank reports the progress.
    Once `stopped()` is true, after a segment, the rest is not read.
    """
    ranks = ranks or Ranks()
    loader = segments_of(loaded, split, lengths, config, ranks.rows(config.batch_size))
    vocab, what = loaded.vocab, f"scoring {split.name} with a memory of {lengths.mem_len:,}"
    segments = report_progress(loader, what) if ranks.first else iter(loader)
    return evaluate(
        loaded.model,
        segments if stopped is None else _until(segments, stopped),
        lengths,
        precision=precision,
        unit=vocab.unit,
        token_sizes=vocab.token_sizes(loaded.config.model.document_end),
        total=ranks.total,
    )


def _until(segments: Iterator[Segment], stopped: Callable[[], bool]) -> Iterator[Segment]:
    for segment in segments:
        yield segment
        if stopped():
            return


def segments_of(
    loaded: LoadedModel, split: Split, lengths: Lengths, config: EvalConfig, rows: slice | None = None
) -> StreamLoader:
    """The segments of a split, as `config` sets the number of tokens and of streams."""
    return StreamLoader(
        split,
        batch_size=config.batch_size,
        tgt_len=lengths.tgt_len,
        max_tokens=config.max_tokens,
        context_len=replace(loaded.config, eval=config).context_len(lengths),
        rows=rows,
    )


def report_infinite(nats: Sequence[float], sentence: str) -> None:
    """Raise `FloatingPointError` if some values are not finite. Called after they were printed."""
    infinite = sum(not math.isfinite(cost) for cost in nats)
    if infinite:
        raise FloatingPointError(f"{infinite:,} of {len(nats):,} {sentence}")


def show_results(split: Split, results: Sequence[EvalResult], *, how: str = "") -> None:
    """Print a row for each set of lengths; `how` ends the title."""
    title = split.title + how
    unit = results[0].headline[0]
    bytes_differ = any(result.bytes not in (None, result.targets) for result in results)
    if bytes_differ and split.unknown:
        title += "; bits/byte is not comparable with other vocabularies: <unk> hides what it stands for"
    per_byte = ["bits/byte"] if bytes_differ else []
    columns = ["mem_len", "tgt_len", "attn_len", "clamp_len", unit, "loss", *per_byte, "targets", "tokens/s"]
    rows = []
    for result in results:
        lengths = result.lengths
        sizes = [lengths.mem_len, lengths.tgt_len, lengths.attn_len or "all", lengths.clamp_len or "none"]
        figures = [f"{result.headline[1]:.4f}", f"{result.loss:.4f}"]
        figures += [f"{result.bits_per_byte:.4f}"] if bytes_differ else []
        counts = [f"{result.targets:,}", f"{result.tokens_per_second:,.0f}"]
        rows.append([*map(str, sizes), *figures, *counts])
    show_table(title, columns, rows)
