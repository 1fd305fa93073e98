"""Choose a recipe by the text, and say why: `txl train --data` without RECIPE.

A published corpus has its small recipe. Any other text is read as bytes (`text-fast`, which takes minutes) unless
corpus.unit says otherwise. Token ids take the recipe for words if their vocabulary is large. The number of steps
follows from the number of tokens, so the text is tokenised here; training opens the same store.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import NamedTuple

from ..config.recipe import holds_ids, load_recipe, packaged_recipes, parse_overrides, text_name, unsaid
from ..config.settings import CorpusConfig
from ..mistake import Mistake, listing
from .corpora.published import DATASETS
from .corpus import Header
from .datasets import inherited, missing_corpus, open_corpus, store_of
from .reading import expand_home
from .vocab import Vocab, units_of

BYTES, WORDS = "text-fast", "text-words"
PASSES = {BYTES: 5, WORDS: 10}
"""Maximum number of passes over the training text; with more, a small model learns a small text by heart."""
MOST_CHARACTERS = 1024
"""The largest vocabulary of ids for `text-fast`, which is made for few and frequent tokens."""
MOST_LEFT_OUT = 0.75
"""The largest share of n-grams to leave out; 0.9 was worse than 0.7 even in 10 passes."""
LEAST_STEPS = 100
_PACED = ("warmup_steps", "eval_every", "save_every", "sample_every")
"""Settings of [train] that keep their share of max_steps."""


class ChosenRecipe(NamedTuple):
    """A recipe for a text."""

    recipe: str
    words: Sequence[str]
    """Settings that follow from the text, as words of a command line. The user's own words come after them."""
    why: str
    """The choice, its reason and how to make another, in one sentence."""


def choose_recipe(
    data: str, overrides: Sequence[str] = (), init: tuple[Vocab, CorpusConfig] | None = None
) -> ChosenRecipe:
    """The recipe for `data`, the name of a corpus or the path of a text. The user's corpus.unit decides for a text, or
    else that of `init`: the vocabulary and the settings of the model to start from.

    Raises:
        FileNotFoundError: there is no such corpus or text.
        Mistake: the corpus has no small recipe, or the text has too little text.
    """
    path, store = expand_home(data), store_of(text_name(data))
    if data in DATASETS and not path.exists():
        return _for_published(data)
    if store is not None:
        header = Header.read(store / "corpus.json")
        unit, words = header.unit, ["--corpus.unit", header.unit, "--corpus.newlines", header.newlines]
    elif not path.exists():
        raise missing_corpus(data)
    else:
        unit = "id" if holds_ids(path) else init[0].unit if init else "byte"
        unit = parse_overrides(overrides).get("corpus.unit") or unit
        words = ["--corpus.unit", unit]
    usual = WORDS if unit in ("word", "bpe") else BYTES
    run = load_recipe(usual, [*words, *overrides], data=data, note=unsaid)
    config, vocab = run.corpus, Vocab.of_ids(run.model.vocab_size) if unit == "id" and run.model.vocab_size else None
    if init is not None and init[0].unit == unit:  # other units are refused later
        vocab, config = init[0], inherited(config, *init)
    corpus = open_corpus(config, vocab, extend=config.extend_vocab and init is not None)
    splits = corpus.header.splits
    if unit == "id" and "test" not in splits:
        words.append("--eval.split=valid")
    recipe = WORDS if unit == "id" and len(corpus.vocab) > MOST_CHARACTERS else usual
    paced, how = _pace(recipe, splits["train"].tokens if "train" in splits else 0, overrides)
    tokens = f"{len(corpus.vocab):,} ids" if unit == "id" else units_of(unit)
    why = f"{_named(recipe)}: {_quote(data)} is read as {tokens}; {how}{_another(data)}."
    return ChosenRecipe(recipe, (*words, *paced), why)


def _for_published(data: str) -> ChosenRecipe:
    """The corpus's recipe whose name ends in -small."""
    recipes = [name for name in packaged_recipes() if load_recipe(name).corpus.name == data]
    small = next((name for name in recipes if name.endswith("-small")), None)
    if small is None:
        like = "text-words" if DATASETS[data].unit == "word" else f"text-small --corpus.unit {DATASETS[data].unit}"
        known = f"one of {listing(recipes)}" if recipes else f"`txl train {like} --data {data}`"
        raise Mistake(f"RECIPE must be named for --data {data}, which has no small recipe. Take {known}.")
    return ChosenRecipe(small, (), f"{_named(small)}: the small one for the corpus {data}; {_another(data)}.")


def _pace(recipe: str, tokens: int, overrides: Sequence[str]) -> tuple[Sequence[str], str]:
    """The steps for a training split of this many tokens, as words of a command line, and in a sentence.

    A long text has the recipe's steps. A short one has `PASSES` passes, and what recurs keeps its share of the steps.
    """
    train = load_recipe(recipe).train
    batch = train.batch_size * train.tgt_len
    steps = min(train.max_steps, max(LEAST_STEPS, PASSES[recipe] * tokens // batch))
    passes = steps * batch / max(tokens, 1)
    by_heart = ", which the model will learn by heart" if passes > 2 * PASSES[recipe] else ""
    how = f"the default is {steps:,} steps, {passes:,.1f} passes over the text{by_heart}; "
    paced: list[str] = []
    if steps != train.max_steps:
        every = {name: getattr(train, name) for name in _PACED if getattr(train, name)}
        paced = [f"--train.{name}={max(1, old * steps // train.max_steps)}" for name, old in every.items()]
        paced.append(f"--train.max-steps={steps}")
    asked = load_recipe(recipe, [*paced, *overrides], note=unsaid)
    passes = asked.train.max_steps * asked.train.batch_size * asked.train.tgt_len / max(tokens, 1)
    if asked.model.ngrams:
        paced.append(f"--model.ngram-dropout={left_out(passes):.2f}")
    return paced, how


def left_out(passes: float) -> float:
    """The share of n-grams to leave out, so that training sees each about once. With more, it learns them by heart."""
    return min(1 - 1 / max(passes, 1), MOST_LEFT_OUT)


def _named(recipe: str) -> str:
    """The recipe, and the kind of model that it trains."""
    kind = "with n-grams and matches, which learn most in minutes" if load_recipe(recipe).model.ngrams else "alone"
    return f"Recipe {recipe}, Transformer-XL {kind}"


def _another(data: str) -> str:
    return f"`txl train RECIPE --data {_quote(data)}` takes another, and `txl recipes` lists them"


def _quote(data: str) -> str:
    """The name as a shell takes it, on one line."""
    return shlex.quote(data) if data.isprintable() else ascii(data)
