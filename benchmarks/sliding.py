"""`python -m benchmarks sliding`: the paper's Table 9, a sliding window against segments with memory, per token."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformer_xl.mistake import Mistake

from . import bound
from .gate import check_op, check_same
from .language import prepare_models
from .options import Options, finish, header, job, show, write_text
from .race import Contender, Pool, Prepared, race
from .vanilla import vanilla_products

PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""The paper's attention lengths, and its speed-up by Transformer-XL at each."""
_MOST_TOKENS = 1 << 14
"""Maximum number of tokens in windows side by side; the fastest number of windows has far fewer."""
_COLUMNS = {
    "attn_len": "attn_len|,d",
    "precision": "precision",
    "windows": "windows|d",
    "vanilla_milliseconds": "vanilla ms|.2f",
    "vanilla_share_of_bound": "of its bound|.0%",
    "vanilla_gflops": "GFLOP/s|,.0f",
    "tgt_len": "tgt_len|d",
    "milliseconds": "ours ms|.4f",
    "share_of_bound": "of its bound|.0%",
    "ratio": "times|,.0f",
    "paper": "paper|,d",
}


def bench_sliding(options: Options, pool: Pool) -> None:
    """Time both models at each attention length, and print one table and a line of JSON.

    Raises:
        AssertionError: results differ, so no time is reported.
    """
    precision = options.precisions[-1]
    lengths = [16, 32] if options.toy else list(PAPER)
    if options.mem_len is not None:
        lengths = [options.mem_len]
        if not options.mem_len:
            raise Mistake("--mem-len must be at least 1 for sliding, whose windows have as many others, got 0.")
    check_op(["auto"], [precision], options.torch_device, backward=False)
    rows = []
    with tempfile.TemporaryDirectory(prefix="txl-bench-") as name:
        folder, config = Path(name), options.config()
        write_text(folder / "ids", config.model.vocab_size)
        _check(options, folder, pool)
        for attn_len in lengths:
            rows.append(_row(options, precision, attn_len, folder, pool))
            pool.release()
    title = (
        f"sliding, {options.recipe}{' as a toy' if options.toy else ''}: ms a token when each sees attn_len others; "
        f"median of {options.repeats}"
    )
    show(title, _COLUMNS, rows)
    finish(header("sliding", options) | {"cases": rows})


def _check(options: Options, folder: Path, pool: Pool) -> None:
    """Check that ours has the losses of the textbook model."""
    queries, memory = (8, 16) if options.toy else (64, 128)
    common = job(options.config(), options, folder, "eval", batch=1, tgt_len=queries, mem_len=memory)
    precision = options.precisions[-1]
    models = [("textbook", "fp32", "benchmarks.textbook", "Textbook"), ("ours", precision, "benchmarks.ours", "Ours")]
    contenders = [Contender(*model) for model in models]
    ready = prepare_models({c: common | {"precision": c.precision} for c in contenders}, pool, {})
    check_same(ready, "textbook fp32", [queries] * 4)


def _row(options: Options, precision: str, attn_len: int, folder: Path, pool: Pool) -> dict[str, Any]:
    model = options.config().model
    vanilla, windows = _windows(options, precision, attn_len, pool)
    ours, tgt_len = _segments(options, precision, attn_len, folder, pool)
    work = bound.Work(1, tgt_len, attn_len - 1, attn_len=attn_len)
    lists = {"vanilla's": vanilla_products(model, 1, attn_len), "ours'": bound.products(model, work, training=False)}
    runners = {"vanilla": vanilla, "ours": ours}
    for name, products in lists.items():
        task = {"precision": precision, "device": options.torch_device, "products": products}
        runners |= pool.prepare_rate(name, "Products", task)
    timings = race(runners, options.repeats, turn_seconds=options.turn_seconds)
    by_window, by_segment = timings["vanilla"].median / windows, timings["ours"].median / tgt_len
    return {
        "attn_len": attn_len,
        "precision": precision,
        "windows": windows,
        "vanilla_milliseconds": by_window * 1e3,
        "vanilla_share_of_bound": timings["vanilla's"].median / by_window,
        "vanilla_gflops": sum(p.flop for p in lists["vanilla's"]) / by_window / 1e9,
        "tgt_len": tgt_len,
        "milliseconds": by_segment * 1e3,
        "share_of_bound": timings["ours'"].median / timings["ours"].median,
        "ratio": by_window / by_segment,
        "paper": PAPER.get(attn_len),
        "timings": {name: timing._asdict() for name, timing in timings.items()},
    }


def _windows(options: Options, precision: str, attn_len: int, pool: Pool) -> tuple[Prepared, int]:
    """The vanilla model, and the fastest number of windows side by side: doubled until that is no longer faster."""
    contender = Contender("vanilla", precision, "benchmarks.vanilla", "Sliding")
    common = {"model": asdict(options.config().model), "attn_len": attn_len, "precision": precision}
    best, count = float("inf"), 1
    while count == 1 or count * attn_len <= _MOST_TOKENS:
        task = common | {"batch": count, "device": options.torch_device}
        [vanilla] = pool.prepare({contender: task}, {}).values()
        vanilla.run(1)
        seconds = vanilla.run(1) / count
        if seconds > 0.97 * best:
            break
        best, count = seconds, 2 * count
    [vanilla] = pool.prepare({contender: common | {"batch": count // 2, "device": options.torch_device}}, {}).values()
    return vanilla, count // 2


def _segments(options: Options, precision: str, attn_len: int, folder: Path, pool: Pool) -> tuple[Prepared, int]:
    """Our model with a window, at its fastest tgt_len. The losses do not depend on tgt_len."""
    contender = Contender("ours", precision, "benchmarks.ours", "Ours")
    best: tuple[float, int] = (float("inf"), 0)
    candidates = (8, 16) if options.toy else (64, 128, 256, 512, 1024, 2048)
    for tgt_len in (*candidates, 0):
        chosen = tgt_len or best[1]
        task = job(options.config(), options, folder, "eval", batch=1, tgt_len=chosen, mem_len=attn_len - 1)
        [ours] = pool.prepare({contender: task | {"precision": precision, "attn_len": attn_len}}, {}).values()
        if not tgt_len:
            return ours, chosen
        ours.run(1)
        best = min(best, (ours.run(2) / tgt_len, tgt_len))
    raise AssertionError("the last candidate returns")
