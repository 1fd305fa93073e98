"""Attention lengths in evaluation: each figure equals that of `evaluate`; the shortest good length; both commands."""

from __future__ import annotations

import io
import json
import math
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from small_models import small_model, text

from transformer_xl import analysis
from transformer_xl.analysis.figures import Curve, draw_curves
from transformer_xl.analysis.length import Sweep, attention_lengths, sweep
from transformer_xl.commands.attention import Attention
from transformer_xl.commands.length import Length
from transformer_xl.commands.recl import Recl
from transformer_xl.config.settings import EvalConfig, Lengths, RunConfig, TrainConfig
from transformer_xl.data.corpus import Split
from transformer_xl.data.loader import StreamLoader
from transformer_xl.data.vocab import Vocab
from transformer_xl.evaluation.score import EvalResult, evaluate
from transformer_xl.run.checkpoint import LoadedModel, save_checkpoint

BYTES = Vocab.build("byte", [])
build = partial(small_model, vocab_size=256, n_layer=2)
CONFIG = RunConfig(model=build().config, train=TrainConfig(tgt_len=8, mem_len=8))
VASWANI = RunConfig(model=build(kind="vaswani").config, train=TrainConfig(tgt_len=8, mem_len=0))
HOW = EvalConfig(batch_size=3)


def split_of(tokens: int) -> Split:
    return Split(text(1, tokens, vocab=256).numpy()[0].astype(np.uint8), None, "test")


def with_losses(losses: list[float], unit: str) -> Sweep:
    results = [EvalResult(loss, 1, 1.0, Lengths(tgt_len=1, mem_len=0), unit=unit) for loss in losses]
    return Sweep(dict(enumerate(results)), "")


@given(losses=st.lists(st.floats(0.5, 6), min_size=1), unit=st.sampled_from(["word", "byte"]))
@example(losses=[4.1, 4.0015, 4.0], unit="word")  # 0.15 % of a perplexity
@example(losses=[4.1, 4.0015, 4.0], unit="byte")  # 0.04 % of the bits
def test_the_shortest_length_is_as_good_as_the_best_and_shorter_ones_are_not(losses, unit):
    found = with_losses(losses, unit)
    figures = [math.exp(loss) if unit == "word" else loss / math.log(2) for loss in losses]
    assert figures[found.best] == pytest.approx(min(figures)) and found.shortest <= found.best
    assert figures[found.shortest] <= min(figures) * 1.001 * (1 + 1e-9)
    assert all(figure > min(figures) * 1.001 * (1 - 1e-9) for figure in figures[: found.shortest])


@pytest.mark.parametrize(("kind", "positions"), [("transformer-xl", 0), ("shaw", 5)])
def test_with_memory_a_length_is_a_window_of_that_many_keys(kind, positions):
    model, split = build(kind=kind, positions=positions), split_of(100)
    found = sweep(LoadedModel(model, BYTES, replace(CONFIG, model=model.config)), split, [16, 1, 5], how=HOW)
    assert list(found.results) == [1, 5, 16]
    for attn_len, result in found.results.items():
        other = Lengths(tgt_len=11, mem_len=attn_len - 1, attn_len=attn_len)
        loader = StreamLoader(split, batch_size=3, tgt_len=11)
        assert math.isclose(result.loss, evaluate(model, loader, other).loss, rel_tol=1e-9)
        assert result.targets == 99


def test_without_recurrence_a_length_is_a_window_of_that_many_tokens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(analysis.length, "STRIDE", 1)
    model, split = build(kind="vaswani"), split_of(60)
    found = sweep(LoadedModel(model, BYTES, VASWANI), split, [3, 8, 9], how=HOW)
    assert list(found.results) == [3, 8] and "from an empty state" in found.description
    ids = torch.from_numpy(split.ids.astype(np.int64))[None]
    for attn_len, result in found.results.items():
        nats = 0.0
        for t in range(1, 60):
            piece = ids[:, max(0, t - attn_len) : t + 1]
            with torch.no_grad():
                nll, _ = model(piece[:, :-1], piece[:, 1:], None, Lengths(tgt_len=attn_len, mem_len=0))
            nats += nll[0, -1].item()
        assert math.isclose(result.nats, nats, rel_tol=1e-9)
    with pytest.raises(ValueError, match="--attn-len must be at most 8 for a model of kind vaswani"):
        sweep(LoadedModel(model, BYTES, VASWANI), split, [9, 10], how=HOW)


