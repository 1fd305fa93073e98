"""Timings of the data: contenders must make the same ids, and each has its own peak memory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import data
from benchmarks.__main__ import main
from benchmarks.measure import measure_call


def hold(megabytes: int) -> int:
    return int(np.ones(megabytes * 125_000).sum())


def test_peak_memory_counts_only_the_call() -> None:
    little, much = measure_call(hold, 1), measure_call(hold, 300)
    assert hold(300) > 0, "now this process held as much"
    assert little.value == 125_000 and much.seconds > 0
    assert 290e6 < much.peak_bytes - little.peak_bytes < 330e6
    assert measure_call(hold, 1).peak_bytes == pytest.approx(little.peak_bytes, rel=0.2), (
        "the peak of this process does not count"
    )


def test_drawn_words_follow_their_counts(tmp_path: Path) -> None:
    (tmp_path / "counts").write_text("the 30\ncat 10\n")
    words, weights = data.read_counts(tmp_path / "counts")
    drawn = data.write_text(tmp_path / "text", words, weights, 200_000, seed=1)
    text = (tmp_path / "text").read_text()
    assert len(text) >= 200_000 and len(text.split()) == drawn
    assert text.count("the") / drawn == pytest.approx(0.75, abs=0.01)
    (tmp_path / "counts").write_text("the 30\ncat\n")
    with pytest.raises(ValueError, match="--counts must be a file with a word and its count"):
        data.read_counts(tmp_path / "counts")


def test_data_is_timed_with_peers_and_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--megabytes", "1"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    rows = {(row["contender"], row["unit"]): row for row in result["rows"]}
    assert ("plain Python loop", "word") in rows and ("transformer_xl", "word") in rows
    assert sum(row["is_bound"] for row in result["rows"]) == 2 and len(table) == len(rows) + 2
    for row in rows.values():
        assert row["megabytes_per_second"] == pytest.approx(result["bytes"] / 1e6 / row["seconds"])
    assert main(["data", "--megabytes", "0"]) == 2


def test_different_ids_end_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "measure_call", lambda run, text: data_measured(run, text))
    with pytest.raises(AssertionError, match="made different ids"):
        data.bench_data(megabytes=1)


def data_measured(run, text: Path):
    from benchmarks.measure import Measured

    return Measured({"_plain_loop": "a", "_words": "b"}.get(run.__name__), 1.0, 1)
