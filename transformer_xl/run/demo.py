"""`txl demo`: on text that every Python has, its own library, show in minutes what a small Transformer-XL learns.

It is held against gzip, bzip2 and xz on the same bytes, files it has never seen. They have only those bytes to learn
from, and the model has read the rest of the library: not a contest between equals, but a scale everyone knows.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os
import shutil
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from transformer_xl.baselines import build_model
from transformer_xl.checkpoint import LoadedModel, load_model
from transformer_xl.data.corpus import Corpus
from transformer_xl.data.datasets import cache_folder
from transformer_xl.data.loader import StreamLoader
from transformer_xl.device import reuse_memory
from transformer_xl.evaluate import EvalResult
from transformer_xl.files import held
from transformer_xl.generate import Sampling, generate
from transformer_xl.metrics import MetricLog
from transformer_xl.recipe import load_recipe
from transformer_xl.settings import Lengths, RunConfig
from transformer_xl.show import show_table
from transformer_xl.train import Trainer

from .evaluate import score_split
from .report import report
from .train import carry_out, prepare, refuse_run, settled

LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data"}
INSTALLED = {"site-packages", "dist-packages", "__pycache__"}
HELD_OUT, VALIDATION = 500_000, 100_000
"""Bytes of whole files, at least."""
PROMPT = "class Memory:\n"
SAMPLE = 400
"""Tokens of text to write."""
SPARE = 0.8
"""The share of the time that is planned for; the rest is for a machine that slows down."""


class Costs(NamedTuple):
    """What things cost on this machine, in seconds."""

    step: float
    token: dict[int, float]
    """Evaluation of one target, by length of memory."""


def demo(*, out: Path | None = None, minutes: float = 5.0) -> int:
    """Train, evaluate with three lengths of memory, write a sample, compare; in at most `minutes` on this machine."""
    begun = time.perf_counter()
    reuse_memory()
    if not 0 < minutes < 1e6:
        raise ValueError(f"--minutes must be above 0 and below 1,000,000, got {minutes:g}.")
    home = cache_folder() / "demo"
    run = home / "run" if out is None else out
    if out is None:
        shutil.rmtree(run, ignore_errors=True)
    refuse_run(run, resume=False)
    splits = library()
    texts = {name: list(files.values()) for name, files in splits.items()}
    corpus = Corpus.build(home / "corpus", texts, name="library")
    sizes = {name: (len(files), sum(map(len, files.values()))) for name, files in splits.items()}
    listed = "; ".join(f"{name} {files} files, {size:,} bytes" for name, (files, size) in sizes.items())
    print(f"The library of this Python, as bytes: {listed}", flush=True)
    config = load_recipe("demo")
    config = settled(replace(config, corpus=replace(config.corpus, name=str(home / "corpus"))), corpus)
    spent = time.perf_counter() - begun
    config = within(SPARE * 60 * minutes - spent, config, corpus)
    with held(run):
        if status := carry_out(prepare(config, run), run):
            return status
    results, sample = measure(run, corpus)
    held_out = b"".join(splits["test"].values())
    print(f"\nA sample, from {PROMPT!r} on:\n\n{PROMPT}{sample}\n")
    compare(results, config.train.mem_len, held_out)
    metrics = MetricLog(run / "metrics.jsonl")
    for result in results:
        metrics.log({"step": config.train.max_steps, "split": "test", **corpus.about, **result.to_json()})
    report([run])
    print(f"{time.perf_counter() - begun:.0f} seconds in all. More text: txl generate {run}")
    return 0


def library() -> dict[str, dict[str, bytes]]:
    """The library's source files by split and name, held out by a hash of their names.

    Raises:
        FileNotFoundError: this Python came without the source of its library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    kept: list[Path] = []
    for folder, below, files in os.walk(root):
        below[:] = set(below) - LEFT_OUT - INSTALLED  # these are not even looked into
        kept += [Path(folder, file).relative_to(root) for file in files if file.endswith(".py")]
    by_hash = sorted(kept, key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
    splits: dict[str, dict[str, bytes]] = {"train": {}, "valid": {}, "test": {}}
    wanted = {"test": HELD_OUT, "valid": VALIDATION}
    for name in by_hash:
        text = (root / name).read_bytes()
        split = next((split for split, size in wanted.items() if size > 0), "train")
        splits[split][name.as_posix()] = text
        wanted[split] = wanted.get(split, 0) - len(text)
    train = sum(map(len, splits["train"].values()))
    if train < HELD_OUT:
        raise FileNotFoundError(f"{root} holds too little Python source to learn from: this Python came without it.")
    return {split: dict(sorted(files.items())) for split, files in splits.items()}


def within(seconds: float, config: RunConfig, corpus: Corpus) -> RunConfig:
    """`config` with as many steps as leave time for everything after them, by trial on this machine."""
    begun = time.perf_counter()
    costs = try_out(config, corpus)
    tokens = len(corpus.split("test").ids)
    after = sum(tokens * cost for cost in costs.token.values())
    after += (config.train.eval_tokens or len(corpus.split("valid").ids)) * costs.token[config.eval_lengths.mem_len]
    after += SAMPLE * costs.step / 4  # a token written costs well below a quarter of a training step
    left = seconds - after - (time.perf_counter() - begun)
    steps = max(int(left / costs.step), 10)
    train = replace(config.train, max_steps=steps, warmup_steps=min(config.train.warmup_steps, steps // 10))
    return replace(config, train=train)


def try_out(config: RunConfig, corpus: Corpus, steps: int = 8) -> Costs:
    """Time a few steps and a little evaluation with a model that is thrown away."""
    train = config.train
    model = build_model(config.model, backend=train.backend).to(train.device).train()
    loader = StreamLoader(corpus.split("train"), batch_size=train.batch_size, tgt_len=train.tgt_len)
    trainer = Trainer(model, loader, train)
    for _ in range(steps // 2):  # memory fills up, caches warm
        trainer.advance()
    before = trainer.seconds
    for _ in range(steps):
        trainer.advance()
    tokens, loaded = {}, LoadedModel(model, corpus.vocab, config)
    for lengths in memories(config):
        few = config.eval.batch_size * (2 * lengths.mem_len + 4 * lengths.tgt_len)
        scope = replace(config.eval, max_tokens=few)
        result = score_split(loaded, corpus.split("test"), lengths, scope, precision=train.precision)
        tokens[lengths.mem_len] = result.seconds / result.targets
    return Costs((trainer.seconds - before) / steps, tokens)


def memories(config: RunConfig) -> list[Lengths]:
    """The lengths to evaluate at: memory as in training, longer, and none."""
    own = config.eval_lengths
    longer = max(own.mem_len, 2 * config.train.mem_len)
    sizes = dict.fromkeys([config.train.mem_len, longer, 0, own.mem_len])
    return [replace(own, mem_len=size, attn_len=None) for size in sizes]


def measure(run: Path, corpus: Corpus) -> tuple[list[EvalResult], str]:
    """Score the held-out files at each length of memory, and write a sample."""
    loaded = load_model(run)
    config = loaded.config
    loaded.model.to(config.train.device)
    held_out = corpus.split("test")
    results = []
    for lengths in memories(config):
        scope = replace(config.eval, max_tokens=0)
        results.append(score_split(loaded, held_out, lengths, scope, precision=config.train.precision))
    sampling = Sampling(temperature=0.8, seed=config.train.seed)
    [sample] = generate(loaded.model, loaded.vocab, [PROMPT], config.eval_lengths, sampling, SAMPLE)
    return results, sample


def compare(results: list[EvalResult], trained: int, held_out: bytes) -> None:
    """The table, best first, and the verdict on gzip."""
    sizes = compressed(held_out)
    figures = {name: 8 * size / len(held_out) for name, size in sizes.items()}
    for result in results:
        memory = result.lengths.mem_len
        note = {trained: " as in training", 0: ": none"}.get(memory, "")
        figures[f"Transformer-XL, memory {memory}{note}"] = result.bpc
    rows = [[name, f"{bpc:.3f}"] for name, bpc in sorted(figures.items(), key=lambda item: item[1])]
    show_table(f"bits per byte on {len(held_out):,} bytes of files held out", ["", "bpc"], rows)
    ours, gzipped = min(result.bpc for result in results), figures["gzip -9"]
    verdict = "It beats gzip -9" if ours < gzipped else "It did NOT beat gzip -9"
    print(f"{verdict}: {ours:.3f} against {gzipped:.3f} bits per byte.")


def compressed(text: bytes) -> Mapping[str, int]:
    """Bytes that everyday compressors need for `text`."""
    return {
        "gzip -9": len(gzip.compress(text, 9)),
        "bzip2 -9": len(bz2.compress(text, 9)),
        "xz -9e": len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)),
    }