def test_default_lengths_range_from_a_quarter_segment_to_eight_segments():
    assert attention_lengths([VASWANI, CONFIG]) == [2, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert attention_lengths([replace(CONFIG, train=TrainConfig(tgt_len=1))])[0] == 1


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory):
    """Two runs over bytes, one over words, and a text."""
    folder = tmp_path_factory.mktemp("home")
    words = "the cat sat on the mat and the dog ate the cat\n" * 60
    (folder / "text.txt").write_text(words)
    for name, config in {"xl": CONFIG, "vaswani": VASWANI}.items():
        save_checkpoint(folder / name, model=build(kind=config.model.kind).float(), vocab=BYTES, config=config)
    vocab = Vocab.build("word", [words])
    model = small_model(vocab_size=len(vocab), dtype=torch.float32)
    save_checkpoint(folder / "words", model=model, vocab=vocab, config=CONFIG)
    return folder


def facts_of(command: type[Recl] | type[Length], runs: list[Path], **options: Any) -> dict[str, Any]:
    """The facts that the command prints as JSON."""
    with redirect_stdout(io.StringIO()) as printed:
        command(tuple(runs), **options, json=True).run()
    return json.loads(printed.getvalue())


recl, length = partial(facts_of, Recl), partial(facts_of, Length)
SMALL = {"step": 4, "max_context": 16, "positions": 40, "split": "train"}


