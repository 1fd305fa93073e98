"""Long training runs are reliable: checkpoints are verified, a run has one writer, and its end has a reason."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock, Timeout
from hypothesis import given
from hypothesis import strategies as st
from ranks import ALONE, trainer_of
from tiny_runs import refused, without_clock

from transformer_xl.commands.main import main
from transformer_xl.config.recipe import load_recipe
from transformer_xl.config.settings import RunConfig
from transformer_xl.data.corpus import Corpus
from transformer_xl.mistake import Mistake
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.report import page
from transformer_xl.run import metrics, parts
from transformer_xl.run.folder import Run
from transformer_xl.run.parts import FILES
from transformer_xl.runtime.files import LOCK, SEAL, check_seal, lock_folder, seal, wait_for
from transformer_xl.runtime.ranks import Ranks
from transformer_xl.train import loop
from transformer_xl.train.start import STOPPED
from transformer_xl.train.step import MOST_SKIPPED, Trainer
from transformer_xl.train.writer import BackgroundWriter

RECIPE = """
[model]
vocab_size = 0
n_layer = 1
n_head = 1
d_head = 4
d_model = 6
d_inner = 5
dropout = 0.1
[corpus]
unit = "byte"
[train]
tgt_len = 8
mem_len = 8
batch_size = 4
max_steps = 12
log_every = 1
save_every = 3
keep = 9
precision = "fp32"
device = "cpu"
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A recipe, its text, and a run trained with it."""
    folder = tmp_path_factory.mktemp("trust")
    (folder / "tiny.toml").write_text(RECIPE)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    assert main(words(folder, folder / "run")) == 0
    return folder


@pytest.fixture
def run(home, tmp_path) -> Path:
    """A copy of the run."""
    shutil.copytree(home / "run", tmp_path / "run")
    return tmp_path / "run"


def words(home: Path, run: Path, *more: str) -> list[str]:
    return ["train", str(home / "tiny.toml"), "--data", str(home / "text.txt"), "--out", str(run), "--no-report", *more]


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place // 8 % len(content)] ^= 1 << place % 8
    path.write_bytes(content)


@given(data=st.binary(max_size=50), place=st.integers(0, 10**6))
def test_a_flipped_bit_is_detected(tmp_path_factory, data, place):
    folder = tmp_path_factory.mktemp("sealed")
    (folder / "a b").write_bytes(data + b"x")
    (folder / "other").write_bytes(data)
    seal(folder)
    check_seal(folder / "a b")
    flip(folder / "a b", place)
    with pytest.raises(ValueError, match=f"checksum is not the one in {SEAL}"):
        check_seal(folder / "a b")
    flip(folder / "a b", place)
    check_seal(folder / "a b")
    check_seal(folder / "other")


def test_the_checksums_equal_those_of_coreutils(run):
    tool = shutil.which("sha256sum")
    if tool is None:
        pytest.skip("there is no sha256sum")
    subprocess.run([tool, "--check", "--strict", "--quiet", SEAL], cwd=Run(run).latest, check=True)


LOST = {"a lost state of training": FILES[3:], "an empty folder": (*FILES, SEAL)}


@pytest.mark.parametrize("damage", [*FILES, SEAL, *LOST])
def test_a_damaged_last_checkpoint_is_set_aside_and_the_run_ends_with_the_same_bits(home, run, damage, capsys):
    weights = {path.name: (path / "model.safetensors").read_bytes() for path in Run(run).checkpoints()}
    figures = without_clock(run)
    last = Run(run).latest
    for name in LOST.get(damage, ()):
        (last / name).unlink()
    if damage not in LOST:
        flip(last / damage, 8 * 20 + 3)
    assert main(words(home, run, "--resume")) == 0
    told = capsys.readouterr().out
    assert "damaged_step_00000012 now, and does not count." in told
    assert (run / "checkpoints" / "damaged_step_00000012").is_dir()
    assert {path.name: (path / "model.safetensors").read_bytes() for path in Run(run).checkpoints()} == weights
    assert without_clock(run) == figures


def test_checkpoints_without_a_state_of_training_stay_and_are_scored(home, run, capsys):
    for folder in Run(run).checkpoints():
        for name in (*FILES[3:], SEAL):
            (folder / name).unlink()
    before = Run(run).checkpoints()
    assert main(words(home, run, "--resume")) == 2
    assert "holds no training state, so training cannot resume there" in capsys.readouterr().err
    assert Run(run).checkpoints() == before and main(["eval", str(run), "--max-tokens", "50"]) == 0


def test_the_best_checkpoint_is_never_guessed(run, capsys):
    """A damaged header may be that of the best: another one is not taken for it in silence, and training goes on."""
    flip(Run(run).checkpoints()[0] / "config.json", 8 * 30)
    assert "config.json is cut short, damaged or of another kind" in refused(["eval", str(run)], capsys)
    Run(run).prune(keep=2)
    assert [path.name for path in Run(run).checkpoints()] == ["step_00000009", "step_00000012"]


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("given", "must"),
    [
        (["--model.n-layer", "2"], "model.n_layer must be 1 with --init"),
        (["--model.vocab-size", "9"], "model.vocab_size must be 256 with --init"),
        (["--corpus.unit", "char"], 'corpus.unit must be "byte" with --init'),
        (["--corpus.newlines", "drop"], 'corpus.newlines must be "keep" with --init'),
        (["--corpus.min-count", "5"], "corpus.min_count must be 1 with --init"),
    ],
)
def test_settings_that_contradict_the_initial_run_are_refused(home, tmp_path, given, must, capsys):
    sentence = refused(words(home, tmp_path / "new", "--init", str(home / "run"), *given), capsys)
    assert sentence.startswith(must) and f"got {given[1]}" in sentence.replace('"', "")
    assert not (tmp_path / "new").exists()


def test_a_recipe_trains_another_shape_and_not_another_unit(home, tmp_path, capsys):
    """The shape is that of the run to start from; what agrees with it may be said, and dropout may differ."""
    line = ["train", "text-words", *words(home, tmp_path / "new", "--init", str(home / "run"))[2:]]
    short = ["--train.max-steps", "1", "--train.batch-size", "4", "--train.eval-tokens", "20"]
    sentence = refused(line, capsys)
    assert 'corpus.unit must be "byte"' in sentence and "name another recipe" in sentence
    agreed = ["--corpus.unit", "byte", "--model.n-layer", "1", "--model.vocab-size", "0", "--model.dropout", "0.3"]
    assert main([*line, *agreed, *short]) == 0
    model = load_recipe(tmp_path / "new" / "config.toml").model
    assert (model.d_model, model.d_inner, model.dropout) == (6, 5, 0.3)


def test_settings_left_open_are_those_of_the_run_that_goes_on(home, tmp_path, capsys):
    left_open = ["--train.device", "auto", "--train.precision", "auto", "--train.backend", "auto"]
    line = words(home, tmp_path / "run", *left_open, "--model.vocab-size", "0", "--resume", "auto")
    assert main(line) == 0
    settled = (tmp_path / "run" / "config.toml").read_text()
    shutil.rmtree(Run(tmp_path / "run").checkpoints()[-1])
    assert main(line) == 0 and "Resumed from step" in capsys.readouterr().out
    assert (tmp_path / "run" / "config.toml").read_text() == settled
    assert "train.lr is" in refused([*line, "--train.lr", "3"], capsys)


def test_a_run_resumes_with_the_recipe_it_began_with(home, run, tmp_path, capsys):
    before = content(run)
    (tmp_path / "tiny.toml").write_text(RECIPE + "lr = 0.5\n")
    for other in ("ptb-small", str(tmp_path / "tiny.toml")):
        sentence = refused(["train", other, "--out", str(run), "--resume"], capsys)
        assert "RECIPE must be tiny.toml" in sentence and f"{run}/config.toml, got {Path(other).name}" in sentence
    assert content(run) == before
    figures = without_clock(run)
    assert main(["train", str(run / "config.toml"), "--resume", "--out", str(run)]) == 0
    assert main(words(home, run, "--resume")) == 0
    assert without_clock(run) == figures and figures[-1]["checkpoint"] == "step_00000012", "scored again, logged once"
    facts = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps({name: facts[name] for name in facts if name != "recipe"}))
    assert main(["train", "ptb-small", "--out", str(run), "--resume"]) == 0  # of a version that did not note it


def test_one_command_begins_a_run_and_resumes_it(home, tmp_path, capsys):
    line = words(home, tmp_path / "run", "--init", str(home / "run"), "--resume", "auto")
    assert main(line) == 0
    assert "Resumed" not in capsys.readouterr().out
    for folder in Run(tmp_path / "run").checkpoints()[1:]:
        shutil.rmtree(folder)
    assert main(line) == 0
    sentence = "Resumed from step 3 of 12 (step_00000003)."
    assert sentence in capsys.readouterr().out and sentence in (tmp_path / "run" / "log.txt").read_text()
    for folder in Run(tmp_path / "run").checkpoints():  # as a run that was killed before it saved
        shutil.rmtree(folder)
    assert main(line) == 0 and Run(tmp_path / "run").latest.name == "step_00000012"
    assert "Resumed" not in capsys.readouterr().out
    for folder in Run(tmp_path / "run").checkpoints():
        flip(folder / "model.safetensors", 12345)
    names = [f"damaged_{folder.name}" for folder in Run(tmp_path / "run").checkpoints()]
    for again in (line, line[:-1]):  # nothing is thrown away because it is damaged, with auto or without it
        assert main(again) == 2
        told = capsys.readouterr().err
        assert "holds no checkpoint to go on from. Restore damaged_" in told and all(name in told for name in names)


def test_a_start_is_logged_before_the_notes_about_its_text(run):
    log = (run / "log.txt").read_text().splitlines()
    assert "M parameters on " in log[0] and log[1].startswith("train, valid, test: text.txt")


def test_beginning_again_never_removes_a_run_that_saved_in_the_meantime(run):
    with pytest.raises(FileExistsError, match="Go on with it by txl train --resume"):
        Run(run).refuse(afresh=True)


def test_a_folder_that_is_not_a_run_is_left_alone(home, tmp_path, capsys):
    (tmp_path / "letters").write_text("keep me")
    for more in ([], ["--resume", "auto"]):
        assert f"{tmp_path} exists. Choose another folder" in refused(words(home, tmp_path, *more), capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["letters"]


@pytest.mark.parametrize("more", [[], ["--resume"], ["--resume", "auto"]])
@pytest.mark.parametrize("saved", [True, False])
def test_a_run_in_progress_is_locked_before_and_after_its_first_save(home, run, more, saved, capsys):
    if not saved:
        shutil.rmtree(run / "checkpoints")
    with FileLock(run / LOCK):  # not the lock of this process
        assert refused(words(home, run, *more), capsys).startswith(f"{run} is in use by another process or thread")


class Failing(io.StringIO):
    """Standard output that fails after three writes."""

    def __init__(self, number: int):
        super().__init__()
        self.number, self.left = number, 3

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError(self.number, os.strerror(self.number))
        return super().write(text)


def test_a_reader_that_ends_stops_a_run_as_sigterm_does(home, tmp_path, monkeypatch, capsys):
    line = words(home, tmp_path / "run")
    monkeypatch.setattr(sys, "stdout", Failing(errno.EPIPE))
    assert main(line) == STOPPED
    ended = f"Stopped by a closed pipe, and saved. Go on with txl train --resume --out {tmp_path / 'run'}."
    assert (tmp_path / "run" / "log.txt").read_text().splitlines()[-1] == ended
    assert capsys.readouterr().err.splitlines() == [ended]
    monkeypatch.undo()
    assert 0 < int(Run(tmp_path / "run").latest.name.removeprefix("step_")) < 12
    assert main([*line, "--resume"]) == 0
    assert without_clock(tmp_path / "run") == without_clock(home / "run")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_run_continues_after_its_output_fails(home, tmp_path, number, monkeypatch, capsys):
    """A full disk holds standard output, or the terminal of a run in the background was closed."""
    monkeypatch.setattr(sys, "stdout", Failing(number))
    assert main(words(home, tmp_path / "run")) == 0
    [sentence] = capsys.readouterr().err.splitlines()
    assert sentence == f"txl: standard output: {os.strerror(number)}. The work continues without it."
    assert without_clock(tmp_path / "run") == without_clock(home / "run")
    assert "step 12/12" in (tmp_path / "run" / "log.txt").read_text()


def test_a_second_interrupt_ends_at_once_with_a_sentence(home, tmp_path, monkeypatch, capsys):
    advance = Trainer.advance

    def interrupted(trainer, signals):
        for _ in range(2 * (trainer.step == 7)):  # what step 6 saves may be half-written
            os.kill(os.getpid(), signal.SIGINT)
        return advance(trainer, signals)

    monkeypatch.setattr(Trainer, "advance", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(words(home, tmp_path / "run")) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    told = rf"txl: Interrupted. step_0000000[36] is saved: go on with --resume --out {tmp_path / 'run'}.\n"
    assert re.fullmatch(told, capsys.readouterr().err)


def test_a_signal_that_also_ends_the_compiler_is_no_error_of_it(home, tmp_path, monkeypatch, capsys):
    """A terminal and `timeout` signal the whole group, with the C++ compiler that torch.compile has started."""

    def stopped(trainer: Trainer, signals: list[str]) -> None:
        signals.append("SIGTERM")
        raise torch._dynamo.exc.TorchDynamoException("C++ compile error")

    monkeypatch.setattr(Trainer, "advance", stopped)
    assert main(words(home, tmp_path / "run")) == 130
    assert capsys.readouterr().err.endswith("txl: Interrupted. Nothing was saved.\n")

    alloc = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    for number, error in enumerate([torch.OutOfMemoryError("CUDA out of memory"), RuntimeError(alloc)]):

        def broken(trainer: Trainer, signals: list[str], error: Exception = error) -> None:
            signals.append("SIGTERM")
            raise error

        monkeypatch.setattr(Trainer, "advance", broken)
        assert main(words(home, tmp_path / str(number))) == 2 and "not enough memory" in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="terminals of POSIX")
def test_a_run_whose_terminal_closes_saves(home, tmp_path):
    import pty

    own, its = pty.openpty()
    line = words(home, tmp_path / "run", "--train.max-steps", "9999", "--train.save-every", "0")
    command = [sys.executable, "-c", TERMINAL, *line]
    streams: dict[str, Any] = {"stdin": its, "stdout": its, "stderr": its}
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "200"}
    with subprocess.Popen(command, **streams, env=environment, start_new_session=True) as process:
        os.close(its)
        shown = b""
        while b"loss" not in shown:
            shown += os.read(own, 10_000)
        os.close(own)
        assert process.wait(100) == STOPPED == 75
    assert len(Run(tmp_path / "run").checkpoints()) == 1
    assert (tmp_path / "run" / "log.txt").read_text().splitlines()[-1].startswith("Stopped by a signal, and saved.")


TERMINAL = """
import fcntl, signal, sys, termios
from transformer_xl.commands.main import main

