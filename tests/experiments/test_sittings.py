"""The sittings on a GPU, tried at toy sizes on the CPU: every part ends well, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.gpu.sitting import Sitting

ROOT = Path(__file__).parents[2]


@pytest.mark.rehearsal
@pytest.mark.timeout(400)
@pytest.mark.parametrize("sitting", ["first", "second"])
def test_a_sitting_runs_through(sitting: str, tmp_path: Path) -> None:
    words = ["-m", f"experiments.gpu.{sitting}", "--out", str(tmp_path), "--device", "cpu", "--toy", "--seconds", "300"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    lines = [json.loads(line) for line in (tmp_path / "parts.jsonl").read_text().splitlines()]
    assert [line["error"] for line in lines if "error" in line] == [] and done.returncode == 0, done.stdout[-2000:]
    assert len(lines) > 4 and all("found" in line for line in lines)


def test_a_part_that_fails_stops_no_other(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["sitting", "--out", str(tmp_path), "--device", "cpu"])
    sitting = Sitting.from_command_line(5)
    sitting.part("wrong", 0)(lambda: 1 / 0)
    sitting.part("long", 99)(lambda: 1)
    sitting.part("right", 0)(lambda: 1)
    with pytest.raises(SystemExit) as exit:
        sitting.finish()
    wrong, long, right = (json.loads(line) for line in (tmp_path / "parts.jsonl").read_text().splitlines())
    assert "ZeroDivisionError" in wrong["error"] and "needs 99" in long["skipped"] and right["found"] == 1
    assert exit.value.code == 1 and "FAILED ZeroDivisionError" in capsys.readouterr().out
