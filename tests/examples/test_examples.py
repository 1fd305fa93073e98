"""The examples run by the commands in their headers, print what their headers show, and keep their promises."""

from __future__ import annotations

import ast
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transformer_xl import load_model
from transformer_xl.commands.main import main

pytestmark = [pytest.mark.outside, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "memory_and_attention.ipynb"

SMALL = {
    "own_text.py": "--steps 100",
    "training_loop.py": "--steps 40",
    "log_stream.py": "--steps 120 --train-lines 1000",
    "fine_tune.py": "--steps 40",
    "classify.py": "--steps 10 --count 8 --epochs 1 --seeds 1",
    "hf_trainer.py": "--steps 30",
    "music.py": "--steps 20 --chorales 26",
}
"""Options with which each example takes seconds."""
NEEDS = {"classify.py": ("sklearn", "transformers"), "hf_trainer.py": ("transformers", "accelerate")}
NEEDS["music.py"] = ("music21", "verovio")


def header(name: str) -> str:
    docstring = ast.get_docstring(ast.parse((EXAMPLES / name).read_text()))
    assert docstring, f"{name} has no header"
    return docstring


def command_and_output(name: str) -> tuple[str, list[str]]:
    """The command in the header of an example, and the lines that follow it."""
    _, _, rest = header(name).partition(f"$ python examples/{name}")
    assert rest, f"the header of {name} has no command that runs it"
    options, *lines = rest.split("\n\n")[0].split("\n")
    return f"python examples/{name}{options}", lines


def shape(line: str) -> str:
    """A line of output without its numbers and without what follows a colon."""
    return re.sub(r"[\d.,]+", "#", line.partition(":")[0]).strip()


def printed(name: str, folder: Path, options: str = "", text: str | None = None) -> str:
    """What an example prints when the command of its header runs in `folder`, with more options."""
    for module in NEEDS.get(name, ()):
        pytest.importorskip(module)
    (folder / "examples").symlink_to(EXAMPLES)
    command, _ = command_and_output(name)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TXL_HOME": str(folder / "home")}
    words = [sys.executable, *shlex.split(command)[1:], *shlex.split(options or SMALL[name])]
    done = subprocess.run(words, cwd=folder, env=environment, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def check_header(name: str, output: str) -> None:
    """Each line that the header shows is one that the example prints, apart from numbers and samples of text."""
    shapes = {shape(line) for line in output.splitlines()}
    _, shown = command_and_output(name)
    assert len(shown) > 1, f"the header of {name} shows no output"
    missing = [line for line in shown if line != "..." and line[:1] != "|" and shape(line) not in shapes]
    assert not missing, f"{name} does not print {missing}"


def figures(pattern: str, output: str) -> list[float]:
    """The numbers at the only group of `pattern`, in the order of the output."""
    found = [float(number.replace(",", "")) for number in re.findall(pattern, output)]
    assert found, f"no {pattern!r} in {output}"
    return found


def test_every_example_is_listed_and_tested():
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert files == {*SMALL, "compress.py", "stream_onnx.py", NOTEBOOK.name, "README.md"}
    listed = (EXAMPLES / "README.md").read_text()
    assert not [name for name in files - {"README.md"} if f"({name})" not in listed]
    for name in SMALL:
        assert f"`{command_and_output(name)[0]}`" in listed


def test_own_text(tmp_path):
    output = printed("own_text.py", tmp_path)
    check_header("own_text.py", output)
    longer, same, none = figures(r"([\d.]+) bits per byte with", output)
    assert max(longer, same) < none < 6
    assert load_model(tmp_path / "runs" / "own-text").vocab.unit == "byte"
    again = subprocess.run(
        [sys.executable, "examples/own_text.py"], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert again.returncode and "--out must be a new folder" in again.stderr


def test_training_loop(tmp_path):
    output = printed("training_loop.py", tmp_path)
    check_header("training_loop.py", output)
    assert max(figures(r"([\d.]+) bits per byte", output)) < 5.5
    loaded = load_model(tmp_path / "runs" / "own-loop" / "checkpoint")
    assert loaded.score("def close(self):").bits_per_byte < 7
    assert (loaded.config.eval_lengths.tgt_len, loaded.config.eval_lengths.mem_len) == (64, 64)


def test_compress(tmp_path, monkeypatch, capsys):
    """A text is restored to the byte, its file is as large as the model says, and a damaged one is refused."""
    pytest.importorskip("constriction")
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the cat sat on the mat, again and again\n" * 200)
    sizes = "--model.n-layer 1 --model.d-model 16 --model.d-inner 16 --model.n-head 2 --model.d-head 8"
    words = f"train text-small --data text.txt {sizes} --train.lr 1e-2 --train.max-steps 30 --out run"
    assert main(words.split()) == 0
    few = bytes(range(256)) + Path("text.txt").read_bytes()[:1000]
    Path("few").write_bytes(few)
    example = [sys.executable, str(EXAMPLES / "compress.py"), "run"]
    done = subprocess.run([*example, "few", "small"], capture_output=True, text=True, check=True)
    [real, own] = map(float, re.findall(r"([\d.]+) bits per byte;.* figure is ([\d.]+)", done.stdout)[0])
    code = Path("small").read_bytes().partition(b"\n")[2]
    assert own <= 8 * len(code) / len(few) <= own * 1.02 + 8 * 8 / len(few) + 0.2 and real < 9
    subprocess.run([*example, "small", "again", "--restore"], check=True, capture_output=True)
    assert Path("again").read_bytes() == few
    Path("small").write_bytes(Path("small").read_bytes()[:-8] + bytes(8))
    Path("nothing").write_bytes(b"")
    subprocess.run([*example, "nothing", "smallest"], check=True, capture_output=True)
    subprocess.run([*example, "smallest", "nothing", "--restore"], check=True, capture_output=True)
    assert Path("nothing").read_bytes() == b""
    other = subprocess.run([*example, "text.txt", "other", "--restore"], capture_output=True, text=True)
    assert other.returncode and "SOURCE must be a file that this program has compressed" in other.stderr
    damaged = subprocess.run([*example, "small", "other", "--restore"], capture_output=True, text=True)
    assert damaged.returncode and "another one than was compressed" in damaged.stderr and not Path("other").exists()


def test_log_stream(tmp_path):
    output = printed("log_stream.py", tmp_path)
    check_header("log_stream.py", output)
    [flagged], [right], [planted] = (
        figures(pattern, output) for pattern in (r"Flagged (\d+)", r"; (\d+) of them", r"the (\d+) planted")
    )
    assert right >= 0.7 * planted > 0 and right >= 0.7 * flagged
    early, late = figures(r"this process has (\d+) MB", output)
    assert late < early + 30


def test_log_stream_of_standard_input(tmp_path):
    lines = [f"12:00:00 line {number % 7} of a log\n" for number in range(700)]
    output = printed("log_stream.py", tmp_path, "- --steps 60 --train-lines 500", "".join([*lines, "PANIC: zzzz!\n"]))
    assert "bits per byte: PANIC: zzzz!" in output
    assert "After 201 lines" in output and "planted" not in output


def test_a_short_log_is_refused_before_a_model_is_trained(tmp_path):
    (tmp_path / "log").write_text("one line\n")
    for options in ("", "--train-lines=0"):
        line = [sys.executable, "examples/log_stream.py", str(tmp_path / "log"), *options.split()]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 1 and done.stderr.startswith("LOG must have more than --train-lines")


def test_fine_tune(tmp_path):
    output = printed("fine_tune.py", tmp_path)
    check_header("fine_tune.py", output)
    before = figures(r"before, .*: ([\d.]+) bits", output)
    after = figures(r"after, .*: ([\d.]+) bits", output)
    assert max(after) < min(before)
    assert len(before) == len(after) == 2


def test_classify(tmp_path):
    """Of one epoch over a few documents only the features learn something; a guess is right in one of 8."""
    output = printed("classify.py", tmp_path)
    check_header("classify.py", output)
    shares = figures(r"right: ([\d.]+)%", output)
    assert len(shares) == 3 and min(shares[1:]) > 100 / 8 + 5  # the standard error is 3


def test_hf_trainer(tmp_path):
    output = printed("hf_trainer.py", tmp_path)
    check_header("hf_trainer.py", output)
    assert max(figures(r"([\d.]+) bits per byte", output)) < 5.5


def test_music(tmp_path):
    output = printed("music.py", tmp_path)
    check_header("music.py", output)
    assert max(figures(r"([\d.]+) nats per token", output)) < math.log(257)
    run = tmp_path / "runs" / "music"
    assert (run / "chorale.mid").read_bytes().startswith(b"MThd")
    assert "<svg" in (run / "chorale.svg").read_text() and (run / "chorale.musicxml").exists()
    assert load_model(run / "lstm").vocab.unit == "id"


def test_the_grid_of_a_chorale_is_its_notes(monkeypatch):
    """Read, written as ids and read again, a chorale has the same notes at the same times."""
    music21 = pytest.importorskip("music21")
    pytest.importorskip("verovio")
    monkeypatch.syspath_prepend(EXAMPLES)
    import music

    score = music21.corpus.parse("bwv66.6")
    again = music.notation((1 + 64 * np.arange(4) + music.grid_of(score)).ravel().tolist())

    def notes(of) -> list[list[tuple[float, float, int]]]:
        lines = [part.stripTies().flatten().notes for part in of.parts]
        return [[(float(n.offset), float(n.quarterLength), n.pitch.midi) for n in line] for line in lines]

    assert [len(part.notesAndRests) for part in music.notation([5, 6, 7, 0]).parts] == [0] * 4
    upbeat = score.parts[0].getElementsByClass("Measure")[0].paddingLeft
    assert notes(again) == [[(at + upbeat, *rest) for at, *rest in line] for line in notes(score)]


@pytest.mark.filterwarnings("ignore")
def test_notebook(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs for cell in cells[1:]) and NOTEBOOK.stat().st_size < 200_000
    shown = [kinds(cell) for cell in cells]
    steps = re.search(r"STEPS = \d+", cells[0].source)
    assert steps
    cells[0].source = cells[0].source.replace(steps[0], "STEPS = 10")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert [kinds(cell) for cell in cells] == shown


def kinds(cell: Any) -> list[str]:
    """The kind of each output of a cell, but for printed lines: lines of progress come only on a slow machine."""
    return [output.output_type for output in cell.outputs if output.output_type != "stream"]
