"""Recipes: every packaged recipe loads and has a true header, files and command lines follow the same rules, and
writing and reading TOML is exact."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from shlex import split as words

import pytest

from transformer_xl.config.recipe import (
    SECTIONS,
    changed_settings,
    load_recipe,
    packaged_recipes,
    settings_in,
    split_overrides,
    unsaid,
    write_toml,
)
from transformer_xl.config.settings import (
    CorpusConfig,
    EvalConfig,
    Lengths,
    RunConfig,
    TrainConfig,
    TransformerXLConfig,
)
from transformer_xl.config.shape import KINDS
from transformer_xl.mistake import Mistake

RECIPES = packaged_recipes()

PAPER = {
    # The original's test settings: tgt_len, mem_len, clamp_len, and same_length as attn_len.
    "enwik8-12l": (80, 2100, 820, 2100),
    "enwik8-18l": (128, 3800, 1000, 3800),
    "enwik8-24l": (128, 3800, 1000, 3800),
    "text8-24l": (128, 3800, 1000, 3800),
    "wikitext103-standard": (64, 640, 400, 640),
    "wikitext103-large": (128, 1600, 1000, 1600),
    "wikitext103-large-16l": (128, 1600, 1000, 1600),
    "wikitext103-128m": (128, 128, None, None),
    "lm1b-base": (32, 128, None, 128),
    "lm1b-large": (32, 128, None, 128),
    "lm1b-20l": (32, 128, None, 128),
    "ptb-24m": (10, 0, None, None),
}

UNUSUAL = RunConfig(
    model=TransformerXLConfig(
        vocab_size=10_000,
        d_embed=64,
        cutoffs=(200, 3_000),
        div_val=2,
        tie_projs=(False, True, True),
        embedding_scale=0.5,
        layer_norm_epsilon=1e-12,
        pre_lnorm=True,
        ngrams=(2, 3),
        matches=(3,),
        ngram_rows=77,
        ngram_dropout=0.5,
        gate="sigmoid-tanh",
        gate_bias=3.5,
        relu_output=True,
    ),
    corpus=CorpusConfig(name='a "quoted" \\ name\twith ü, \x7f and\nlines', unit="word", reset_documents=True),
    train=TrainConfig(
        clamp_len=3,
        attn_len=100,
        betas=(0.5, 0.25),
        lr=1e-16,
        optimizer="sgd",
        momentum=0.5,
        seed=-7,
        trackers=("wandb", "tensorboard"),
    ),
    eval=EvalConfig(tgt_len=11, mem_len=0, attn_len=1, split="valid"),
)


def header(name: str) -> str:
    return RECIPES[name].read_text().split("\n\n")[0]


@pytest.mark.parametrize("name", PAPER)
def test_recipe_of_the_paper_has_its_settings_and_names_their_source(name: str):
    config, text = load_recipe(name), header(name)
    tgt_len, mem_len, clamp_len, attn_len = PAPER[name]
    assert config.eval_lengths == Lengths(tgt_len=tgt_len, mem_len=mem_len, clamp_len=clamp_len, attn_len=attn_len)
    assert (config.train.clamp_len, config.train.attn_len) == (None, None)
    assert (config.train.optimizer, config.train.schedule, config.train.clip) == ("adam", "cosine", 0.25)
    assert not (config.model.pre_lnorm or config.model.final_norm)
    assert re.search(r"published: (perplexity )?\d+\.\d+ .*\(paper, Tables? \d", text)
    assert "Source: " in text and "\n# Measured here: " in text
    assert f"txl data {config.corpus.name}\n" in text and f"txl eval runs/{name}" in text
    for overrides in re.findall(rf"txl train {name} (.*)", text):  # what another script of the authors has
        assert load_recipe(name, words(overrides)) != config


@pytest.mark.parametrize("config", [*map(load_recipe, RECIPES), RunConfig(), UNUSUAL])
def test_writing_and_reading_toml_gives_the_same_config(config: RunConfig, tmp_path: Path):
    file = tmp_path / "config.toml"
    file.write_text(write_toml(config), encoding="utf-8")
    assert load_recipe(file) == config


def words_of(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, tuple) else [str(value)]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_can_be_given_on_the_command_line(section: str, tmp_path: Path):
    (tmp_path / "empty.toml").write_text("")
    wanted = getattr(UNUSUAL, section)
    overrides = []
    for field in fields(wanted):
        overrides += [f"--{section}.{field.name.replace('_', '-')}", *words_of(getattr(wanted, field.name))]
    assert split_overrides(overrides) == (overrides, [])
    assert getattr(load_recipe(tmp_path / "empty.toml", overrides), section) == wanted


def test_the_last_option_wins_over_the_recipe_and_over_data():
    config = load_recipe(
        "enwik8-small",
        ["--train.lr", "3", "--train.lr=0.5", "--model.pre-lnorm=false", "--train.compile", "--model.vocab_size", "7"],
        data="some text",
    )
    assert (config.train.lr, config.model.pre_lnorm, config.train.compile) == (0.5, False, True)
    assert (config.corpus.name, config.corpus.newlines, config.model.vocab_size) == ("some text", "drop", 7)


def test_data_keeps_line_ends_and_takes_the_vocabulary_from_the_text(tmp_path: Path):
    (tmp_path / "text").write_text("abc")
    config = load_recipe("enwik8-small", data=tmp_path / "text")
    assert (config.corpus.newlines, config.model.vocab_size) == ("keep", 0)
    assert config.corpus.name == str((tmp_path / "text").resolve())
    sentences = load_recipe("lm1b-small", data=tmp_path / "text").corpus
    assert (sentences.newlines, sentences.shuffle_lines) == ("sentence", True)
    named = load_recipe("lm1b-small", data="lm1b")
    assert (named.corpus.name, named.corpus.newlines) == ("lm1b", "sentence")
    assert load_recipe("enwik8-small").corpus.newlines == "drop"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_adapts_to_every_kind_and_to_no_memory_and_says_so(recipe: str):
    plain = load_recipe(recipe)
    for kind, memory in product((None, *KINDS), (None, "0")):
        given = ["--model.kind", kind] * (kind is not None) + ["--train.mem-len", memory] * (memory is not None)
        notes: list[str] = []
        config = load_recipe(recipe, given, note=notes.append)
        for name, value in settings_in(config).items():
            changed = settings_in(plain)[name] != value
            assert not changed or f"--{name}".replace("_", "-") in given or name in "".join(notes)
        reach = config.train.tgt_len + config.train.context_len
        reach += config.train.mem_len if kind == "shaw" else 0
        assert config.model.positions == (reach if kind in ("shaw", "al-rfou") else 0)
        assert not notes or given, "a recipe as it is needs no change"


@pytest.mark.parametrize(
    ("recipe", "first", "then", "wanted"),
    [
        ("enwik8-small", "", "--model.kind shaw --train.tgt-len 9 --train.mem-len 4", {"model.positions": 13}),
        ("enwik8-small", "--model.kind shaw", "--train.mem-len 0 --train.tgt-len 9", {"model.positions": 9}),
        ("enwik8-small", "--model.kind shaw", "--model.kind al-rfou --train.tgt-len 9", {"model.positions": 9}),
        ("enwik8-small", "--model.kind shaw", "--model.kind vaswani", {"model.positions": 0}),
        ("enwik8-12l", "", "--train.mem-len 0", {"eval.tgt_len": None, "eval.mem_len": None}),
        ("ptb-24m", "", "--train.mem-len 70", {"train.context_len": 0, "eval.context_len": None}),
        ("ptb-24m", "", "--model.kind al-rfou --train.context-len 9", {"model.positions": 79}),
    ],
)
def test_positions_and_lengths_are_those_of_the_changed_model(recipe, first, then, wanted, tmp_path: Path):
    """Also of a run's config.toml, which has every setting."""
    file = tmp_path / "config.toml"
    file.write_text(write_toml(load_recipe(recipe, words(first), note=unsaid)))
    config = load_recipe(file, words(then), note=unsaid)
    for name, value in wanted.items():
        section, field = name.split(".")
        assert getattr(getattr(config, section), field) == value, name


