"""`python -m benchmarks`: compare the time of one part of the work with its peers and its bound."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import tyro
from tyro.conf import DisallowNone

from transformer_xl.mistake import Mistake

if TYPE_CHECKING:
    from .options import Options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one part and return the exit status: 2 for a user's mistake, which is reported in one sentence."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `txl` sets it, before torch loads OpenMP
    from .options import Options

    options = tyro.cli(Options, prog="python -m benchmarks", args=arguments, config=(DisallowNone,))
    try:
        options.refuse()
        bench(options)
    except (Mistake, OSError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    return 0


def bench(options: Options) -> None:
    """Time one part of the work.

    Raises:
        Mistake: an option does not fit.
        AssertionError: results differ, so no time is reported.
    """
    if options.part == "kernels":
        from .kernels import bench_kernels

        return bench_kernels(options.size)
    if options.part == "launches":
        from .launches import bench_launches

        return bench_launches(options.recipe, options.batch_size)
    if options.part == "here":
        from .here import bench_here

        return bench_here(options)
    import torch

    from transformer_xl.ops.choice import build_native

    from .language import bench_language
    from .op import bench_op
    from .race import Pool

    build_native(torch.device(options.torch_device))
    with Pool() as pool:
        for name in ("train", "eval", "decode", "op") if options.part == "all" else (options.part,):
            if name == "op":
                bench_op(options, pool)
            else:
                bench_language(name, options, pool)


if __name__ == "__main__":
    sys.exit(main())
