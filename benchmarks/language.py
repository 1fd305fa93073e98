"""`python -m benchmarks train|eval|decode`: one model in this package and in its peers, compared with its bound."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformer_xl.config.settings import RunConfig
from transformer_xl.mistake import Mistake

from . import bound
from .gate import check_op, check_same
from .options import Options, finish, header, job, show, write_text
from .ours import write_weights
from .race import Contender, Pool, Prepared, Timing, race

PAPER = {
    "train": [(2, 512, 512)],
    "eval": [(1, 128, 3800), (1, 80, 2100)],
    "decode": [(1, 1, 3800), (1, 1, 2100), (1, 1, 512), (16, 1, 512)],
}
"""Batch, tgt_len and mem_len of each case."""
TOY = {"train": [(2, 16, 16)], "eval": [(1, 8, 32)], "decode": [(1, 1, 32), (3, 1, 16)]}
_COLUMNS = {
    "contender": "",
    "precision": "precision",
    "milliseconds": "ms|.2f",
    "spread": "least to most",
    "tokens_per_second": "tokens/s|,.0f",
    "ratio": "times|.2f",
    "share_of_bound": "of the bound|.0%",
    "peak_megabytes": "MB on top|,.0f",
}


def bench_language(part: str, options: Options, pool: Pool) -> None:
    """Time each case of a part, and print its table and a line of JSON.

    Raises:
        AssertionError: results differ, so no time is reported.
        Mistake: an option does not fit.
        ChildProcessError: a contender's process failed.
    """
    config = options.config()
    check_op(["auto"], options.precisions, options.torch_device, backward=part == "train")
    result = header(part, options) | {"cases": []}
    for case in cases(part, options, config):
        with tempfile.TemporaryDirectory(prefix="txl-bench-") as folder:
            write_text(Path(folder) / "ids", config.model.vocab_size)
            result["cases"].append(_case(part, options, config, case, Path(folder), pool))
        pool.release()
    finish(result)


def cases(part: str, options: Options, config: RunConfig) -> list[bound.Work]:
    """The sizes to time: the defaults of the part and the recipe, changed by the given options."""
    found = (TOY if options.toy else PAPER)[part]
    if part == "train" and not options.toy:
        found = [(2, config.train.tgt_len, config.train.mem_len)]
    asked = (options.batch_size, options.tgt_len, options.mem_len)
    changed = [tuple(a if b is None else b for a, b in zip(case, asked, strict=True)) for case in found]
    return [bound.expected_work(config.model, *case) for case in dict.fromkeys(changed)]


def prepare_models(
    jobs: Mapping[Contender, dict[str, Any]], pool: Pool, refused: dict[str, str]
) -> dict[str, Prepared]:
    """Prepare contenders with the same weights, which Hugging Face's model writes if it takes part.

    Raises:
        Mistake: the first contender, with which all others are compared, cannot take part.
    """
    first, *others = jobs
    weights = Path(jobs[first]["weights"])
    if weights.exists():
        shutil.rmtree(weights)
    if first.label != "Hugging Face":
        write_weights(jobs[first])
    ready = pool.prepare({first: jobs[first]}, refused)
    if first.key in refused:
        why = refused[first.key]
        if first.label != "Hugging Face":
            raise Mistake(f"--recipe must name a model to compare with, and {why}. Give --peers.")
        raise Mistake(
            f"--peers must be the Python of an environment with torch and transformers 4.37.2, and {first.python} "
            f"reports: {why}."
        )
    return ready | pool.prepare({contender: jobs[contender] for contender in others}, refused)


def _case(part: str, options: Options, config: RunConfig, work: bound.Work, folder: Path, pool: Pool) -> dict[str, Any]:
    sizes = {"batch": work.batch, "tgt_len": work.tgt_len, "mem_len": work.mem_len}
    common = job(config, options, folder, part, **sizes)
    contenders = options.contenders()
    jobs = {
        c: common | {"precision": c.precision, "train": common["train"] | {"precision": c.precision}}
        for c in contenders
    }
    refused: dict[str, str] = {}
    ready = prepare_models(jobs, pool, refused)
    reference = contenders[0].key
    same = {key: model for key, model in ready.items() if not key.startswith("x-transformers")}
    pieces = [2 * work.tgt_len] * 2 if work.tgt_len < 16 else [work.tgt_len] * 2
    differences = check_same(same, reference, [16] + [1] * 8 if part == "decode" else pieces)

    limits = {p: bound.least_work(part, config.model, work, p) for p in options.precisions}
    rates = _rates(options, limits[options.precisions[0]][0], pool)
    timings = race(ready | rates, options.repeats, turn_seconds=options.turn_seconds)
    per_byte = timings["bandwidth fp32"].median
    least = {p: timings[f"products {p}"].median + moved * per_byte for p, (_, moved) in limits.items()}
    tokens = work.batch * work.tgt_len
    rows = []
    for contender in contenders:
        if contender.key in ready:
            timing = timings[contender.key]
            row = _row(contender.label, contender.precision, timing, tokens, timings[reference].median)
            row["peak_megabytes"] = ready[contender.key].peak() / 1e6
            if contender.precision in least:
                row["share_of_bound"] = least[contender.precision] / timing.median
            rows.append(row | {"difference": differences.get(contender.key)})
    rows += [
        _row("bound", precision, Timing(seconds, seconds, seconds), tokens, timings[reference].median)
        for precision, seconds in least.items()
    ]
    case = {
        **sizes,
        "flop_per_token": sum(p.flop for p in bound.products(config.model, work, training=part == "train")) / tokens,
        "bytes": {p: moved for p, (_, moved) in limits.items()},
        "gigabytes_per_second": 1e-9 / per_byte,
        "reference": reference,
        "rows": rows,
        "refused": refused,
    }
    _print_case(part, options, case)
    return case


def _row(label: str, precision: str, timing: Timing, tokens: int, reference: float) -> dict[str, Any]:
    return {
        "contender": label,
        "precision": precision,
        "seconds": timing.median,
        "milliseconds": timing.median * 1e3,
        "least": timing.least,
        "most": timing.most,
        "spread": f"{timing.least * 1e3:.2f} to {timing.most * 1e3:.2f}",
        "tokens_per_second": tokens / timing.median,
        "ratio": reference / timing.median,
    }


def _print_case(part: str, options: Options, case: dict[str, Any]) -> None:
    unit = {"train": "step", "eval": "segment", "decode": "step"}[part]
    sizes = f"batch {case['batch']}, tgt_len {case['tgt_len']}, mem_len {case['mem_len']}"
    notes = [
        f"{part}, {options.recipe}{' as a toy' if options.toy else ''}: {sizes}; a {unit}'s ms, "
        f"median of {options.repeats}; times as fast as {case['reference']}; "
        f"{case['flop_per_token'] / 1e6:.1f} MFLOP a token"
    ]
    if not options.peers:
        notes.append("There are no peers. Give --peers the Python of an environment with transformers 4.37.2.")
    else:
        notes.append("Hugging Face fails in bf16; x-transformers is another model, with T5's bias for positions.")
    notes += [f"{key} does not take part: {why}." for key, why in case["refused"].items()]
    show("\n".join(notes), _COLUMNS, case["rows"])


def _rates(options: Options, products: list[bound.Product], pool: Pool) -> dict[str, Prepared]:
    """What the bound is computed from: it takes turns with the contenders."""
    found, device = dict[str, Prepared](), options.torch_device
    for precision in options.precisions:
        task = {"device": device, "precision": precision, "products": products}
        found |= pool.prepare_rate(f"products {precision}", "Products", task)
    large = {"device": device, "bytes": 10**6 if options.toy else 1 << 29}
    return found | pool.prepare_rate("bandwidth fp32", "Bandwidth", large)
