"""Begin a run: open its text, choose what is open, build the model; then train it and score its best checkpoint.

A user's mistakes are found here, before anything is written.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import NamedTuple

import torch

from ..config.problems import Problems
from ..config.recipe import is_open, text_name, value_of
from ..config.settings import RunConfig
from ..config.shape import RECURRENT
from ..config.values import value_text
from ..data.corpus import Corpus
from ..data.datasets import inherited, open_corpus
from ..data.vocab import Vocab, units_of
from ..evaluation.score import EvalResult, score_split
from ..mistake import Mistake
from ..model.baselines import build_model
from ..model.transformer_xl import TransformerXL
from ..ops.choice import build_native
from ..run.checkpoint import load_config, load_model, load_vocab
from ..run.folder import Run, find_checkpoint
from ..run.parts import read_tensors, set_weights
from ..runtime.device import resolve_device
from ..runtime.files import refuse_odd_name
from ..runtime.ranks import Ranks
from .agreement import check_ranks
from .choices import choices, resolve_settings
from .growth import grown
from .loop import check_order, fit
from .resuming import check_text, name_of
from .trackers import Trackers, require_installed

STOPPED = 75
"""Exit status of a run that a signal ended after it saved (EX_TEMPFAIL: try again, with --resume)."""

_DROPOUTS = ["dropout", "dropatt", "dropout_words", "dropout_input", "dropout_output", "locked_dropout", "weight_drop"]
"""Settings of [model] in which a run with --init may differ from the run that it starts from."""
MOST_UNKNOWN = 0.1
"""Maximum share of unknown words in the training split of a run with --init."""


class Origin(NamedTuple):
    """The sources of a new run."""

    recipe: str = ""
    """The `recipe_identity` of its recipe."""
    init: Path | None = None
    """The run, on this machine, whose weights, shape and vocabulary it starts from."""
    init_given: Path | None = None
    """That run, as the user named it."""
    given: Sequence[str] = ()
    """The names of settings that the user chose; they must not contradict `init`."""
    why: str = ""
    """The sentence about the recipe if it was chosen for the text."""


class Start(NamedTuple):
    """Everything that training needs at the first step."""

    corpus: Corpus
    model: TransformerXL
    config: RunConfig
    """The settings, in which nothing is "auto" any more."""
    begun: Mapping[str, object]
    """The facts `BEGUN` for `fit`."""


def prepare(config: RunConfig, run: Run, origin: Origin, ranks: Ranks, *, resume: bool = False) -> Start:
    """Open the corpus, choose every setting that is open, and build the model."""
    require_installed(config.train.trackers)
    check_ranks(config.train, ranks)
    refuse_odd_name(config.corpus.name, "--data")
    refuse_odd_name(config.corpus.vocab, "--corpus.vocab")
    init = run.facts().get("init", "") if resume else name_of(origin.init_given)
    source = find_checkpoint(origin.init) if origin.init is not None else None
    vocab = load_vocab(source or find_checkpoint(run.path, which="last")) if init else None
    if vocab is None and config.corpus.unit == "id" and config.model.vocab_size:
        vocab = Vocab.of_ids(config.model.vocab_size)
    asked = config.corpus.document_end  # what is inherited need not occur in a new text
    if source is not None and vocab is not None:
        config = inherit(config, source, vocab, origin)
    if config.corpus.extend_vocab and vocab is None:
        raise Mistake("corpus.extend_vocab needs --init, the run whose vocabulary it extends. Leave it out.")
    corpus = open_corpus(config.corpus, vocab=vocab, extend=config.corpus.extend_vocab and source is not None)
    if resume:
        check_text(run, corpus)
    if config.eval.split not in corpus.header.splits:  # now, because training may take hours
        got, splits = config.eval.split, " or ".join(corpus.header.splits)
        raise Mistake(f"eval.split must be {splits} for the corpus {corpus.name}, got {got}. Give --eval.split valid.")
    corpus.split(config.eval.split)  # someone may remove the store before the last score
    config = replace(config, corpus=replace(config.corpus, vocab=text_name(config.corpus.vocab)))
    if ranks.first:  # the others wait until this is done
        build_native(resolve_device(config.train.device))
    chosen = choices(config.train, config.model)
    if config.train.backend not in ("auto", chosen["backend"]["name"]) and ranks.first:
        print(f"train.backend is {chosen['backend']['name']}: {chosen['backend']['why']}.", file=sys.stderr)
    config = resolve_settings(config, corpus)
    _check_document_end(config, corpus, asked)
    check_order(corpus, config)
    torch.manual_seed(config.train.seed)
    model = build_model(config.model, backend=config.train.backend, recompute=config.train.recompute)
    if source is not None:
        if not config.corpus.extend_vocab and config.corpus.name != load_config(source).corpus.name:
            _check_unknown(corpus)
        file = source / "model.safetensors"
        set_weights(model, grown(model, read_tensors(file), vocab or corpus.vocab), str(file))
    begun = {"recipe": origin.recipe, "why": origin.why, "init": init, "chosen": chosen}
    return Start(corpus, model, config, run.facts() if resume else begun)


def _check_unknown(corpus: Corpus) -> None:
    """Refuse a text of which the model that the run starts from does not know many words."""
    train = corpus.header.splits["train"]
    if train.unknown > MOST_UNKNOWN * train.tokens:
        share = f"{train.unknown / train.tokens:.1%} of {train.tokens:,}"
        add = "Give" if corpus.vocab.unit == "bpe" else "Add them with --corpus.extend-vocab, or give"
        raise Mistake(
            f"The training split of {corpus.name} must have at most {MOST_UNKNOWN:.0%} of "
            f"{units_of(corpus.vocab.unit)} that the model of --init does not know, and {share} are "
            f"unknown. {add} another text."
        )


def _check_document_end(config: RunConfig, corpus: Corpus, asked: str) -> None:
    """Refuse a token that was asked for and does not occur: the model would never see an end."""
    end, ids = config.model.document_end, corpus.split("train").ids
    if asked and not any((ids[i : i + (1 << 24)] == end).any() for i in range(0, len(ids), 1 << 24)):
        raise Mistake(
            f"corpus.document_end must occur in the training split of {corpus.name}, and {asked!r} does not. Name the "
            "token that ends its documents, or leave it out."
        )


def inherit(config: RunConfig, source: Path, vocab: Vocab, origin: Origin) -> RunConfig:
    """`config` with the shape and the vocabulary of `source`, the checkpoint that the run starts from.

    Raises:
        Mistake: a line for each setting of the user that contradicts the checkpoint.
    """
    theirs = load_config(source)
    kept = {name: getattr(config.model, name) for name in _DROPOUTS}
    unfit = "dropatt" if theirs.model.base_kind in RECURRENT else "weight_drop"
    if f"model.{unfit}" not in origin.given:
        del kept[unfit]  # the recipe is of another kind
    corpus = inherited(config.corpus, vocab, theirs.corpus)
    if config.corpus.extend_vocab:
        kept["vocab_size"] = 0
    if config.corpus.document_end:
        kept["document_end"] = None  # the id is that of the new token
    new = replace(config, model=replace(theirs.model, **kept), corpus=corpus)
    problems = Problems()
    for name in origin.given:
        value, own = value_of(config, name), value_of(new, name)
        if value != own and not is_open(config, name):
            problems.append(
                f"{name} must be {value_text(own)} with --init {origin.init_given}, whose "
                f"shape and vocabulary ({vocab}) the new run takes, got {value_text(value)}. Leave it "
                "out, or name another recipe."
            )
    if config.corpus.vocab:
        problems.append(f"corpus.vocab must be left out with --init, because {origin.init_given} has the vocabulary.")
    problems.refuse()
    return new


def train_and_save(
    start: Start, run: Run, ranks: Ranks, *, resume: bool = False, trackers: Trackers | None = None
) -> int:
    """Train in the folder. Returns the exit status."""
    call, begun = (start.model, start.corpus, start.config, run.path), start.begun
    try:
        finished = fit(*call, resume=resume, trackers=trackers, ranks=ranks, begun=begun)
    except KeyboardInterrupt as interrupt:
        last = run.latest
        interrupt.add_note(
            f"{last.name} is saved: go on with --resume --out {quote(str(run.path))}." if last else "Nothing was saved."
        )
        raise
    if finished:
        return 0
    if ranks.first:
        left = getattr(sys.stdout, "reader_left", False)
        cause = "a closed pipe" if left else "a signal"
        line = f"Stopped by {cause}, and saved. Go on with txl train --resume --out {quote(str(run.path))}."
        run.say(line)
        if left:
            print(line, file=sys.stderr)
    ranks.wait()  # the launcher stops all ranks when one ends
    return STOPPED


def score_best(run: Run, start: Start, trackers: Trackers, ranks: Ranks) -> EvalResult:
    """Score the best checkpoint with the settings of `[eval]`, and append the result to the metrics."""
    config = start.config
    loaded = load_model(run.path, device=config.train.device, backend=config.train.backend)
    split, lengths, precision = start.corpus.split(config.eval.split), config.eval_lengths, config.train.precision
    result = score_split(loaded, split, lengths, config.eval, precision=precision, ranks=ranks)
    if ranks.first:
        named = {"checkpoint": find_checkpoint(run.path).name, "step": config.train.max_steps}
        run.metrics.log(entry := {**named, **split.about, **result.to_json()})
        trackers.log(entry)
    return result
