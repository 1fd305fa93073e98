"""Whole sessions of a user, from training to evaluation, on a real text; the first training is its own process."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from shlex import split as words

import pytest
from tiny_runs import printed, without_clock

from transformer_xl.commands.main import main
from transformer_xl.config.recipe import load_recipe
from transformer_xl.data.corpora.published import DATASETS, Dataset
from transformer_xl.run.metrics import Metrics

TEXT = Path(os.__file__).read_bytes()[:20_000]
TINY = words(
    "--model.n-layer 1 --model.d-model 16 --model.n-head 2 --model.d-head 8 --model.d-inner 32"
    " --train.tgt-len 16 --train.mem-len 16 --train.batch-size 4 --train.max-steps 40 --train.lr 0.01"
    " --train.warmup-steps 0 --train.log-every 10 --train.eval-every 20 --train.save-every 20"
    " --train.sample-every 0 --train.eval-tokens 200 --train.precision fp32 --eval.mem-len 32 --no-report"
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory):
    """A folder with a text and a cache of its own, where a run was trained."""
    folder = tmp_path_factory.mktemp("journey")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        patch.chdir(folder)
        Path("text.py").write_bytes(TEXT)
        command = [sys.executable, *words("-m transformer_xl train text-small --data text.py --out runs/first"), *TINY]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        (folder / "log").write_text(done.stdout)
        yield folder


def test_training_leaves_everything_needed_to_repeat_and_use_it(home: Path):
    run = home / "runs/first"
    assert {path.name for path in run.iterdir()} >= {"config.toml", "environment.json", "log.txt", "metrics.jsonl"}
    config = load_recipe(run / "config.toml")
    assert config.model.vocab_size == 256 and config.train.device == "cpu" and config.train.backend != "auto"
    assert config.corpus.name == str((home / "text.py").resolve())
    environment = json.loads((run / "environment.json").read_text())
    assert environment["chosen"]["backend"]["why"] and environment["packages"]["torch"]
    assert os.uname().nodename not in (run / "environment.json").read_text().replace("linux", "")
    log = (run / "log.txt").read_text()
    assert "step 40/40" in log and "valid" in log
    assert "step 40/40" in (home / "log").read_text()
    losses = [entry["loss"] for entry in Metrics(run / "metrics.jsonl").entries() if entry.get("split") == "train"]
    assert losses[-1] < losses[0] < math.log(256)


def test_the_written_config_repeats_the_run_to_the_bit(home: Path):
    assert main(["train", "runs/first/config.toml", "--out", "runs/again"]) == 0
    assert without_clock(home / "runs/again") == without_clock(home / "runs/first")


def test_same_length_is_attn_len_equal_to_mem_len(home: Path, capsys):
    line = "eval runs/first --json --precision fp32 --mem-len 16"
    same = json.loads(printed(f"{line} 9 --same-length", capsys))["results"]
    assert [(result["mem_len"], result["attn_len"]) for result in same] == [(16, 16), (9, 9)]
    [windowed] = json.loads(printed(f"{line} --attn-len 16", capsys))["results"]
    assert windowed["nats"] == same[0]["nats"]


def test_score_prints_a_line_for_each_line_of_a_file_or_standard_input(home: Path, monkeypatch, capsys):
    text = b"import os\n\nxyzzy " * 3
    Path("lines.txt").write_bytes(text)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    shown = printed("score runs/first -", capsys).splitlines()
    figures = [list(map(float, line.split("\t"))) for line in shown]
    assert len(figures) == text.count(b"\n") + 1
    assert all(bits == pytest.approx(-nats / math.log(2), abs=1e-3) for nats, _, bits in figures)
    lines = printed(["score", "runs/first", "lines.txt", "--json"], capsys).splitlines()
    assert [json.loads(line)["log_prob"] for line in lines] == pytest.approx([nats for nats, *_ in figures], abs=1e-3)


def test_generation_follows_its_prompt_and_its_seed(home: Path, monkeypatch, capsys):
    asked = words("generate runs/first --max-tokens 20 --seed 3 --json")
    rows = list(map(json.loads, printed([*asked, "--prompt", "def a", "import", "--n", "2"], capsys).splitlines()))
    assert [row["prompt"] for row in rows] == ["def a", "def a", "import", "import"]
    assert rows[0]["text"] != rows[1]["text"]
    assert json.loads(printed([*asked, "--prompt", "def a"], capsys))["text"] == rows[0]["text"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"def a")))
    assert json.loads(printed([*asked, "--prompt", "-"], capsys)) == rows[0]
    Path("prompt.txt").write_text("def a")
    assert json.loads(printed([*asked, "--prompt", "@prompt.txt"], capsys)) == rows[0]


def test_a_text_streams_after_its_prompt_and_ends_before_a_stop_string(home: Path, capsys):
    assert main(words("generate runs/first --from-test 30 --max-tokens 60 --temperature 0")) == 0
    shown = capsys.readouterr()
    prompt = TEXT[-1000:][:30].decode()
    assert shown.out.startswith(prompt) and "60 tokens in" in shown.err
    stop = shown.out[len(prompt) + 2 : len(prompt) + 4]
    ended = ["generate", "runs/first", "--from-test", "30", "--max-tokens", "60", "--temperature", "0", "--stop", stop]
    assert stop not in printed(ended, capsys).removesuffix("\n")[len(prompt) :]


def test_text_from_the_test_split_is_shown_beside_what_follows_there(home: Path, capsys):
    asked = ["generate", "runs/first", "--from-test", "20", "--max-tokens", "10", "--temperature", "0", "--reference"]
    test = TEXT[-1000:].decode()
    row = json.loads(printed([*asked, "--at", "100", "--json"], capsys))
    assert (row["prompt"], row["reference"]) == (test[100:120], test[120:130])
    shown = printed([*asked, "--at", "100"], capsys)
    assert test[100:120] in shown and "Generated" in shown and " | Reference" in shown
    places = []
    for seed in (1, 1, 2):
        row = json.loads(printed([*asked, "--at", "random", "--seed", str(seed), "--json"], capsys))
        places.append(row["prompt"] + row["reference"])
        assert places[-1] in test
    assert places[0] == places[1] != places[2]
    assert main([*asked, "--at", "971"]) == 2
    assert "--at must be at most 970, because the test split has 1,000 tokens" in capsys.readouterr().err
    assert main(words("generate runs/first --from-test 20 --max-tokens 990 --reference")) == 2
    assert "The test split has 1,000 tokens, which is too few." in capsys.readouterr().err


def test_fine_tuning_starts_from_the_weights_and_vocabulary_of_a_run(home: Path, capsys):
    Path("other.txt").write_text("Another text, in quite another style. " * 50)
    few = words("--train.max-steps 1 --train.lr 0 --model.dropout 0.25 --train.tgt-len 8 --train.mem-len 8")
    arguments = ["train", "text-small", "--data", "other.txt", "--init", "runs/first", "--out", "runs/tuned", *few]
    assert main([*arguments, "--train.precision", "fp32", "--eval.mem-len", "16"]) == 0
    nats = []
    lengths = words("--mem-len 7 --tgt-len 9 --precision fp32")
    for run in ("runs/first", "runs/tuned"):  # at a learning rate of 0 they are the same weights
        [result] = json.loads(printed(["eval", run, "--data", "other.txt", "--json", *lengths], capsys))["results"]
        nats.append(result["nats"])
    assert nats[0] == nats[1]


def test_a_published_corpus_from_its_files_to_new_text(home: Path, monkeypatch, capsys):
    """As sentences in a new order each epoch."""
    text = b'He said , " no @-@ one " .\nShe did n\'t .\n' * 40
    files = {"train": "", "valid": "", "mine.txt": ""}
    splits = {"train": ("train",), "valid": ("valid",), "test": ("valid",)}
    protocols = {"sentence": {}}
    known = Dataset("word", files, (), protocols, splits, counted=("train",), vocab_file="mine.txt")
    monkeypatch.setitem(DATASETS, "tiny", known)
    Path("tiny").mkdir()
    for name in ("train", "valid"):
        (Path("tiny") / name).write_bytes(text)
    Path("tiny/mine.txt").write_text("\n".join(["<S>", *dict.fromkeys(text.decode().split()), "<unk>"]))
    assert main(words("data tiny --source tiny")) == 0
    sentences = words("--corpus.name tiny --corpus.newlines sentence --corpus.shuffle-lines")
    assert main(["train", "text-words", "--out", "runs/tiny", *TINY, *sentences, "--train.max-steps", "60"]) == 0
    result = json.loads(printed("eval runs/tiny --json", capsys))
    assert result["results"][0]["targets"] == len(text.split()) + 80
    asked = ["generate", "runs/tiny", "--prompt", 'He said , "', "--max-tokens", "12", "--seed", "1"]
    assert printed(asked, capsys).startswith('He said , "')
    assert main([*asked[:3], "Nobody said", "--max-tokens", "3", "--json"]) == 0
    shown = capsys.readouterr()
    assert set(json.loads(shown.out)) == {"prompt", "text"}
    assert "1 of 2 words of the prompt are unknown to the model" in shown.err
