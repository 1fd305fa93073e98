"""Compile the kernels of the sittings for a Hopper card, on a machine without one, into a cache of Triton.

python -m experiments.gpu.compile_kernels FOLDER

Triton chooses a binary by the dtypes, the constants, and which addresses and strides are multiples of 16. Tensors
without memory have all of these.
"""

from __future__ import annotations

import os
import sys
from itertools import product
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.kernels import Hopper

SHAPES = [  # batch, heads, T, M, K: of the recipes, the op, and evaluation
    *((22, 8, 512, 512, 64), (64, 8, 512, 512, 64), (32, 3, 128, 128, 64), (60, 10, 150, 150, 41)),
    *((4, 10, 70, 70, 38), (2, 8, 768, 768, 128), (3, 5, 131, 257, 64), (60, 10, 150, 150, 48)),
    *((10, 8, 80, 2100, 64), (1, 8, 128, 3800, 64)),
]


class Pointer:
    """A tensor of a launch: its dtype, and an address for its alignment."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self.address = tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        return self.address


class Compiled:
    """A kernel whose launches compile and run nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            found = [Pointer(each) if isinstance(each, Tensor) else each for each in arguments]
            self.kernel.warmup(*found, grid=grid, **constants)

        return launch


def main(folder: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = folder
    triton.runtime.driver.set_active(Hopper())
    from transformer_xl.ops import triton as fused

    fused._target = lambda device: 90
    fused.KERNELS = {name: Compiled(kernel) for name, kernel in fused.KERNELS.items()}
    for shape, joined in product(SHAPES, (False, True)):
        _launch_all(fused, *shape, joined=joined)


def _launch_all(fused: Any, batch: int, heads: int, queries: int, memory: int, size: int, *, joined: bool) -> None:
    """Forward and backward; with `joined` keys and values are laid out as a model joins them with its memory's."""
    keys = queries + memory

    def draw(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    q, k, v = (x.transpose(1, 2) for x in draw(batch, keys, 3, heads, size).unbind(2))
    if joined:
        q, k, v = (x.transpose(1, 2) for x in draw(batch, queries, 3, heads, size).unbind(2))
        past = draw(batch, memory, 2, heads, size).transpose(1, 3)
        k, v = torch.cat([past[:, :, 0], k], 2), torch.cat([past[:, :, 1], v], 2)
    inputs = q[:, :, -queries:], k, v, draw(keys, heads, size).transpose(0, 1), draw(heads, size), draw(heads, size)
    rest = None, None, None, keys, size**-0.5, 0.0
    out, lse = fused._attend._init_fn(*inputs, *rest)
    fused._attend_backward._init_fn(out.transpose(1, 2), out, lse, *inputs, *rest)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(sys.argv[1])
