"""`python -m benchmarks`: compare the time of one part of the work with its peers and its bound."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro
from tyro.conf import DisallowNone, Positional, arg

from transformer_xl.mistake import Mistake

Part = Literal["train", "eval", "decode", "op", "sliding", "kernels", "launches", "here", "all"]
_ALWAYS = ("size", "recipe", "device", "precision", "repeats")
TAKES = {
    "train": (*_ALWAYS, "peers", "against", "batch_size", "tgt_len", "mem_len"),
    "eval": (*_ALWAYS, "peers", "against", "batch_size", "tgt_len", "mem_len"),
    "decode": (*_ALWAYS, "peers", "against", "batch_size", "mem_len"),
    "op": (*_ALWAYS, "batch_size", "tgt_len", "mem_len"),
    "sliding": (*_ALWAYS, "mem_len"),
    "kernels": ("size",),
    "launches": ("recipe", "batch_size"),
    "here": ("recipe", "device", "precision", "seconds", "repeats"),
    "all": (*_ALWAYS, "peers"),
}
"""The options that each part uses."""
_ALONE = "kernels", "launches", "here"
_RACES = [name for name in TAKES if name not in (*_ALONE, "all")]


@dataclass(frozen=True)
class Command:
    """Compare the time of one part of the work with its peers and its bound. The last line is JSON."""

    part: Annotated[Positional[Part], arg(metavar="|".join(get_args(Part)))]
    """train: optimizer steps; eval: segments; decode: one token at a time; op: attention alone; sliding: the paper's
    Table 9; kernels: the fused kernels compiled for GPUs, without one; launches: what a step and a token start on a
    GPU, counted without one; here: one recipe or run on this machine, without peers; all: everything but these
    three."""
    size: Literal["paper", "toy"] | None = None
    """toy: the same code at sizes that take seconds; by default paper. kernels: by default with all masks only; paper:
    with each choice of masks."""
    recipe: Annotated[str | None, arg(metavar="RECIPE")] = None
    """The recipe of the model; by default enwik8-12l. here: also a run folder or hf:NAME."""
    peers: Annotated[str | None, arg(metavar="PYTHON")] = None
    """The Python of an environment with torch, transformers 4.37.2 and, if wanted, x-transformers."""
    against: Annotated[Path | None, arg(metavar="CHECKOUT")] = None
    """Another checkout of this repository; its package takes part in the same race."""
    device: str | None = None
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    """The precision of this package and of the textbook form; by default both are timed."""
    batch_size: Annotated[int | None, arg(metavar="N")] = None
    tgt_len: Annotated[int | None, arg(metavar="N")] = None
    mem_len: Annotated[int | None, arg(metavar="N")] = None
    """Tokens of memory; sliding: the attention length."""
    repeats: Annotated[int | None, arg(metavar="N")] = None
    """Turns of each contender; medians are reported. By default 5."""
    seconds: float | None = None
    """here: minimum duration of one measurement; by default 1."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one part and return the exit status: 2 for a user's mistake, which is reported in one sentence."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `txl` sets it, before torch loads OpenMP
    command = tyro.cli(Command, prog="python -m benchmarks", args=arguments, config=(DisallowNone,))
    given = {name: value for name, value in vars(command).items() if name != "part" and value is not None}
    try:
        bench(command.part, given)
    except (Mistake, OSError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    return 0


def bench(part: Part, given: dict[str, Any]) -> None:
    """Time one part of the work with the given options.

    Raises:
        Mistake: an option has no effect on this part, or does not fit.
        AssertionError: results differ, so no time is reported.
    """
    for name in given:
        if name not in TAKES[part]:
            known = ", ".join(f"--{option.replace('_', '-')}" for option in TAKES[part])
            raise Mistake(f"--{name.replace('_', '-')} has no effect on {part}, which takes {known}. Leave it out.")
    if part in _ALONE:
        getattr(import_module(f".{part}", __package__), f"bench_{part}")(**given)
        return
    import torch

    from transformer_xl.ops.choice import build_native

    from .language import bench_language
    from .op import bench_op
    from .options import Options
    from .race import Pool
    from .sliding import bench_sliding

    options = Options(**given)
    build_native(torch.device(options.torch_device))
    own = {"op": bench_op, "sliding": bench_sliding}
    with Pool() as pool:
        for name in _RACES if part == "all" else [part]:
            if name in own:
                own[name](options, pool)
            else:
                bench_language(name, options, pool)


if __name__ == "__main__":
    sys.exit(main())
