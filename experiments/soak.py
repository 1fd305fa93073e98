"""Whether a process of `txl` grows: a line fitted to its memory and its open descriptors (/proc, so Linux).

    python experiments/soak.py --minutes 45           training with evaluations, checkpoints and samples
    python experiments/soak.py --generate 100000      that many tokens written by a small model: memory and speed

The first fifth is warm-up and left out. Neighbouring samples are correlated, so the line is fitted to the means of
twenty blocks, whose residuals give the slope's error. The process grows, and the exit status is 1, if the slope is more
than three errors above zero and above 1 MB or half a descriptor an hour.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from trial import Life, markdown, saved_step, verdict, write_recipe

BLOCKS, WARM_UP = 20, 0.2

SOAK = """
[corpus]
name = "{text}"
unit = "byte"

[model]
vocab_size = 0
n_layer = 2
n_head = 2
d_head = 32
d_model = 64
d_inner = 256
dropout = 0.1

[train]
tgt_len = 64
mem_len = 64
batch_size = 8
max_steps = 100_000_000
optimizer = "adam"
lr = 1e-3
schedule = "constant"
log_every = 20
eval_every = 200
save_every = 100
sample_every = 300
sample_tokens = 50
"""


@dataclass
class Line:
    """A straight line through block means, least squares."""

    slope: float
    error: float
    """The slope's standard error."""
    level: float
    """The mean of what it goes through."""

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]], blocks: int = BLOCKS) -> Line:
        cuts = [len(points) * number // blocks for number in range(blocks + 1)]
        parts = [points[a:b] for a, b in pairwise(cuts) if b > a]
        means = [(mean(x for x, _ in part), mean(y for _, y in part)) for part in parts]
        assert len(means) > 2, f"a line with an error needs three blocks, got {len(means)}"
        x, y = (mean(values) for values in zip(*means, strict=True))
        spread = sum((a - x) ** 2 for a, _ in means)
        slope = sum((a - x) * (b - y) for a, b in means) / spread
        rest = sum((b - y - slope * (a - x)) ** 2 for a, b in means)
        return cls(slope, math.sqrt(rest / (len(means) - 2) / spread), mean(b for _, b in points))

    def grows(self, matters: float) -> bool:
        return self.slope > max(3 * self.error, matters)


def memory(process: int) -> float:
    """Resident MB."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def descriptors(process: int) -> int:
    return len(os.listdir(f"/proc/{process}/fd"))


def cpu_seconds(process: int) -> float:
    """What the process has computed, however busy the machine is beside it."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def watch(life: Life, hours: float, every: float) -> list[tuple[float, float, int]]:
    """Hours since its start, MB and descriptors, until the time is over."""
    samples = []
    while life.lives_until(min(life.age + every, hours * 3600)) and life.age < hours * 3600:
        samples.append((life.age / 3600, memory(life.process.pid), descriptors(life.process.pid)))
    return samples


def soak(recipe: Path, minutes: float, every: float) -> tuple[dict[str, Any], list[str]]:
    """Train for so long; figures, and the laws broken."""
    run = recipe.parent / "run"
    life = Life("train", recipe, "--out", run, home=recipe.parent / "home")
    samples = watch(life, minutes / 60, every)
    life.process.terminate()
    status = life.end()
    kept = samples[int(len(samples) * WARM_UP) :]
    lines = {
        "resident MB": Line.through([(hour, size) for hour, size, _ in kept]),
        "open descriptors": Line.through([(hour, count) for hour, _, count in kept]),
    }
    rows = [(name, line.level, line.slope, line.error, line.slope * 168) for name, line in lines.items()]
    shown = ((name, *map(figure, values)) for name, *values in rows)
    print(markdown(("", "mean", "slope, per hour", "its error", "in a week"), shown))
    tenths = [mean(size for _, size, _ in kept[len(kept) * n // 10 : len(kept) * (n + 1) // 10]) for n in range(10)]
    print(f"\nResident MB in each tenth of that time: {', '.join(f'{size:.1f}' for size in tenths)}.")
    steps = saved_step(run)
    evaluations = sum("  valid  " in text for _, text in life.said)
    print(f"\n{minutes:g} minutes, {len(samples)} samples; {steps:,} steps, {steps // 100:,} checkpoints, ", end="")
    print(f"{evaluations:,} evaluations, {steps // 300:,} samples of text; ended by SIGTERM with status {status}.")
    problems = [] if status == 75 else [f"it ended with status {status}: {life.complaints}"]
    for (name, line), matters in zip(lines.items(), (1.0, 0.5), strict=True):
        if line.grows(matters):
            problems.append(f"{name} grow by {line.slope:.3g} ± {line.error:.2g} an hour")
    facts = {"steps": steps, "evaluations": evaluations, "samples": samples}
    return facts | {name: line.__dict__ for name, line in lines.items()}, problems


def write(recipe: Path, tokens: int, block: int) -> tuple[dict[str, Any], list[str]]:
    """Train a little, then write so many tokens, each one byte; figures of each block, and the laws broken."""
    run = recipe.parent / "run"
    short = ("--train.max-steps", "300", "--train.sample-every", "0")
    life = Life("train", recipe, "--out", run, *short, home=recipe.parent / "home")
    assert life.end() == 0, f"training failed: {life.complaints}"
    life = Life("generate", run, "--max-tokens", str(tokens), "--seed", "1", home=recipe.parent / "home", listen=False)
    assert life.process.stdout is not None, "it writes into a pipe"
    rows, last = [], (0.0, 0.0)
    while len(life.process.stdout.read(block)) == block and life.process.poll() is None:
        now, process = (life.age, cpu_seconds(life.process.pid)), life.process.pid
        if last[0]:  # the first block has the start-up
            speeds = [block / (after - before) for before, after in zip(last, now, strict=True)]
            rows.append((len(rows) + 2, memory(process), descriptors(process), *speeds))
        last = now
    status = life.end()
    kept = rows[int(len(rows) * WARM_UP) :]
    size, speed = (Line.through([(row[0] * block / 1e5, row[column]) for row in kept], len(kept)) for column in (1, 4))
    columns = ("tokens", "resident MB", "descriptors", "tokens/s", "tokens/CPU s")
    print(markdown(columns, ((f"{n * block:,}", f"{row[0]:.1f}", row[1], *map(figure, row[2:])) for n, *row in rows)))
    print(f"\nPer 100,000 tokens: {size.slope:+.2f} ± {size.error:.2f} MB, of {size.level:.0f}; ", end="")
    print(f"{speed.slope:+.0f} ± {speed.error:.0f} tokens/CPU s, of {speed.level:.0f}.")
    problems = [] if status == 0 else [f"it ended with status {status}: {life.complaints}"]
    if (len(rows) + 2) * block < tokens:  # the last block may end with the process
        problems.append(f"it wrote less than {tokens} tokens: {(len(rows) + 1) * block}")
    if size.grows(1.0):
        problems.append(f"memory grows by {size.slope:.2f} ± {size.error:.2f} MB in 100,000 tokens")
    if -speed.slope > max(3 * speed.error, 0.05 * speed.level):
        problems.append(f"speed falls by {-speed.slope:.0f} ± {speed.error:.0f} tokens/CPU s in 100,000 tokens")
    return {"tokens": tokens, "blocks": rows, "memory": size.__dict__, "speed": speed.__dict__}, problems


def figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=45)
    parser.add_argument("--generate", type=int, metavar="TOKENS")
    parser.add_argument("--every", type=float, default=3, help="seconds between two samples")
    parser.add_argument("--block", type=int, default=5000, help="tokens of a line in the table")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recipe = write_recipe(Path(folder), SOAK, given.seed)
        if given.generate:
            facts, problems = write(recipe, given.generate, given.block)
        else:
            facts, problems = soak(recipe, given.minutes, given.every)
    status = verdict(problems)
    print(json.dumps({"seed": given.seed} | facts | {"problems": problems}))
    return status


if __name__ == "__main__":
    sys.exit(main())
