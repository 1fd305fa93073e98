"""Choose a recipe by the text, and say why: `txl train --data` without RECIPE.

A published corpus has its small recipe. Any other text is read as bytes (`text-fast`, which takes minutes) unless
corpus.unit says otherwise. Token ids take the recipe for words if their vocabulary is large. The number of steps
follows from the size of the text.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ..config.recipe import holds_ids, load_recipe, packaged_recipes, parse_overrides, text_name, unsaid
from ..mistake import Mistake, listing
from .corpora.archive import unpack_if_archive
from .corpora.published import DATASETS
from .datasets import cache_folder, missing_corpus, store_of
from .header import Header
from .ids import id_blocks, largest_id
from .reading import expand_home, pieces, resolved
from .texts import read_splits
from .vocab import Unit

BYTES, WORDS = "text-fast", "text-words"
PASSES = {BYTES: 5, WORDS: 10}
"""Maximum number of passes over the training text; with more, a small model learns a small text by heart."""
MOST_CHARACTERS = 1024
"""The largest vocabulary of ids for `text-fast`, which is made for few and frequent tokens."""
MOST_LEFT_OUT = 0.75
"""The largest share of n-grams to leave out; 0.9 was worse than 0.7 even in 10 passes."""
LEAST_STEPS = 100
_SUBWORD = 4
"""Bytes of a subword, about, in English and in Chinese."""
_SIZES: dict[str, Callable[[bytes], int]] = {
    "byte": len,
    "char": lambda piece: len(piece.decode()),
    "word": lambda piece: len(piece.split()),
    "bpe": lambda piece: len(piece) // _SUBWORD,
}
"""The number of tokens of a piece of text."""
_PACED = ("warmup_steps", "eval_every", "save_every", "sample_every")
"""Settings of [train] that keep their share of max_steps."""


class ChosenRecipe(NamedTuple):
    """A recipe for a text."""

    recipe: str
    words: Sequence[str]
    """Settings that follow from the text, as words of a command line. The user's own words come after them."""
    why: str
    """The choice, its reason and how to make another, in one sentence."""


Found = tuple[str, Sequence[str], int, str]
"""A recipe, settings that follow from the text, its tokens for training, and what the text is."""


def choose_recipe(data: str, overrides: Sequence[str] = (), usual: Unit = "byte") -> ChosenRecipe:
    """The recipe for `data`, the name of a corpus or the path of a text. The user's corpus.unit decides for a text, or
    else the `usual` unit.

    Raises:
        FileNotFoundError: there is no such corpus or text.
        Mistake: the corpus has no small recipe, or the text has too little text.
    """
    path, store = expand_home(data), store_of(text_name(data))
    if data in DATASETS and not path.exists():
        return _for_published(data)
    if store is not None:
        recipe, words, tokens, what = _of_store(Header.read(store / "corpus.json"))
    elif not path.exists():
        raise missing_corpus(data)
    else:
        unit = given_setting(overrides, "unit") or ("id" if holds_ids(path) else "byte" if usual == "id" else usual)
        column = given_setting(overrides, "column") or ""
        with unpack_if_archive(resolved(path), cache_folder()) as files:
            recipe, words, tokens, what = _of_ids(files) if unit == "id" else _of_text(files, unit, column)
    paced, how = _pace(recipe, tokens, overrides)
    return ChosenRecipe(recipe, (*words, *paced), f"{_named(recipe)}: {_quote(data)} {what}; {how}{_another(data)}.")


def given_setting(overrides: Sequence[str], name: str) -> Any:
    """The last value that the user gives to a setting of [corpus]; None if there is none."""
    given = [s.value for s in parse_overrides(overrides, []) if (s.section, s.field) == ("corpus", name)]
    return given[-1] if given else None


def _for_published(data: str) -> ChosenRecipe:
    """The corpus's recipe whose name ends in -small."""
    recipes = [name for name in packaged_recipes() if load_recipe(name).corpus.name == data]
    small = next((name for name in recipes if name.endswith("-small")), None)
    if small is None:
        like = "text-words" if DATASETS[data].unit == "word" else f"text-small --corpus.unit {DATASETS[data].unit}"
        known = f"one of {listing(recipes)}" if recipes else f"`txl train {like} --data {data}`"
        raise Mistake(f"RECIPE must be named for --data {data}, which has no small recipe. Take {known}.")
    return ChosenRecipe(small, (), f"{_named(small)}: the small one for the corpus {data}; {_another(data)}.")


def _of_store(header: Header) -> Found:
    """A token store has fixed tokens."""
    words = ("--corpus.unit", header.unit, "--corpus.newlines", header.newlines)
    tokens = header.splits["train"].tokens if "train" in header.splits else 0
    return WORDS if header.unit == "word" else BYTES, words, tokens, f"is tokenised as {header.unit}s"


def _of_text(files: Path, unit: Unit, column: str) -> Found:
    recipe = WORDS if unit in ("word", "bpe") else BYTES
    splits = read_splits(files, unit, column=column).splits
    texts = (piece for span in splits.get("train", ()) for piece in pieces(span, unit))
    tokens = sum(map(_SIZES[unit], texts))
    what = f"subwords of about {_SUBWORD} bytes" if unit == "bpe" else f"{unit}s"
    return recipe, ("--corpus.unit", unit), tokens, f"is read as {what}"


def _of_ids(files: Path) -> Found:
    """With few ids the recipe for bytes, otherwise the one for words."""
    splits = read_splits(files, "id").splits
    size = 1 + largest_id(chain(*splits.values()))
    tokens = sum(len(block) for span in splits.get("train", ()) for block in id_blocks(span, size))
    words = ("--corpus.unit=id", *(() if "test" in splits else ("--eval.split=valid",)))
    what = f"has {tokens:,} ids of {size:,} in its train split"
    return BYTES if size <= MOST_CHARACTERS else WORDS, words, tokens, what


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
