"""Measure new parts of Transformer-XL against a base recipe in equal time, paired by seed.

    python -m experiments.parts --name screen-0.9M --seconds 300 --seeds 1 --jobs 2
    python -m experiments.parts --name screen-0.9M --table

First the time of a step of each part is measured, in turns with the base. Nothing else may run then. A part trains for
as many steps as fit into the time of the base, so the runs themselves may share the machine. Lines of
experiments/parts/NAME.jsonl are results; what is there is not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer_xl import RunConfig, TransformerXL
    from transformer_xl.data.corpus import Corpus, Split
    from transformer_xl.train.step import Trainer

HERE = Path(__file__).parent / "parts"
SIZES = {
    "0.9M": "--model.n-layer 4 --model.n-head 4 --model.d-head 32 --model.d-model 128 --model.d-inner 512",
    "own": "",
}
"""Settings of each size of the base; `enwik8-small` itself has 2.9M parameters."""

PARTS = {
    "base": "",
    "n-grams": "--model.ngrams 2 3 4 --model.ngram-width 64",
    "QK-norm": "--model.qk-norm",
    "n-grams and QK-norm": "--model.ngrams 2 3 4 --model.ngram-width 64 --model.qk-norm",
    "n-grams to 8": "--model.ngrams 2 3 4 5 6 8 --model.ngram-rows 262144 --model.ngram-width 32",
    "matches": "--model.matches 3 5 8",
    "n-grams to 8 and matches": (
        "--model.ngrams 2 3 4 5 6 8 --model.ngram-rows 262144 --model.ngram-width 32 --model.matches 3 5 8"
    ),
    "half the batch": "--train.batch-size 16",
    "lengths grow": "--train.short-share 0.4",
    "linear": "--train.schedule linear",
    "twice the rate": "--train.lr 2e-2",
    "half the rate": "--train.lr 5e-3",
    "without n-grams": "--model.ngrams= --model.ngram-rows 65536",
    "without matches": "--model.matches=",
    "without short segments": "--train.short-share 0",
    "without the line": "--train.schedule cosine",
}
"""Settings of each part."""


def config_of(options: argparse.Namespace, part: str, seed: int, **train: int) -> RunConfig:
    """The base with the settings of a part."""
    from transformer_xl import load_recipe

    words = f"{SIZES[options.size]} {PARTS[part]} --train.seed {seed}".split()
    found = load_recipe(options.base, words)
    return replace(found, train=replace(found.train, **train))


def trainer_of(config: RunConfig, corpus: Corpus) -> Trainer:
    """A new trainer."""
    import torch

    from transformer_xl import resolve_settings
    from transformer_xl.model.baselines import build_model
    from transformer_xl.train.loop import train_segments
    from transformer_xl.train.step import Trainer

    config = resolve_settings(config, corpus)
    torch.manual_seed(config.train.seed)
    model = build_model(config.model, backend=config.train.backend).train()
    return Trainer(model, train_segments(corpus, config), config.train)


TIMED_STEPS = 10


def seconds_a_step(options: argparse.Namespace, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """The median seconds of a step of each part, and of the base in turn with it."""
    from transformer_xl import open_corpus
    from transformer_xl.runtime.device import prepare_process

    prepare_process()
    corpus = open_corpus(config_of(options, "base", 1).corpus)

    def seconds_of(trainer: Trainer) -> float:
        start = time.perf_counter()
        for trainer.step in range(TIMED_STEPS):
            trainer.advance()
        return (time.perf_counter() - start) / TIMED_STEPS

    def started(name: str) -> Trainer:
        trainer = trainer_of(config_of(options, name, 1, max_steps=TIMED_STEPS), corpus)
        seconds_of(trainer)
        return trainer

    base, found = started("base"), {}
    for name in names:
        own = started(name)
        turns = [(seconds_of(own), seconds_of(base)) for _ in range(options.turns)]
        found[name] = tuple(statistics.median(column) for column in zip(*turns, strict=True))
    return found


def score(model: TransformerXL, split: Split, config: RunConfig, mem_len: int, targets: int) -> float:
    """The mean nats of the first targets of a split, read in 32 parallel streams, in fp32."""
    import torch

    from transformer_xl import Lengths, StreamLoader

    lengths = Lengths(tgt_len=config.train.tgt_len, mem_len=mem_len)
    total, count, memory = 0.0, 0, None
    with torch.no_grad():
        for ids, wanted, _ in StreamLoader(split, batch_size=32, tgt_len=lengths.tgt_len, max_tokens=targets):
            nll, memory = model.eval()(ids, wanted, memory, lengths)
            total, count = total + nll.double().sum().item(), count + int((wanted >= 0).sum())
    model.train()
    return total / count


def run_one(options: argparse.Namespace, part: str, seed: int, steps: int) -> dict[str, float]:
    """Train one part, and score the start of the validation split with its memory, twice the memory and none."""
    from transformer_xl import open_corpus
    from transformer_xl.runtime.device import prepare_process

    prepare_process()
    config = config_of(options, part, seed, max_steps=steps)
    corpus = open_corpus(config.corpus)
    trainer, start = trainer_of(config, corpus), time.perf_counter()
    for _ in range(steps):
        trainer.advance()
    found: dict[str, float] = {"parameters": sum(p.numel() for p in trainer.model.parameters())}
    for name, size in (("memory", config.train.mem_len), ("none", 0), ("twice", 2 * config.train.mem_len)):
        found[name] = score(trainer.model, corpus.split("valid"), config, size, options.targets)
    return found | {"seconds": round(time.perf_counter() - start, 1)}


class Results:
    """The lines of one experiment: the time of a step of each part, and the runs."""

    def __init__(self, file: Path):
        self.file = file
        self.lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        with self.file.open("a") as out:
            out.write(json.dumps(line) + "\n")
        print(line, flush=True)

    @property
    def times(self) -> dict[str, dict[str, Any]]:
        return {line["part"]: line for line in self.lines if line["kind"] == "time"}

    @property
    def runs(self) -> dict[tuple[str, int], dict[str, Any]]:
        return {(line["part"], line["seed"]): line for line in self.lines if line["kind"] == "run"}

    def show(self) -> None:
        """Print a table, the best part first. A gain is in bits, against the base with the same seed."""
        rows = []
        for part in dict.fromkeys(part for part, _ in self.runs):
            own = {seed: run for (name, seed), run in self.runs.items() if name == part}
            pairs = [(self.runs["base", seed], run) for seed, run in own.items() if ("base", seed) in self.runs]
            gains = [(base["memory"] - run["memory"]) / math.log(2) for base, run in pairs]
            error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
            bits = {
                k: statistics.mean(run[k] for run in own.values()) / math.log(2) for k in ("memory", "none", "twice")
            }
            rows.append((statistics.mean(gains) if gains else math.nan, part, next(iter(own.values())), bits, error))
        print("| part | time of a step | steps | parameters | bpc | no memory | twice | gain | ± | t |")
        print("|---|" + "---:|" * 9)
        for gain, part, run, bits, error in sorted(rows, key=lambda row: -row[0]):
            figures = f"{bits['memory']:.4f} | {bits['none']:.4f} | {bits['twice']:.4f} | {gain:+.4f}"
            print(
                f"| {part} | {self.times[part]['ratio']:.2f} | {run['steps']:,} | {run['parameters']:,} | {figures} | "
                f"{error:.4f} | {gain / error if error else math.nan:.1f} |"
            )


def time_parts(options: argparse.Namespace, results: Results) -> None:
    """Measure the parts that have no time yet; the first time, the base determines the number of steps."""
    names = dict.fromkeys(["base", *options.only])
    if all(name in results.times for name in names):
        return
    found = seconds_a_step(options, list(names))
    steps = results.times["base"]["steps"] if results.times else round(options.seconds / found["base"][1])
    for name, (own, base) in found.items():
        if name not in results.times:
            ratio = 1.0 if name == "base" else own / base
            what = {"part": name, "base": options.base, "size": options.size}
            if options.tokens:
                train = config_of(options, name, 1).train
                wanted = options.tokens // (train.batch_size * train.tgt_len)
            else:
                wanted = round(steps / ratio)
            times = {"seconds": round(own, 4), "ratio": round(ratio, 4), "steps": wanted}
            results.add({"kind": "time"} | what | times)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="screen-0.9M", help="of the file of results")
    parser.add_argument("--base", default="enwik8-small")
    parser.add_argument("--size", default="0.9M", choices=SIZES)
    parser.add_argument("--seconds", type=float, default=300.0, help="of the base's training, without other load")
    parser.add_argument("--tokens", type=int, help="the budget of every part; --seconds is then left out")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=PARTS, metavar="PART")
    parser.add_argument("--targets", type=int, default=500_000, help="of the validation split to score")
    parser.add_argument("--turns", type=int, default=5, help="of ten steps, to measure the time of a step")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one thread if there are several")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.one:
        part, seed, steps = options.one
        print(json.dumps(run_one(options, part, int(seed), int(steps))))
        return
    HERE.mkdir(exist_ok=True)
    results = Results(HERE / f"{options.name}.jsonl")

    def carry_out(part: str, seed: int) -> None:
        steps = results.times[part]["steps"]
        words = ["--base", options.base, "--size", options.size, "--targets", str(options.targets)]
        command = [sys.executable, "-m", "experiments.parts", *words, "--one", part, str(seed), str(steps)]
        threads = {"OMP_NUM_THREADS": "1"} if options.jobs > 1 else {}
        done = subprocess.run(command, env=os.environ | threads, text=True, stdout=subprocess.PIPE, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        results.add({"kind": "run", "part": part, "seed": seed, "steps": steps} | found)

    if not options.table:
        time_parts(options, results)
        wanted = [(part, seed) for seed in options.seeds for part in dict.fromkeys(["base", *options.only])]
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(lambda job: carry_out(*job), [job for job in wanted if job not in results.runs]))
    results.show()


if __name__ == "__main__":
    main()
