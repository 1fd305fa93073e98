"""Compile the kernels of the sittings for a Hopper card, on a machine without one, into a cache of Triton.

python -m experiments.gpu.compile_kernels FOLDER
"""

from __future__ import annotations

import os
import sys
from itertools import product

from benchmarks.kernels import compiling, launch_op

SHAPES = [  # batch, heads, T, M, K: of the recipes, the op, and evaluation
    *((22, 8, 512, 512, 64), (64, 8, 512, 512, 64), (32, 3, 128, 128, 64), (60, 10, 150, 150, 41)),
    *((4, 10, 70, 70, 38), (2, 8, 768, 768, 128), (3, 5, 131, 257, 64), (60, 10, 150, 150, 48)),
    *((10, 8, 80, 2100, 64), (1, 8, 128, 3800, 64)),
]

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    os.environ["TRITON_CACHE_DIR"] = sys.argv[1]
    with compiling(90):
        for shape, joined in product(SHAPES, (False, True)):
            launch_op(*shape, joined=joined)
