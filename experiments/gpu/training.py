"""A recipe's training on random ids, for the sittings."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.bound import zipf_ids
from transformer_xl.config.recipe import load_recipe
from transformer_xl.config.settings import TransformerXLConfig
from transformer_xl.data.loader import StreamLoader
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.train.step import Trainer

from .sitting import Sitting

STEPS = 50
"""Of an epoch; the first one is step 3,000, whose learning rate is that of training."""


class Training(Trainer):
    """A recipe's model in bf16 on random ids; call it for one step, which returns the mean loss."""

    def __init__(
        self, sitting: Sitting, recipe: str, batch: int, *, length: int = 0, dropout: bool = True, **settings: Any
    ) -> None:
        self.sitting = sitting
        config = load_recipe(recipe)
        shape = config.model if dropout else replace(config.model, dropout=0.0, dropatt=0.0)
        train = replace(config.train, device=str(sitting.device), precision="bf16", batch_size=batch, max_steps=10**6)
        train = replace(train, short_share=0.0)
        if length:
            train = replace(train, tgt_len=length, mem_len=length)
        if sitting.toy:
            shape = small(shape)
            train = replace(train, tgt_len=16, mem_len=16, batch_size=2)
        torch.manual_seed(0)
        model = TransformerXL(shape, backend="triton" if sitting.cuda else "strided").to(sitting.device).train()
        ids = zipf_ids(shape.vocab_size, STEPS * train.batch_size * train.tgt_len + 1)
        loader = StreamLoader(ids, batch_size=train.batch_size, tgt_len=train.tgt_len)
        super().__init__(model, loader, replace(train, **settings), step=60 * STEPS)

    def __call__(self) -> float:
        result = self.advance()
        return result.nats / result.targets

    def times(self, *, profile: bool) -> dict[str, Any]:
        """The median time of 12 steps, tokens per second, peak memory and, if wanted, the kernels."""
        sitting = self.sitting
        for _ in range(4):
            self()
        if sitting.cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(3 if sitting.toy else 12):
            sitting.wait()
            begun = time.perf_counter()
            self()
            sitting.wait()
            seconds.append(time.perf_counter() - begun)
        step = statistics.median(seconds)
        found = {"ms": step * 1e3, "tokens/s": self.config.batch_size * self.config.tgt_len / step}
        if sitting.cuda:
            found["peak, GB"] = torch.cuda.max_memory_allocated() / 1e9
        return found | ({"kernels": sitting.profile(self)} if profile else {})


def small(shape: TransformerXLConfig) -> TransformerXLConfig:
    cutoffs = tuple(100 * (band + 1) for band in range(len(shape.cutoffs)))
    sizes = {"n_layer": 2, "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 32, "d_embed": None, "cutoffs": cutoffs}
    return replace(shape, **sizes, vocab_size=min(shape.vocab_size, 500))
