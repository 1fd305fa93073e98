"""`python -m benchmarks here`: the speed of training, evaluation and generation on this machine, and its bound.

Weights are random and the text is drawn by Zipf's law, because neither changes the speed. Each row repeats one unit of
work with a full memory: a training step, the evaluation of a segment, or the generation of a token.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from transformer_xl.config.recipe import load_recipe
from transformer_xl.config.settings import Lengths, RunConfig
from transformer_xl.data.loader import StreamLoader
from transformer_xl.evaluation.generate import Sampling, stream
from transformer_xl.interop.hub import local
from transformer_xl.mistake import Mistake
from transformer_xl.model.baselines import build_model
from transformer_xl.ops.choice import build_native
from transformer_xl.run.checkpoint import load_config
from transformer_xl.run.folder import environment, find_checkpoint
from transformer_xl.runtime.device import autocast, prepare_process, resolve_device
from transformer_xl.runtime.terminal import report_progress, show_table
from transformer_xl.train.choices import choices
from transformer_xl.train.step import Trainer

from . import bound
from .measure import first_step, peak_memory, restart_peak, seconds_each
from .options import Options
from .rates import Bandwidth, Products


class Unit(NamedTuple):
    """The unit of work that one row of the table repeats."""

    run: Callable[[], object]
    batch: int
    lengths: Lengths
    """Lengths of one unit. Generating a token has a `tgt_len` of 1."""

    @property
    def warm_up(self) -> int:
        """Number of units until the memory is full, plus two."""
        return 2 + math.ceil(self.lengths.mem_len / self.lengths.tgt_len)


def bench_here(options: Options) -> None:
    """Print a row for training, evaluation and generation; the last line is JSON."""
    prepare_process()
    config = _settings(options.recipe, options.device, options.precision)
    first_step()
    rows = [measured_row(part, config, options) for part in report_progress(list(PARTS), "timing")]
    facts = {"model": options.recipe, "device": config.train.device, "precision": config.train.precision}
    columns = ["", "tokens/s", "peak MB", "bound tokens/s", "of the bound", "rows", "tgt_len", "mem_len"]
    title = "{model} on {device}, {precision}; median of ".format(**facts) + str(options.repeats)
    show_table(title, columns, [*map(_cells, rows)])
    print(json.dumps(facts | {"repeats": options.repeats, "rows": rows, "machine": environment()}))


def _settings(target: str, device: str, precision: str | None) -> RunConfig:
    """The settings of a recipe or a run, with the device, precision and backend chosen for this machine."""
    if target.startswith("hf:") or Path(target).is_dir():
        config = load_config(find_checkpoint(local(target)))
        config = replace(config, train=replace(config.train, backend="auto"))
    else:
        config = load_recipe(target)
    if not config.model.vocab_size:
        raise Mistake(f"--recipe must set model.vocab_size, and {target} takes it from its corpus. Give a run of it.")
    train = replace(config.train, device=device, precision=precision or config.train.precision)
    build_native(resolve_device(device))
    chosen = {name: choice["name"] for name, choice in choices(train, config.model).items()}
    return replace(config, train=replace(train, **chosen, random_tgt_len=False, short_share=0))


def measured_row(part: str, config: RunConfig, options: Options) -> dict[str, Any]:
    """The speed, the peak memory and the bound of one part of the table, with the seconds of one unit."""
    device = config.train.device
    gc.collect()
    before = restart_peak(device)
    torch.manual_seed(config.train.seed)
    unit = PARTS[part](config)
    for _ in range(unit.warm_up):
        unit.run()
    times = max(1, math.ceil(options.seconds / max(seconds_each(unit.run, 1), 1e-6)))
    peak = peak_memory(device) - before
    least = _bound(part, config, unit)
    turns, bounds = [], []
    for _ in range(options.repeats):
        turns.append(seconds_each(unit.run, times))
        bounds += [least()] if least else []
    taken = statistics.median(turns)
    bound_seconds = statistics.median(bounds) if bounds else None
    tokens = unit.batch * unit.lengths.tgt_len
    return {
        "part": part,
        "batch": unit.batch,
        "lengths": asdict(unit.lengths),
        "peak_bytes": peak,
        "seconds": taken,
        "tokens_per_second": tokens / taken,
        "bound_tokens_per_second": bound_seconds and tokens / bound_seconds,
        "share_of_bound": bound_seconds and bound_seconds / taken,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    share, lengths = row["share_of_bound"], row["lengths"]
    limit = ["", ""] if share is None else [f"{row['bound_tokens_per_second']:,.0f}", f"{share:.0%}"]
    sizes = [f"{size:,}" for size in (row["batch"], lengths["tgt_len"], lengths["mem_len"])]
    return [row["part"], f"{row['tokens_per_second']:,.0f}", f"{row['peak_bytes'] / 1e6:,.0f}", *limit, *sizes]


def _segments(config: RunConfig, batch: int, lengths: Lengths, context_len: int) -> StreamLoader:
    """Segments of a long text. The memory is almost always full, although it is emptied at each new epoch."""
    count = 256 + 16 * lengths.mem_len // lengths.tgt_len
    text = bound.zipf_ids(config.model.vocab_size, batch * lengths.tgt_len * count + 1)
    return StreamLoader(text, batch_size=batch, tgt_len=lengths.tgt_len, context_len=context_len)


def _training_steps(config: RunConfig) -> Unit:
    train = config.train
    model = build_model(config.model, backend=train.backend, recompute=train.recompute).to(train.device)
    loader = _segments(config, train.batch_size, train.lengths, train.context_len)
    return Unit(Trainer(model, loader, train).advance, train.batch_size, train.lengths)


def _evaluation(config: RunConfig) -> Unit:
    lengths, device, precision = config.eval_lengths, torch.device(config.train.device), config.train.precision
    model = build_model(config.model).to(device).for_inference(precision)
    loader = _segments(config, config.eval.batch_size, lengths, config.context_len(lengths))
    with torch.no_grad(), autocast(precision, device):
        memory, step = model.empty_cache(config.eval.batch_size, lengths), 0

    def run() -> None:
        nonlocal memory, step
        segment, step = loader.segment(step), step + 1
        with torch.no_grad(), autocast(precision, device):
            nll, memory = model(segment.ids.to(device), segment.targets.to(device), memory, lengths)
        nll.sum().item()

    return Unit(run, config.eval.batch_size, lengths)


def _generation(config: RunConfig) -> Unit:
    lengths = config.writing_lengths(config.eval_lengths)
    window = config.model.match_window if config.model.matches else 0
    prompt = bound.zipf_ids(config.model.vocab_size, max(lengths.mem_len, lengths.tgt_len, window) + 1)
    model = build_model(config.model).to(config.train.device)
    tokens = stream(model, [prompt], lengths, Sampling(), 1 << 62, precision=config.train.precision)
    attn_len = lengths.attn_len
    next(tokens)  # the prompt fills the memory and the window of matches
    return Unit(lambda: next(tokens), 1, Lengths(tgt_len=1, mem_len=lengths.mem_len, attn_len=attn_len))


def _bound(part: str, config: RunConfig, unit: Unit) -> Callable[[], float] | None:
    """A function that measures the minimum time of a unit; None for a baseline and for generation without memory."""
    model, lengths, precision, device = config.model, unit.lengths, config.train.precision, config.train.device
    if model.kind != "transformer-xl" or (part == "generate" and not lengths.mem_len):
        return None
    work = bound.expected_work(model, unit.batch, lengths.tgt_len, lengths.mem_len, lengths.attn_len)
    listed, moved = bound.least_work(part, model, work, precision)
    products = Products({"device": device, "precision": precision, "products": listed})
    if not moved:
        return products.seconds
    bandwidth = Bandwidth({"device": device})
    return lambda: products.seconds() + moved * bandwidth.seconds()


PARTS = {"train": _training_steps, "eval": _evaluation, "generate": _generation}
"""How each row of the table is prepared."""
