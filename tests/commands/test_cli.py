"""The command line: help at once, one sentence for each mistake, and a traceback for each bug."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_runs import TINY, printed, refused, sentences_of

from transformer_xl.commands import env
from transformer_xl.commands import main as cli
from transformer_xl.commands.main import main
from transformer_xl.data.library import library
from transformer_xl.ops import choice
from transformer_xl.runtime.terminal import show_table

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory):
    """A folder with a text, a run trained on it, and a cache of its own."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
        assert main(["train", "text-small", "--data", "text.txt", "--out", "run", *TINY]) == 0
        yield folder


def test_help_of_every_command_loads_no_torch():
    script = """
import sys
from transformer_xl.commands.main import COMMANDS, main
for command in ("--help", *COMMANDS):
    try:
        main([command, "--help"])
    except SystemExit as exit:
        assert exit.code == 0
heavy = {"torch", "numpy", "safetensors", "rich.progress", "jaxtyping"} & sys.modules.keys()
assert not heavy, heavy
main(["data"])
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


READ = """
import sys
from transformer_xl.commands.main import main
status = main(["env", "--json"])
import transformer_xl.evaluation.language_model
assert "torch._dynamo" not in sys.modules, "its import takes as long as torch's"
sys.exit(status)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="OpenMP is GNU's on Linux")
def test_openmp_spins_briefly():
    """OpenMP itself reports the values that it read when it was loaded. What only reads imports no compiler."""
    kept = {name: value for name, value in os.environ.items() if name not in cli.WAITING}
    done = subprocess.run(
        [sys.executable, "-c", READ], env=kept | {"OMP_DISPLAY_ENV": "VERBOSE"}, capture_output=True, text=True
    )
    assert done.returncode == 0 and f"GOMP_SPINCOUNT = '{cli.SPINS}'" in done.stderr


def test_how_threads_wait_is_left_as_the_user_sets_it(monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert main(["--version"]) == 0 and "GOMP_SPINCOUNT" not in os.environ


def test_a_text_that_changed_since_training_is_noticed(home, capsys, tmp_path):
    """By the SHA-256 of what was read; nothing is trained or scored on it, and restored it goes on."""
    text = tmp_path / "own.txt"
    text.write_text("the quick brown fox\n" * 60)
    run = str(tmp_path / "run")
    assert main(["train", "text-small", "--data", str(text), "--out", run, *TINY]) == 0
    before = text.read_bytes()
    text.write_bytes(before.replace(b"brown", b"green"))
    for arguments in (["eval", run], ["generate", run, "--from-test", "5"], ["analyse", "length", run]):
        sentence = refused(arguments, capsys)
        assert "has changed since" in sentence and "the SHA-256 of train, valid and test differs" in sentence
    more = ["train", "text-small", "--out", run, "--resume", "--train.max-steps", "6"]
    sentence = refused(more, capsys)
    assert "has changed since" in sentence and f"--init {run}" in sentence
    assert main(["eval", run, "--data", str(text)]) == 0
    text.write_bytes(before)
    assert main(["eval", run]) == 0 and main(more) == 0
    moved = text.rename(tmp_path / "moved.txt")
    further = [*more[:-1], "7", "--data", str(moved)]
    assert main(further) == 0, "the same text may be elsewhere"
    moved.write_bytes(before + before)
    sentence = refused(further, capsys)
    assert "moved.txt has changed since" in sentence
    moved.rename(other := tmp_path / "other.txt")
    sentence = refused([*further[:-1], str(other)], capsys)
    assert f"--data must be the text of {run}, {moved}, which may have been moved, got other.txt." in sentence
    (Path(run) / "environment.json").unlink()
    sentence = refused([*further[:-1], str(other)], capsys)
    assert f"--data is {moved} in {run}, and cannot change now" in sentence, "there are no checksums"


def test_compiling_without_a_compiler_is_refused(home, capsys, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    sentence = refused(["train", "text-small", "--data", "text.txt", "--train.compile"], capsys)
    assert "C++ compiler" in sentence and not Path("runs").exists()


@pytest.mark.parametrize(("number", "status"), [(errno.ENOSPC, 2), (errno.EIO, 2), (errno.EPIPE, 141)])
@pytest.mark.parametrize("fails", ["write", "flush"])
def test_failing_output_is_reported_unless_its_reader_ended(number, status, fails, monkeypatch, capsys):
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("transformer_xl.commands.env.Env.run", lambda _: print("much") or 0)
    stream = io.StringIO()
    setattr(stream, fails, fail)
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["env"]) == status
    told = capsys.readouterr().err
    assert told == ("" if status == 141 else f"txl: standard output: {os.strerror(number)}.\n")


def test_closed_input_is_empty(home):
    command = f"{sys.executable} -m transformer_xl score run - <&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("line", "status", "told"),
    [
        (["--help"], 2, "txl: Standard output is closed. Send it to a file, or to /dev/null.\n"),
        (["train", "text-small", "--data", "text.txt", "--out", "closed", *TINY], 0, ""),
    ],
)
def test_output_that_is_closed_is_missed_by_all_but_training(home, line, status, told, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)  # as Python finds it
    assert main(line) == status and capsys.readouterr().err == told


