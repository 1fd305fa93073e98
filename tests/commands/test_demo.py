"""`txl demo` keeps its time limit, also where scoring slows down, and does not touch other folders."""

from __future__ import annotations

import gzip
import os
import re
from itertools import islice, pairwise
from pathlib import Path
from shlex import split as words
from typing import Any

import pytest
from filelock import FileLock
from torch import Tensor

from transformer_xl.commands.demo import measure
from transformer_xl.commands.main import main
from transformer_xl.config.recipe import load_recipe
from transformer_xl.data.corpus import Corpus
from transformer_xl.data.loader import StreamLoader
from transformer_xl.evaluation.score import evaluate
from transformer_xl.model.transformer_xl import DecoderLayer
from transformer_xl.run.checkpoint import load_config, load_model
from transformer_xl.run.folder import find_checkpoint
from transformer_xl.run.metrics import Metrics
from transformer_xl.runtime.files import LOCK

TEXT = Path(os.__file__).read_bytes()[:8000]
TINY = words(
    "--model.n-layer 1 --model.d-model 16 --model.n-head 2 --model.d-head 8 --model.d-inner 32"
    " --model.ngram-rows 500 --train.tgt-len 16 --train.mem-len 16 --train.batch-size 4 --train.eval-tokens 200"
    " --train.precision fp32 --eval.mem-len 32 --eval.batch-size 5"
)
forward = DecoderLayer.forward
TIMED = ("commands.demo", "train.step")
TIMED += ("evaluation.score", "runtime.terminal")
"""Files that look at the clock."""


class Machine:
    """A clock that advances only with a model's work: a step takes `step` seconds."""

    def __init__(self, step: float):
        self.now = 0.0
        self.token = step / (3 * 4 * 16)  # to train on one costs three times as much as to read it

    def perf_counter(self) -> float:
        return self.now

    def work(self, tokens: int, training: bool) -> None:
        self.now += self.token * max(tokens, 5) * (3 if training else 1)


