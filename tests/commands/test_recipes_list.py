"""`txl recipes`: exact counts and true results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from shlex import split as words

import pytest
from tiny_runs import printed

from transformer_xl.commands import recipes as journey
from transformer_xl.config.recipe import load_recipe, packaged_recipes
from transformer_xl.config.settings import CorpusConfig
from transformer_xl.data.corpus import Corpus
from transformer_xl.model.baselines import count_parameters

pytestmark = pytest.mark.usefixtures("own_folder")


def listed(arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, dict]:
    found = json.loads(printed(["recipes", *words(arguments), "--json"], capsys))["recipes"]
    return {entry["name"]: entry for entry in found}


def test_every_recipe_is_listed_with_the_count_in_its_header(capsys):
    entries = listed("", capsys)
    assert entries.keys() == packaged_recipes().keys()
    for name, file in packaged_recipes().items():
        text, count = file.read_text(), entries[name]["parameters"]
        assert (count is None) == (name == "text-words")
        found = re.findall(r"^# Parameters: (.*)$", text, re.MULTILINE)
        assert found == ([] if name.startswith("text-") else [f"{count:,}"])
        for millions, decimals in re.findall(r"(\d+\.?(\d*))M parameters", text.splitlines()[0]):
            assert millions == f"{count / 1e6:.{len(decimals)}f}"
    _, heading, demo, row = printed(["recipes", "text-fast", "text-words"], capsys).splitlines()
    assert heading.split()[0] == "recipe" and demo.split()[0] == "text-fast"
    assert "4 layers of 256" in row and "your text, words" in row and "by the text" in row


def test_results_are_those_of_the_headers():
    results, files = journey.read_results(), packaged_recipes()
    assert results.keys() <= files.keys()
    for name, file in files.items():
        header, known = file.read_text().split("\n\n")[0], results.get(name, {})
        assert known.keys() <= {"published", "own"}
        assert f"txl train {name}" in header and " · " in header.splitlines()[0]
        assert (" · published: " in header.splitlines()[0]) == ("published" in known), name
        if "published" in known:
            figure, unit = known["published"].split()
            assert (f"published: {figure} bpc" if unit == "bpc" else f"published: perplexity {figure}") in header, name
        if "# Ours: " in header:
            figure, unit = known["own"].split()
            assert (f"Ours: {figure} bpc" if unit == "bpc" else f"Ours: perplexity {figure}") in header, name


def test_own_results_are_those_of_the_readme():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    own = {name: known["own"] for name, known in journey.read_results().items() if "own" in known}
    assert len(own) >= 4
    for name, result in own.items():
        [row] = [line for line in readme.splitlines() if f"**{result}**" in line]
        assert name in row


def test_the_vocabulary_of_a_prepared_corpus_counts(capsys):
    splits = dict.fromkeys(("train", "valid", "test"), b"one two three four\n" * 30)
    vocab = Corpus.build("store", splits, CorpusConfig(unit="word"), name="store").vocab
    Path("mine.toml").write_text('[corpus]\nname = "store"\nunit = "word"\n[model]\nn_layer = 2\nvocab_size = 0\n')
    [entry] = listed("mine.toml", capsys).values()
    sized = load_recipe("mine.toml", ["--model.vocab-size", str(len(vocab))])
    assert entry["parameters"] == count_parameters(sized.model)
