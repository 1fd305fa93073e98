"""Refusals of settings name every setting, and report each mistake once."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from shlex import split as words
from typing import Any, Literal, get_args, get_origin

import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config.problems import Problem, WrongSettings, refuse_settings
from transformer_xl.config.recipe import TYPES, load_recipe
from transformer_xl.config.settings import Lengths, TrainConfig, TransformerXLConfig
from transformer_xl.config.values import alternatives
from transformer_xl.mistake import Mistake

REFUSALS = (
    "--model.n-head 0",
    "--model.n-layer 10001",
    "--model.dropout-input 1",
    "--model.layer-norm-epsilon 0",
    "--model.d-model 7",
    "--model.cutoffs 3 2",
    "--model.cutoffs 3 5 --model.vocab-size 4",
    "--model.vocab-size 4 | --model.document-end 4",
    "--model.div-val 2",
    "--model.cutoffs 1 2 3 4 | --model.div-val 99",
    "--model.tie-projs true false",
    "--model.ngrams 3 2",
    "--model.ngrams 2 | --model.ngram-rows 0",
    "--model.ngram-rows 5",
    "--model.ngrams 2 | --model.ngram-width 0",
    "--model.kind lstm --model.ngrams 2",
    "--model.ngrams 2 --train.parallel fsdp",
    "--model.matches 2 --train.parallel fsdp",
    "--train.cuda-graph --train.recompute",
    "--model.matches 3 | --model.match-window 0",
    "--model.match-window 5",
    "--model.ngrams 2 | --model.ngram-dropout 1",
    "--train.ngram-lr-ratio 3",
    "--model.ngrams 2 | --train.ngram-lr-ratio 0",
    "--model.untie-r --model.share-position-projection",
    "--model.gate gru | --model.gate-bias 101",
    "--model.gate-bias 3",
    "--model.gate input --model.gate-bias 3",
    "--model.kind lstm --model.n-head 8",
    "--model.kind lstm --train.attn-len 3",
    "--model.kind shaw --model.positions 0",
    "--corpus.min-count 0",
    "--corpus.newlines sentence",
    "--corpus.newlines drop --corpus.shuffle-lines",
    "--corpus.unit id --corpus.newlines drop",
    "--corpus.unit id --corpus.vocab words.txt",
    "--train.clamp-len 0",
    "--train.mem-len 3000000000",
    "--train.attn-len 200",
    "--train.attn-len 7 --eval.mem-len 5",
    "--eval.attn-len 7 --eval.mem-len 5",
    "--train.context-len 5",
    "--eval.context-len 5 --eval.mem-len 5",
    "--eval.batch-size 1048577",
    "--train.average-from 3",
    "--train.cuda-graph --train.random-tgt-len",
    "--train.batch-size 6 | --train.cuda-graph --train.batch-chunk 3",
    "--train.short-share 1",
    "--train.short-share 0.4 --train.tgt-len 5",
    "--train.short-share 0.4 --train.mem-len 7",
    "--train.short-share 0.4 --train.attn-len 9",
    "--train.short-share 0.4 --train.random-tgt-len",
    "--train.mem-len 0 | --train.short-share 0.4 --train.context-len 4",
    "--train.min-lr-ratio 0.1 | --train.parallel fsdp --train.average-from 3",
    "--train.embedding-lr-ratio 0",
    "--train.momentum 1",
    "--train.betas 0 1",
    "--train.lr 1e300",
    "--train.batch-chunk 3",
    "--model.positions 128 | --model.kind al-rfou --train.tar-beta 1",
    "--model.positions 128 | --model.kind al-rfou --train.random-tgt-len",
    "--model.positions 128 | --model.kind al-rfou --train.clamp-len 3",
    "--model.kind al-rfou | --model.positions 5",
    "--model.positions 3",
    "--model.weight-drop 0.5",
    "--train.passes 0",
    "--train.keep 0",
    "--train.schedule constant | --train.average-from -1",
    "--corpus.unit id --corpus.column text",
    "--train.schedule linear | --train.average-from 3",
    "--train.compile --train.parallel fsdp",
    "--model.positions 128 | --model.kind al-rfou --train.ar-alpha 1",
    "--train.passes 2 --corpus.shuffle-lines",
    "--eval.batch-size 0",
    "--model.ngrams 65",
    "--model.document-end 3 --model.zero-memory",
    "--model.document-end 3 --model.kind vaswani",
    "--corpus.document-end a --model.zero-memory",
    "--corpus.document-end a --model.kind vaswani",
    "--model.cutoffs 5 --model.vocab-size 5",
    "--model.kind lstm | --model.weight-drop 1",
    "--train.mem-len 0 --train.context-len 3 --model.kind al-rfou | --model.positions 130",
    "--train.mem-len 0 --model.kind al-rfou | --model.positions 130 --eval.context-len 3",
)
"""At least one command line for each refusal, which names all of its options, or those after a bar."""


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe that sets nothing."""
    file = tmp_path_factory.mktemp("recipe") / "empty.toml"
    file.write_text("")
    return file


def names_in(words: list[str]) -> set[str]:
    """The names of settings in a command line or a sentence, without sections: [eval] takes lengths of [train]."""
    found = (re.match(r"-{0,2}(?:model|corpus|train|eval)\.([a-z_-]+)", word) for word in words)
    return {match[1].replace("-", "_") for match in found if match}


