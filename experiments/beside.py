"""Measure how much another busy process slows training on a CPU, for each waiting policy of OpenMP's threads.

    python -m experiments.beside [--turns 3] [--steps 60] [--recipe enwik8-small]

Each turn trains the recipe with each policy, alone and next to a process that keeps one core busy. The output is the
tokens/s of the last two thirds of the steps: the median over the turns, and every turn. Every other turn runs the
policies in the opposite order, because the speed of a shared machine drifts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

RULES = {
    "txl's own rule": {},
    "spin 300,000 (GNU's default)": {"GOMP_SPINCOUNT": "300000"},
    "spin 10,000": {"GOMP_SPINCOUNT": "10000"},
    "spin 3,000": {"GOMP_SPINCOUNT": "3000"},
    "spin 300": {"GOMP_SPINCOUNT": "300"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep this many cores busy with work that never waits."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def markdown(columns: list[str], rows: list[list[object]]) -> str:
    """A table, every column but the first aligned to the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def speed(recipe: str, steps: int, rule: dict[str, str]) -> float:
    """Tokens/s of the last two thirds of a short training run."""
    few = {"max-steps": steps, "log-every": steps // 3, "warmup-steps": 10, "eval-every": 0, "eval-tokens": 1000}
    words = [word for name, value in few.items() for word in (f"--train.{name}", str(value))]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "transformer_xl", "train", recipe, "--out", str(run), *words]
        command += ["--train.save-every", "0", "--train.sample-every", "0", "--eval.max-tokens", "1000"]
        subprocess.run(command, env=os.environ | rule, check=True, capture_output=True)
        entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [entry for entry in entries if entry["split"] == "train"][1:]
    return len(lines) / sum(1 / line["tokens_per_second"] for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--recipe", default="enwik8-small")
    parser.add_argument("--rules", nargs="*", default=list(RULES), help="some of the rules, by name")
    given = parser.parse_args()
    found: dict[tuple[str, int], list[float]] = {(rule, others): [] for rule in given.rules for others in (0, 1)}
    for turn in range(given.turns):
        for rule, others in list(found)[:: 1 if turn % 2 == 0 else -1]:
            with busy(others):
                found[rule, others].append(speed(given.recipe, given.steps, RULES[rule]))
            last = found[rule, others][-1]
            print(f"turn {turn + 1}  {rule}  beside {others}: {last:,.0f}", file=sys.stderr, flush=True)
    rows = []
    for rule in given.rules:
        cells = [f"{median(found[rule, n]):,.0f} ({', '.join(f'{s:,.0f}' for s in found[rule, n])})" for n in (0, 1)]
        rows.append((rule, *cells))
    print(f"{given.recipe}, {given.steps} steps a run, {os.cpu_count()} cores; tokens/s, median (each turn)\n")
    print(markdown(("how threads wait", "alone", "beside one busy process"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