def test_recl_compares_a_group_and_writes_figures_arrays_and_pictures(home: Path, tmp_path: Path, capsys):
    runs, data = [home / "xl", home / "vaswani"], str(home / "text.txt")
    facts = recl(runs, data=data, out=tmp_path, r=(0.5,), **SMALL)
    assert facts == json.loads((tmp_path / "recl.json").read_text())
    saved = np.load(tmp_path / "recl.npz")
    assert saved["losses"].shape == (2, 4, 40) and saved["contexts"].tolist() == facts["contexts"] == [4, 8, 12, 16]
    for name in ("gains", "context"):
        assert (tmp_path / f"recl_{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert "<svg" in (tmp_path / f"recl_{name}.svg").read_text()
    losses = saved["losses"]
    np.testing.assert_array_equal(losses[1, 2:], losses[1, 1:2].repeat(2, 0))  # 8 tokens are all it sees
    assert [run["kind"] for run in facts["runs"]] == ["transformer-xl", "vaswani"]
    np.testing.assert_allclose([run["loss"] for run in facts["runs"]], losses.mean(-1), rtol=1e-5)
    [share] = facts["recl"]
    xl, vaswani = share["runs"]
    assert vaswani["recl"] <= 8 and vaswani["reached"] and vaswani["net"]["tokens"] <= 8  # no gain from 8 to 12
    assert xl["interval"][0] <= xl["interval"][1] and len(xl["relative"]) == len(xl["back"]) == 3
    Recl(tuple(runs), data=data, **SMALL).run()
    told = capsys.readouterr().out
    assert "\nnet of what going back gains [95 % interval]\n" in told
    assert "r = 0.1" in told and "bpc by context" in told and "at most the last 8 tokens" in told


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_the_seed_determines_the_positions_and_losses_are_in_fp32_unless_asked_otherwise(home: Path, undrawn: None):
    first, again, other, rounded = (
        recl([home / "xl"], data=str(home / "text.txt"), **asked, **SMALL)["runs"][0]["loss"]
        for asked in ({}, {"seed": 0, "precision": "fp32"}, {"seed": 2}, {"precision": "bf16"})
    )
    assert first == again and other != first != rounded


def test_length_compares_runs_and_marks_the_best(home: Path, tmp_path: Path, capsys):
    asked = {"data": str(home / "text.txt"), "split": "train", "max_tokens": 200, "attn_len": (2, 8, 16)}
    runs = [home / "xl", home / "vaswani"]
    facts = length(runs, out=tmp_path, **asked)
    Length(tuple(runs), **asked).run()
    told = capsys.readouterr().out
    assert told.count("best,") + told.count("best\n") == 2 and "shortest within 0.1% of the best bpc" in told
    assert [len(run["results"]) for run in facts["runs"]] == [3, 2]
    assert facts == json.loads((tmp_path / "length.json").read_text()) and (tmp_path / "length.svg").exists()
    assert {result["targets"] for run in facts["runs"] for result in run["results"]} == {200}
    losses = {result["attn_len"]: result["loss"] for result in facts["runs"][0]["results"]}
    assert losses[facts["runs"][0]["best"]] == min(losses.values())
    assert length([home / "xl"], **asked)["runs"][0]["best"] == facts["runs"][0]["best"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"r": (0.0, 2.0)}, r"--r must be above 0 and at most 1, got 0\.0\.\n--r must be above 0 and at most 1, got 2"),
        ({"step": 0}, "step must be at least 1, got 0"),
        ({"max_context": 6}, "--max-context must be a multiple of --step = 4, at least twice it, got 6"),
        ({"max_context": 4}, "at least twice it, got 4"),
    ],
)
def test_impossible_options_of_recl_are_refused(home: Path, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        recl([home / "xl"], data=str(home / "text.txt"), **SMALL | options)


def test_runs_with_different_vocabularies_are_refused(home: Path):
    for command in (recl, length):
        with pytest.raises(ValueError, match=r"words has .* words.*, and .*xl 256 bytes"):
            command([home / "xl", home / "words"], data=str(home / "text.txt"))
        with pytest.raises(ValueError, match="name a file, a folder or a corpus by --data"):
            command([home / "xl"])
    with pytest.raises(ValueError, match=r"--attn-len must be at least 1, got 0\.\n--batch-size must be at least 1"):
        length([home / "xl"], attn_len=(4, 0), batch_size=0)


def test_each_document_of_one_stream_has_its_own_contexts(tmp_path: Path, undrawn: None):
    """A target of RECL has its whole context in its document, as where documents are apart."""
    (tmp_path / "text.txt").write_text(("a" * 30 + "|") * 40)
    model = small_model(vocab_size=256, dtype=torch.float32, document_end=ord("|"))
    save_checkpoint(tmp_path / "run", model=model, vocab=BYTES, config=CONFIG)
    recl([tmp_path / "run"], data=str(tmp_path / "text.txt"), out=tmp_path, **SMALL)
    positions = np.load(tmp_path / "recl.npz")["positions"]
    assert ((positions + 1) % 31 >= 16).all(), "a document begins with its |"
    with pytest.raises(
        ValueError, match=r"--positions must be at most 0, .* Give more text or a lower --max-context\."
    ):
        recl([tmp_path / "run"], data=str(tmp_path / "text.txt"), **SMALL | {"max_context": 32})


def test_weights_that_diverged_are_named_and_nothing_is_written(home: Path, tmp_path: Path):
    model = build().float()
    next(model.parameters()).data.fill_(math.nan)
    save_checkpoint(tmp_path / "run", model=model, vocab=BYTES, config=CONFIG)
    given = {"data": str(home / "text.txt"), "split": "train", "out": tmp_path / "out"}
    for call in (
        lambda: recl([tmp_path / "run"], **given | SMALL),
        lambda: length([tmp_path / "run"], **given),
        Attention(tmp_path / "run", **given, max_tokens=50).run,
    ):
        with pytest.raises(ValueError, match="run gives figures that are not finite: its weights diverged"):
            call()
    assert not (tmp_path / "out").exists()


def test_a_file_instead_of_a_folder_is_refused_before_any_work(home: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        for call in (recl, length):
            with pytest.raises(ValueError, match=r"--out must be a folder, and .*file.* is a file, or below one"):
                call([home / "no run"], out=out)


def test_bytes_are_those_of_evaluation():
    """The token that ends documents is no text."""
    split = split_of(100)
    end = int(split.ids[50])
    model = build(document_end=end)
    found = sweep(LoadedModel(model, BYTES, replace(CONFIG, model=model.config)), split, [5], how=HOW)
    assert found.results[5].bytes == 99 - int((split.ids[1:] == end).sum()) < 99


def test_curves_without_a_positive_value_are_drawn_without_a_warning(tmp_path: Path):
    """Gains are 0 if a model gains nothing, and a logarithmic axis cannot show 0."""
    nothing = Curve(np.array([5, 10]), np.zeros(2))
    assert draw_curves(tmp_path / "flat", {"": {"run": nothing}}, "context", "gain", log=True)


def test_the_description_says_how_far_matches_reach():
    model = build(matches=(3,), match_window=50)
    found = sweep(LoadedModel(model, BYTES, replace(CONFIG, model=model.config)), split_of(40), [5], how=HOW)
    assert "matches are found in the last 50 tokens" in found.description
