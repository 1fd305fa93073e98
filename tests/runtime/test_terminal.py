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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("columns", "shown"), [(80, "scoring:  67% done, 0:02 left"), (20, "scoring:  67% done,")])
def test_a_terminal_shows_one_line_of_progress_of_its_width_and_erases_it_at_the_end(monkeypatch, columns, shown):
    monkeypatch.setenv("COLUMNS", str(columns))
    now, terminal = iter(range(100)), Terminal()
    monkeypatch.setattr("transformer_xl.runtime.terminal.time.perf_counter", lambda: next(now))
    monkeypatch.setattr("sys.stderr", terminal)
    assert list(report_progress(range(3), "scoring")) == [0, 1, 2]
    assert "\n" not in terminal.getvalue() and terminal.getvalue().endswith(f"\r{shown}\x1b[K\r\x1b[K")
