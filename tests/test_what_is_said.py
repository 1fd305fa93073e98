"""What is told to a user is true and can be followed: help, sentences, titles and documentation."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from transformer_xl.cli import main

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path
    for folder, pattern in (("transformer_xl", "*.py"), ("docs", "*.md"), (".", "README.md"), ("tests", "*.py"))
    for path in (ROOT / folder).rglob(pattern)
    if ".venv" not in path.parts and path != Path(__file__)
)


def shown_help(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    return " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())


def test_nothing_asks_pip_for_this_package_by_name():
    """It is not published, so `pip install transformer-xl[...]` fails; from a clone `-e ".[...]"` works."""
    asked = [f"{path.relative_to(ROOT)}: {line.strip()}" for path in PAGES for line in path.read_text().splitlines()
             if re.search(r"transformer-xl\[", line)]  # fmt: skip
    assert not asked, "\n".join(asked)


def test_the_oldest_torch_that_is_declared_has_every_optimizer():
    [torch] = [
        need
        for need in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        if need.startswith("torch")
    ]
    assert torch == "torch>=2.9", "torch.optim.Muon, which every small recipe trains with, came with 2.9"


def test_report_promises_no_model_of_the_hub(capsys):
    assert "hf:" not in shown_help("report", capsys)
    assert "hf:NAME" in shown_help("analyse recl", capsys)
