"""Flip bits in the checkpoints of a stopped run, and check that each flip is detected or harmless.

    python -m experiments.flips --times 200

Each case flips one bit (or, with probability 1/5, a few bits) in one file of a checkpoint in a copy of the run. All
files are equally likely, however small, and half of the flips in tensors are in the header. Then `txl train --resume`
or `txl eval` runs as a Python call. Three outcomes are correct: a sentence and status 2; a warning and the result of an
undamaged copy; the same result without a warning, if nothing depends on the bit. Exit status 1 means that a flip
silently changed figures, or caused a traceback or a hang.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.trial import CRASH, Life, differences, markdown, saved, verdict, without_clocks, write_recipe

KINDS = {
    "refused": "a sentence, status 2",
    "went back": "a warning, and the right end from an older checkpoint; for eval, the figures of another one",
    "warned": "a warning beside the right figures",
    "harmless": "the right figures",
    "SILENT": "other figures without a word",
    "WRONG": "other figures after a warning",
    "BROKEN": "a traceback, a hang or another status",
}
LAWFUL = {name for name in KINDS if name.islower()}


@dataclass
class Flip:
    """One damaged checkpoint and its outcome."""

    command: str
    checkpoint: str
    file: str
    byte: int
    bits: list[int]
    kind: str
    said: str


class Flips:
    """An interrupted run, and the results of an undamaged copy."""

    def __init__(self, recipe: Path, draw: random.Random) -> None:
        self.recipe, self.draw, self.folder = recipe, draw, recipe.parent
        self.run, self.whole, self.copy = (self.folder / name for name in ("interrupted", "whole", "copy"))
        life = Life("train", recipe, "--out", self.run, home=self.folder / "home")
        assert life.lives_until_told(284), f"the run failed: {life.complaints}"
        life.process.terminate()
        assert life.end() == 75, f"the run was not stopped but ended: {life.complaints}"
        shutil.copytree(self.run, self.whole)
        assert call("train", recipe, "--out", self.whole, "--resume")[0] == 0, "the unharmed run goes on"
        shutil.copytree(self.run, self.copy)
        self.figures = {path.name: figures(call("eval", path, "--json")[1]) for path in saved(self.copy)}
        self.right = figures(call("eval", self.copy, "--json")[1])

    def flip(self) -> Flip:
        """Damage a copy, use it, and classify the outcome."""
        shutil.rmtree(self.copy)
        shutil.copytree(self.run, self.copy)
        command = self.draw.choice(["train --resume", "eval"])
        folder = self.draw.choice(saved(self.copy))
        if self.draw.random() < 2 / 3:  # the one that is read
            folder = saved(self.copy)[-1] if command != "eval" else best(self.copy)
        file = self.draw.choice(sorted(folder.iterdir()))
        byte, bits = self._harm(file)
        if command == "eval":
            status, out, told = call("eval", self.copy, "--json")
            right = figures(out) == self.right
            back = not right and figures(out) in self.figures.values()
        else:
            status, out, told = call("train", self.recipe, "--out", self.copy, "--resume")
            right = status == 0 and not list(differences(self.copy, self.whole))
            back = right and any(self.copy.glob("checkpoints/damaged*"))
        said = told.strip() or "\n".join(line for line in out.splitlines() if "damaged" in line)
        kind = judge(status, right, said, back)
        return Flip(command, folder.name, file.name, byte, bits, kind, said.replace(str(self.copy), "RUN"))

    def _harm(self, file: Path) -> tuple[int, list[int]]:
        """Flip bits of one byte, and return the numbers of the byte and the bits."""
        content = bytearray(file.read_bytes())
        end = len(content)
        if file.suffix == ".safetensors" and self.draw.random() < 1 / 2:
            end = 8 + int.from_bytes(content[:8], "little")
        byte = self.draw.randrange(end)
        bits = self.draw.sample(range(8), self.draw.randint(2, 4) if self.draw.random() < 1 / 5 else 1)
        content[byte] ^= sum(1 << bit for bit in bits)
        file.write_bytes(content)
        return byte, sorted(bits)


def judge(status: int | None, right: bool, said: str, back: bool) -> str:
    if status == 2 and said.startswith("txl: ") and "Traceback" not in said:
        return "refused"
    if status != 0:
        return "BROKEN"
    if back and said:
        return "went back"
    if right:
        return "warned" if said else "harmless"
    return "WRONG" if said else "SILENT"


def figures(out: str) -> Any:
    """The results that `txl eval --json` printed; other lines may come first."""
    lines = [line for line in out.splitlines() if line.startswith("{")]
    return without_clocks(json.loads(lines[-1])["results"]) if lines else None


def best(run: Path) -> Path:
    from transformer_xl.checkpoint import find_checkpoint

    return find_checkpoint(run)


def call(*arguments: str | Path, patience: int = 120) -> tuple[int | None, str, str]:
    """Run `txl` in this process. Returns status (None for an exception), standard output and standard error."""
    from transformer_xl.cli.main import main

    def give_up(*_: object) -> None:
        raise AssertionError(f"it hangs: {patience} s")

    out, err = io.StringIO(), io.StringIO()
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(patience)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            status = main([str(argument) for argument in arguments])
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return None, out.getvalue(), f"{err.getvalue()}{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
    return status, out.getvalue(), err.getvalue()


def summary(flips: Sequence[Flip]) -> str:
    """The number of outcomes of each kind, by file."""
    counts = Counter((flip.command, flip.file, flip.kind) for flip in flips)
    kinds = [kind for kind in KINDS if any(flip.kind == kind for flip in flips)]
    rows = []
    for command, file in sorted({(command, file) for command, file, _ in counts}):
        numbers = [counts[command, file, kind] for kind in kinds]
        rows.append((f"{command}, {file}", sum(numbers), *numbers))
    rows.append(("all", len(flips), *(sum(flip.kind == kind for flip in flips) for kind in kinds)))
    return markdown(("command, file", "flips", *kinds), rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    start, done = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TXL_HOME"] = str(Path(folder) / "home")
        flips = Flips(write_recipe(Path(folder), CRASH, given.seed), random.Random(given.seed))
        for number in range(given.times):
            done.append(flip := flips.flip())
            if flip.kind not in LAWFUL or number % 20 == 19:
                print(f"{number + 1}: {flip}", file=sys.stderr, flush=True)
    print(summary(done))
    print("\n" + "\n".join(f"- {kind}: {meaning}" for kind, meaning in KINDS.items() if kind in {f.kind for f in done}))
    problems = [f"{flip.kind}: {flip}" for flip in done if flip.kind not in LAWFUL]
    status = verdict(problems)
    facts = {"seed": given.seed, "seconds": time.perf_counter() - start}
    print(json.dumps(facts | {"flips": [asdict(flip) for flip in done], "problems": problems}))
    return status


if __name__ == "__main__":
    sys.exit(main())