def on(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the clock and the model's work by this machine's."""

    def worked(layer: DecoderLayer, x: Tensor, *others: Any, **options: Any) -> Tensor:
        machine.work(len(x) * x.shape[1], layer.training)
        return forward(layer, x, *others, **options)

    monkeypatch.setattr(DecoderLayer, "forward", worked)
    for file in TIMED:
        monkeypatch.setattr(f"transformer_xl.{file}.time", machine)


@pytest.fixture
def demo(tmp_path: Path, monkeypatch):
    """A small library and a small model; call it with a clock and options, and it returns the exit status."""
    monkeypatch.setenv("TXL_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformer_xl.data.library.library", lambda: {
        "train": {"a.py": TEXT}, "valid": {"b.py": TEXT[:500]}, "test": {"c.py": TEXT[:3000]}
    })  # fmt: skip
    monkeypatch.setattr(
        "transformer_xl.commands.demo.load_recipe", lambda name, words: load_recipe(name, [*words, *TINY])
    )

    def run(machine: Machine, options: str = "--minutes 1") -> int:
        on(machine, monkeypatch)
        return main(words(f"demo {options}"))

    return run


def test_the_demo_trains_scores_generates_and_compares(demo, capsys):
    """Its verdict on gzip is the plain comparison."""
    assert demo(Machine(0.1), "--minutes 0.5 --out runs/demo") == 0
    shown = capsys.readouterr().out
    config = load_config(find_checkpoint("runs/demo"))
    passes = config.train.max_steps * 4 * 16 / len(TEXT)
    assert passes > 1.5 and config.model.ngram_dropout == 1 - 1 / passes  # as `txl train --data` leaves them out
    assert "train 1 files, 8,000 bytes" in shown and "class Memory:" in shown and "on 3,000 bytes" in shown
    table = re.findall(r"^(gzip|bzip2|xz|Transformer-XL, memory \d+)(?: -\w+)?.* (\d+\.\d{3})$", shown, re.MULTILINE)
    figures = {name: float(bpc) for name, bpc in table}
    assert {"gzip", "bzip2", "xz", "Transformer-XL, memory 0", "Transformer-XL, memory 32"} <= figures.keys()
    ours = min(bpc for name, bpc in figures.items() if name.startswith("Transformer-XL"))
    gzipped = 8 * len(gzip.compress(TEXT[1:3000], 9)) / 2999  # the first byte is context only
    assert figures["gzip"] == pytest.approx(gzipped, abs=1e-3)
    assert ("It beats gzip -9" in shown) == (ours < gzipped) and ("did NOT beat gzip -9" in shown) == (ours >= gzipped)
    assert main(words("generate runs/demo --max-tokens 5 --seed 1")) == 0
    sample = shown.partition("\n\nclass Memory:\n")[2].partition("\n\nbits per byte")[0]
    assert 100 < len(sample) <= 400, "a sample fits on a screen"


@pytest.mark.parametrize("step", [0.5, 1.0])
def test_the_demo_ends_in_time(demo, step):
    machine = Machine(step)
    assert demo(machine, "--minutes 1 --out run") == 0
    assert 40 < machine.now <= 60
    steps = load_config(find_checkpoint("run")).train.max_steps
    assert load_recipe("run/config.toml").train.max_steps == steps
    assert find_checkpoint("run").name == f"step_{steps:08d}"
    entries = Metrics("run/metrics.jsonl").entries()
    shown = [(entry["step"], entry["lr"], entry["seconds"]) for entry in entries if entry["split"] == "train"]
    assert shown[-1][0] == steps and shown[-1][1] < 0.05 * max(lr for _, lr, _ in shown)  # the line ends
    assert max(b[2] - a[2] for a, b in pairwise(shown)) <= 10
    [targets] = {entry["targets"] for entry in entries if entry["split"] == "test"}
    assert 0 < targets <= 2999


def test_a_slow_machine_scores_less_text_and_compressors_read_the_same_text(demo, capsys):
    assert demo(Machine(2), "--minutes 1 --out run") == 0
    shown = capsys.readouterr().out
    sample = shown.partition("\n\nclass Memory:\n")[2].partition("\n\nbits per byte")[0]
    assert 80 < len(sample) < 300, "a quarter of a sample"
    [scored] = [int(size.replace(",", "")) for size in re.findall(r"on ([\d,]+) of 3,000 bytes", shown)]
    assert 80 <= scored < 2999
    rows = [TEXT[1 + start : 1 + start + scored // 5] for start in range(0, 3000, 600)]
    assert f"{8 * len(gzip.compress(b''.join(rows), 9)) / scored:.3f}" in shown


def test_figures_are_of_the_bytes_that_the_longest_memory_had_time_for(demo, monkeypatch):
    assert demo(Machine(2), "--minutes 1 --out run") == 0
    loaded, test = load_model("run"), Corpus.open(load_config(find_checkpoint("run")).corpus.name).split("test")
    machine = Machine(0.5)
    on(machine, monkeypatch)
    results, scored = measure(loaded, test, 18.0)
    assert machine.now <= 18 and 80 <= len(scored) < 2999 - 80
    segments = len(scored) // (5 * 16)
    loader = StreamLoader(test, batch_size=5, tgt_len=16)
    for memory, result in zip((32, 16, 0), results, strict=True):
        plain = evaluate(loaded.model, islice(loader, segments), result.lengths)
        assert (result.targets, result.lengths.mem_len) == (len(scored), memory)
        assert result.targets == plain.targets and result.nats == pytest.approx(plain.nats, rel=1e-6)
    results, scored = measure(loaded, test, machine.now)
    assert len(scored) == 3 * 5 * 16 and len({result.nats for result in results}) == 3, "no memory was used"


def test_a_second_one_is_refused_while_the_first_runs(demo, tmp_path, capsys):
    assert demo(Machine(4)) == 0
    run = tmp_path / "cache" / "demo" / "run"
    with FileLock(run / LOCK):  # as the one that runs there does
        assert demo(Machine(4)) == 2
    assert "in use by another process" in capsys.readouterr().err and find_checkpoint(run)
    assert demo(Machine(4)) == 0
