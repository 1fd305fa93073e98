"""`txl eval` and `txl score`: score a split, or each line of a file, with a trained model."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from ...config.problems import as_options
from ...config.settings import EvalConfig, Lengths
from ...data.corpus import Corpus, Split
from ...data.loader import StreamLoader
from ...evaluation.dynamic import Dynamic, DynamicConfig, relative_rms
from ...evaluation.lines import score_lines
from ...evaluation.score import EvalResult, Tempered, TokenLog
from ...evaluation.score import evaluate as evaluate_stream
from ...evaluation.sliding import Sliding
from ...run import LoadedModel
from ...runtime.ranks import Ranks
from ...runtime.terminal import report_progress, show_table
from ..options.use import Eval, Score
from .texts import read_text, report_unknown, text_of, writable
from .trained import Text, Trained

HIGHEST_RATE = 1e30


def evaluate(options: Eval) -> None:
    """Score a split once for each combination of lengths, and print the results."""
    trained = Trained(options.folder, options.device, options.precision)
    problems, own = trained.problems, trained.config.eval
    reading = Reading.of(options, trained)
    asked = {"batch_size": options.batch_size, "max_tokens": options.max_tokens}
    given = {name: value for name, value in asked.items() if value is not None}
    how = problems.attempt(lambda: replace(own, **reading.scope | given), as_options(given)) or own
    lengths = reading.lengths(options, trained)
    log, dump = TokenLog(), options.dump
    if dump is not None:
        problems.attempt(lambda: writable(dump, "--dump"))
        if len(lengths) > 1:
            problems.append(f"--dump writes one file, so give one set of lengths with it, got {len(lengths)}.")
    loaded = trained.load()
    text = trained.text(loaded.vocab, options.data, options.split, how.split)
    results = []
    for each in lengths:
        reader = reading.dress(loaded, text.corpus, each, how, trained.precision)
        logs = None if dump is None else log
        results.append(score_split(reader, text.split, each, how, precision=trained.precision, log=logs))
    if dump is not None:
        log.save(dump)
    _show(results, trained, text, reading, options)
    advice = f"Lower --dynamic-lr, which is {reading.dynamic.lr:g}." if reading.dynamic else "Score another checkpoint."
    refuse_infinite([result.nats for result in results], f"results are not finite: the weights diverged. {advice}")


def _show(results: Sequence[EvalResult], trained: Trained, text: Text, reading: Reading, options: Eval) -> None:
    if not options.json:
        show_results(f"{text.title}{reading}", results, unknown=text.unknown)
        return
    facts = {"run": str(trained.run), "trained_on": trained.config.corpus.name, **text.about, "unknown": text.unknown}
    print(json.dumps(facts | asdict(reading) | {"results": [result.to_json() for result in results]}))


@dataclass(frozen=True)
class Reading:
    """The way to read a text, besides the lengths; by default as in training."""

    sliding: int | None = None
    temperature: float = 1.0
    dynamic: DynamicConfig | None = None

    @classmethod
    def of(cls, options: Eval, trained: Trained) -> Reading:
        """The reading that the options ask for. Mistakes are added to the run's problems."""
        problems, rule = trained.problems, options.dynamic
        problems.attempt(lambda: Tempered(None, options.temperature))
        asked = {name: getattr(options, f"dynamic_{name}") for name in ("lr", "decay", "epsilon", "tokens")}
        given = {name: value for name, value in asked.items() if value is not None}
        needed = {"lr": "sgd or rms", "decay": "sgd or rms", "epsilon": "rms", "tokens": "rms"}
        problems += [f"--dynamic-{n} needs --dynamic {needed[n]}." for n in given if (rule or "none") not in needed[n]]
        learning = problems.attempt(lambda: DynamicConfig(rule=rule, **given)) if rule else None
        if learning is not None and learning.lr > HIGHEST_RATE:
            problems.append(f"--dynamic-lr must be at most {HIGHEST_RATE:g}, got {learning.lr:g}.")
        return cls(options.sliding, options.temperature, learning)

    def __str__(self) -> str:
        """The addition to a title; empty by default."""
        words = [] if self.sliding is None else [f"windows sliding by {self.sliding}"]
        words += [] if self.temperature == 1 else [f"temperature {self.temperature:g}"]
        if self.dynamic is not None:
            rms = f", epsilon {self.dynamic.epsilon:g}" if self.dynamic.rule == "rms" else ""
            words.append(f"dynamic {self.dynamic.rule}, lr {self.dynamic.lr:g}, decay {self.dynamic.decay:g}{rms}")
        return "".join(f"; {part}" for part in words)

    @property
    def scope(self) -> dict[str, int]:
        """Defaults for `EvalConfig`: sliding windows and dynamic evaluation read one stream."""
        if self.sliding is not None:
            return {"batch_size": 1, "context_len": 0}
        return {"batch_size": 1} if self.dynamic else {}

    def lengths(self, options: Eval, trained: Trained) -> list[Lengths]:
        """The lengths that the options ask for, without memory for --sliding. Adds mistakes to the run's problems."""
        if self.sliding is None:
            return trained.lengths(options)
        if options.mem_len or options.attn_len or options.same_length:
            trained.problems.append(
                "--sliding reads windows without memory: leave out --mem-len, --attn-len, --same-length."
            )
        found = trained.lengths(replace(options, mem_len=(0,), attn_len=(None,), same_length=False))
        for each in found[:1]:
            trained.problems.attempt(partial(Sliding, None, each.tgt_len, self.sliding))
        return found

    def dress(
        self, loaded: LoadedModel, corpus: Corpus, lengths: Lengths, config: EvalConfig, precision: str
    ) -> LoadedModel:
        """`loaded` with a model that reads in this way. This first measures gradients if they are needed."""
        model: Any = loaded.model
        if self.sliding is not None:
            model = Sliding(model, lengths.tgt_len, self.sliding)
        if self.temperature != 1:
            model = Tempered(model, self.temperature)
        if self.dynamic is not None:
            rms = None
            if self.dynamic.rule == "rms":
                part = replace(config, batch_size=1, max_tokens=self.dynamic.tokens)
                loader = segments_of(loaded, corpus.split("train"), lengths, part)
                rms = relative_rms(model, report_progress(loader, "measuring gradients"), lengths, precision=precision)
            model = Dynamic(model, self.dynamic, rms)
        return loaded._replace(model=model)


