"""Measure new parts of Transformer-XL against a base recipe in equal time, paired by seed.

    python -m experiments.parts --name screen-0.9M --seconds 300 --seeds 1 --jobs 2
    python -m experiments.parts --name screen-0.9M --table
    python -m experiments.parts --name screen-0.9M --picture docs/figures/parts.svg --only base n-grams

First the time of a step of each part is measured, in turns with the base. Nothing else may run then. A part trains for
as many steps as fit into the time of the base, so the runs themselves may share the machine. Lines of
experiments/parts/NAME.jsonl are results; what is there is not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent / "parts"
SIZES = {
    "0.9M": "--model.n-layer 4 --model.n-head 4 --model.d-head 32 --model.d-model 128 --model.d-inner 512",
    "own": "",
}
"""Settings of each size of the base; `enwik8-small` itself has 2.9M parameters."""


STAGED = ("tgt_len", "mem_len", "batch_size")


class Part(NamedTuple):
    """A change of the base: settings of the whole run, and stages, each until a share of the steps."""

    settings: str = ""
    stages: tuple[tuple[float, dict[str, int]], ...] = ()
    shuffled: bool = False
    """Whether the articles of the training text are in a random order."""


PARTS: dict[str, Part] = {
    "base": Part(),
    "n-grams": Part("--model.ngrams 2 3 4 --model.ngram-width 64"),
    "QK-norm": Part("--model.qk-norm"),
    "n-grams and QK-norm": Part("--model.ngrams 2 3 4 --model.ngram-width 64 --model.qk-norm"),
    "n-grams to 6, 2^18 rows of 64": Part("--model.ngrams 2 3 4 5 6 --model.ngram-rows 262144 --model.ngram-width 64"),
    "n-grams to 8": Part("--model.ngrams 2 3 4 5 6 8 --model.ngram-rows 262144 --model.ngram-width 32"),
    "n-grams to 8 and QK-norm": Part(
        "--model.ngrams 2 3 4 5 6 8 --model.ngram-rows 262144 --model.ngram-width 32 --model.qk-norm"
    ),
    "matches": Part("--model.matches 3 5 8"),
    "n-grams to 8 and matches": Part(
        "--model.ngrams 2 3 4 5 6 8 --model.ngram-rows 262144 --model.ngram-width 32 --model.matches 3 5 8"
    ),
    "half the batch": Part("--train.batch-size 16"),
    "lengths grow": Part("--train.short-share 0.4"),
    "RoPE and QK-norm": Part("--model.rope --model.qk-norm"),
    "linear": Part("--train.schedule linear"),
    "cooldown 0.4": Part("--train.schedule linear --train.cooldown 0.4"),
    "twice the rate": Part("--train.lr 2e-2"),
    "same-layer": Part("--model.same-layer"),
    "embedding skips": Part("--model.skips embedding"),
    "n-grams and last skip": Part("--model.ngrams 2 3 4 --model.ngram-width 64 --model.skips last"),
    "gated attention": Part("--model.gated-attention"),
    "SwiGLU": Part("--model.activation swiglu"),
    "ReLU squared": Part("--model.activation relu2"),
    "untied": Part("--model.tie-weight false"),
    "softcap": Part("--model.softcap 15"),
    "RMSNorm": Part("--model.norm rms"),
    "U skips": Part("--model.skips u"),
    "zero outputs": Part("--model.zero-output"),
    "EMA": Part("--train.ema 0.98"),
    "cautious decay": Part("--train.cautious true"),
    "momentum warm-up": Part("--train.momentum-warmup 150"),
    "batch grows": Part(stages=((0.4, {"batch_size": 16}),)),
    "articles shuffled": Part(shuffled=True),
    "memory grows": Part(stages=((0.5, {"mem_len": 32}),)),
    "RoPE": Part("--model.rope"),
    "convolution": Part("--model.convolution 3"),
    "less clipping": Part("--train.clip 4"),
    "half the rate": Part("--train.lr 5e-3"),
    "n-grams of 2 and 3, 4096 rows": Part("--model.ngrams 2 3 --model.ngram-rows 4096 --model.ngram-width 64"),
    "without n-grams": Part("--model.ngrams= --model.ngram-rows 65536"),
    "without matches": Part("--model.matches="),
    "without short segments": Part("--train.short-share 0"),
    "without the line": Part("--train.schedule cosine"),
}


class ShuffledArticles:
    """A corpus of Wikipedia's XML with the articles of its training text in a random order."""

    def __init__(self, corpus: Any, seed: int):
        self.corpus, self.seed = corpus, seed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.corpus, name)

    def split(self, name: str) -> Any:
        import numpy as np

        found = self.corpus.split(name)
        if name != "train":
            return found
        begin = np.asarray(self.corpus.vocab.encode("<page>"), found.ids.dtype).tobytes()
        assert found.ids.dtype.itemsize == 1, "only a text of bytes"
        starts = [match.start() for match in re.finditer(re.escape(begin), found.ids.tobytes())]
        articles = np.split(found.ids, starts)
        order = np.random.default_rng(self.seed).permutation(len(articles))
        return found._replace(ids=np.concatenate([articles[index] for index in order]))


def config_of(options: argparse.Namespace, part: str, seed: int, **train: Any) -> Any:
    from transformer_xl import load_recipe

    words = f"{SIZES[options.size]} {PARTS[part].settings} --train.seed {seed}".split()
    found = load_recipe(options.base, words)
    return replace(found, train=replace(found.train, **train))


def trainer_of(config: Any, corpus: Any) -> Any:
    import torch

    from transformer_xl import resolve_settings
    from transformer_xl.model.baselines import build_model
    from transformer_xl.train import Trainer
    from transformer_xl.train.loop import train_segments

    config = resolve_settings(config, corpus)
    torch.manual_seed(config.train.seed)
    model = build_model(config.model, backend=config.train.backend).train()
    return Trainer(model, train_segments(corpus, config), config.train)


