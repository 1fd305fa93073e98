"""`txl eval` and `txl score`: the loss of a trained model on a text, over a split or line by line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...checkpoint import LoadedModel
from ...config.problems import Problems, as_options
from ...config.settings import EvalConfig, Lengths
from ...data.corpus import Corpus, Split
from ...data.loader import StreamLoader
from ...evaluation.dynamic import Dynamic, DynamicConfig, relative_rms
from ...evaluation.lines import score_lines
from ...evaluation.score import EvalResult, Tempered, TokenLog
from ...evaluation.score import evaluate as evaluate_stream
from ...evaluation.sliding import Sliding
from ...runtime.device import resolve_precision
from ...runtime.ranks import Ranks
from ...runtime.terminal import report_progress, show_table
from .texts import CountingVocab, Part, decoded, read_text, writable
from .trained import Text, Trained

HIGHEST_RATE = 1e30


def evaluate(
    run: Path,
    *,
    data: str | None = None,
    scope: Mapping[str, Any] | None = None,
    device: str = "auto",
    precision: str = "auto",
    as_json: bool = False,
    dump: Path | None = None,
    tgt_len: int | None = None,
    sliding: int | None = None,
    temperature: float = 1.0,
    dynamic: Mapping[str, Any] | None = None,
    **lengths: Any,
) -> list[EvalResult]:
    """Score a split once for each combination of lengths (those of `eval_lengths`), and print the figures.

    `data` is another text, read with the run's own vocabulary; it is scored whole where it names no splits, unless one
    is asked for. `scope` sets what of `EvalConfig` is not None in it; its split may be "all".
    `dump` gets every target's log-probability, as NumPy `.npz`.
    `sliding` is the stride of windows of `tgt_len` tokens that are read without memory. `temperature` divides
    log-probabilities. `dynamic` sets what of `DynamicConfig` is not None in it, and the weights follow the text. Under
    `sliding` and `dynamic` a text is one stream unless `scope` says otherwise.

    Raises:
        ValueError, FileNotFoundError: a sentence for what does not fit.
    """
    trained = Trained(run, device, precision)
    reading = Reading.of(trained.problems, sliding, temperature, dynamic or {})
    plan = Plan.of(trained, scope or {}, tgt_len, reading, lengths)
    _check_dump(trained.problems, dump, plan)
    loaded = trained.load()
    text = trained.text(loaded, data, plan.split, plan.how.split)
    log = TokenLog() if dump is not None else None
    results = []
    for each in plan.lengths:
        reader = plan.reading.dress(loaded, text.corpus, each, plan.how, trained.precision)
        results.append(score_split(reader, text.split, each, plan.how, precision=trained.precision, log=log))
    if log is not None and dump is not None:
        log.save(dump)
    _show(results, trained, text, plan.reading, as_json=as_json, other=data is not None)
    learning = plan.reading.dynamic
    advice = f"Lower --dynamic-lr, which is {learning.lr:g}." if learning else "Score another checkpoint."
    refuse_infinite([result.nats for result in results], f"results are not finite: the weights diverged. {advice}")
    return results


def _check_dump(problems: Problems, dump: Path | None, plan: Plan) -> None:
    if dump is None:
        return
    problems.attempt(lambda: writable(dump, "--dump"))
    if len(plan.lengths) > 1:
        problems.append(f"--dump writes one file, so give one set of lengths with it, got {len(plan.lengths)}.")


def _show(
    results: Sequence[EvalResult], trained: Trained, text: Text, reading: Reading, *, as_json: bool, other: bool
) -> None:
    """Print the figures; `other` says that the text is not the run's own."""
    trained_on = trained.config.corpus.name
    if as_json:
        facts = {"run": str(trained.run), "trained_on": trained_on, **text.about, "unknown": text.unknown}
        print(json.dumps(facts | asdict(reading) | {"results": [result.to_json() for result in results]}))
        return
    partial_run = f"; trained on {trained_on}" if trained_on.endswith("-partial") and other else ""
    show_results(f"{text.title}{partial_run}{reading}", results, unknown=text.unknown)


@dataclass(frozen=True)
class Plan:
    """What one command scores, and how."""

    reading: Reading
    how: EvalConfig
    split: Part | None
    """The split asked for, if any."""
    lengths: list[Lengths]

    @classmethod
    def of(
        cls,
        trained: Trained,
        scope: Mapping[str, Any],
        tgt_len: int | None,
        reading: Reading,
        lengths: Mapping[str, Any],
    ) -> Plan:
        """What was asked for; mistakes go to the run's problems."""
        given = {name: value for name, value in scope.items() if value is not None}
        split, own, problems = given.pop("split", None), trained.config.eval, trained.problems
        how = problems.attempt(lambda: replace(own, **reading.scope | given), as_options(given)) or own
        combinations = reading.lengths(trained, tgt_len=tgt_len, **lengths)
        return cls(reading, how, split, combinations)


