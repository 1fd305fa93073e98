"""Metrics on disk survive kills and resumes; figures and progress lines are correct."""

from __future__ import annotations

import json
import math

import pytest

from transformer_xl.run.metrics import Metrics
from transformer_xl.train.loop import progress_text


def test_every_line_is_strict_json_even_when_training_diverges(tmp_path):
    log = Metrics(tmp_path / "metrics.jsonl")
    log.log({"step": 1, "loss": math.nan, "gradient_norm": math.inf})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(log.path.read_text(), parse_constant=refuse) == {"step": 1, "loss": None, "gradient_norm": None}


def test_resuming_drops_later_entries_and_an_unfinished_line(tmp_path):
    """A sample's text may hold line ends of any kind, and words that look like an entry."""
    log, text = Metrics(tmp_path / "run" / "metrics.jsonl"), 'a\n{"step": 99}\u2028\x85\ud800"step": 99'
    for step in (10, 20, 30):
        log.log({"step": step, "loss": 1.0})
        log.log({"step": step, "sample": text})
    entries = log.entries()
    with log.path.open("a") as file:
        file.write('\0\n{"step": 40}\n{"step": 30, "sample": "torn')
    log.truncate(20)
    assert log.entries() == entries[:4] and entries[3] == {"step": 20, "sample": text}
    log.log({"step": 21})
    assert log.entries()[4:] == [{"step": 21}]


def test_truncating_a_missing_log_makes_no_file(tmp_path):
    log = Metrics(tmp_path / "metrics.jsonl")
    log.truncate(20)
    assert not log.path.exists()


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnot json\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2 is not a JSON object with a step: 'not json'"):
        Metrics(path).entries()
    with pytest.raises(ValueError, match="line 2 is not a JSON object"):
        Metrics(path).truncate(2)


def test_a_log_that_cannot_be_written_raises_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"metrics\.jsonl could not be written: .+\."):
        Metrics(tmp_path / "file" / "metrics.jsonl").log({"step": 1})


def test_a_line_of_figures_by_hand():
    figures = {"loss": math.log(4), "lr": 2.5e-4, "tokens_per_second": 12345.6, "seconds_left": 61}
    assert progress_text("byte", **figures) == "loss 1.3863  bpc 2.0000  lr 2.50e-04  12,346 tokens/s  1:01 left"
    assert "ppl     4.00" in progress_text("word", **figures)
