"""`python -m benchmarks here`: every row is measured on this machine, and its figures agree with each other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import here
from benchmarks.__main__ import main
from transformer_xl import build_model, load_recipe, save_checkpoint
from transformer_xl.data.vocab import Vocab

TINY = """
[model]
vocab_size = 101
n_layer = 2
n_head = 2
d_head = 8
d_model = 16
d_inner = 32
cutoffs = [20]
tie_projs = [false, true]
[train]
tgt_len = 5
mem_len = 11
batch_size = 3
[eval]
tgt_len = 7
batch_size = 2
"""
QUICK = ["--seconds", "0.001", "--repeats", "2", "--device", "cpu"]


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "tiny.toml").write_text(TINY)
    return str(tmp_path / "tiny.toml")


def test_each_row_of_a_run_reports_speed_memory_and_bound(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings, run = load_recipe(recipe), Path(recipe).with_name("run")
    save_checkpoint(run, model=build_model(settings.model), vocab=Vocab.of_ids(101), config=settings)
    assert main(["here", "--recipe", str(run), *QUICK]) == 0
    _, heading, *table, line = capsys.readouterr().out.splitlines()
    assert "tokens/s" in heading and [row.split()[0] for row in table] == ["train", "eval", "generate"]
    rows = {row["part"]: row for row in json.loads(line)["rows"]}
    sizes = {part: (row["batch"], row["lengths"]["tgt_len"], row["lengths"]["mem_len"]) for part, row in rows.items()}
    assert sizes == {"train": (3, 5, 11), "eval": (2, 7, 11), "generate": (1, 1, 11)}
    for row in rows.values():
        tokens = row["batch"] * row["lengths"]["tgt_len"]
        assert row["tokens_per_second"] == pytest.approx(tokens / row["seconds"])
        bound_seconds = tokens / row["bound_tokens_per_second"]
        assert row["share_of_bound"] == pytest.approx(bound_seconds / row["seconds"])
        assert row["peak_bytes"] < 100e6


def test_a_row_without_a_bound_still_has_a_speed(tmp_path, capsys) -> None:
    (tmp_path / "other.toml").write_text(TINY.replace("[model]", '[model]\nkind = "shaw"\npositions = 16'))
    assert main(["here", "--recipe", str(tmp_path / "other.toml"), *QUICK]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert [row["part"] for row in rows if row["share_of_bound"] is None] == ["train", "eval", "generate"]


def test_writing_without_memory_has_no_bound(recipe: str) -> None:
    config = here._settings(recipe, "cpu", "fp32")
    config = replace(config, eval=replace(config.eval, mem_len=0))
    unit = here._generation(config)
    unit.run()
    assert here._bound("generate", config, unit) is None
    assert here._bound("eval", config, here._evaluation(config)) is not None


def test_units_are_timed_with_a_full_memory(recipe: str) -> None:
    config = here._settings(recipe, "cpu", "fp32")
    unit = here._training_steps(config)
    for _ in range(unit.warm_up):
        unit.run()
    assert unit.run.__self__.memory.length == config.train.mem_len


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--seconds", "0"], "--seconds must be above 0"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--device", "abacus"], "device must be auto"),
        (["--recipe", "text-small"], "Give a run of it"),
        (["--recipe", "nowhere"], "RECIPE must be a TOML file"),
    ],
)
def test_what_does_not_fit_is_refused(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["here", *words]) == 2
    assert sentence in capsys.readouterr().err
