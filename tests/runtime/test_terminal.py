"""Progress: one line that is replaced on a terminal, plain lines in a pipe."""

from __future__ import annotations

import io

import pytest

from transformer_xl.runtime.terminal import clock, report_progress


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0:00"), (59.6, "1:00"), (754, "12:34"), (12345, "3:25:45"), (185145, "51:25:45"), (None, "-:--")],
)
def test_a_duration_is_written_like_a_clock(seconds, shown):
    assert clock(seconds) == shown


def test_long_work_reports_its_progress(monkeypatch, capsys):
    """In a pipe a line every four seconds, and none for short work; the items pass unchanged."""
    now = iter(range(0, 1000, 2))
    monkeypatch.setattr("transformer_xl.runtime.terminal.time.perf_counter", lambda: next(now))
    assert list(report_progress(range(8), "scoring")) == [*range(8)]
    assert capsys.readouterr().err.splitlines() == [
        "scoring:  12% done, 0:28 left",
        "scoring:  38% done, 0:13 left",
        "scoring:  62% done, 0:07 left",
        "scoring:  88% done, 0:02 left",
    ]
    monkeypatch.setattr("transformer_xl.runtime.terminal.time.perf_counter", lambda: 7.0)
    assert list(report_progress(range(8), "scoring")) == [*range(8)] and capsys.readouterr().err == ""


def test_a_terminal_shows_one_line_of_progress_and_erases_it_at_the_end(monkeypatch):
    now, terminal = iter(range(100)), Terminal()
    monkeypatch.setattr("transformer_xl.runtime.terminal.time.perf_counter", lambda: next(now))
    monkeypatch.setattr("sys.stderr", terminal)
    assert list(report_progress(range(3), "scoring")) == [0, 1, 2]
    assert "\n" not in terminal.getvalue() and terminal.getvalue().endswith("\r\x1b[K")
    assert "scoring:  67% done, 0:02 left" in terminal.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_line_is_cut_to_the_width_of_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    now, terminal = iter(range(100)), Terminal()
    monkeypatch.setattr("transformer_xl.runtime.terminal.time.perf_counter", lambda: next(now))
    monkeypatch.setattr("sys.stderr", terminal)
    assert list(report_progress(range(3), "scoring with a memory of 9")) == [0, 1, 2]
    assert "\rscoring with a memo\x1b[K" in terminal.getvalue()
