"""Scores a model on a text, or a split of a corpus, and prints the results: loss, perplexity and bits.

Every figure is a sum of nats in float64 over the number of targets, never a mean of means.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..config.settings import EvalConfig, Lengths, TransformerXLConfig
from ..data.corpus import Split
from ..data.loader import Segment, StreamLoader
from ..mistake import Mistake
from ..model.adaptive import AdaptiveSoftmax
from ..run.checkpoint import LoadedModel
from ..run.metrics import finite
from ..runtime.device import autocast, on_device, sums_on
from ..runtime.ranks import Ranks
from ..runtime.terminal import report_progress, show_table


@runtime_checkable
class State(Protocol):
    """What a model remembers of the text before a segment, in rows."""

    def select(self, rows: Tensor | slice) -> State: ...

    def reset(self, rows: Tensor) -> State: ...


@runtime_checkable
class Scoring(Protocol):
    """The methods of `TransformerXL` that scoring needs."""

    __call__: Callable[..., tuple[Tensor, State]]

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def for_inference(self, precision: str = "fp32") -> Self: ...

    def empty_cache(self, batch: int, lengths: Lengths, valid: Tensor | None = None) -> State: ...


@runtime_checkable
class Reader(Scoring, Protocol):
    """The methods of `TransformerXL` that give features of each position and the probabilities after it."""

    config: TransformerXLConfig
    takes_padding: bool

    @property
    def softmax(self) -> AdaptiveSoftmax: ...

    def hidden(self, *args: Any, **options: Any) -> tuple[Tensor, State]: ...

    def log_probs(self, *args: Any, **options: Any) -> tuple[Tensor, State]: ...

    def empty_memory(self, batch: int, lengths: Lengths, valid: Tensor | None = None) -> State: ...


@dataclass(frozen=True)
class EvalResult:
    """The cost of one pass over a text, or of a line. `bytes` counts the UTF-8 of the targets, if it is known."""

    nats: float
    targets: int
    seconds: float
    """0 for a line, whose time is not measured."""
    lengths: Lengths
    bytes: int | None = None
    unit: str = "byte"

    @property
    def loss(self) -> float:
        """Nats per target; nan for a line without targets."""
        return ratio(self.nats, self.targets)

    @property
    def ppl(self) -> float:
        """Perplexity per target; infinite where a float cannot hold it."""
        return perplexity(self.loss)

    @property
    def bpc(self) -> float:
        """Bits per target: per character where targets are characters or bytes."""
        return bits(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        return None if self.bytes is None else ratio(bits(self.nats), self.bytes)

    @property
    def tokens_per_second(self) -> float:
        return ratio(self.targets, self.seconds)

    @property
    def headline(self) -> tuple[str, float]:
        """See `figure`."""
        return figure(self.unit, self.loss)

    def __str__(self) -> str:
        figures = f"{self.headline[0]} {self.headline[1]:.4f}  loss {self.loss:.4f}"
        if self.headline[0] == "ppl" and self.bits_per_byte is not None:
            figures += f"  bits per byte {self.bits_per_byte:.4f}"
        figures += f"  over {self.targets:,} targets  {self.tokens_per_second:,.0f} tokens/s"
        return figures if math.isfinite(self.nats) else f"{figures}  NOT FINITE"

    def to_json(self) -> dict[str, object]:
        """Every figure by name. Figures that are not finite are null; `finite` says whether the nats are."""
        counts = ("unit", "targets", "bytes", "seconds", "tokens_per_second")
        costs = ("nats", "loss", "ppl", "bpc", "bits_per_byte")
        figures = {name: finite(getattr(self, name)) for name in (*counts, *costs)}
        return {**figures, "finite": math.isfinite(self.nats), **asdict(self.lengths)}


def evaluate(
    model: Scoring,
    loader: Iterable[Segment],
    lengths: Lengths,
    *,
    precision: str = "fp32",
    unit: str = "byte",
    token_sizes: Int[np.ndarray, " V"] | None = None,
    dump: Callable[[Segment, Float[Tensor, "B T"]], None] | None = None,
    total: Callable[[Sequence[float]], Sequence[float]] | None = None,
) -> EvalResult:
    """Score every target of `loader` once; memory continues from segment to segment.

    `token_sizes` is the UTF-8 length of each id, for bits per byte. `dump(segment, nll)` is called for every segment.
    `total` adds up the sums of several ranks, each of which reads some of the streams.
    """
    device = device_of(model)
    nats = torch.zeros((), dtype=torch.float64, device=sums_on(device))
    targets = text_bytes = 0
    memory: State | None = None
    start = time.perf_counter()
    with inference(model, precision) as model:
        for segment in loader:
            if memory is None:
                memory = model.empty_cache(len(segment.ids), lengths)
            elif segment.reset is not None:
                memory = memory.reset(segment.reset)
            call = on_device(segment.ids, device), on_device(segment.targets, device)
            nll, memory = model(*call, memory, lengths)
            nats += nll.to(nats.device).sum(dtype=torch.float64)
            scored = segment.targets[segment.targets >= 0]
            targets += len(scored)
            if token_sizes is not None:
                text_bytes += int(token_sizes[scored.numpy()].sum(dtype=np.int64))
            if dump is not None:
                dump(segment, nll)
    cost = nats.item()  # waits for the device, so the time is taken afterwards
    if total is not None:
        cost, *counts = total([cost, targets, text_bytes])
        targets, text_bytes = map(int, counts)
    if targets == 0:
        raise Mistake("The text must hold at least 2 tokens to be scored, because the first one is only context.")
    seconds = time.perf_counter() - start
    return EvalResult(cost, targets, seconds, lengths, text_bytes if token_sizes is not None else None, unit)


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


@contextmanager
def inference(model: Scoring, precision: str) -> Iterator[Scoring]:
    """A copy of the model without gradients and dropout, in this precision; the model itself does not change."""
    with torch.no_grad(), autocast(precision, device_of(model)):
        yield model.for_inference(precision)


def device_of(model: Scoring) -> torch.device:
    return next(model.parameters()).device


def ratio(amount: float, count: float) -> float:
    return amount / count if count else math.nan


def bits(nats: float) -> float:
    """Nats in bits; a loss per character gives bpc."""
    return nats / math.log(2)


def perplexity(nats: float) -> float:
    """e to the loss; inf if a float cannot hold it."""
    return math.inf if nats > 709 else math.exp(nats)


def figure(unit: str, loss: float) -> tuple[str, float]:
    """The name and value that papers print for a loss: ppl for words, byte pairs and ids, otherwise bpc."""
    return ("ppl", perplexity(loss)) if unit in ("word", "bpe", "id") else ("bpc", bits(loss))
