"""Sessions on token ids (`.npy`, `.bin`) and on documents (`.jsonl`): all commands read them or refuse them."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from shlex import split as words

import numpy as np
import pytest
from tiny_runs import TINY, TRAIN, printed, refused

from transformer_xl import StreamLoader, evaluate, load_model, load_recipe
from transformer_xl.commands.main import main

SHORT = [*TINY, *words("--model.ngrams= --train.save-every 2")]
STATIC = ["--train.precision", "fp32"]
TEXTS = [f"Document {number} holds {number * number} and more.\n" for number in range(60)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with nanoGPT's files of ids, JSON lines, a run of each; and a cache of its own."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        text = Path(os.__file__).read_text()[:5_000]
        stoi = {letter: i for i, letter in enumerate(sorted(set(text)))}
        ids = np.array([stoi[letter] for letter in text], np.uint16)
        Path("chars").mkdir()
        ids[:4_500].tofile("chars/train.bin")
        ids[4_500:].tofile("chars/val.bin")
        Path("chars/meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(stoi)}))
        Path("lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        assert main(["train", "--data", "chars", *SHORT, *STATIC]) == 0
        assert main(["train", "text-fast", "--data", "lines.jsonl", *SHORT, *STATIC, "--out", "runs/lines"]) == 0
        yield folder


def test_a_folder_of_ids_has_a_recipe_its_counts_and_a_score(home: Path):
    config, log = load_recipe("runs/chars/config.toml"), Path("runs/chars/log.txt").read_text()
    assert (config.corpus.unit, config.eval.split) == ("id", "valid")
    size = config.model.vocab_size
    assert f"on chars, 4,500 tokens, {size} ids; segments of 7 after 5, scored 7 after 5; cpu" in log
    kind = "Transformer-XL with n-grams and matches, which learn most in minutes"
    assert f"Recipe text-fast, {kind}: chars is read as {size} ids;" in log
    assert "train: train.bin; valid: val.bin." in log
    assert "Left out: meta.pkl (no ids)." in log
    assert "ppl" in log and "bpc" not in log and "per byte" not in log and "test" not in log


def test_a_large_vocabulary_takes_the_recipe_for_words(home: Path, capsys):
    np.save("many.npy", np.arange(5_000))
    told = printed("train --data many.npy --print-config", capsys)
    assert told.startswith("# Recipe text-words, Transformer-XL alone: many.npy is read as 5,000 ids; ")
    assert 'unit = "id"' in told and 'split = "test"' in told
    sentence = refused("train --data many.npy --print-config --corpus.unit byte", capsys)
    assert "many.npy must be text, and is binary" in sentence


def test_ids_are_scored_with_the_vocabulary_of_the_run(home: Path, capsys):
    own = json.loads(printed("eval runs/chars --json --precision fp32", capsys))
    other = json.loads(printed("eval runs/chars --json --precision fp32 --data chars/val.bin", capsys))
    [result] = own["results"]
    assert own["split"] == "valid" and result["targets"] == 499 and result["unit"] == "id"
    assert result["bytes"] is None and result["bits_per_byte"] is None
    assert other["results"][0]["nats"] == result["nats"]
    assert "per byte" not in printed("eval runs/chars", capsys)
    np.save("high.npy", np.full(99, 500))
    size = len(load_model("runs/chars").vocab)
    assert f"must hold ids from 0 to {size - 1}, the vocabulary's, got 500" in refused(
        "eval runs/chars --data high.npy", capsys
    )
    assert 'must be an object with a list "ids"' in refused("eval runs/chars --data lines.jsonl", capsys)
    assert "has nothing for" in refused("eval runs/lines --data chars", capsys)


def test_prompts_and_lines_are_numbers(home: Path, capsys):
    text = printed("generate runs/chars --prompt '3 5 7' --max-tokens 6 --seed 1", capsys)
    numbers = list(map(int, text.split()))
    assert numbers[:3] == [3, 5, 7] and len(numbers) == 9
    whole = json.loads(printed("generate runs/chars --prompt '3 5 7' --max-tokens 6 --seed 1 --json", capsys))
    assert whole["prompt"] + whole["text"] == text.strip()
    assert "'x', id 1 of the text" in refused("generate runs/chars --prompt '3 x'", capsys)
    Path("lines.txt").write_text("3 5 7 9\n\n1 2\n")
    scored = [json.loads(line) for line in printed("score runs/chars lines.txt --json", capsys).splitlines()]
    assert [line["targets"] for line in scored] == [3, 0, 1] and scored[0]["bytes"] is None
    model = load_model("runs/chars")
    found = model.score("3 5 7 9")
    assert found.tokens == [" 5", " 7", " 9"] and found.bytes is None and np.isnan(found.bits_per_byte)
    assert -found.nats.sum() == pytest.approx(scored[0]["log_prob"], abs=1e-5)
    assert model.generate("3 5 7", max_tokens=6, seed=1) == whole["text"]


def test_analyses_and_the_page_show_ids(home: Path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # draws nothing
    assert "ppl" in printed("analyse length runs/chars --split valid --attn-len 3 --max-tokens 50", capsys)
    printed("analyse recl runs/chars --split valid --step 5 --max-context 10 --positions 10 --out recl", capsys)
    printed("analyse attention runs/chars --split valid --max-tokens 100 --positions 50 --out attention", capsys)
    assert "report.html" in printed("report runs/chars --out report.html", capsys)
    assert "chars (ids)" in Path("report.html").read_text()


def test_a_run_of_ids_resumes_and_its_vocabulary_may_be_larger(home: Path, capsys):
    without_split = " ".join(["train", "text-fast", "--data", "chars", *SHORT, *STATIC, "--out", "runs/wide"])
    assert "eval.split must be train or valid for the corpus chars, got test." in refused(without_split, capsys)
    wide = ["train", "text-fast", "--data", "chars", *SHORT, *STATIC, *words("--eval.split valid --out runs/wide")]
    assert main([*wide, "--model.vocab-size", "300"]) == 0
    assert len(load_model("runs/wide").vocab) == 300
    shown = printed("train --resume --out runs/wide --train.max-steps 6", capsys)
    assert "Resumed from step 4" in shown and "train: train.bin; valid: val.bin." in shown
    np.save("other.npy", [7, 299] * 99)
    printed("eval runs/wide --data other.npy", capsys)
    narrow = ["train", "text-fast", "--data", "chars", *SHORT, "--model.vocab-size", "9", "--out", "runs/narrow"]
    assert "must hold ids from 0 to 8" in refused(" ".join(narrow), capsys) and not Path("runs/narrow").exists()
    tuned = ["train", "--data", "other.npy", "--init", "runs/wide", *TRAIN, *STATIC, "--out", "runs/tuned"]
    assert main(tuned) == 0 and len(load_model("runs/tuned").vocab) == 300


def test_a_text_and_ids_do_not_continue_each_other(home: Path, capsys):
    told = refused(" ".join(["train", "--data", "chars/train.bin", "--init", "runs/lines", *TRAIN]), capsys)
    assert 'corpus.unit must be "byte" with --init runs/lines' in told
    told = refused("train --data lines.jsonl --init runs/chars --out runs/new", capsys)
    assert 'must be an object with a list "ids"' in told


@pytest.mark.parametrize("order", ["--corpus.shuffle-lines", "--train.passes 2", "--train.random-tgt-len"])
def test_documents_have_no_other_order_and_nothing_is_written(home: Path, capsys, order: str):
    line = f"train text-small --data lines.jsonl --out runs/new --train.trackers tensorboard {order}"
    assert " documents" in refused(line, capsys) and not Path("runs/new").exists()


def test_documents_reset_in_training_and_evaluation(home: Path, capsys):
    result = json.loads(printed("eval runs/lines --json --data lines.jsonl --precision fp32", capsys))["results"][0]
    assert result["targets"] == sum(len(text) - 1 for text in TEXTS)
    loaded = load_model("runs/lines")
    lengths = loaded.config.eval_lengths
    alone = [
        evaluate(loaded.model, StreamLoader(loaded.vocab.encode(text), batch_size=1, tgt_len=lengths.tgt_len), lengths)
        for text in TEXTS
    ]
    assert result["nats"] == pytest.approx(sum(each.nats for each in alone), rel=1e-5)
    assert result["bits_per_byte"] is not None
    log = Path("runs/lines/log.txt").read_text()
    assert "train, valid, test: lines.jsonl; " in log and "cut 90 : 5 : 5" in log


def test_an_average_of_attention_is_over_full_memories_where_the_text_is_long_enough(home: Path, monkeypatch, capsys):
    """Each stream begins with an empty memory: 32 streams of three tokens would show none."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # draws nothing
    for tokens in (90, 4):
        line = f"analyse attention runs/chars --split train --max-tokens {tokens} --mem-len 5 --out few --json"
        assert main(words(line)) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["queries"] == tokens
        counts = np.load("few/attention.npz")["counts"]
        assert counts[:4].tolist() == [4, 3, 2, 1] if tokens == 4 else counts[5] > 0.8 * tokens
