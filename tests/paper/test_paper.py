"""The paper's tables: every row has commands that work, figures of the paper's size, and results that are kept."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from io import StringIO
from pathlib import Path
from shlex import split as words

import pytest
import torch

from transformer_xl.commands.main import main
from transformer_xl.config.recipe import load_recipe, split_overrides
from transformer_xl.config.settings import Lengths, RunConfig
from transformer_xl.model.baselines import build_model, count_parameters
from transformer_xl.paper import exhibits, show, study
from transformer_xl.paper.exhibits import content, first_like, training
from transformer_xl.paper.measures import MEASURES
from transformer_xl.paper.study import result_of
from transformer_xl.run.folder import Run

ROWS = [(row, size) for row in content()["rows"] for size in exhibits.SIZES if training(row, size)]
PARAMETERS = {
    **{"wikitext103-standard": 151e6, "standard": 151e6, "lstm": 151e6, "qrnn": 151e6, "enwik8-12l": 41e6},
    **{"enwik8-18l": 88e6, "enwik8-24l": 277e6, "text8-24l": 277e6, "text8-12l": 41e6, "ptb-24m": 24e6},
    **{"al-rfou-12l": 44e6, "al-rfou-64l": 235e6, "ours": 128e6, "shaw": 128e6, "lm1b-large": 0.84e9},
}
"""The paper's counts; of `text8-12l` the authors' script's."""


def config_of(row: str, size: str) -> RunConfig:
    recipe, *others = training(row, size) or ()
    return load_recipe(recipe, split_overrides(others)[0], note=lambda sentence: None)


def test_every_line_has_a_row_and_as_many_cells_as_columns():
    for exhibit in exhibits.exhibits().values():
        assert exhibit.page or exhibit.measure in MEASURES
        for line in exhibit.lines:
            assert not line.row or line.row in content()["rows"]
            assert not exhibit.columns or len(line.cells) == len(exhibit.columns), exhibit.name
            assert len(line.paper) == len(exhibit.published), exhibit.name
        for _, better, worse, *_ in exhibit.claims:
            assert {better, worse} <= {*exhibit.rows()}, exhibit.name
    names = [f"table-{n}" for n in range(1, 11)] + [f"figure-{n}" for n in range(1, 8)]
    assert [*exhibits.exhibits()] == names + [f"appendix-{letter}" for letter in "abcde"]


@pytest.mark.parametrize(("row", "size"), ROWS)
def test_the_words_of_a_row_are_settings_that_fit(row: str, size: str):
    config = config_of(row, size)
    change = content()["rows"][row].get("change", "")
    named = dict(zip(words(change)[::2], words(change)[1::2], strict=True))
    assert config.model.kind == named.get("--model.kind", "transformer-xl")
    assert (config.train.mem_len == 0) == ("mem-len 0" in change or (row == "ptb-24m" and size != "small"))
    assert ("half" in row) == (config.train.loss == "half")


@pytest.mark.parametrize("row", PARAMETERS)
def test_models_of_the_papers_size_have_its_number_of_parameters(row: str):
    assert count_parameters(config_of(row, "paper").model) == pytest.approx(PARAMETERS[row], rel=0.015)


def test_models_of_the_small_size_that_are_compared_are_equally_large():
    sizes = {row: count_parameters(config_of(row, "small").model) for row in ("ours", "lstm", "qrnn")}
    assert max(sizes.values()) < 1.02 * min(sizes.values()), sizes


def test_our_results_are_of_rows_and_each_knows_its_trained_length():
    found = show.measured("small")
    assert len(found["ours"]) == 3
    for row, results in found.items():
        config = config_of(row, "small")
        for result in results:
            assert first_like(row, "small") == row
            assert result["trained_length"] == config.train.tgt_len + config.train.mem_len, row
            assert result["steps"] == config.train.max_steps
            assert config.model.kind in ("lstm", "qrnn") or str(result["trained_length"]) in result["lengths"]