def test_what_a_user_names_is_never_left_out():
    for given, refused in {
        "--model.kind lstm --model.n-head 3": "model.n_head is for kind",
        "--train.mem-len 0 --train.attn-len 9": "train.attn_len must be at most train.mem_len",
        "--model.kind shaw --model.ngrams 2 3": "model.ngrams is for",
        "--train.batch-size 7": "train.batch_size must be a multiple",
        "--train.mem-len 33 --train.short-share 0.5": "train.mem_len must be even",
    }.items():
        with pytest.raises(Mistake, match=refused):
            load_recipe("wikitext103-128m", words(given + " --train.batch-chunk 2"))


def test_overrides_are_separated_from_other_words_by_the_types_of_settings():
    given = "enwik8 --train.compile a --train.compile false b --train.lr -1 c --train.trackers= d"
    overrides, others = split_overrides(f"{given} --train.betas 0.1 0.2 --out e".split())
    assert others == ["enwik8", "a", "b", "c", "d", "--out", "e"]
    asked = "--train.compile --train.compile false --train.lr -1 --train.trackers= --train.betas 0.1 0.2"
    assert overrides == words(asked)


def test_settings_of_the_first_release_are_still_read():
    file = Path(__file__).parents[1] / "golden" / "config-0.1.0.toml"
    assert load_recipe(str(file)).train.max_steps == tomllib.loads(file.read_text())["train"]["max_steps"] == 2000