@dataclass(frozen=True)
class Reading:
    """How a text is read, besides the lengths; by default as the model was trained."""

    sliding: int | None = None
    temperature: float = 1.0
    dynamic: DynamicConfig | None = None

    @classmethod
    def of(cls, problems: Problems, sliding: int | None, temperature: float, dynamic: Mapping[str, Any]) -> Reading:
        """What was asked for; each mistake goes to `problems`."""
        problems.attempt(lambda: Tempered(None, temperature))
        given = {name: value for name, value in dynamic.items() if value is not None}
        idle = given.keys() & {"epsilon", "tokens"} if given.get("rule") == "sgd" else set()
        if given and "rule" not in given:
            problems.append(f"--dynamic-{min(given)} needs --dynamic sgd or --dynamic rms.")
        elif idle:
            problems.append(f"--dynamic-{min(idle)} is for --dynamic rms, got sgd. Leave it out.")
        learning = problems.attempt(lambda: DynamicConfig(**given)) if given else None
        if learning is not None and learning.lr > HIGHEST_RATE:
            problems.append(f"--dynamic-lr must be at most {HIGHEST_RATE:g}, got {learning.lr:g}.")
        return cls(sliding, temperature, learning)

    def __str__(self) -> str:
        """The addition to a title; empty by default."""
        told = [] if self.sliding is None else [f"windows sliding by {self.sliding}"]
        told += [] if self.temperature == 1 else [f"temperature {self.temperature:g}"]
        if self.dynamic is not None:
            rms = f", epsilon {self.dynamic.epsilon:g}" if self.dynamic.rule == "rms" else ""
            told.append(f"dynamic {self.dynamic.rule}, lr {self.dynamic.lr:g}, decay {self.dynamic.decay:g}{rms}")
        return "".join(f"; {part}" for part in told)

    @property
    def scope(self) -> dict[str, int]:
        """Defaults of `EvalConfig`: windows are a batch from one stream, and dynamic evaluation follows one stream."""
        if self.sliding is not None:
            return {"batch_size": 1, "context_len": 0}
        return {"batch_size": 1} if self.dynamic else {}

    def lengths(self, trained: Trained, **asked: Any) -> list[Lengths]:
        """`eval_lengths`, without memory if windows slide; mistakes go to the run's problems."""
        if self.sliding is None:
            return trained.lengths(**asked)
        if any(asked.get(name) for name in ("mem_len", "attn_len", "same_length")):
            trained.problems.append(
                "--sliding reads windows without memory: leave out --mem-len, --attn-len, --same-length."
            )
        found = trained.lengths(**asked | {"mem_len": [0], "attn_len": [None], "same_length": False})
        for each in found[:1]:
            trained.problems.attempt(partial(Sliding, None, each.tgt_len, self.sliding))
        return found

    def dress(
        self, loaded: LoadedModel, corpus: Corpus, lengths: Lengths, config: EvalConfig, precision: str
    ) -> LoadedModel:
        """`loaded` with a model that reads this way; gradients are measured first if they are needed."""
        model: Any = loaded.model
        if self.sliding is not None:
            model = Sliding(model, lengths.tgt_len, self.sliding)
        if self.temperature != 1:
            model = Tempered(model, self.temperature)
        if self.dynamic is not None:
            rms = None
            if self.dynamic.rule == "rms":
                part = replace(config, batch_size=1, max_tokens=self.dynamic.tokens)
                loader = _segments(loaded, corpus.split("train"), lengths, part)
                rms = relative_rms(model, report_progress(loader, "measuring gradients"), lengths, precision=precision)
            model = Dynamic(model, self.dynamic, rms)
        return loaded._replace(model=model)


def score_split(
    loaded: LoadedModel,
    split: Split,
    lengths: Lengths,
    config: EvalConfig,
    *,
    precision: str = "auto",
    log: TokenLog | None = None,
    ranks: Ranks | None = None,
) -> EvalResult:
    """Score one split at one set of lengths. `config` gives the number of tokens and of streams, which are distributed
    over `ranks`."""
    ranks = ranks or Ranks()
    device = next(loaded.model.parameters()).device
    chosen, _ = resolve_precision(precision, device)
    segments = _segments(loaded, split, lengths, config, ranks.rows(config.batch_size))
    if ranks.first:
        segments = report_progress(segments, f"scoring {split.name} with a memory of {lengths.mem_len:,}")
    vocab = loaded.vocab
    return evaluate_stream(
        loaded.model,
        segments,
        lengths,
        precision=chosen,
        unit=vocab.unit,
        token_sizes=vocab.token_sizes(),
        dump=log,
        total=ranks.total,
    )


def _segments(
    loaded: LoadedModel, split: Split, lengths: Lengths, config: EvalConfig, rows: slice | None = None
) -> StreamLoader:
    return StreamLoader(
        split,
        batch_size=config.batch_size,
        tgt_len=lengths.tgt_len,
        max_tokens=config.max_tokens,
        context_len=replace(loaded.config, eval=config).context_len(lengths),
        rows=rows,
    )


def refuse_infinite(nats: Sequence[float], sentence: str) -> None:
    """Raise `FloatingPointError` if some costs are not finite; they were printed before."""
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


def score(
    run: Path,
    file: str,
    lengths: Mapping[str, Any],
    *,
    device: str = "auto",
    precision: str = "auto",
    as_json: bool = False,
) -> None:
    """Print a line for each line of `file` ("-": standard input): log-probability in nats, perplexity and bits.

    Raises:
        FileNotFoundError: no such run or file.
        Mistake: a line holds a character that the vocabulary lacks.
    """
    trained = Trained(run, device, precision)
    found = trained.lengths(**lengths)
    trained.problems.refuse()
    text = read_text(file)
    loaded = trained.load()
    lines = text.split(b"\n")[: -1 if text.endswith(b"\n") or not text else None]
    given = lines if loaded.vocab.unit == "byte" else [decoded(line, file) for line in lines]
    counted = CountingVocab(loaded.vocab)
    scores = score_lines(loaded.model, counted, given, found[0], precision=trained.precision)
    counted.report("the text", ", so bits are not comparable with other models")
    for each in scores:
        plain = f"{each.log_prob:.6f}\t{each.ppl:.4f}\t{each.bits:.4f}"
        print(json.dumps(each.to_json()) if as_json else plain)
    refuse_infinite([each.nats for each in scores], "lines have no finite score. Use another checkpoint.")
