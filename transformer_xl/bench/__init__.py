"""Timings: each contender in a process of its own, its result held against the others' before its time counts."""

from __future__ import annotations

from typing import Any

_ALWAYS = ("size", "recipe", "device", "precision", "repeats")
TAKES = {
    "data": ("megabytes", "counts", "repeats"),
    "train": (*_ALWAYS, "peers", "batch_size", "tgt_len", "mem_len"),
    "eval": (*_ALWAYS, "peers", "batch_size", "tgt_len", "mem_len"),
    "decode": (*_ALWAYS, "peers", "batch_size", "mem_len"),
    "op": (*_ALWAYS, "batch_size", "tgt_len", "mem_len"),
    "sliding": (*_ALWAYS, "mem_len"),
    "memory": ("size", "recipe", "device", "precision", "peers", "batch_size", "tgt_len", "mem_len"),
    "all": (*_ALWAYS, "peers"),
}
"""The parts, and which options each has a use for."""


def bench(part: str, options: dict[str, Any]) -> None:
    """Time a part of the work; an option that is None is the part's own.

    Raises:
        ValueError: an option has no effect on this part, or does not fit.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in TAKES[part]:
            known = ", ".join(f"--{option.replace('_', '-')}" for option in TAKES[part])
            raise ValueError(f"--{name.replace('_', '-')} has no effect on {part}, which takes {known}. Leave it out.")
    if part == "data":
        from .data import bench_data

        bench_data(**given)
        return
    from .language import bench_language
    from .memory import bench_memory
    from .op import bench_op
    from .options import Options
    from .race import Pool
    from .sliding import bench_sliding

    settled = Options(**given)
    with Pool() as pool:
        for name in [name for name in TAKES if name not in ("data", "all")] if part == "all" else [part]:
            if name == "memory":
                bench_memory(settled)
            elif name == "op":
                bench_op(settled, pool)
            elif name == "sliding":
                bench_sliding(settled, pool)
            else:
                bench_language(name, settled, pool)