@pytest.mark.parametrize("fault", ["int('x')", "[][0]", "import numpy; numpy.zeros(3).reshape(2)", "assert False"])
def test_a_bug_keeps_its_traceback(fault: str, monkeypatch):
    def faulty(_: object) -> None:
        exec(fault, {"__name__": "transformer_xl.somewhere"})

    monkeypatch.setattr("transformer_xl.commands.env.Env.run", faulty)
    with pytest.raises((ValueError, IndexError, AssertionError)):
        main(["env"])


def test_several_mistakes_in_generate_are_reported_at_once(home, capsys):
    sentences = sentences_of("generate run --n 0 --max-tokens 0 --top-p 3 --mem-len -1 --from-test 600", capsys)
    assert len(sentences) == 5


def test_resuming_allows_only_changes_without_effect_on_the_result(home, capsys):
    assert "got 'x'" in refused("train x --out run --resume --train.lr 3 --train.max-steps 9 --data other", capsys)
    changes = "--train.lr 3 --train.max-steps 9 --data other --init x"
    sentences = sentences_of(f"train text-small --out run --resume auto {changes}", capsys)
    assert [sentence.split()[0] for sentence in sentences] == ["train.lr", "--data", "--init"]
    assert all("--init run" in sentence for sentence in sentences)
    sentence = refused("train text-fast --out run --resume", capsys)
    assert sentence == "RECIPE must be text-small, by which run began, or run/config.toml, got text-fast."
    assert "nowhere holds no run to resume" in refused("train text-fast --out nowhere --resume", capsys)
    away = (home / "run/config.toml").rename(home / "run/away")
    sentence = refused("train --out run --resume", capsys)
    away.rename(home / "run/config.toml")
    assert "run/config.toml is missing" in sentence


@pytest.mark.parametrize("line", ["--resume text-small", "text-small --resume", "--resume auto text-small"])
def test_resume_accepts_only_the_word_auto(line, home, capsys):
    assert "max_steps = 9" in printed(f"train {line} --out run --train.max-steps 9 --print-config", capsys)


def test_env_reports_device_precision_and_backend_with_reasons(capsys):
    facts = json.loads(printed(["env", "--json"], capsys))
    assert {"python", "packages", "cores", "threads", "cpu_features", "devices", "backends", "auto"} <= facts.keys()
    assert all(choice["name"] != "auto" and choice["why"] for choice in facts["auto"].values())
    assert "precision" in printed(["env"], capsys)


def test_env_check_keeps_a_verdict_on_one_card_of_each_kind(tmp_path, monkeypatch, capsys):
    """A training on cuda:1 needs the verdict of its own card."""
    if not torch.cuda.is_available():
        assert "--check needs a CUDA device" in refused("env --check", capsys)
    tried, kinds = [], ["A card", "A card", "Another"]
    monkeypatch.setenv("TXL_HOME", str(tmp_path))
    monkeypatch.setattr("transformer_xl.ops.choice.triton_refusal", lambda *_: None)
    monkeypatch.setattr("transformer_xl.ops.choice.card", lambda device: {"card": kinds[device.index or 0]})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    for why, said in ((None, "They passed, after"), ("d q is wrong", "They failed (d q is wrong), after")):
        monkeypatch.setattr("transformer_xl.ops.testing.fault_of", lambda *on, why=why: tried.append(on[1]) or why)
        env.check_cards()
        assert said in capsys.readouterr().err
        kept = [json.loads(file.read_text()) for file in tmp_path.rglob("*.json")]
        assert {each["card"] for each in kept} == {*kinds} and len(kept) == 2
        assert all(each["why"] == why and each["date"] for each in kept)
        why_not = choice.doubt(torch.device("cuda"))
        assert why_not is None if why is None else why in str(why_not)
    assert tried == ["cuda:0", "cuda:2"] * 2
    choice.read_verdict.cache_clear()


def test_tables_in_a_pipe_are_aligned_columns(capsys):
    show_table("title", ["name", "bpc"], [["a", "1.25"], ["longer", "12.5"]])
    assert capsys.readouterr().out == "title\nname     bpc\na       1.25\nlonger  12.5\n"


def test_the_demo_holds_out_whole_files_by_a_hash_of_their_names():
    splits = library()
    names = [set(files) for files in splits.values()]
    assert names[0].isdisjoint(names[1] | names[2]) and names[1].isdisjoint(names[2])
    assert sum(map(len, splits["test"].values())) >= 500_000
    for name in set.union(*names):
        left_out = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data", "site-packages"}
        assert left_out.isdisjoint(Path(name).parts)