fcntl.ioctl(0, termios.TIOCSCTTY)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("option", ["--data", "--out", "--corpus.vocab"])
def test_a_name_that_config_toml_cannot_hold_is_refused(home, tmp_path, option, capsys):
    odd = tmp_path / "odd\udcff"
    odd.write_text("to be or not to be\n" * 60)
    line = words(home, tmp_path / "new", option, str(odd if option != "--out" else tmp_path / "run\udcff"))
    assert f"{option} must be a name in UTF-8, got '" in refused(line, capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["odd\udcff"]


def test_a_folder_is_locked_by_one_process(tmp_path):
    (tmp_path / "kept").touch()
    with lock_folder(tmp_path), pytest.raises(Timeout):
        FileLock(tmp_path / LOCK).acquire(timeout=0)
    with lock_folder(tmp_path / "a" / "b"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"kept", LOCK}, "of a new folder nothing stays"
    with lock_folder(tmp_path / "run"):
        (tmp_path / "run").rename(tmp_path / "moved")  # ends the run with an error of writing, not of the lock


def test_a_lock_that_was_removed_is_noticed(tmp_path):
    with lock_folder(tmp_path) as check:
        check()
        (tmp_path / LOCK).unlink()
        with pytest.raises(Mistake, match=r"was removed or replaced.* go on with --resume\."):
            check()
        (tmp_path / LOCK).touch()
        with pytest.raises(Mistake, match="was removed or replaced"):
            check()


@pytest.mark.skipif(sys.platform == "win32", reason="a mapped file cannot be removed")
def test_a_token_store_may_be_removed_while_the_run_trains(home, tmp_path, monkeypatch):
    """Someone empties the cache."""
    introduce = loop.introduce

    def empty(run: Run, model: TransformerXL, corpus: Corpus, config: RunConfig, ranks: Ranks) -> None:
        introduce(run, model, corpus, config, ranks)
        shutil.rmtree(corpus.path)

    monkeypatch.setattr(loop, "introduce", empty)
    monkeypatch.setenv("TXL_HOME", str(tmp_path / "cache"))  # where no store is yet
    assert main(words(home, tmp_path / "run")) == 0
    assert without_clock(tmp_path / "run") == without_clock(home / "run")


def test_a_page_that_cannot_be_written_says_that_the_run_is_done(home, run, capsys, monkeypatch):
    (run / "report.html").mkdir()
    assert main([word for word in words(home, run, "--resume") if word != "--no-report"]) == 2
    assert (note := f"\ntxl: The run is done and saved. txl report {run} writes its page.\n") in capsys.readouterr().err
    monkeypatch.setattr(page, "write_page", lambda _: (run / "none").read_text())  # an error of the system
    assert main([word for word in words(home, run, "--resume") if word != "--no-report"]) == 2
    assert f"txl: {run / 'none'}: No such file or directory.{note}" in capsys.readouterr().err


def test_waiting_for_another_process_is_told(tmp_path, monkeypatch, capsys):
    acquire = FileLock.acquire  # a tenth of the two seconds
    monkeypatch.setattr(FileLock, "acquire", lambda lock, timeout=None: acquire(lock, timeout and timeout / 10))
    held, ended = threading.Event(), threading.Event()

    def hold():
        with FileLock(tmp_path / "lock"):  # as another process does
            held.set()
            ended.wait(0.5)
            ended.set()

    threading.Thread(target=hold).start()
    assert held.wait(60)
    with wait_for(tmp_path / "lock", "unpacking a.zip"):
        assert ended.is_set()
    assert "Another process is unpacking a.zip; this one waits" in capsys.readouterr().err


def test_copies_stay_unchanged_until_written_and_their_memory_is_reused():
    aside, tensor, found = BackgroundWriter(), torch.arange(6.0).view(2, 3).T, []
    for number in range(3):
        aside.wait()
        with torch.device("meta"):  # the default device of a process
            copy = aside.copy("tensor", tensor + number)
        aside.begin(lambda copy=copy: (threading.Event().wait(0.05), found.append((copy.clone(), copy.data_ptr()))))
    aside.wait()
    assert [int(copy[0, 0]) for copy, _ in found] == [0, 1, 2]
    assert all(torch.equal(copy, tensor + number) for number, (copy, _) in enumerate(found))
    assert len({place for _, place in found}) == 1
    assert aside.copy("tensor", tensor.double()).dtype == torch.float64
    assert BackgroundWriter(kept=False).copy("tensor", tensor).numel() == 0


def test_background_work_runs_in_order_and_reports_its_failure():
    gate, done, aside = threading.Event(), [], BackgroundWriter()

    def work():
        gate.wait(60)
        done.append(1)

    aside.begin(work)
    assert not done
    gate.set()
    aside.begin(lambda: done.append(2))
    aside.wait()
    assert done == [1, 2]

    def fail():
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"), aside:
        aside.begin(fail)
    aside.check()
    with pytest.raises(FloatingPointError), aside:
        aside.begin(lambda: done.append(3))
        raise FloatingPointError
    assert done == [1, 2, 3]
    with pytest.raises(FloatingPointError) as caught, aside:
        aside.begin(fail)
        raise FloatingPointError
    assert "No space left" in caught.value.__notes__[0]


def test_a_disk_that_fills_up_stops_the_run_with_a_sentence(home, tmp_path, monkeypatch, capsys):
    save = parts.save_file
    saved = []

    def full(tensors, path):
        saved.append(path)
        if len(saved) > 4:
            raise OSError(28, "No space left on device")
        save(tensors, path)

    monkeypatch.setattr(parts, "save_file", full)
    assert main(words(home, tmp_path / "run")) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "could not be written: No space left on device. Free some space" in told
    monkeypatch.undo()
    assert [path.name for path in Run(tmp_path / "run").checkpoints()] == ["step_00000003", "step_00000006"]
    assert main(words(home, tmp_path / "run", "--resume")) == 0
    assert without_clock(tmp_path / "run") == without_clock(home / "run")


def test_a_snapshot_does_not_change_while_training_continues():
    trainer = trainer_of("averaged", ALONE)
    for _ in range(3):
        trainer.advance()
    state = trainer.state()
    kept = {name: value.clone() for name, value in state.tensors.items()}
    trainer.advance()
    assert kept and all(torch.equal(value, kept[name]) for name, value in state.tensors.items())


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("module", "the loss"),
        ("gradient", "a gradient"),
        ("weight", "the weight backbone.layers.1.attention.qkv.weight"),
        ("memory", "the memory of layer 1"),
    ],
)
def test_the_first_value_that_is_not_finite_is_named(where, told):
    trainer = trainer_of("plain", ALONE)
    trainer.advance()
    layer, bias = trainer.model.backbone.layers[1], trainer.model.softmax.bias
    if where == "module":
        layer.feed_forward.outer.register_forward_hook(lambda m, i, out: out * float("inf"))
    elif where == "gradient":
        bias.register_hook(lambda gradient: gradient * float("nan"))
    elif where == "weight":
        with torch.no_grad():
            layer.attention.qkv.weight[0, 0] = float("nan")
    else:
        trainer.memory.layers[1][0, 0, 0] = float("inf")
    with pytest.raises(FloatingPointError, match=rf"first nan or infinity is in {told}\. Lower train\.lr") as caught:
        for _ in range(MOST_SKIPPED):
            assert trainer.advance().skipped
    assert f"{MOST_SKIPPED} steps in a row" in str(caught.value)


def test_metrics_are_on_the_disk_before_their_checkpoint(home, tmp_path, monkeypatch):
    order, rename = [], Path.rename

    def renamed(path: Path, to: Path) -> Path:
        order.append(to.name)
        return rename(path, to)

    monkeypatch.setattr(metrics, "sync", lambda path: order.append(path.name))
    monkeypatch.setattr(Path, "rename", renamed)
    assert main(words(home, tmp_path / "run")) == 0
    steps = [i for i, name in enumerate(order) if name.startswith("step_")]
    assert len(steps) == 4
    for number, i in enumerate(steps, start=1):
        assert order[:i].count("metrics.jsonl") >= number
