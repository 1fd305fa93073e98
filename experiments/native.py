"""Time the native kernels beside the other backends of a CPU: `python -m experiments.native`.

One thread's processor time, because other programs then matter less: medians of alternating calls in one process.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from transformer_xl.ops import native, relative_attention
from transformer_xl.ops.choice import STRIDED_SCORES
from transformer_xl.runtime.device import prepare_process

INFERENCE = (1, 8, 80, 2100, 64), (1, 8, 128, 3800, 64), (10, 8, 128, 128, 64), (16, 8, 8, 512, 64)
TRAINING = (32, 3, 128, 128, 64), (2, 8, 512, 512, 64), (32, 3, 64, 64, 64), (4, 10, 150, 150, 41)
"""Rows, heads, queries, memory, size of a head."""


def inputs(B: int, H: int, T: int, M: int, K: int, dtype: torch.dtype) -> list[Tensor]:
    """As the model leaves them, but for their values."""
    generator = torch.Generator().manual_seed(0)
    shapes = (B, T, H, K), (B, M + T, H, K), (B, M + T, H, K), (M + T + 32, H, K)
    tensors = [torch.randn(shape, generator=generator).to(dtype).transpose(-2, -3) for shape in shapes]
    return [*tensors, *torch.randn(2, H, K, generator=generator).to(dtype)]


def race(first: Callable[[], object], second: Callable[[], object], turns: int = 11) -> list[float]:
    """The median milliseconds of each."""
    times: list[list[float]] = [[], []]
    for _ in range(turns):
        for call, own in zip((first, second), times, strict=True):
            begun = time.thread_time()
            call()
            own.append(time.thread_time() - begun)
    return [1e3 * statistics.median(own[1:]) for own in times]


def main() -> None:
    prepare_process()
    torch.set_num_threads(1)
    native.build(print)
    for dtype in (torch.bfloat16, torch.float32):
        if reason := native.machine_refusal(dtype):
            print(f"{dtype}: not timed: {reason}.")
            continue
        for training in (False, True):
            for shape in TRAINING if training else INFERENCE:
                for dropout_p in (0.0, 0.1) if training else (0.0,):
                    tensors = [x.requires_grad_(training) for x in inputs(*shape, dtype)]
                    cotangent = torch.ones_like(tensors[0])
                    B, H, T, M, _ = shape
                    many = B * H * T * (M + T) > STRIDED_SCORES
                    other = ("chunked" if many else "strided") if training else "sdpa"

                    def call(backend: str, tensors=tensors, dropout_p=dropout_p, cotangent=cotangent) -> None:
                        out = relative_attention(*tensors, dropout_p=dropout_p, backend=backend)
                        if out.requires_grad:
                            torch.autograd.grad(out, tensors, cotangent)

                    before, now = race(lambda call=call, other=other: call(other), lambda call=call: call("native"))
                    case = f"{dtype} B, H, T, M, K {shape} dropout {dropout_p}"
                    print(f"{case}: {other} {before:.2f} ms, native {now:.2f} ms, {before / now:.2f}x", flush=True)


if __name__ == "__main__":
    sys.exit(main())