def begin_stage(trainer: Any, part: str, config: Any, corpus: Any) -> None:
    """Change the lengths and the batch where a stage of the part begins or ends."""
    from transformer_xl.train.loop import train_segments

    share = trainer.step / config.train.max_steps
    changes = next((changes for until, changes in PARTS[part].stages if share < until), {})
    wanted = replace(config, train=replace(trainer.config, **{name: getattr(config.train, name) for name in STAGED}))
    wanted = replace(wanted, train=replace(wanted.train, **changes))
    if trainer.config != wanted.train:
        trainer.config = wanted.train
        trainer.loader = train_segments(corpus, wanted)
        trainer.memory = trainer._empty_memory(trainer.config)


TIMED_STEPS = 10


def seconds_a_step(options: argparse.Namespace, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """The median seconds of a step of each part, and of the base in turn with it. A turn is a run of ten steps, so its
    stages count by their shares."""
    from transformer_xl import open_corpus
    from transformer_xl.runtime.device import prepare_process

    prepare_process()
    corpus = open_corpus(config_of(options, "base", 1).corpus)

    def seconds_of(trainer: Any, name: str) -> float:
        config, start = config_of(options, name, 1, max_steps=TIMED_STEPS), time.perf_counter()
        for trainer.step in range(TIMED_STEPS):
            begin_stage(trainer, name, config, corpus)
            trainer.advance()
        return (time.perf_counter() - start) / TIMED_STEPS

    def started(name: str) -> Any:
        trainer = trainer_of(config_of(options, name, 1, max_steps=TIMED_STEPS), corpus)
        seconds_of(trainer, name)
        return trainer

    base, found = started("base"), {}
    for name in names:
        own = started(name)
        turns = [(seconds_of(own, name), seconds_of(base, "base")) for _ in range(options.turns)]
        found[name] = tuple(statistics.median(column) for column in zip(*turns, strict=True))
    return found


CURVE_POINTS, CURVE_TARGETS, CURVE_STREAMS = 10, 50_000, 8
"""How often a run scores the validation split while it trains, how many targets, and in how many streams."""


def score(model: Any, split: Any, config: Any, mem_len: int, targets: int, streams: int = 32) -> float:
    """The mean nats of the first targets of a split, read in parallel streams, in fp32."""
    import torch

    from transformer_xl import Lengths, StreamLoader

    lengths = Lengths(tgt_len=config.train.tgt_len, mem_len=mem_len)
    total, count, memory = 0.0, 0, None
    with torch.no_grad():
        for ids, wanted, _ in StreamLoader(split, batch_size=streams, tgt_len=lengths.tgt_len, max_tokens=targets):
            nll, memory = model.eval()(ids, wanted, memory, lengths)
            total, count = total + nll.double().sum().item(), count + int((wanted >= 0).sum())
    model.train()
    return total / count


def run_one(options: argparse.Namespace, part: str, seed: int, steps: int) -> dict[str, Any]:
    """Train one part, and score the start of the validation split with its memory, twice the memory and none."""
    from transformer_xl import open_corpus
    from transformer_xl.runtime.device import prepare_process

    prepare_process()
    config = config_of(options, part, seed, max_steps=steps)
    corpus: Any = open_corpus(config.corpus)
    if PARTS[part].shuffled:
        corpus = ShuffledArticles(corpus, seed)
    trainer, start, curve = trainer_of(config, corpus), time.perf_counter(), []
    for step in range(1, steps + 1):
        begin_stage(trainer, part, config, corpus)
        trainer.advance()
        if step * CURVE_POINTS // steps > (step - 1) * CURVE_POINTS // steps:
            valid = corpus.split("valid")
            nats = score(trainer.model, valid, config, config.train.mem_len, CURVE_TARGETS, CURVE_STREAMS)
            curve.append((step, round(nats, 5)))
    model = trainer.model if trainer.average is None else trainer.average.model
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "curve": curve}
    for name, size in (("memory", config.train.mem_len), ("none", 0), ("twice", 2 * config.train.mem_len)):
        found[name] = score(model, corpus.split("valid"), config, size, options.targets)
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

    def draw(self, parts: Sequence[str], file: Path) -> None:
        """Draw validation bpc against seconds of training alone on the machine, the mean of all seeds."""
        from matplotlib import pyplot as plt
        from matplotlib.ticker import ScalarFormatter

        _, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        for part in parts:
            curves = [run["curve"] for (name, _), run in self.runs.items() if name == part and "curve" in run]
            if curves:
                a_step = self.times["base"]["seconds"] * self.times[part]["ratio"]
                seconds = [step * a_step for step, _ in curves[0]]
                nats = [statistics.mean(nats for _, nats in points) for points in zip(*curves, strict=True)]
                axes.plot(seconds, [mean / math.log(2) for mean in nats], marker=".", label=part)
        axes.set(xlabel="seconds of training", ylabel="bits per character of valid", yscale="log")
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(ScalarFormatter())
        axes.legend(fontsize="small")
        plt.savefig(file, metadata={"Date": None})


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
    parser.add_argument("--picture", type=Path, help="a file for a picture of bpc against seconds; runs nothing")
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

    if options.picture:
        results.draw(list(dict.fromkeys(options.only)), options.picture)
        return
    if not options.table:
        time_parts(options, results)
        wanted = [(part, seed) for seed in options.seeds for part in dict.fromkeys(["base", *options.only])]
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(lambda job: carry_out(*job), [job for job in wanted if job not in results.runs]))
    results.show()


if __name__ == "__main__":
    main()