def test_all_problems_of_file_and_command_line_are_reported_at_once(tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text(
        """
        stray = 1
        [trian]
        lr = 1
        [model]
        d_modle = 64
        n_layer = "four"
        d_embed = "wide"
        tie_projs = [1]
        d_head = -1
        [train]
        mem_lenn = 3
        lr = true
        optimizer = "adma"
        betas = [0.9]
        batch_chunk = 3
        [eval]
        attn_len = 4
        mem_len = 0
        """
    )
    with pytest.raises(ValueError) as caught:
        load_recipe(file, words("--train.qqq 3 --modle.n-layer 2 --train.seed"))
    sentences = {line.split()[0]: line for line in str(caught.value).splitlines()}
    assert sentences.keys() == set(
        words(
            "stray trian.lr model.d_modle model.n_layer model.d_embed model.tie_projs train.mem_lenn train.lr"
            " train.optimizer train.betas train.qqq modle.n_layer train.seed"
        )
    )
    assert sentences["modle.n_layer"] == "modle.n_layer is not a setting; did you mean model.n_layer?"
    assert sentences["model.tie_projs"].endswith("must be a list of values that are true or false, got [1].")
    file.write_text("[model]\nd_head = -1\n[train]\nbatch_chunk = 3\n[eval]\nattn_len = 4\nmem_len = 0\n")
    with pytest.raises(ValueError) as caught:
        load_recipe(file, words("--train.batch-size 7"))
    assert str(caught.value).splitlines() == [
        "model.d_head must be at least 1, got -1.",
        "train.batch_size must be a multiple of train.batch_chunk = 3, got 7.",
        "eval.attn_len must be at most eval.mem_len + 1 = 1, got 4: the first query of a segment sees no more. Raise "
        "mem_len to 3, or lower attn_len.",
    ]


def test_a_context_that_evaluation_reads_again_replaces_its_memory():
    config = RunConfig(train=TrainConfig(mem_len=0, context_len=7), eval=EvalConfig(tgt_len=2))
    assert config.eval_lengths == Lengths(tgt_len=2, mem_len=0) and config.context_len(config.eval_lengths) == 7
    assert config.context_len(Lengths(tgt_len=2, mem_len=9)) == 0
    again = RunConfig(train=TrainConfig(mem_len=0, context_len=3), eval=EvalConfig(context_len=0))
    assert RunConfig(eval=EvalConfig(context_len=5)).eval_lengths.mem_len == again.context_len(again.eval) == 0
    assert TrainConfig(short_share=0.5, max_steps=3).at(1).tgt_len == 64


def test_a_path_without_a_recipe_gets_the_nearest_name(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="RECIPE must be a TOML file or one of"):
        load_recipe(tmp_path / "none.toml")
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(FileNotFoundError, match=r"Did you mean .*config\.toml"):
        load_recipe(tmp_path)


def test_a_file_that_is_not_toml_is_refused_with_the_line(tmp_path: Path):
    (tmp_path / "bad.toml").write_text("[model]\nn_layer 3\n")
    with pytest.raises(ValueError, match=r"not valid TOML: .*line 2"):
        load_recipe(tmp_path / "bad.toml")


def test_changed_settings_lists_exactly_the_differences():
    config = replace(UNUSUAL, train=replace(UNUSUAL.train, max_steps=5))
    changed, different = changed_settings(config, words("--train.max-steps 9 --train.momentum 0.5 --eval.tgt-len 3"))
    assert changed == replace(config, train=replace(config.train, max_steps=9), eval=replace(config.eval, tgt_len=3))
    assert different == ["train.max_steps", "eval.tgt_len"]


def test_evaluation_follows_lengths_of_training_that_change_unless_it_has_its_own():
    """Evaluation at the recipe's lengths would score another use of the model than the one that was asked for."""
    assert load_recipe("text-small").eval_lengths.mem_len == 256 != load_recipe("text-small").train.mem_len
    config = load_recipe("text-small", words("--train.mem-len 32"))
    assert (config.eval_lengths.mem_len, config.eval_lengths.tgt_len) == (32, 128)
    config = load_recipe("text-small", words("--train.tgt-len 16"))
    assert (config.eval_lengths.mem_len, config.eval_lengths.tgt_len) == (256, 16)
    for given in ("--train.mem-len 32 --eval.mem-len 64", "--eval.mem-len 64 --train.mem-len 32"):
        assert load_recipe("text-small", words(given)).eval_lengths.mem_len == 64
    assert load_recipe("wikitext103-standard").eval_lengths.clamp_len == 400
    other = load_recipe("wikitext103-standard", words("--train.mem-len 32")).eval_lengths
    assert (other.tgt_len, other.mem_len, other.clamp_len) == (64, 32, None)  # the clamp is of the recipe's memory


@pytest.mark.unchecked
@pytest.mark.parametrize("overrides", [{"train.lr": 1e-3}, "--train.lr 1e-3"])
def test_overrides_are_words(overrides):
    with pytest.raises(Mistake, match="overrides must be a list of words"):
        load_recipe("text-small", overrides)
