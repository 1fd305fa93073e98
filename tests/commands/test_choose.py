"""`txl train --data` without RECIPE: the choice follows the unit and the size of the text, is printed and recorded."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from shlex import split as words

import pytest
from tiny_runs import TINY, printed, refused

from transformer_xl.commands.main import main
from transformer_xl.config.recipe import load_recipe, packaged_recipes
from transformer_xl.config.settings import CorpusConfig
from transformer_xl.data import choose
from transformer_xl.data.choose import LEAST_STEPS, PASSES, choose_recipe
from transformer_xl.data.corpora.published import DATASETS
from transformer_xl.data.corpus import Corpus
from transformer_xl.data.datasets import inherited, open_corpus
from transformer_xl.data.vocab import Vocab

pytestmark = pytest.mark.usefixtures("own_folder")
CODE = Path(os.__file__).read_bytes()[:20_000]


def prose(count: int, types: int = 300) -> bytes:
    """A text of `count` words out of `types`, ten on a line."""
    dice = random.Random(1)
    drawn = [f"w{dice.randrange(types)}" for _ in range(count)]
    return "".join(" ".join(drawn[start : start + 10]) + "\n" for start in range(0, count, 10)).encode()


@pytest.mark.parametrize(
    ("unit", "recipe"), [("word", "text-words"), ("bpe", "text-words"), ("char", "text-fast"), (None, "text-fast")]
)
def test_a_text_is_read_as_bytes_unless_the_user_names_a_unit(unit: str | None, recipe: str, capsys):
    for text in (CODE, prose(20_000)):
        Path("a text.txt").write_bytes(text)
        given = [] if unit is None else ["--corpus.unit", unit]
        shown = printed(["train", "--data", "a text.txt", "--print-config", "--train.max-steps", "7", *given], capsys)
        tokens = {None: "bytes", "bpe": "subwords"}.get(unit, f"{unit}s")
        assert re.match(rf"# Recipe {recipe}, [^:]+: 'a text.txt' is read as {tokens}; ", shown)
        Path("mine.toml").write_text(shown)
        config = load_recipe("mine.toml")
        assert (config.corpus.unit, config.train.max_steps) == (unit or "byte", 7)
        assert "`txl train RECIPE --data 'a text.txt'` takes another" in shown


def test_a_text_for_a_known_vocabulary_is_tokenised_once(own_folder: Path, monkeypatch):
    monkeypatch.setenv("TXL_HOME", str(own_folder / "cache"))
    Path("text.txt").write_bytes(prose(2_000))
    theirs = CorpusConfig(unit="word", min_count=7, document_end="w1")
    vocab = Vocab.build("word", [prose(2_000)], min_count=7)
    choose_recipe("text.txt", [], (vocab, theirs))
    open_corpus(inherited(CorpusConfig(name="text.txt"), vocab, theirs), vocab)
    assert len(list(Path("cache/texts").glob("text-*"))) == 1


@pytest.mark.parametrize("unit", ["byte", "char", "word", "bpe"])
def test_passes_are_over_tokens_of_the_unit(unit: str):
    Path("text.txt").write_text(prose(60_000, types=2_000).decode().translate({ord("w"): "言", ord("1"): "語"}))
    choice = choose_recipe("text.txt", ["--corpus.unit", unit])
    config = load_recipe(choice.recipe, choice.words, data="text.txt")
    tokens = len(open_corpus(config.corpus).split("train").ids)
    shown = re.search(r"([\d,.]+) passes", choice.why)
    assert shown is not None
    passes = config.train.max_steps * config.train.batch_size * config.train.tgt_len / tokens
    assert float(shown[1].replace(",", "")) == pytest.approx(passes, abs=0.05)


@pytest.mark.parametrize("tokens", [1, 5_000, 100_000, 300_000, 10**7])
def test_a_short_text_has_fewer_steps_and_all_else_keeps_its_share(tokens: int):
    own = load_recipe("text-fast")
    batch = own.train.batch_size * own.train.tgt_len
    settings, sentence = choose._pace("text-fast", tokens, ())
    train = load_recipe("text-fast", list(settings)).train
    assert LEAST_STEPS <= train.max_steps <= own.train.max_steps
    if LEAST_STEPS < train.max_steps < own.train.max_steps:
        assert train.max_steps == PASSES["text-fast"] * tokens // batch
    passes = train.max_steps * batch / tokens
    assert f"{train.max_steps:,} steps, {passes:,.1f} passes" in sentence
    assert ("by heart" in sentence) == (passes > 2 * PASSES["text-fast"])
    for name in ("warmup_steps", "eval_every", "save_every", "sample_every"):
        share = getattr(own.train, name) / own.train.max_steps
        assert getattr(train, name) == pytest.approx(share * train.max_steps, abs=1)
        assert (getattr(train, name) == 0) == (share == 0), "0 stands for never"


@pytest.mark.parametrize(
    ("tokens", "overrides", "left_out"),
    [
        (10**7, "", 0.0),
        (10**5, "", 0.75),
        (10**3, "", 0.75),
        (1_024_000, "--train.max-steps 1000", 0.5),
        (512_000, "--train.max-steps 1000 --train.batch-size 4", 0.0),
        (512_000, "--train.max-steps 1000 --model.ngram-dropout 0.2", 0.2),
        (10**5, "--model.ngrams=", 0.0),
        (768_000, "--train.tgt-len 64 --train.max-steps 1000", 0.25),
    ],
)
def test_ngrams_of_p_passes_are_left_out_but_for_one_in_p(tokens: int, overrides: str, left_out: float):
    settings, _ = choose._pace("text-fast", tokens, words(overrides))
    assert load_recipe("text-fast", [*settings, *words(overrides)]).model.ngram_dropout == left_out


def test_a_published_corpus_has_its_small_recipe_or_a_sentence(capsys):
    for name in DATASETS:
        if (small := f"{name.replace('-', '')}-small") in packaged_recipes():
            choice = choose_recipe(name)
            assert (choice.recipe, choice.words) == (small, ()) and load_recipe(small).corpus.name == name
    assert "Take one of wikitext103-128m" in refused("train --data wikitext-103", capsys)
    assert "`txl train text-words --data wikitext-2-raw`" in refused("train --data wikitext-2-raw", capsys)
    assert "--corpus.unit char --data ptb-char`" in refused("train --data ptb-char", capsys)


def test_a_token_store_keeps_its_tokens():
    splits = {name: prose(500) for name in ("train", "valid", "test")}
    for unit, recipe in (("word", "text-words"), ("char", "text-fast")):
        Corpus.build(f"{unit}s", splits, CorpusConfig(unit=unit), name=f"{unit}s")
        choice = choose_recipe(f"{unit}s")
        config = load_recipe(choice.recipe, choice.words, data=f"{unit}s")
        assert (choice.recipe, config.corpus.unit) == (recipe, unit)
        assert open_corpus(config.corpus).header.unit == unit


def test_the_choice_is_printed_recorded_and_not_made_again(capsys):
    Path("my").mkdir()
    for name in ("a.txt", "b.txt"):
        Path("my", name).write_bytes(prose(3_000))
    shown, run = printed(["train", "--data", "my/", "--corpus.unit", "word", *TINY], capsys), Path("runs/my")
    facts = json.loads((run / "environment.json").read_text())
    assert facts["recipe"] == "text-words"
    assert facts["why"].startswith("Recipe text-words, Transformer-XL alone: my/ is read as words")
    assert facts["why"] in shown and facts["why"] in (run / "log.txt").read_text()
    more = words("--resume --train.max-steps 6")
    assert main(["train", "--out", "runs/my", *more]) == 0  # needs no text either: the run names it
    assert main(["train", "--data", "my", "--out", "runs/my", "--resume", "--train.max-steps", "8"]) == 0
    assert main(words("train --data my --resume --train.max-steps 9")) == 0
    again = json.loads((run / "environment.json").read_text())
    assert (again["recipe"], again["why"]) == (facts["recipe"], facts["why"])
