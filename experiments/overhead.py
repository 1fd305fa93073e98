"""Measure how many steps of training a checkpoint of the paper's 41M model costs.

    python -m experiments.overhead [--saves 4] [--every 8] [--train.batch-size 2 ...]

The script trains enwik8-12l on enwik8, in smaller batches, and reads the time of every step from the printed lines. A
save starts after its step and ends when the folder has its final name. Its overhead is the time of the steps in between
minus the time of as many steps without a save. The median time of a step is measured around each save, because the
machine's speed drifts. The exit status is 1 unless the median overhead is below one step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from experiments.trial import Life, markdown, saved, saved_step, verdict

SMALLER = ("--train.batch-size", "2", "--train.tgt-len", "256", "--train.mem-len", "256")


@dataclass
class Save:
    """One checkpoint, and the steps during which it was written. All times are in seconds."""

    step: int
    written: float
    """From the end of its step until it stood under its name."""
    steps: int
    """How many steps ended later for it."""
    taken: float
    usual: float
    """A step without a save, median of those around."""

    @property
    def overhead(self) -> float:
        return self.taken - self.steps * self.usual


def watch(run: Path, settings: list[str], saves: int, every: int, threads: int) -> tuple[Life, dict[int, float]]:
    """Train until this many checkpoints are written, and a few more steps; return when each got its final name."""
    logged = ("--train.log-every", "1", "--train.save-every", str(every), "--train.eval-every", "0")
    life, seen = Life("train", "enwik8-12l", "--out", run, *logged, *settings, threads=threads), {}
    last = saves * every
    while life.reached < last + every - 1 or last not in seen:
        if not life.lives_until(life.age + 0.005):
            raise RuntimeError(f"training ended: {life.complaints}")
        if (step := saved_step(run)) and step not in seen:
            seen[step] = life.age
    return life, seen


def measure(life: Life, seen: dict[int, float], every: int) -> list[Save]:
    """The cost of each save except the first, which also allocates memory."""
    seconds = {step: life.steps[step] - life.steps[step - 1] for step in life.steps if step - 1 in life.steps}
    busy = {step: [s for s in seconds if life.steps[s - 1] < seen[step] and s > step] for step in seen}
    quiet = {s for s in seconds if s > every // 2} - {s for steps in busy.values() for s in steps}
    found = []
    for step, steps in list(busy.items())[1:]:
        around = [seconds[s] for s in quiet if abs(s - step) < every]
        assert around, f"no step near {step} ended without a save beside it: --every must be more than {every}"
        taken = sum(seconds[s] for s in steps)
        found.append(Save(step, seen[step] - life.steps[step], len(steps), taken, median(around)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=4, help="how many to measure")
    parser.add_argument("--every", type=int, default=8, help="steps between them")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    given, settings = parser.parse_known_args()
    settings = [*SMALLER, *settings]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        run = Path(folder) / "run"
        life, seen = watch(run, settings, given.saves + 1, given.every, given.threads)
        life.process.kill()
        life.end()
        size = sum(file.stat().st_size for file in saved(run)[-1].iterdir())
    found = measure(life, seen, given.every)
    rows = [(s.step, s.usual, s.written, s.steps, s.overhead, s.overhead / s.usual) for s in found]
    columns = ("save at step", "step s", "written in s", "steps beside", "overhead s", "in steps")
    print(f"enwik8-12l {' '.join(settings)}; {given.threads} threads; a checkpoint has {size / 1e6:.0f} MB\n")
    print(markdown(columns, rows))
    typical = median(s.overhead / s.usual for s in found)
    print(f"\nIn the median a save costs {typical:.2f} steps.")
    status = verdict([] if typical < 1 else [f"a save costs {typical:.2f} steps"])
    facts = {"settings": settings, "threads": given.threads, "checkpoint_bytes": size, "steps": life.steps}
    print(json.dumps(facts | {"saves": [asdict(save) | {"overhead": save.overhead} for save in found]}))
    return status


if __name__ == "__main__":
    sys.exit(main())
