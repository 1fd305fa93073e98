"""Shared code of crash.py, flips.py, soak.py and overhead.py: a small text, a small recipe, and `txl` as a process.
All facts about a run come from its output and its folder.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import IO, Any

CLOCKS = {"seconds", "tokens_per_second"}
"""What may differ between two runs that did the same."""
SUMS = "SHA256SUMS"

CRASH = """
[corpus]
name = "{text}"
unit = "word"
shuffle_lines = true

[model]
vocab_size = 0
n_layer = 2
n_head = 2
d_head = 32
d_model = 64
d_inner = 128
dropout = 0.1
dropatt = 0.1

[train]
tgt_len = 32
mem_len = 32
random_tgt_len = true
batch_size = 8
max_steps = 300
optimizer = "muon"
momentum = 0.95
lr = 1e-2
min_lr_ratio = 0.1
average_from = 150
log_every = 1
eval_every = 50
save_every = 10
keep = 3
sample_every = 70
sample_tokens = 20
"""
"""All that has a state which must come back: dropout, two optimizers, an average of weights, shuffled lines, segments
of random lengths, memories."""


def write_text(path: Path, seed: int, size: int = 200_000) -> Path:
    """Write lines of made-up words, some far more frequent than others; the seed determines the text."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(500)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    lines: list[str] = []
    while size > 0:
        lines.append(" ".join(draw.choices(words, weights, k=draw.randint(4, 20))))
        size -= len(lines[-1]) + 1
    path.write_text("\n".join(lines) + "\n")
    return path


def write_recipe(folder: Path, recipe: str, seed: int) -> Path:
    """Write a text and a recipe that names it into `folder`."""
    text = write_text(folder / "text.txt", seed)
    (folder / "recipe.toml").write_text(recipe.format(text=text.resolve().as_posix()))
    return folder / "recipe.toml"


class Life:
    """A process of `txl` from its start to its end. Times are seconds since the start. Its output is kept line by
    line, or with `listen` false left to be read."""

    def __init__(self, *arguments: str | Path, home: Path | None = None, threads: int = 1, listen: bool = True) -> None:
        own = {"OMP_NUM_THREADS": str(threads)} | ({} if home is None else {"TXL_HOME": str(home)})
        command = [sys.executable, "-m", "transformer_xl", *map(str, arguments)]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._start = time.perf_counter()
        self.process = subprocess.Popen(command, **pipes, env=os.environ | own, text=True, errors="replace")
        self.said: list[tuple[float, str]] = []
        self.complaints: list[str] = []
        self.steps: dict[int, float] = {}
        """When each step was told of, in a run that logs every one."""
        readers = (self._listen, self._hear_out) if listen else (self._hear_out,)
        self._readers = [Thread(target=reader, daemon=True) for reader in readers]
        for reader in self._readers:
            reader.start()

    @property
    def age(self) -> float:
        return time.perf_counter() - self._start

    @property
    def reached(self) -> int:
        """The last step that it reported, 0 before the first."""
        return max(self.steps, default=0)

    @property
    def first(self) -> int | None:
        """The first step that it reported."""
        return min(self.steps, default=None)

    def lives_until(self, moment: float) -> bool:
        try:
            self.process.wait(max(moment - self.age, 0))
        except subprocess.TimeoutExpired:
            return True
        return False

    def lives_until_told(self, step: int) -> bool:
        """Wait until the process reports `step`, and return whether it did."""
        while self.reached < step:
            if not self.lives_until(self.age + 0.005):
                return False
        return True

    def end(self, patience: float = 600) -> int:
        """Wait for the end, and return the exit status, or -N if signal N ended it.

        Raises:
            TimeoutError: it hangs; it is killed then.
        """
        if self.lives_until(self.age + patience):
            self.process.kill()
            raise TimeoutError(f"{self.process.args} was still there after {patience} s")
        for reader in self._readers:
            reader.join()
        return self.process.returncode

    def _listen(self) -> None:
        for line in _pipe(self.process.stdout):
            self.said.append((self.age, line.rstrip("\n")))
            if step := re.match(r"step +(\d+)/", line):
                self.steps.setdefault(int(step[1]), self.age)

    def _hear_out(self) -> None:
        self.complaints += [line.rstrip("\n") for line in _pipe(self.process.stderr)]


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None, "the process was started with pipes"
    return stream


def saved(run: Path) -> list[Path]:
    """A run's whole checkpoints, oldest first."""
    return sorted(path for path in run.glob("checkpoints/step_*") if re.fullmatch(r"step_\d+", path.name))


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def saved_step(run: Path) -> int:
    """The step of a run's last whole checkpoint, 0 before the first."""
    return max(map(step_of, saved(run)), default=0)


def half_written(run: Path) -> set[str]:
    return {path.name for path in run.glob("checkpoints/.tmp-*")}


def metrics(run: Path) -> list[dict[str, Any]]:
    """The entries of a run's metrics file without times and speeds."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [without_clocks(json.loads(line)) for line in lines]


def without_clocks(value: Any) -> Any:
    """JSON without times and speeds."""
    if isinstance(value, Mapping):
        return {name: without_clocks(inner) for name, inner in value.items() if name not in CLOCKS}
    return [without_clocks(inner) for inner in value] if isinstance(value, list) else value


def differences(run: Path, whole: Path) -> Iterator[str]:
    """The differences between a finished run and an undisturbed one: the bytes of tensors and the JSON, without times,
    of its last checkpoint, and every line of its metrics."""
    ours, theirs = saved(run)[-1], saved(whole)[-1]
    if ours.name != theirs.name:
        yield f"it ends with {ours.name}, not {theirs.name}"
        return
    for name in sorted({path.name for folder in (ours, theirs) for path in folder.iterdir()} - {SUMS}):
        a, b = ours / name, theirs / name
        if not (a.exists() and b.exists()):
            yield f"only one has {name}"
        elif name.endswith(".json"):
            if without_clocks(json.loads(a.read_text())) != without_clocks(json.loads(b.read_text())):
                yield f"{name} differs"
        elif a.read_bytes() != b.read_bytes():
            yield f"{name} differs"
    yield from _metric_differences(metrics(run), metrics(whole))


def _metric_differences(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> Iterator[str]:
    def keys(entries: Iterable[dict[str, Any]]) -> Counter[tuple[Any, Any]]:
        return Counter((entry["step"], entry.get("split")) for entry in entries)

    for what, left in (("lacks", keys(theirs) - keys(ours)), ("has once more", keys(ours) - keys(theirs))):
        if left:
            names = [f"{split} at step {step}" for step, split in left]
            yield f"metrics.jsonl {what} {len(names)} entries: {', '.join(names[:5])}"
    if keys(ours) == keys(theirs) and list(ours) != list(theirs):
        first = next(pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1])
        yield f"metrics.jsonl differs first in {first[0]}, where there should be {first[1]}"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table, every column but the first aligned to the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


def cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else "" if value is None else str(value)


def verdict(problems: Sequence[str]) -> int:
    """Report the broken laws, and return the exit status."""
    print(f"\nLaws broken: {len(problems) or 'none'}" + "".join(f"\n- {problem}" for problem in problems), flush=True)
    return int(bool(problems))
