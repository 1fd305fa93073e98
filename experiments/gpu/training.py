"""A recipe's training on random ids, for the sittings."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.bound import zipf_ids
from transformer_xl.config.recipe import load_recipe
from transformer_xl.config.settings import TrainConfig, TransformerXLConfig
from transformer_xl.data.loader import Segment
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.train.optim import build_optimizers
from transformer_xl.train.replay import Replay, forward_backward
from transformer_xl.train.step import objective_of, train_step

from .sitting import Sitting


class Training:
    """A recipe's model in bf16 on random ids; call it for one step, which returns the mean loss."""

    def __init__(
        self,
        sitting: Sitting,
        recipe: str,
        batch: int,
        *,
        length: int | None = None,
        dropout: bool = True,
        replay: bool = False,
    ) -> None:
        self.sitting = sitting
        config = load_recipe(recipe)
        shape = config.model if dropout else replace(config.model, dropout=0.0, dropatt=0.0)
        train = replace(config.train, device=str(sitting.device), precision="bf16", batch_size=batch)
        self.train: TrainConfig = replace(train, max_steps=10**6, short_share=0.0)
        if length:
            self.train = replace(self.train, tgt_len=length, mem_len=length)
        if sitting.toy:
            shape = small(shape)
            self.train = replace(self.train, tgt_len=16, mem_len=16, batch_size=2)
        torch.manual_seed(0)
        model = TransformerXL(shape, backend="triton" if sitting.cuda else "strided")
        self.model = model.to(sitting.device).train()
        if self.model.ngrams is not None:
            self.model.ngrams.table.sparse = True
        self.memory = self.model.empty_memory(self.train.batch_size, self.train.lengths)
        self.optimizers = build_optimizers(self.model, self.train)
        self.objective: Any = objective_of(self.model, self.train)
        self.run = Replay() if replay else forward_backward
        self.segments, self.step = list(self._segments(8)), 3000

    def _segments(self, count: int) -> Iterator[Segment]:
        shape = count, self.train.batch_size, self.train.tgt_len + 1
        ids = zipf_ids(self.model.config.vocab_size, count * shape[1] * shape[2])
        for piece in torch.as_tensor(ids).long().view(shape):
            yield Segment(piece[:, :-1], piece[:, 1:], None)

    def __call__(self) -> float:
        segment = self.segments[self.step % len(self.segments)]
        call = self.model, self.optimizers, segment, self.memory, self.train, self.step
        result, self.memory = train_step(*call, objective=self.objective, run=self.run)
        self.step += 1
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
        found = {"ms": step * 1e3, "tokens/s": self.train.batch_size * self.train.tgt_len / step}
        if sitting.cuda:
            found["peak, GB"] = torch.cuda.max_memory_allocated() / 1e9
        return found | ({"kernels": sitting.profile(self)} if profile else {})


def small(shape: TransformerXLConfig) -> TransformerXLConfig:
    cutoffs = tuple(100 * (band + 1) for band in range(len(shape.cutoffs)))
    sizes = {"n_layer": 2, "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 32, "d_embed": None, "cutoffs": cutoffs}
    return replace(shape, **sizes, vocab_size=min(shape.vocab_size, 500))