def score_split(
    loaded: LoadedModel,
    split: Split,
    lengths: Lengths,
    config: EvalConfig,
    *,
    precision: str,
    log: TokenLog | None = None,
    ranks: Ranks | None = None,
) -> EvalResult:
    """Score one split with one set of lengths.

    `config` gives the number of tokens and of streams. `ranks` share the streams.
    """
    ranks = ranks or Ranks()
    segments = segments_of(loaded, split, lengths, config, ranks.rows(config.batch_size))
    if ranks.first:
        segments = report_progress(segments, f"scoring {split.name} with a memory of {lengths.mem_len:,}")
    vocab = loaded.vocab
    return evaluate_stream(
        loaded.model,
        segments,
        lengths,
        precision=precision,
        unit=vocab.unit,
        token_sizes=vocab.token_sizes(),
        dump=log,
        total=ranks.total,
    )


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


def refuse_infinite(nats: Sequence[float], sentence: str) -> None:
    """Raise `FloatingPointError` if some values are not finite. Called after they were printed."""
    infinite = sum(not math.isfinite(cost) for cost in nats)
    if infinite:
        raise FloatingPointError(f"{infinite:,} of {len(nats):,} {sentence}")


def show_results(title: str, results: Sequence[EvalResult], *, unknown: int = 0) -> None:
    """Print a row for each set of lengths. With `unknown` tokens, bits per byte cannot be compared."""
    unit = results[0].headline[0]
    bytes_differ = any(result.bytes not in (None, result.targets) for result in results)
    if bytes_differ and unknown:
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


def score(options: Score) -> None:
    """Print a line for each line of a file: log-probability in nats, perplexity and bits."""
    trained = Trained(options.folder, options.device, options.precision)
    found = trained.lengths(options)
    trained.problems.refuse()
    text = read_text(options.file)
    loaded = trained.load()
    lines = text.split(b"\n")[: -1 if text.endswith(b"\n") or not text else None]
    given = lines if loaded.vocab.unit == "byte" else [text_of(line, options.file) for line in lines]
    scores = score_lines(loaded.model, loaded.vocab, given, found[0], precision=trained.precision)
    report_unknown(loaded.vocab, given, "the text", ", so bits are not comparable with other models")
    for each in scores:
        plain = f"{each.log_prob:.6f}\t{each.ppl:.4f}\t{each.bits:.4f}"
        print(json.dumps(each.to_json()) if options.json else plain)
    refuse_infinite([each.nats for each in scores], "lines have no finite score. Use another checkpoint.")