def test_a_table_has_means_and_standard_errors_and_a_conclusion_is_paired_by_seed():
    exhibit = replace(exhibits.exhibits()["table-7"], measure="score")
    scores = {"sentences-ours": [1.0, 2.0, 4.0], "sentences-shaw": [1.5, 2.4, 4.6], "sentences-alone": [2.0]}
    results = {
        row: [{"seed": seed, "unit": "bpc", "test": value, "parameters": 1000} for seed, value in enumerate(values)]
        for row, values in scores.items()
    }
    head, ours, *_, alone = show.table(exhibit, results)
    assert head == ["model", "paper: ppl", "here: bpc", "here: valid", "here: parameters"]
    assert ours == ["ours", "25.2", f"{7 / 3:.3f} ± {math.sqrt(7 / 9):.3f}", "-", "1,000"]
    assert alone[2] == "2.000"
    _, recurrence, shaw, *_ = show.claims(exhibit, results)
    assert recurrence[1:] == ["+1.000", "one seed"]
    assert shaw[1:] == ["+0.500", f"{0.5 / (0.1 / math.sqrt(3)):+.1f}"]
    assert [*csv.reader(StringIO(show.as_csv([head, ours])))] == [head, ours]
    latex = show.as_latex("a", [["50 %", "a_b"], ["1 ± 2", "x & y"]])
    assert r"$>$= 96 & 50\% \\" in show.as_latex("t", [["a"], [">= 96", "50%"]])
    assert r"50 \% & a\_b \\" in latex and r"1 $\pm$ 2 & x \& y \\" in latex


