"""Metrics on disk survive kills and resumes; figures and lines say what was measured."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import pytest

from transformer_xl.evaluation.measures import bits, figure, perplexity, tokens_per_second
from transformer_xl.runtime.terminal import clock, followed, seconds_left
from transformer_xl.train.metric_log import MetricLog, Progress, ProgressPrinter, read_metrics

HALFWAY = Progress(step=50, max_steps=1000, loss=math.log(4), lr=2.5e-4, tokens_per_second=12345.6, seconds_left=61)


def test_a_log_gives_back_what_it_was_given(tmp_path):
    log = MetricLog(tmp_path / "run" / "metrics.jsonl")
    entries = [{"step": 1, "loss": 0.1 + 0.2}, {"step": 2, "split": "valid", "loss": 1e-300}]
    for entry in entries:
        log.log(entry)
    assert read_metrics(log.path) == entries


def test_every_line_is_strict_json_even_when_training_diverges(tmp_path):
    log = MetricLog(tmp_path / "metrics.jsonl")
    log.log({"step": 1, "loss": math.nan, "gradient_norm": math.inf})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(log.path.read_text(), parse_constant=refuse) == {"step": 1, "loss": None, "gradient_norm": None}


def test_resuming_drops_what_it_will_repeat_and_a_torn_line(tmp_path):
    log = MetricLog(tmp_path / "metrics.jsonl")
    for step in (10, 20, 30, 40):
        log.log({"step": step})
    with log.path.open("a") as file:
        file.write('{"step": 5')
    log.truncate(20)
    log.log({"step": 21})
    assert [entry["step"] for entry in read_metrics(log.path)] == [10, 20, 21]


def test_resuming_keeps_samples_of_the_steps_it_keeps(tmp_path):
    """A sample's text may hold line ends of any kind, and words that look like an entry."""
    log, text = MetricLog(tmp_path / "metrics.jsonl"), 'a\n{"step": 99}\u2028\x85\ud800"step": 99'
    for step in (10, 20, 30):
        log.log({"step": step, "loss": 1.0})
        log.log({"step": step, "sample": text})
    entries = read_metrics(log.path)
    with log.path.open("a") as file:
        file.write('{"step": 30, "sample": "torn')
    log.truncate(20)
    assert read_metrics(log.path) == entries[:4] and entries[3] == {"step": 20, "sample": text}


def test_truncating_a_log_that_never_began_leaves_none(tmp_path):
    log = MetricLog(tmp_path / "metrics.jsonl")
    log.truncate(20)
    assert not log.path.exists()


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnot json\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2 is not a JSON object: 'not json'"):
        read_metrics(path)


def test_a_log_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"metrics\.jsonl could not be written: .+\."):
        MetricLog(tmp_path / "file" / "metrics.jsonl").log({"step": 1})


def test_figures_by_hand():
    assert bits(math.log(4)) == pytest.approx(2, rel=1e-15)
    assert perplexity(math.log(130)) == pytest.approx(130, rel=1e-12)
    assert perplexity(1e4) == math.inf
    assert figure("word", math.log(8)) == ("ppl", pytest.approx(8))
    assert figure("byte", math.log(8)) == figure("char", math.log(8)) == ("bpc", pytest.approx(3))


def test_speed_and_time_left_by_hand():
    assert tokens_per_second(3000, 1.5) == 2000
    assert tokens_per_second(3000, 0.0) == 0
    assert seconds_left(50, 1000, 10.0) == 190
    assert seconds_left(1000, 1000, 10.0) == 0
    assert seconds_left(0, 1000, 10.0) is None


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0:00"), (59.6, "1:00"), (754, "12:34"), (12345, "3:25:45"), (185145, "2d 3:25:45"), (None, "-:--")],
)
def test_a_duration_reads_like_a_clock(seconds, shown):
    assert clock(seconds) == shown


def test_a_progress_line_by_hand():
    assert HALFWAY.line("byte") == ("step   50/1000  loss 1.3863  bpc 2.0000  lr 2.50e-04  12,346 tokens/s  1:01 left")
    assert "ppl     4.00" in HALFWAY.line("word")


def test_a_pipe_gets_plain_lines_and_so_does_the_log(tmp_path):
    pipe = io.StringIO()
    with ProgressPrinter(1000, "byte", stream=pipe, log=tmp_path / "log.txt") as printer:
        printer.advance(49)
        printer.show(HALFWAY)
        printer.note("valid [bold] 1.5 bpc")
    assert pipe.getvalue() == HALFWAY.line("byte") + "\nvalid [bold] 1.5 bpc\n"
    assert (tmp_path / "log.txt").read_text() == pipe.getvalue()


def test_long_work_reports_how_far_it_has_come(monkeypatch, capsys):
    """Every four seconds in a pipe, nothing where it is short, and the items are those that were given."""
    now = iter(range(0, 1000, 2))
    monkeypatch.setattr("transformer_xl.runtime.terminal.time.perf_counter", lambda: next(now))
    assert list(followed(range(8), "scoring")) == [*range(8)]
    assert capsys.readouterr().err.splitlines() == [
        "scoring:  12% done, 0:28 left",
        "scoring:  38% done, 0:13 left",
        "scoring:  62% done, 0:07 left",
        "scoring:  88% done, 0:02 left",
    ]
    monkeypatch.setattr("transformer_xl.runtime.terminal.time.perf_counter", lambda: 7.0)
    assert list(followed(range(8), "scoring")) == [*range(8)] and capsys.readouterr().err == ""


def test_a_terminal_has_one_line_of_progress_that_goes(monkeypatch):
    now, terminal = iter(range(100)), Terminal()
    monkeypatch.setattr("transformer_xl.runtime.terminal.time.perf_counter", lambda: next(now))
    monkeypatch.setattr("sys.stderr", terminal)
    assert list(followed(range(3), "scoring")) == [0, 1, 2]
    assert "\n" not in terminal.getvalue() and terminal.getvalue().endswith("\r\x1b[K")
    assert "scoring:  67% done, 0:02 left" in terminal.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_with_the_same_figures(monkeypatch, tmp_path):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    terminal = Terminal()
    with ProgressPrinter(1000, "byte", step=40, stream=terminal, log=tmp_path / "log.txt") as printer:
        printer.show(HALFWAY)
        printer.note("a [sample]")
    assert "50/1000" in terminal.getvalue() and HALFWAY.figures("byte") in terminal.getvalue()
    assert "a [sample]" in terminal.getvalue()
    assert (tmp_path / "log.txt").read_text() == HALFWAY.line("byte") + "\na [sample]\n"


def test_the_bar_follows_a_number_of_steps_that_changes(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    terminal = Terminal()
    with ProgressPrinter(1000, "byte", stream=terminal) as printer:
        printer.show(replace(HALFWAY, max_steps=60))
    assert "50/60" in terminal.getvalue()
