"""Options of a run that trains in a moment, what it measured, and what a command prints or is refused with."""

from __future__ import annotations

from pathlib import Path
from shlex import split as words

import pytest

from transformer_xl.commands.main import main
from transformer_xl.run.metrics import Metrics

MODEL = words("--model.n-layer 1 --model.d-model 8 --model.n-head 2 --model.d-head 3 --model.d-inner 5")
TRAIN = words("--train.tgt-len 7 --train.mem-len 5 --train.batch-size 3 --train.max-steps 4 --train.log-every 2")
REST = words("--no-report --train.eval-every 0 --eval.mem-len 5 --train.sample-every 0 --train.save-every 0")
TINY = [*MODEL, *TRAIN, *REST]
CLOCK = {"seconds", "tokens_per_second"}


def without_clock(run: Path) -> list[dict]:
    """The entries of a run's metrics file, but for what a clock says."""
    return [{k: v for k, v in entry.items() if k not in CLOCK} for entry in Metrics(run / "metrics.jsonl").entries()]


def printed(line: str | list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that succeeds prints."""
    capsys.readouterr()
    assert main(words(line) if isinstance(line, str) else line) == 0
    return capsys.readouterr().out


def sentences_of(line: str | list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The sentences with which a command is refused, before it prints anything else."""
    capsys.readouterr()
    assert main(words(line) if isinstance(line, str) else line) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    left_out = "txl: Left out, because"  # true before it too
    return [line.removeprefix("txl: ") for line in shown.err.splitlines() if not line.startswith(left_out)]


def refused(line: str | list[str], capsys: pytest.CaptureFixture[str]) -> str:
    [sentence] = sentences_of(line, capsys)
    return sentence
