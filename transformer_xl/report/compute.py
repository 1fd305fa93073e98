"""Compute the figures of a run's page that need its model; `figures` describes and stores them.

The work is bounded by a number of tokens and by a time. A slow machine or a large model scores less text.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from ..analysis.attention import TERMS, AverageAttention, average_attention
from ..config.settings import Lengths, RunConfig
from ..data.corpus import Split
from ..data.loader import Segment, StreamLoader
from ..data.vocab import Vocab
from ..evaluation.generate import Sampling, TokenText, stream
from ..evaluation.lengths import before, score_lengths
from ..evaluation.score import EvalResult, device_of, evaluate, inference
from ..evaluation.splits import segments_of
from ..run import LoadedModel, Run, find_checkpoint
from ..run.trained import TrainedRun
from .figures import (
    FILE,
    Figures,
    LayerAttention,
    Passage,
    Token,
    are_current,
    identity,
    load_figures,
    save_figures,
)
from .page import write_page

SECONDS = 60.0
"""Maximum time for all figures of a run. The shares of the parts are in `model_figures`."""
TARGETS = 20_000
"""Number of targets to score at each memory length."""
READ, WRITTEN = 400, 200
"""Number of tokens of the passage from the split, and of the text that the model writes after it."""
CONTEXT = 4096
"""Maximum number of tokens to read before the passage, to fill the memory."""
FAILURES = (ValueError, OSError, ArithmeticError, RuntimeError, LookupError, MemoryError)
"""Errors for which a page is made without these figures, because a trained run must not fail at its page."""


def model_figures(
    loaded: LoadedModel,
    split: Split,
    checkpoint: Path,
    *,
    precision: str,
    seconds: float = SECONDS,
    results: Sequence[EvalResult] = (),
) -> Figures:
    """The figures of one checkpoint, computed in about `seconds`. `results` replace the costs by memory length."""
    begun, command = time.perf_counter(), ""
    if not results:
        results, command = costs(loaded, split, begun + 0.6 * seconds, precision)
    read, ids = passage(loaded, split, begun + 0.7 * seconds, precision)
    written = continuation(loaded, ids[-READ:], begun + 0.85 * seconds, precision)
    return Figures(
        checkpoint=identity(checkpoint),
        split=split.name,
        command=command,
        costs=[result.to_json() for result in sorted(results, key=lambda result: result.lengths.mem_len)],
        passages=[read, written],
        attention=layer_attention(loaded, ids, begun + seconds, precision),
    )


def memory_lengths(config: RunConfig) -> list[int]:
    """The memory lengths to compare, longest first: none, half, as in training and twice, and the one of `[eval]`.

    For a recurrent network every length but 0 means the same.
    """
    trained, own = config.train.mem_len, config.eval_lengths.mem_len
    if config.model.kind not in TERMS:
        return sorted({0, own or trained}, reverse=True)
    return sorted({0, trained // 2, trained, 2 * trained, own}, reverse=True)


def streams(config: RunConfig) -> int:
    """The number of streams: the one of `[eval]`, or fewer, so each stream fills the longest memory several times."""
    longest = memory_lengths(config)[0]
    return max(1, min(config.eval.batch_size, TARGETS // (4 * max(longest, 1))))


def at_memory(lengths: Lengths, mem_len: int) -> Lengths:
    """`lengths` with another memory. An `attn_len` that needs a longer memory is dropped, as in `txl eval`."""
    attn_len = lengths.attn_len
    return replace(lengths, mem_len=mem_len, attn_len=attn_len if attn_len and attn_len <= mem_len + 1 else None)


def costs(loaded: LoadedModel, split: Split, end: float, precision: str) -> tuple[list[EvalResult], str]:
    """The cost of the first targets of a split at each memory length; and the command that repeats it, or "" if there
    was no time for all targets."""
    config = loaded.config
    how = replace(config.eval, batch_size=streams(config), max_tokens=TARGETS)
    sizes = memory_lengths(config)
    every = [at_memory(config.eval_lengths, size) for size in sizes]
    loaders = [(lengths, segments_of(loaded, split, lengths, how)) for lengths in every]
    options = {"precision": precision, "unit": loaded.vocab.unit, "token_sizes": loaded.vocab.token_sizes()}
    results, count = score_lengths(loaded.model, loaders, end, **options)
    words = f"--split {split.name} --max-tokens {TARGETS} --batch-size {how.batch_size} --precision {precision}"
    command = f"txl eval RUN {words} --mem-len {' '.join(map(str, sizes[::-1]))}"
    return results, command if count == len(loaders[0][1]) else ""


def passage(loaded: LoadedModel, split: Split, end: float, precision: str) -> tuple[Passage, Int[np.ndarray, " n"]]:
    """A part of the split, read after enough tokens to fill the memory; and all ids that were read since the last
    document began."""
    lengths = loaded.config.eval_lengths
    loader = segments_of(loaded, split, lengths, replace(loaded.config.eval, batch_size=1, max_tokens=0))
    wanted = -(-min(lengths.mem_len, CONTEXT) // lengths.tgt_len) + -(-READ // lengths.tgt_len)
    ids: list[int] = []
    nats: list[float | None] = []

    def keep(segment: Segment, nll: Float[Tensor, "1 T"]) -> None:
        if segment.reset is not None:
            ids.append(int(segment.ids[0, 0]))
            nats.append(None)
        scored = segment.targets[0] >= 0
        ids.extend(segment.targets[0, scored].tolist())
        nats.extend(nll[0].float().cpu()[scored].tolist())

    evaluate(loaded.model, before(end, islice(loader, wanted)), lengths, precision=precision, dump=keep)
    first = max(len(ids) - READ, 1)
    document = max(position for position, cost in enumerate(nats) if cost is None)
    tokens = texts_of(loaded.vocab, ids[:first], ids[first:], nats[first:])
    return Passage("read", first, tokens), np.array(ids[document:], np.int64)


def continuation(loaded: LoadedModel, prompt: Int[np.ndarray, " n"], end: float, precision: str) -> Passage:
    """The text that the model writes after `prompt`, and what each of its tokens costs. The cost is of all tokens, also
    of those from which `Sampling` does not draw."""
    config = loaded.config
    nats: list[float | None] = []

    def keep(log_probs: Float[Tensor, "1 V"], ids: Int[Tensor, " 1"]) -> None:
        nats.append(-float(log_probs[0, int(ids[0])]))

    lengths = config.writing_lengths(config.eval_lengths)
    sampling = Sampling(seed=config.train.seed)
    steps = stream(loaded.model, [prompt], lengths, sampling, WRITTEN, dump=keep, precision=precision)
    ids = [new for [(_, new)] in before(end, steps)]
    return Passage("written", 0, texts_of(loaded.vocab, prompt.tolist(), ids, nats))


def texts_of(vocab: Vocab, prompt: Sequence[int], ids: Sequence[int], nats: Sequence[float | None]) -> list[Token]:
    """Each token after `prompt` as text. A character of several tokens belongs to the last of them."""
    writer = TokenText(vocab, np.array(prompt, np.int64))
    tokens = [Token(writer.write(new), cost) for new, cost in zip(ids, nats, strict=False)]
    if rest := writer.close():
        tokens[-1] = tokens[-1]._replace(text=tokens[-1].text + rest)
    return tokens


def layer_attention(
    loaded: LoadedModel, ids: Int[np.ndarray, " n"], end: float, precision: str
) -> LayerAttention | None:
    """Attention in a text after a full memory, of the layer that attends most to memory. None without attention."""
    config = loaded.config
    if config.model.kind not in TERMS or len(ids) < 2:
        return None
    lengths = config.writing_lengths(config.eval_lengths)
    segments = list(StreamLoader(ids, batch_size=1, tgt_len=lengths.tgt_len))
    counted = -(-READ // lengths.tgt_len)
    memory = memory_after(loaded, segments[:-counted], lengths, (time.perf_counter() + end) / 2, precision)
    timed = before(end, segments[-counted:])
    return most_remembering_layer(
        average_attention(loaded.model, timed, lengths, memory=memory, precision=precision), lengths
    )


def memory_after(loaded: LoadedModel, segments: Sequence[Segment], lengths: Lengths, end: float, precision: str) -> Any:
    """The memory after some segments of one text; None if there are none."""
    device, memory = device_of(loaded.model), None
    with inference(loaded.model, precision) as reader:
        for segment in before(end, segments):
            memory = reader.empty_memory(1, lengths) if memory is None else memory  # type: ignore[attr-defined]
            _, memory = reader.hidden(segment.ids.to(device), memory, lengths)  # type: ignore[attr-defined]
    return memory


def most_remembering_layer(average: AverageAttention, lengths: Lengths) -> LayerAttention:
    """The layer that attends most to memory; without memory, the one that attends farthest."""
    beyond, distance = average.beyond_segment.mean(1), average.mean_distance.mean(1)
    layer = max(range(len(beyond)), key=lambda number: (beyond[number], distance[number]))
    shares = average.sums[0, layer] / average.queries
    reach = max(int(np.count_nonzero(average.counts)), 1)
    edges = [0, *(1 << power for power in range((reach - 1).bit_length())), reach]
    ranges = list(pairwise(edges))
    return LayerAttention(
        layer=layer + 1,
        queries=average.queries,
        tgt_len=lengths.tgt_len,
        mem_len=lengths.mem_len,
        beyond_segment=beyond.tolist(),
        ranges=[(first, end - 1) for first, end in ranges],
        shares=[[float(head[first:end].sum()) for first, end in ranges] for head in shares],
        by_distance=[float(f"{mean:.4g}") for mean in average.probability[0, layer, :, :reach].mean(0)],
    )


def figures_of(run: Path, *, device: str = "auto") -> Figures:
    """The figures of the run's best checkpoint: the stored ones, or newly computed and stored.

    Raises:
        ValueError, OSError: there is no checkpoint or no text, or they cannot be read or written.
    """
    with suppress(*FAILURES):
        stored = load_figures(run / FILE)
        if are_current(stored, run):
            return stored
    trained = TrainedRun(run, device, "auto")
    checkpoint = find_checkpoint(run)
    loaded = trained.load()
    split = trained.text(loaded.vocab, None, None, loaded.config.eval.split)
    line = f"Computing the figures of {run} that need its model; this takes at most about {SECONDS:.0f} seconds."
    print(line, file=sys.stderr)
    figures = model_figures(loaded, split, checkpoint, precision=trained.precision)
    save_figures(run, figures)
    return figures


def finish_page(run: Run, loaded: LoadedModel, split: Split, **options: Any) -> None:
    """Compute the figures of a finished run that need the model, and write its page; `model_figures` has the options.

    The run is saved, so a failure costs only these figures, which a line of the log reports.
    """
    try:
        figures = model_figures(
            loaded, split, find_checkpoint(run.path), precision=loaded.config.train.precision, **options
        )
        save_figures(run.path, figures)
    except FAILURES as error:
        run.say(f"The page lacks the figures that need the model: {str(error) or type(error).__name__}")
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(f"{run.path} is trained and scored: txl report {run.path} writes its page.")
        raise
    write_page([run.path])