def test_a_loss_that_is_not_finite_is_left_out(tmp_path: Path):
    """`metrics.jsonl` has null for it."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "environment.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"config\.toml is missing\. It has the settings of the run"):
        result_of(folder)
    Run(folder).write_settings(load_recipe("enwik8-small"))
    Run(folder).metrics.log({"step": 1, "split": "valid", "loss": None})
    with pytest.raises(ValueError, match=r"has no finite loss on test\. Give --again"):
        result_of(folder)


def test_shuffled_sentences_are_the_lines_of_the_text_in_one_order(tmp_path: Path, monkeypatch):
    lines = {split: "".join(f"{split} {n}\n" for n in range(50)) for split in study.BYTES}
    monkeypatch.setattr(study, "_library", lambda: iter(lines.items()))
    plain, shuffled = (study.make_text(name, tmp_path, "toy") for name in ("text", "sentences"))
    again = study.make_text("sentences", tmp_path / "other", "toy")
    for split, text in lines.items():
        assert (plain / f"{split}.txt").read_text() == text
        mixed = (shuffled / f"{split}.txt").read_text()
        assert mixed != text and sorted(mixed.splitlines()) == sorted(text.splitlines())
        assert (again / f"{split}.txt").read_text() == mixed


def test_layers_of_al_rfou_predict_two_tokens_until_their_share_of_training_is_over():
    config = config_of("al-rfou-12l", "toy").model.__class__(
        vocab_size=11, kind=exhibits.AL_RFOU, n_layer=3, n_head=2, d_head=3, d_model=8, d_inner=5, positions=6
    )
    model = build_model(config).double()
    ids = torch.randint(11, (2, 7))
    prediction, _ = model.predict(ids[:, :-1], ids[:, 1:], None, Lengths(tgt_len=6, mem_len=0))
    extra = [(model.training_nll(prediction, ids[:, 1:], at) - prediction.nll).detach() for at in (0.0, 0.2, 0.4, 1.0)]
    ln = math.log(11)  # what untrained classifiers cost, nearly
    for found, layers in zip(extra, (2, 1, 0, 0), strict=True):
        wanted = layers * 1.5 + 0.5
        torch.testing.assert_close(found[:, :-1].mean().item(), wanted * ln, rtol=0.1, atol=0)
        torch.testing.assert_close(found[:, -1].mean().item(), layers * ln, rtol=0.1, atol=0.01)


def test_a_table_is_made_and_used_again_and_other_settings_are_refused(tmp_path: Path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for split in study.BYTES:
        file = tmp_path / "runs/paper/texts/lines" / f"{split}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("to be or not to be\nthat is the question\n" * 60)
    few = content()["words"]["tiny"] + " --train.max-steps 2 --eval.max-tokens 100 --train.eval-tokens 50"
    monkeypatch.setitem(content()["words"], "tiny", few)
    line = "paper table-7 --size toy --rows sentences-ours"
    assert main(words(line)) == 0
    shown = capfd.readouterr().out
    assert "[1/1 sentences-ours, seed 1]" in shown and "step 2/2" in shown
    [result] = [json.loads(file.read_text()) for file in tmp_path.glob("runs/paper/toy/*/result.json")]
    row = next(csv.reader((tmp_path / "runs/paper/toy/table-7/table.csv").read_text().splitlines()[1:]))
    assert row[:4] == ["ours", "25.2", f"{result['lengths']['32']:.3f}", f"{min(result['lengths'].values()):.3f}"]
    assert main(words(line)) == 0
    shown = capfd.readouterr().out
    assert "Trained before, and used: 1 of 1 models" in shown and "step 2/2" not in shown
    monkeypatch.setitem(content()["words"], "tiny", few + " --train.lr 0.1")
    assert main(words(line)) == 2
    assert "Give --again for this row and seed" in capfd.readouterr().err
    other = tmp_path / "runs/paper/toy/sentences-shaw-1/result.json"
    other.parent.mkdir()
    other.write_text("{}")
    assert main(words("paper table-7 --size toy --rows sentences-shaw --again")) == 2
    assert other.exists(), "nothing is removed before all rows are looked at"
    shown = capfd.readouterr()
    assert "was made with other settings" in shown.err and "sentences-shaw, seed" not in shown.out


def test_the_list_and_what_is_known_of_a_table_need_no_training(capsys):
    assert main(["paper"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in exhibits.exhibits())
    assert main(["paper", "table-6"]) == 0
    assert "2.268 ± 0.003" in capsys.readouterr().out
    assert main(["paper", "figure-2"]) == 0
    assert "docs/math.md" in capsys.readouterr().out


@pytest.mark.outside
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name, exhibit in exhibits.exhibits().items() if exhibit.measure])
def test_every_exhibit_is_made_as_a_toy(name: str, tmp_path_factory, monkeypatch):
    home = tmp_path_factory.getbasetemp() / "paper"
    home.mkdir(exist_ok=True)
    monkeypatch.chdir(home)
    assert main(["paper", name, "--size", "toy"]) == 0
    made = home / "runs/paper/toy" / exhibits.exhibits()[name].home
    assert {file.suffix for file in made.rglob("*")} & {".csv", ".png", ".txt"}


def test_a_conclusion_is_about_the_best_length_or_a_multiple_of_the_trained_one():
    exhibit = exhibits.exhibits()["table-7"]
    found = {"sentences-ours": {"8": 3.0, "16": 2.5}, "sentences-shaw": {"8": 2.0, "16": 4.5}}
    results = {row: [{"seed": 1, "trained_length": 8, "lengths": lengths}] for row, lengths in found.items()}
    _, _, at_best, at_twice, at_four_times = show.claims(exhibit, results)
    assert (at_best[1], at_twice[1], at_four_times[1]) == ("-0.500", "+2.000", "-")


def test_lengths_are_scored_in_fp32_as_the_page_says(tmp_path, monkeypatch):
    exhibit, asked = exhibits.exhibits()["table-7"], []
    monkeypatch.setattr(study.Study, "measured", lambda self, words: asked.extend(words) or {"runs": []})
    results = study.Study("small", tmp_path)
    (results.folder("sentences-ours", 1)).mkdir(parents=True)
    results.keep("sentences-ours", 1, {"kind": "transformer-xl", "trained_length": 64})
    MEASURES["lengths"].make(results, exhibit, 1, tmp_path)
    assert asked[asked.index("--precision") + 1] == "fp32"