def refusals(recipe: Path | str, overrides: list[str]) -> list[str]:
    """The sentences that a command line is refused with, if any."""
    try:
        load_recipe(recipe, overrides)
    except Mistake as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize("line", REFUSALS)
def test_a_refusal_names_every_setting(line: str, empty: Path):
    named = names_in(words(line.rpartition("|")[2]))
    sentences = refusals(empty, words(line.replace("|", "")))
    assert any(named <= names_in(re.split("[ ,:]", sentence)) for sentence in sentences), sentences


def test_a_sentence_names_each_setting_with_its_section():
    assert refusals("enwik8-small", words("--model.kind lstm --model.n-head 8 --model.d-head 3")) == [
        f"model.{name} is for kind = transformer-xl, shaw, vaswani or al-rfou, got model.kind = lstm. Leave it out."
        for name in ("n_head", "d_head")
    ]


def test_words_that_set_nothing_and_empty_tables_without_a_name_are_refused(tmp_path: Path):
    (tmp_path / "odd.toml").write_text('"train.lr" = 0.5\n')
    assert [sentence[:26] for sentence in refusals(tmp_path / "odd.toml", [])] == ["train.lr is not a setting;"]
    (tmp_path / "odd.toml").write_text("[trian]\n")
    assert refusals(tmp_path / "odd.toml", ["lr", "--train.lr", "3"]) == [
        "lr is neither a setting nor a value of one. Leave it out.",
        "trian is not a setting; `txl train --help` lists them all.",
    ]


def some_words(dice: random.Random, hint: Any) -> list[str]:
    """Words for a setting: of its type as a rule, at or beyond its limits often."""
    kind = dice.choice([kind for kind in alternatives(hint) if kind is not type(None)])
    if get_origin(kind) is tuple:
        items = get_args(kind)
        count = dice.randrange(1, 4) if Ellipsis in items else len(items)
        return [word for _ in range(count) for word in some_words(dice, items[0])]
    if get_origin(kind) is Literal:
        return [dice.choice([*get_args(kind)])]
    pools = {int: ["-1", "0", "1", "3", "7", "99", str(10**12)], float: ["-1", "0", "0.5", "2", "1e300"]}
    return [dice.choice((pools | {bool: ["true", "false"], str: ["auto"]})[kind] + ["wrong"] * (dice.random() < 0.05))]


@settings(max_examples=examples(300))
@given(dice=st.integers(0, 2**32).map(random.Random))
def test_no_mistake_is_reported_twice_and_each_names_a_setting(dice: random.Random, empty: Path):
    overrides: list[str] = []
    for name in dice.sample([*TYPES], dice.choice([1, 2, 3, 20])):
        overrides.append(f"--{name.replace('_', '-')}={','.join(some_words(dice, TYPES[name]))}")
    sentences = refusals(empty, overrides)
    subjects = [sentence.split()[0].rstrip(",") for sentence in sentences]
    assert len(set(subjects)) == len(subjects), sentences
    for sentence in sentences:
        assert names_in(overrides) & names_in(re.split("[ ,:]", sentence)), sentence


def test_a_recipe_of_an_editor_that_marks_utf_8_is_read(tmp_path):
    (tmp_path / "mine.toml").write_text("[train]\nlr = 0.5\n", encoding="utf-8-sig")
    assert load_recipe(tmp_path / "mine.toml").train.lr == 0.5


def test_a_refusal_holds_its_settings_and_reads_as_a_sentence_in_python():
    with pytest.raises(WrongSettings) as caught:
        TransformerXLConfig(vocab_size=5, cutoffs=(7,), dropout=2.0)
    assert [problem.fields for problem in caught.value.problems] == [("dropout",), ("cutoffs", "vocab_size")]
    assert str(caught.value).splitlines() == [
        "dropout must be at least 0 and below 1, got 2.0.",
        "cutoffs must be below vocab_size = 5, got [7]. Lower them.",
    ]
    with pytest.raises(WrongSettings, match=r"^attn_len must be at most mem_len \+ 1 = 4, got 9"):
        Lengths(tgt_len=1, mem_len=3, attn_len=9)


def test_the_largest_rate_is_the_one_that_the_refusal_names():
    assert TrainConfig(lr=1e30).lr == 1e30
    with pytest.raises(WrongSettings, match=r"^lr must be at most 1e\+30, got 1e\+31\.$"):
        TrainConfig(lr=1e31)


@pytest.mark.unchecked
def test_a_word_that_no_setting_knows_is_refused_in_python_too():
    with pytest.raises(WrongSettings, match=r"^schedule must be one of cosine, linear, inv_sqrt, constant, got wsd\.$"):
        TrainConfig(schedule="wsd")  # type: ignore[arg-type]


def test_an_invalid_setting_is_not_compared_with_others():
    assert Problem(("a", "b"), "{} is {x} for {}.").named("{}") == "a is {x} for b."
    alone, other = Problem(("a",), "{} is wrong."), Problem(("b", "c"), "{} contradicts {}.")
    with pytest.raises(WrongSettings) as caught:
        refuse_settings([alone, Problem(("a",), "{} is odd."), Problem(("b", "a"), "{} contradicts {}."), other])
    assert caught.value.problems == [alone, other]
    refuse_settings([])


def test_a_value_of_another_type_suppresses_contradictions_of_its_default(tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text(f"[train]\nmem_len = {json.dumps('none')}\ncontext_len = 3\n")
    assert refusals(file, []) == ['train.mem_len must be a whole number, got "none".']
