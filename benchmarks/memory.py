"""`python -m benchmarks memory`: the peak memory of a training step by length, each in a new process."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

from .language import prepare_models
from .options import Options, finish, header, job, show, write_text
from .race import Contender, Pool

PAPER, TOY = (512, 1024, 2048, 4096), (32,)
_LONGEST_PEER = 1024
"""The longest length for peers. They keep the scores of all layers, which grow with the square of the length."""
_COLUMNS = {
    "contender": "",
    "precision": "precision",
    "tgt_len": "T = M|,d",
    "peak_megabytes": "MB on top|,.0f",
    "share": "of the first's|.0%",
    "growth": "grows like length to the|.2f",
}


def bench_memory(options: Options, _: Pool) -> dict[str, Any]:
    """Take two steps with a full memory, and report the peak above weights, gradients and optimizer state.

    Each row has its own process, so the common pool is not used.

    Raises:
        ChildProcessError: a process failed, perhaps for lack of memory.
    """
    lengths = TOY if options.toy else PAPER
    lengths = lengths if options.tgt_len is None else (options.tgt_len,)
    contenders = [c for c in options.contenders() if c.label in ("Hugging Face", "ours")]
    if not options.peers:
        contenders.insert(0, Contender("textbook", "fp32", "benchmarks.textbook", "Textbook"))
    rows = []
    for contender in contenders:
        for length in lengths:
            if contender.label == "ours" or length <= _LONGEST_PEER:
                rows.append(_row(options, contender, length))
    first = {row["tgt_len"]: row["peak_megabytes"] for row in rows if row["contender"] == rows[0]["contender"]}
    for before, row in zip([None, *rows], rows, strict=False):
        row["share"] = row["peak_megabytes"] / first[row["tgt_len"]] if row["tgt_len"] in first else None
        if before and before["tgt_len"] < row["tgt_len"] and min(before["peak_megabytes"], row["peak_megabytes"]) > 0:
            change = math.log(row["peak_megabytes"] / before["peak_megabytes"])
            row["growth"] = change / math.log(row["tgt_len"] / before["tgt_len"])
    title = (
        f"memory, {options.recipe}{' as a toy' if options.toy else ''}: a training step at batch "
        f"{options.batch_size or 1}, above weights, gradients and optimizer state; linear is 1"
    )
    show(title, _COLUMNS, rows)
    return finish(header("memory", options) | {"cases": rows})


def _row(options: Options, contender: Contender, length: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="txl-bench-") as folder, Pool() as pool:
        config = options.config()
        write_text(Path(folder) / "ids", config.model.vocab_size)
        batch = options.batch_size or 1
        memory = length if options.mem_len is None else options.mem_len
        task = job(config, options, Path(folder), "train", batch=batch, tgt_len=length, mem_len=memory)
        task |= {"precision": contender.precision, "train": task["train"] | {"precision": contender.precision}}
        [model] = prepare_models({contender: task}, pool, {}).values()
        seconds = model.run(2)
        row = {"contender": contender.label, "precision": contender.precision, "tgt_len": length, "mem_len": memory}
        return row | {"peak_megabytes": model.peak() / 1e6, "seconds": seconds}
