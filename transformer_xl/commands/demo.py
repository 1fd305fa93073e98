"""`txl demo`: train a small Transformer-XL in minutes on the source of Python's own library.

The model is compared with gzip, bzip2 and xz on files that were held out. The comparison is not fair, because the model
has read the rest of the library and the compressors have not; but the scale is familiar.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from ..config.recipe import load_recipe
from ..config.settings import RunConfig
from ..mistake import Mistake
from ..runtime.files import empty_folder, lock_folder
from ..runtime.terminal import report_progress, show_table

if TYPE_CHECKING:
    from ..data.corpus import Corpus, Split
    from ..data.loader import Segment
    from ..evaluation.language_model import LanguageModel
    from ..evaluation.score import EvalResult
    from ..run.folder import Run
    from ..train.start import Start

PROMPT = "class Memory:\n"
SAMPLE = 400
"""Number of tokens of text to generate."""
TRAINED, SCORED = 0.7, 0.95
"""Shares of the time after which training and scoring end. The rest is for the compressors and the page."""
MEASURED = 0.03
"""Share of the time in which the pace of training is measured."""
SPEED_UP = 2.5
"""Assumed ratio of the speeds of scoring and training; the true one is at least this."""
VALIDATION_SECONDS, LINE_SECONDS = 1.0, 2.0
"""Seconds for one validation, and between two lines of progress."""


@dataclass(frozen=True)
class Demo:
    """Train a small model in minutes, score it and generate text. This needs no network and no data."""

    out: Annotated[Path | None, arg(metavar="RUN")] = None
    """Keep the run in this folder; by default the next demo replaces it."""
    minutes: float = 5.0
    """Time for the whole demo, in minutes. On a slow machine it trains for fewer steps."""

    def run(self) -> int:
        begun = time.perf_counter()  # before torch is imported, which takes seconds
        from ..data.datasets import cache_folder
        from ..run.folder import Run
        from ..runtime.device import prepare_process

        prepare_process()
        if not 0.1 <= self.minutes < 1e6:
            raise Mistake(f"--minutes must be at least 0.1 and below 1,000,000, got {self.minutes:g}.")
        if self.out is not None:
            Run(self.out).refuse()
        corpus = library_corpus()
        folder = self.out or cache_folder() / "demo" / "run"
        with lock_folder(folder):
            if self.out is None:
                empty_folder(folder)
            seconds = 60 * self.minutes
            status = show(Run(folder), corpus, begun + TRAINED * seconds, begun + SCORED * seconds)
        if status == 0:
            kept = "" if self.out else " (the next demo takes its place)"
            took = time.perf_counter() - begun
            print(f"{took:.0f} seconds in all. More text: txl generate {folder}{kept}", flush=True)
        return status


def planned(start: Start, config: RunConfig, end: float) -> RunConfig:
    """`config` with as many steps as end at about the time `end`, at the pace of `start`, whose model is trained for a
    moment and thrown away."""
    from ..data.choose import left_out
    from ..train.loop import train_segments
    from ..train.step import Trainer

    train, begun = start.config.train, time.perf_counter()
    trainer = Trainer(start.model.to(train.device).train(), train_segments(start.corpus, start.config), train)
    trainer.advance()  # takes longer than the others
    first, seconds = time.perf_counter(), (end - begun) * MEASURED
    while trainer.step < 2 or time.perf_counter() < first + seconds:
        trainer.advance()
    now = time.perf_counter()
    pace = (now - first) / (trainer.step - 1)
    steps = max(int((end - VALIDATION_SECONDS - now) / pace), 1)
    tokens = train.batch_size * train.tgt_len
    train = replace(
        config.train,
        max_steps=steps,
        warmup_steps=min(train.warmup_steps, steps // 10),
        eval_tokens=max(min(train.eval_tokens, int(VALIDATION_SECONDS * SPEED_UP * tokens / pace)), 1),
        log_every=max(int(LINE_SECONDS / pace), 1),
    )
    share = left_out(steps * tokens / len(start.corpus.split("train").ids))
    return replace(config, train=train, model=replace(config.model, ngram_dropout=share))


def library_corpus() -> Corpus:
    """The library as a corpus, in a folder of the cache named by a hash of its content."""
    from ..data.corpus import Corpus
    from ..data.datasets import cache_folder
    from ..data.library import library

    splits = library()
    sizes = {name: (len(files), sum(map(len, files.values()))) for name, files in splits.items()}
    listed = "; ".join(f"{name} {files} files, {size:,} bytes" for name, (files, size) in sizes.items())
    print(f"The library of this Python, as bytes: {listed}", flush=True)
    texts = {name: list(files.values()) for name, files in splits.items()}
    digest = hashlib.sha256(b"".join([listed.encode(), *chain.from_iterable(texts.values())])).hexdigest()
    folder = cache_folder() / "demo" / f"library-{digest[:16]}"
    return Corpus.build(folder, texts, name="library", reuse=True)


def show(run: Run, corpus: Corpus, trained: float, end: float) -> int:
    """Run the demo in the folder of `run`: train until about the time `trained` and score until `end`. Returns the exit
    status."""
    from ..interop.hub import load_model
    from ..report.page import write_page
    from ..runtime.ranks import Ranks
    from ..train.start import Origin, prepare, train_and_save

    settings = ["--train.eval-every", "0", "--train.save-every", "0"]  # only at the end
    settings += ["--eval.batch-size", "32"]  # faster, and the text is long
    config = load_recipe("text-fast", settings)
    config = replace(config, corpus=replace(config.corpus, name=str(corpus.path)))
    origin, ranks = Origin("text-fast"), Ranks()
    config = planned(prepare(config, run, origin, ranks), config, trained)
    start, test = prepare(config, run, origin, ranks), corpus.split("test")
    if status := train_and_save(start, run, ranks):
        return status
    loaded = load_model(run.path, device=start.config.train.device)
    now = time.perf_counter()
    write_sample(loaded, now + (end - now) / 5)
    results, scored = measure(loaded, test, end)
    compare(results, scored, len(test.ids))
    for result in results:
        run.metrics.log(
            {"step": loaded.config.train.max_steps, "split": "test", "corpus": corpus.name, **result.to_json()}
        )
    write_page([run.path])
    return 0


def write_sample(loaded: LanguageModel, end: float) -> None:
    """Print text while the model generates it: all of it until the time `end`, and afterwards a quarter of it."""
    print(f"\nA sample, from {PROMPT!r} on:\n\n{PROMPT}", end="", flush=True)
    pieces = loaded.stream(PROMPT, temperature=0.8, seed=loaded.config.train.seed, max_tokens=SAMPLE)
    for number, text in enumerate(pieces):
        print(text, end="", flush=True)
        if number >= SAMPLE // 4 and time.perf_counter() > end:
            break
    print("\n", flush=True)


def measure(loaded: LanguageModel, test: Split, end: float) -> tuple[list[EvalResult], bytes]:
    """Score the same targets with a memory longer than in training, as in training, and without one.

    The longest memory, which takes longest, reads as much as it can in a third of the time until `end`, and at least
    until it is full; the others read the same. The scored bytes are returned too.
    """
    import torch

    from ..data.loader import StreamLoader
    from ..evaluation.score import evaluate

    config, now = loaded.config, time.perf_counter()
    loader = StreamLoader(test, batch_size=config.eval.batch_size, tgt_len=config.eval_lengths.tgt_len)
    read: list[Segment] = []
    results, longest = [], 2 * config.train.mem_len
    fill = -(-longest // loader.tgt_len)
    for mem_len in (longest, config.train.mem_len, 0):
        segments = report_progress(read or loader, f"scoring with a memory of {mem_len:,}")
        result = evaluate(
            loaded.model,
            segments if read else before(now + (end - now) / 3, segments, least=fill + 1),
            replace(config.eval_lengths, mem_len=mem_len, attn_len=None),
            precision=config.train.precision,
            dump=None if read else lambda segment, _: read.append(segment),
        )
        results.append(result)
    targets = torch.cat([segment.targets for segment in read], dim=1)
    return results, loaded.vocab.decode_bytes(targets[targets >= 0].numpy())


def before(end: float, segments: Iterable[Segment], least: int) -> Iterator[Segment]:
    """Yield the first `least` segments, and more while the pace so far allows to finish each before the time `end`."""
    begun = time.perf_counter()
    for done, segment in enumerate(segments):
        now = time.perf_counter()
        if done >= least and now + (now - begun) / done > end:
            return
        yield segment


def compare(results: Sequence[EvalResult], scored: bytes, held_out: int) -> None:
    """Print bits per byte on the `scored` bytes, best first, and the comparison with gzip."""
    size = len(scored)
    packed = {"gzip -9": gzip.compress(scored, 9), "bzip2 -9": bz2.compress(scored, 9)}
    packed["xz -9e"] = lzma.compress(scored, preset=9 | lzma.PRESET_EXTREME)
    figures = {name: 8 * len(text) / size for name, text in packed.items()}
    notes = ("", " as in training", ": none")  # in the order of the memories of `measure`
    for result, note in zip(results, notes, strict=True):
        figures[f"Transformer-XL, memory {result.lengths.mem_len}{note}"] = result.bpc
    rows = [[name, f"{bpc:.3f}"] for name, bpc in sorted(figures.items(), key=lambda item: item[1])]
    some = f"{size:,} of " if size < held_out - 1 else ""  # the first byte is context only
    show_table(f"bits per byte on {some}{held_out:,} bytes of files held out", ["", "bpc"], rows)
    ours, gzipped = min(result.bpc for result in results), figures["gzip -9"]
    verdict = "It beats gzip -9" if ours < gzipped else "It did NOT beat gzip -9"
    print(f"{verdict}: {ours:.3f} against {gzipped:.3f} bits per byte.", flush=True)
