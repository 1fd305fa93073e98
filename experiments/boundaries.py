"""`python -m experiments.boundaries`: the op with `first` beside the op without, forward and backward, on a CPU.

First one document a row: the bounds are given, and hide nothing. Then documents of 128 tokens, of which some backends
skip what is hidden. Last, a step of three recipes with `document_end` beside one without. Each number is the median of
ratios of neighbouring times.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from transformer_xl import build_model, load_recipe
from transformer_xl.mistake import Mistake
from transformer_xl.ops import relative_attention

SHAPES = {"enwik8-small": (4, 8, 512, 512, 64), "enwik8-12l": (2, 8, 512, 512, 64), "short": (16, 8, 128, 128, 64)}
"""Rows, heads, queries, memory and the size of a head."""


def call(backend: str, dtype: torch.dtype, tensors: list[Tensor], first: Tensor | None) -> Callable[[], object]:
    """A call of the op with all gradients."""

    def run() -> None:
        out = relative_attention(*tensors, first=first, backend=backend)
        torch.autograd.grad(out.sum(), tensors)

    return run


def step(recipe: str, end: int | None) -> Callable[[], object]:
    """Forward and backward of a recipe's model on ids in which nothing is the end of a document."""
    run = load_recipe(recipe)
    torch.manual_seed(1)
    model = build_model(replace(run.model, vocab_size=300, cutoffs=(), document_end=end))
    ids = torch.randint(256, (run.train.batch_size, run.train.tgt_len + 1))
    memory = model.empty_memory(len(ids), run.train.lengths)

    def train() -> None:
        nonlocal memory
        with torch.autocast("cpu", torch.bfloat16):
            nll, memory = model(ids[:, :-1], ids[:, 1:], memory, run.train.lengths)
        nll.mean().backward()

    return train


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main(rounds: int = 15) -> None:
    torch.manual_seed(1)
    for name, (B, H, T, M, K) in SHAPES.items():
        shapes = [(B, H, T, K), (B, H, M + T, K), (B, H, M + T, K), (H, M + T, K), (H, K), (H, K)]
        every = torch.arange(T) % 128 == 0
        bounds = {
            "one document": torch.zeros(B, T, dtype=torch.long),
            "of 128 tokens": torch.arange(M, M + T).where(every, 0).cummax(0).values.expand(B, T),
        }
        for dtype in (torch.float32, torch.bfloat16):
            tensors = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
            for backend in ("strided", "chunked", "native"):
                try:
                    runs = {each: call(backend, dtype, tensors, first) for each, first in bounds.items()}
                    plain = call(backend, dtype, tensors, None)
                    plain()
                except Mistake as refusal:
                    print(f"{name} {dtype} {backend}: {refusal}")
                    continue
                for each, run in runs.items():
                    run()
                    ratios = [seconds(run) / seconds(plain) for _ in range(rounds)]
                    print(f"{name} {dtype} {backend}, {each}: {statistics.median(ratios):.3f}", flush=True)


def steps(rounds: int = 15) -> None:
    for recipe in ("enwik8-small", "text-small", "enwik8-12l-modern"):
        plain, ends = step(recipe, None), step(recipe, 299)
        for run in (plain, ends, plain, ends):
            run()
        ratios = [seconds(ends) / seconds(plain) for _ in range(rounds)]
        print(f"a step of {recipe}: {statistics.median(ratios):.3f}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
    steps(*map(int, sys.argv[1:]))
