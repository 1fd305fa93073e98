"""`txl data` without a name lists the published corpora, and what is prepared here, with the counts of the stores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_runs import printed

from transformer_xl.commands.main import main
from transformer_xl.data.corpora.published import DATASETS, Dataset

TEXT = b"the quick brown fox\n" * 40


@pytest.fixture(autouse=True)
def home(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TXL_HOME", str(own_folder / "cache"))
    return own_folder


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict]:
    return {entry["name"]: entry for entry in json.loads(printed("data --json", capsys))["corpora"]}


def test_every_published_corpus_is_listed_before_anything_is_prepared(home, capsys):
    entries = listed(capsys)
    assert entries.keys() == DATASETS.keys() and not (home / "cache").exists()
    assert {entry["prepared"] for entry in entries.values()} == {"no"}
    assert entries["enwik8"]["tokens"] == {"train": 88_982_818, "valid": 4_945_742, "test": 4_943_417}
    assert entries["enwik8"]["download_bytes"] == 36_445_475 and entries["enwik8"]["command"] == "txl data enwik8"
    assert entries["lm1b"]["tokens"]["train"] is None and entries["ptb"]["download_bytes"] is None
    shown = printed(["data"], capsys).splitlines()
    assert shown[0].startswith("`txl data NAME` downloads") and len(shown) == 2 + len(DATASETS)
    [row] = [line.split() for line in shown if line.startswith("enwik8")]
    assert row == ["enwik8", "byte", "88,982,818", "4,945,742", "4,943,417", "36.4", "no"]


def test_what_is_prepared_is_listed_with_its_own_counts(home, monkeypatch, capsys):
    files = {"train": "", "valid": "", "more": ""}
    splits = {"train": ("train", "more"), "valid": ("valid",), "test": ("valid",)}
    monkeypatch.setitem(DATASETS, "tiny", Dataset("word", files, (), {"keep": {}}, splits))
    Path("copy").mkdir()
    for name in files:
        Path("copy", name).write_bytes(TEXT)
    told = json.loads(printed("data tiny --source copy --json", capsys))
    whole = listed(capsys)["tiny"]
    assert told == whole and whole["prepared"] == "yes"
    assert whole["tokens"] == {"train": 400, "valid": 200, "test": 200}
    assert whole["store_bytes"] == sum(file.stat().st_size for file in Path(whole["store"]).rglob("*"))
    Path(whole["store"], "corpus.json").write_text("{")
    assert listed(capsys)["tiny"]["prepared"] == "damaged"
    assert main(["data"]) == 0 and "damaged" in capsys.readouterr().out
