"""The figures that lead a page are the model's: they agree with `txl eval`, and are of the best checkpoint."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from shlex import split as words
from typing import Any

import numpy as np
import pytest
import torch
from test_report import EVIL, Page

from transformer_xl.commands.main import main
from transformer_xl.config.recipe import load_recipe, write_toml
from transformer_xl.config.settings import RunConfig
from transformer_xl.data.datasets import open_corpus
from transformer_xl.evaluation.generate import Sampling, generate
from transformer_xl.evaluation.language_model import LanguageModel
from transformer_xl.model.baselines import build_model
from transformer_xl.report.compute import (
    READ,
    TARGETS,
    WRITTEN,
    figures_of,
    finish_page,
    memory_lengths,
    model_figures,
    texts_of,
)
from transformer_xl.report.figures import FILE, Figures, Token, identity, load_figures, save_figures
from transformer_xl.report.lead import NATS, SHARES, legend, level
from transformer_xl.report.record import read_run
from transformer_xl.run import Run, find_checkpoint, load_model, save_checkpoint
from transformer_xl.train import resolve_settings

SENTENCES = "The naïve bird <b>sang</b> & 'twice'.\n\tNo one\u00a0heard “it” — 雨が降る.\n"
SMALL = words(
    "--model.n-layer 2 --model.d-model 14 --model.d-inner 11 --train.precision fp32 --train.device cpu"
    " --train.tgt-len 31 --train.mem-len 40 --train.max-steps 10 --eval.mem-len 62 --eval.batch-size 3"
)
HEADS = ["--model.n-head", "3", "--model.d-head", "5"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def make_run(run: Path, *changes: str, heads: bool = True, step: int = 10, seed: int = 1) -> RunConfig:
    """A run whose weights are random and large, so that memory matters; its text is escaped HTML in many scripts."""
    text = run.parent / "text.txt"
    text.write_text("".join(f"{number % 7} {SENTENCES}" for number in range(150)), "utf-8")
    config = load_recipe("text-small", [*SMALL, *(HEADS if heads else []), *changes], data=text)
    corpus = open_corpus(config.corpus)
    config = resolve_settings(config, corpus)
    torch.manual_seed(seed)
    model = build_model(config.model)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    folder = Run(run).checkpoint(step)
    save_checkpoint(folder, model=model, vocab=corpus.vocab, config=config, step=step, valid_loss=1.0)
    (run / "config.toml").write_text(write_toml(config), "utf-8")
    facts = {"recipe": "text-small", "corpus": {n: s.sha256 for n, s in corpus.header.splits.items()}}
    (run / "environment.json").write_text(json.dumps(facts))
    (run / "metrics.jsonl").write_text("")
    return config


def page_of(run: Path, *options: str) -> Page:
    assert main(["report", str(run), *options]) == 0
    return Page((run / "report.html").read_text("utf-8"))


def compute(run: Path, config: RunConfig, **options: Any) -> Figures:
    """The figures in fp32, stored in the run."""
    split, folder = open_corpus(config.corpus).split("test"), find_checkpoint(run)
    found = model_figures(load_model(run), split, folder, precision="fp32", **options)
    save_figures(run, found)
    return found


def eval_json(run: Path, options: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["eval", str(run), *words(options), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["results"]


def test_the_costs_are_those_of_the_command_on_the_page(tmp_path, capsys):
    config = make_run(tmp_path / "run")
    found = figures_of(tmp_path / "run")
    assert [cost["mem_len"] for cost in found.costs] == sorted(memory_lengths(config)) == [0, 20, 40, 62, 80]
    command = found.command.removeprefix("txl eval RUN ")
    for cost, result in zip(found.costs, eval_json(tmp_path / "run", command, capsys), strict=True):
        for name in ("nats", "loss", "bits_per_byte"):
            assert cost[name] == pytest.approx(result[name], rel=1e-9)
        assert cost["targets"] == result["targets"] == min(TARGETS, cost["targets"])
    assert found.command in page_of(tmp_path / "run").text
    assert len({round(cost["nats"], 3) for cost in found.costs}) == 5  # memory matters, so equal sums mean something


UNITS = {
    "bytes": [],
    "characters": ["--corpus.unit", "char"],
    "words": ["--corpus.unit", "word", "--eval.batch-size", "1"],
    "byte pairs": ["--corpus.unit", "bpe", "--corpus.bpe-size", "300"],
}


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
def test_a_page_has_the_nats_of_every_target_and_the_whole_text(tmp_path, unit, capsys):
    run = tmp_path / "run"
    read, written = compute(run, make_run(run, *unit)).passages
    assert 50 < len(read.tokens) <= READ and len(written.tokens) == WRITTEN
    first = read.start - 1  # the first token of the split is no target
    options = "--batch-size 1 --precision fp32 --max-tokens"
    upto = eval_json(run, f"{options} {first + len(read.tokens)}", capsys)[0]["nats"]
    before = eval_json(run, f"{options} {first}", capsys)[0]["nats"] if first else 0.0
    assert sum(token.nats or 0 for token in read.tokens) == pytest.approx(upto - before, rel=1e-5)
    page = page_of(run, "--no-model")
    titles = [attrs["title"] or "" for tag, attrs in page.elements if tag == "span" and "title" in attrs]
    shown = [float(match[1]) for title in titles if (match := re.match(r"([\d.]+) nats.*, probability ", title))]
    total = sum(token.nats or 0 for passage in (read, written) for token in passage.tokens)
    assert len(shown) == len(titles)
    assert sum(shown) == pytest.approx(total, abs=5e-4 * len(shown))
    text = "".join(token.text for token in read.tokens).strip("\ufffd")
    assert " ".join(text.split()) in " ".join((tmp_path / "text.txt").read_text("utf-8").split())


def test_the_written_text_is_what_the_model_generates(tmp_path):
    attends = ["--train.attn-len", "33", "--eval.attn-len", "33"]  # so costs do not depend on where a text is cut
    config = make_run(tmp_path / "run", "--corpus.unit", "char", *attends)
    read, written = compute(tmp_path / "run", config).passages
    loaded = load_model(tmp_path / "run")
    prompt, sampling = "".join(token.text for token in read.tokens), Sampling(seed=config.train.seed)
    [text] = generate(loaded.model, loaded.vocab, [prompt], config.eval_lengths, sampling, WRITTEN)
    assert "".join(token.text for token in written.tokens) == text
    begun = LanguageModel(*loaded).score(prompt)
    again = LanguageModel(*loaded).score(text, begun.context)
    np.testing.assert_allclose([token.nats or 0.0 for token in written.tokens], again.nats, rtol=1e-4)


def test_attention_is_shared_out_whole(tmp_path):
    make_run(tmp_path / "run")
    attention = figures_of(tmp_path / "run").attention
    assert attention is not None and attention.mem_len == 62 and len(attention.shares) == 3
    np.testing.assert_allclose(np.sum(attention.shares, axis=1), 1, rtol=1e-5)
    assert [0, *(last + 1 for _, last in attention.ranges)][:-1] == [first for first, _ in attention.ranges]
    assert attention.ranges[-1][1] == len(attention.by_distance) - 1 == 62 + 31 - 1
    assert attention.beyond_segment[attention.layer - 1] == max(attention.beyond_segment) < 1
    page = page_of(tmp_path / "run")
    shares = [attrs["title"] or "" for tag, attrs in page.elements if tag == "td" and "title" in attrs]
    of_all = [float(title.split()[-1].rstrip("%")) for title in shares if title.startswith("all heads")]
    assert sum(of_all) == pytest.approx(100, abs=0.1)


KINDS: dict[str, tuple[list[str], bool]] = {
    "lstm": (["--model.kind", "lstm", "--model.pre-lnorm", "false", "--model.final-norm", "false"], False),
    "al-rfou": (
        ["--model.kind", "al-rfou", "--model.positions", "31", "--train.mem-len", "0", "--eval.mem-len", "0"],
        True,
    ),
    "shaw": (["--model.kind", "shaw", "--model.positions", "9"], True),
    "no memory": (["--train.mem-len", "0", "--eval.mem-len", "0"], True),
    "context read again": (
        ["--train.mem-len", "0", "--train.context-len", "7", "--eval.context-len", "7", "--eval.mem-len", "0"],
        True,
    ),
    "limited attention": (["--train.attn-len", "33", "--eval.attn-len", "33"], True),
}


@pytest.mark.parametrize("kind", KINDS, ids=KINDS)
def test_every_kind_of_model_gets_a_page(tmp_path, kind, capsys):
    changes, attends = KINDS[kind]
    if kind == "lstm":
        changes = [*changes, "--model.n-head", "10", "--model.d-head", "50"]
    make_run(tmp_path / "run", *changes, heads=attends)
    page = page_of(tmp_path / "run")
    assert "lacks" not in capsys.readouterr().err
    found = load_figures(tmp_path / "run" / FILE)
    assert (found.attention is not None) == attends == ("Attention" in page.text)
    charts = [attrs["aria-label"] or "" for tag, attrs in page.elements if tag == "svg"]
    points = {"lstm": 2, "al-rfou": 1, "shaw": 5, "no memory": 1, "context read again": 1, "limited attention": 5}
    assert len(found.costs) == points[kind]
    assert any("by memory length" in label for label in charts) == (points[kind] > 1)
    assert "Memory length" in page.text and "The model reads" in page.text


def test_figures_of_another_checkpoint_are_not_shown_and_are_computed_again(tmp_path, capsys):
    run = tmp_path / "run"
    make_run(run)
    old = figures_of(run)
    make_run(run, step=20, seed=2)  # the later checkpoint wins a tie
    page = page_of(run, "--no-model")
    assert "of another checkpoint than the best one" in page.text and "Text, token by token" not in page.text
    assert read_run(run, "run").figures is None
    capsys.readouterr()
    page = page_of(run)
    assert "Computing the figures" in capsys.readouterr().err and "another checkpoint" not in page.text
    new = load_figures(run / FILE)
    assert new.checkpoint == identity(find_checkpoint(run)) != old.checkpoint and new.costs != old.costs
    page_of(run)
    assert "Computing" not in capsys.readouterr().err
    make_run(run, step=20, seed=3)  # the same name with other weights
    assert read_run(run, "run").figures is None


def test_missing_text_and_damaged_figures_leave_the_rest_of_the_page(tmp_path, capsys):
    run = tmp_path / "run"
    make_run(run)
    for damage in (b"", b"[1]", b"{}", b'{"costs": [], "passages": []}', b"\xff"):
        (run / FILE).write_bytes(damage)
        assert "could not be read" in page_of(run, "--no-model").text
    page_of(run)  # computes them again
    assert load_figures(run / FILE).costs
    (run / FILE).unlink()
    (tmp_path / "text.txt").unlink()
    assert "figures that need the model are missing" in page_of(run).text
    assert "lacks the figures that need the model" in capsys.readouterr().err


def test_a_failure_or_an_interrupt_after_training_costs_only_these_figures(tmp_path, monkeypatch):
    run = tmp_path / "run"
    config = make_run(run)
    loaded, split = load_model(run), open_corpus(config.corpus).split("test")

    def fail(error: BaseException) -> Any:
        def raising(*_: Any, **__: Any) -> Figures:
            raise error

        return raising

    monkeypatch.setattr("transformer_xl.report.compute.model_figures", fail(FloatingPointError("nan")))
    finish_page(Run(run), loaded, split)
    assert (run / "log.txt").read_text() == "The page lacks the figures that need the model: nan\n"
    assert (run / "report.html").exists()
    monkeypatch.setattr("transformer_xl.report.compute.model_figures", fail(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt) as interrupt:
        finish_page(Run(run), loaded, split)
    assert "txl report" in interrupt.value.__notes__[0]


def test_figures_end_in_time(tmp_path):
    """Without time there is still a segment of everything, and no command claims to repeat the costs."""
    config = make_run(tmp_path / "run")
    found = compute(tmp_path / "run", config, seconds=0.0)
    assert {cost["targets"] for cost in found.costs} == {3 * 31} and found.command == ""
    assert [len(passage.tokens) for passage in found.passages] == [31, 1]
    assert found.attention is not None and found.attention.queries == 31


def test_texts_are_escaped_and_control_characters_replaced(tmp_path):
    run = tmp_path / "run"
    make_run(run)
    found = figures_of(run)
    plain = page_of(run)
    tokens = [Token(EVIL.replace("\ud800", ""), token.nats) for token in found.passages[0].tokens if token.text]
    save_figures(
        run, found._replace(passages=[found.passages[0]._replace(tokens=tokens)], split=EVIL[:40], command=EVIL[:40])
    )
    evil = page_of(run, "--no-model")
    assert {tag for tag, _ in evil.elements} <= {tag for tag, _ in plain.elements}
    assert evil.text.count("<script>alert(1)</script>") >= len(tokens)


@pytest.mark.parametrize("nats", [math.nan, math.inf, 0.0, 1e-12, 800.0])
def test_any_cost_has_a_colour(nats):
    assert 0 <= level(nats, NATS) <= len(NATS) and 0 <= level(nats, SHARES) <= len(SHARES)
    assert len(legend()) == len(NATS) + 1 and all(low < high for low, high in pairwise(NATS))


def test_a_character_of_several_tokens_is_one_piece(tmp_path):
    make_run(tmp_path / "run")
    vocab = load_model(tmp_path / "run").vocab
    ids = vocab.encode("a雨b").tolist()
    tokens = texts_of(vocab, vocab.encode("x").tolist(), ids, [1.0, 2, 3, 4, 5])
    assert [token.text for token in tokens] == ["a", "", "", "雨", "b"]
    cut = texts_of(vocab, vocab.encode("x").tolist(), ids[:3], [1.0, 2, 3])
    assert "".join(token.text for token in cut) == "a\ufffd"


def test_settings_that_differ_from_the_recipe_come_first(tmp_path):
    run = tmp_path / "run"
    make_run(run)
    page = page_of(run, "--no-model")
    assert not any("open" in attrs for tag, attrs in page.elements if tag == "details")
    seen = page.text
    assert "The recipe is text-small." in seen and re.search(r"model\.n_layer\s+2\s+6", seen)
    assert not re.search(r"model\.vocab_size\s+256\s+0", seen)  # the recipe leaves it open
    assert "All other settings" in seen
    for recipe, sentence in (
        ("", "does not name its recipe"),
        ("mine.toml (SHA-256 1)", "The recipe was the file mine.toml"),
    ):
        (run / "environment.json").write_text(json.dumps({"recipe": recipe}))
        page = page_of(run, "--no-model")
        assert sentence in page.text and "All settings" in page.text
        assert [tag for tag, attrs in page.elements if "open" in attrs] == ["details"]


def test_several_runs_show_their_figures_side_by_side(tmp_path):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", "--train.mem-len", "0", "--eval.mem-len", "0", seed=2)
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b"), "--out", "both.html"]) == 0
    seen = Page(Path("both.html").read_text("utf-8"))
    assert "a: The model reads" in seen.text and "b: The model reads" in seen.text
    assert len(re.findall(r"\bnone\s+\(training, test\)", seen.text)) == 1  # of b, which has one row


def test_a_config_without_a_memory_length_is_compared_with_its_own(tmp_path):
    config = make_run(tmp_path / "run")
    twice = replace(config, eval=replace(config.eval, mem_len=80))
    assert memory_lengths(twice) == [80, 40, 20, 0]
