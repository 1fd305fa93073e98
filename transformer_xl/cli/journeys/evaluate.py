"""`txl eval` and `txl score`: what a text costs a trained model, over a split or line by line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeVar

from ...checkpoint import LoadedModel, find_checkpoint, load_config, load_model
from ...config.settings import EvalConfig, Lengths, RunConfig
from ...data.corpus import Corpus, Split
from ...data.loader import StreamLoader
from ...evaluation.dynamic import Dynamic, DynamicConfig, relative_rms
from ...evaluation.lines import score_lines
from ...evaluation.score import EvalResult, Tempered, TokenLog, fastest_tgt_len
from ...evaluation.score import evaluate as evaluate_stream
from ...evaluation.sliding import Sliding
from ...interop import local
from ...mistake import Mistake
from ...runtime.device import resolve_device, resolve_precision, reuse_memory
from ...runtime.ranks import Ranks
from ...runtime.terminal import followed, show_table
from .texts import corpus_for, decoded, part_of, read_text, tell_unknown, title, writable

Value = TypeVar("Value")
FARTHEST, HIGHEST_RATE = (1 << 63) - 1, 1e30
_AUTO = (
    "--tgt-len auto needs a window, --attn-len or --same-length, and neither --sliding nor --dynamic: else figures "
    "depend on it."
)


def evaluate(
    run: Path,
    *,
    data: str | None = None,
    scope: Mapping[str, Any] | None = None,
    device: str = "auto",
    precision: str = "auto",
    as_json: bool = False,
    dump: Path | None = None,
    tgt_len: int | Literal["auto"] | None = None,
    sliding: int | None = None,
    temperature: float = 1.0,
    dynamic: Mapping[str, Any] | None = None,
    **lengths: Any,
) -> list[EvalResult]:
    """Score a split once for each combination of lengths (those of `eval_lengths`), and print the figures.

    `data` is another text, read with the run's own vocabulary; it is scored whole where it names no splits, unless one
    is asked for. `scope` sets what of `EvalConfig` is not None in it; its split may be "all".
    `dump` gets every target's log-probability, as NumPy `.npz`. `tgt_len` "auto" is the fastest one under a window.
    `sliding` is the stride of windows of `tgt_len` tokens that are read without memory. `temperature` divides
    log-probabilities. `dynamic` sets what of `DynamicConfig` is not None in it, and the weights follow the text. Under
    `sliding` and `dynamic` a text is one stream unless `scope` says otherwise.

    Raises:
        ValueError, FileNotFoundError: a sentence for what does not fit.
    """
    reuse_memory()
    run = local(run)
    config = load_config(find_checkpoint(run))
    problems: list[str] = []
    reading = told(problems, lambda: Reading.of(sliding, temperature, dynamic or {})) or Reading()
    given = {name: value for name, value in (scope or {}).items() if value is not None}
    asked = given.pop("split", None)
    how = told(problems, lambda: replace(config.eval, **reading.scope | given)) or config.eval
    width = None if tgt_len == "auto" else tgt_len
    combinations = told(problems, lambda: reading.lengths(config, tgt_len=width, **lengths)) or []
    if tgt_len == "auto" and (reading.scope or any(each.attn_len is None for each in combinations)):
        problems.append(_AUTO)
    if dump is not None:
        told(problems, lambda: writable(dump, "--dump"))
    if dump is not None and len(combinations) > 1:
        problems.append(f"--dump writes one file, so give one set of lengths with it, got {len(combinations)}.")
    if problems:
        raise Mistake("\n".join(problems))
    loaded = load_model(run, device=resolve_device(device))
    corpus = corpus_for(run, loaded.config.corpus, loaded.vocab, data, asked)
    part = part_of(corpus, asked, how.split)
    split = corpus.split(part)
    precision, _ = resolve_precision(precision, resolve_device(device))
    if tgt_len == "auto":
        fastest = partial(fastest_tgt_len, loaded.model, batch=how.batch_size, precision=precision)
        combinations = [replace(each, tgt_len=fastest(each)) for each in combinations]
    log = TokenLog() if dump is not None else None
    results = []
    for each in combinations:
        reader = reading.dress(loaded, corpus, each, how, precision)
        results.append(score_split(reader, split, each, how, precision=precision, log=log))
    if log is not None and dump is not None:
        log.save(dump)
    about = {"run": str(run), "trained_on": config.corpus.name, **corpus.about, "split": part}
    if as_json:
        facts = about | {"unknown": corpus.unknown(part), **asdict(reading)}
        print(json.dumps(facts | {"results": [result.to_json() for result in results]}))
    else:
        other = f"; trained on {config.corpus.name}" if config.corpus.name.endswith("-partial") and data else ""
        show_results(title(corpus, part) + other + str(reading), results, unknown=corpus.unknown(part))
    _refuse_divergence(results, reading)
    return results


def _refuse_divergence(results: Sequence[EvalResult], reading: Reading) -> None:
    """Raise where a result is not finite, and say what to change."""
    learning = reading.dynamic
    advice = f"Lower --dynamic-lr, which is {learning.lr:g}." if learning else "Score another checkpoint."
    refuse_infinite([result.nats for result in results], f"results are not finite: the weights diverged. {advice}")


@dataclass(frozen=True)
class Reading:
    """How a text is read, beyond the lengths; by default as the model does."""

    sliding: int | None = None
    temperature: float = 1.0
    dynamic: DynamicConfig | None = None

    @classmethod
    def of(cls, sliding: int | None, temperature: float, dynamic: Mapping[str, Any]) -> Reading:
        """What was asked for; `ValueError` with a sentence for each mistake."""
        problems: list[str] = []
        told(problems, lambda: Tempered(None, temperature))
        given = {name: value for name, value in dynamic.items() if value is not None}
        idle = given.keys() & {"epsilon", "tokens"} if given.get("rule") == "sgd" else set()
        if given and "rule" not in given:
            problems.append(f"--dynamic-{min(given)} needs --dynamic sgd or --dynamic rms.")
        elif idle:
            problems.append(f"--dynamic-{min(idle)} is for --dynamic rms, got sgd: leave it out.")
        learning = told(problems, lambda: DynamicConfig(**given)) if given else None
        if learning is not None and learning.lr > HIGHEST_RATE:
            problems.append(f"--dynamic-lr must be at most {HIGHEST_RATE:g}, got {learning.lr:g}.")
        if problems:
            raise Mistake("\n".join(problems))
        return cls(sliding, temperature, learning)

    def __str__(self) -> str:
        """For a title: nothing where nothing was asked for."""
        told = [] if self.sliding is None else [f"windows sliding by {self.sliding}"]
        told += [] if self.temperature == 1 else [f"temperature {self.temperature:g}"]
        if self.dynamic is not None:
            rms = f", epsilon {self.dynamic.epsilon:g}" if self.dynamic.rule == "rms" else ""
            told.append(f"dynamic {self.dynamic.rule}, lr {self.dynamic.lr:g}, decay {self.dynamic.decay:g}{rms}")
        return "".join(f"; {part}" for part in told)

    @property
    def scope(self) -> dict[str, int]:
        """Windows stand side by side within one stream, and weights that follow a text follow one."""
        if self.sliding is not None:
            return {"batch_size": 1, "context_len": 0}
        return {"batch_size": 1} if self.dynamic else {}

    def lengths(self, config: RunConfig, **asked: Any) -> list[Lengths]:
        """`eval_lengths`, where windows slide without memory; `ValueError` where these do not fit."""
        if self.sliding is None:
            return eval_lengths(config, **asked)
        problems: list[str] = []
        if any(asked.get(name) for name in ("mem_len", "attn_len", "same_length")):
            problems.append("--sliding reads windows without memory: leave out --mem-len, --attn-len, --same-length.")
        asked |= {"mem_len": [0], "attn_len": [None], "same_length": False}
        found = told(problems, lambda: eval_lengths(config, **asked)) or []
        for each in found[:1]:
            told(problems, partial(Sliding, None, each.tgt_len, self.sliding))
        if problems:
            raise Mistake("\n".join(problems))
        return found

    def dress(
        self, loaded: LoadedModel, corpus: Corpus, lengths: Lengths, config: EvalConfig, precision: str
    ) -> LoadedModel:
        """`loaded` with a model that reads so; what has to be measured before is."""
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
                rms = relative_rms(model, followed(loader, "measuring gradients"), lengths, precision=precision)
            model = Dynamic(model, self.dynamic, rms)
        return loaded._replace(model=model)


def told(problems: list[str], attempt: Callable[[], Value]) -> Value | None:
    """What `attempt` gives, or None, with its sentences among `problems`."""
    try:
        return attempt()
    except ValueError as error:
        problems += str(error).splitlines()
        return None


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
    """Score one split at one set of lengths, as `config` says how much of it and how many streams side by side, which
    are dealt out to `ranks`."""
    ranks = ranks or Ranks()
    device = next(loaded.model.parameters()).device
    chosen, _ = resolve_precision(precision, device)
    loader = _segments(loaded, split, lengths, config, ranks.rows(config.batch_size))
    vocab = loaded.vocab
    return evaluate_stream(
        loaded.model,
        followed(loader, f"scoring {split.name} with a memory of {lengths.mem_len:,}") if ranks.first else loader,
        lengths,
        precision=chosen,
        unit=vocab.unit,
        symbol_bytes=vocab.symbol_bytes(),
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


def eval_lengths(
    config: RunConfig,
    *,
    tgt_len: int | None = None,
    mem_len: Sequence[int] = (),
    clamp_len: Sequence[int | None] = (),
    attn_len: Sequence[int | None] = (),
    same_length: bool = False,
) -> list[Lengths]:
    """Every combination of the lengths asked for; what is not asked for is the run's `[eval]`, else its `[train]`.

    An `attn_len` that is only inherited gives way where the memory asked for is too short for it. `same_length` means
    `attn_len = mem_len`, as in the original PyTorch code.

    Raises:
        ValueError: lengths that no call can have.
    """
    own = {
        name: getattr(config.train if getattr(config.eval, name) is None else config.eval, name)
        for name in ("tgt_len", "mem_len", "clamp_len", "attn_len")
    }
    if config.eval.context_len:
        own["mem_len"] = 0
    width = own["tgt_len"] if tgt_len is None else tgt_len
    found: list[Lengths | None] = []
    problems: list[str] = []
    if same_length and attn_len:
        problems.append("--same-length sets attn_len to mem_len, so give it or --attn-len, not both.")
    sizes = product(mem_len or [own["mem_len"]], clamp_len or [own["clamp_len"]], attn_len or [own["attn_len"]])
    for memory, clamp, window in sizes:
        if same_length:
            window = memory
        elif not attn_len and window is not None and window > memory + 1:
            window = None
        problems += near(clamp)
        call = partial(Lengths, tgt_len=width, mem_len=memory, clamp_len=clamp, attn_len=window)
        found.append(told(problems, call))
    if problems:
        raise Mistake("\n".join(dict.fromkeys(problems)))
    return [lengths for lengths in found if lengths is not None]


def near(clamp_len: int | None) -> list[str]:
    """What is wrong with a distance that no tensor can hold."""
    far = clamp_len is not None and clamp_len > FARTHEST
    return [f"clamp_len must be at most {FARTHEST:,}, got {clamp_len}."] if far else []


def refuse_infinite(nats: Sequence[float], sentence: str) -> None:
    """Raise `FloatingPointError` after costs were shown of which some are no number."""
    infinite = sum(not math.isfinite(cost) for cost in nats)
    if infinite:
        raise FloatingPointError(f"{infinite:,} of {len(nats):,} {sentence}")


def show_results(title: str, results: Sequence[EvalResult], *, unknown: int = 0) -> None:
    """A row for each set of lengths; `unknown` tokens of the text make its bits per byte no figure to compare."""
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
        ValueError: a line holds a symbol the model has none for.
    """
    reuse_memory()
    run = local(run)
    [width] = eval_lengths(load_config(find_checkpoint(run)), **lengths)
    chosen = resolve_device(device)
    text = read_text(file)
    loaded = load_model(run, device=chosen)
    lines = text.split(b"\n")[: -1 if text.endswith(b"\n") or not text else None]
    given = lines if loaded.vocab.unit == "byte" else [decoded(line, file) for line in lines]
    precision, _ = resolve_precision(precision, chosen)
    scores = score_lines(loaded.model, loaded.vocab, given, width, precision=precision)
    tell_unknown(loaded.vocab, given, "the text", ", so bits are not comparable with other models")
    for each in scores:
        plain = f"{each.log_prob:.6f}\t{each.ppl:.4f}\t{each.bits:.4f}"
        print(json.dumps(each.to_json()) if as_json else plain)
    refuse_infinite([each.nats for each in scores], "lines have no finite score. Use another checkpoint.")
