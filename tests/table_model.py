"""A model whose probabilities are a table, so that tests know them in closed form, and whose state is no `Memory`."""

from __future__ import annotations

from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from transformer_xl.config.settings import Lengths


class Tally(NamedTuple):
    """How many tokens each row has seen; below 0: so many more are padding."""

    seen: Tensor

    def select(self, rows: Tensor) -> Tally:
        return Tally(self.seen[rows])

    def reset(self, rows: Tensor) -> Tally:
        return Tally(self.seen.masked_fill(rows, 0))


class TableModel(nn.Module):
    """The n-th token of a row, if its id is i, is followed by j with log-probability `table[n % clock, i, j]`."""

    takes_padding = True
    config: Any = None
    softmax: Any = None
    hidden: Any = ...
    empty_memory: Any = ...
    """Not needed where there is a memory."""

    def __init__(self, vocab_size: int = 7, clock: int = 3):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        scores = torch.randn(clock, vocab_size, vocab_size, generator=generator)
        self.table = nn.Parameter(scores.log_softmax(-1))
        self.dropout = nn.Dropout(0.5)
        self.calls: list[tuple[int, int]] = []

    def for_inference(self, precision: str = "fp32") -> TableModel:
        shared = copy(self)
        shared.training = False
        return shared

    def empty_cache(self, batch: int, lengths: Lengths, valid: Tensor | None = None) -> Tally:
        return Tally(torch.zeros(batch, dtype=torch.int64) if valid is None else valid)

    def log_probs(self, ids, memory, lengths, last=None):
        assert not self.training, "dropout would be on"
        assert not torch.is_grad_enabled(), "a graph would grow"
        self.calls.append(tuple(ids.shape))
        moment = memory.seen[:, None] + torch.arange(ids.shape[1])
        log_probs = self.table[moment % len(self.table), ids]
        return log_probs if last is None else log_probs[:, -last:], Tally(memory.seen + ids.shape[1])

    def forward(self, ids, targets, memory, lengths):
        log_probs, memory = self.log_probs(ids, memory, lengths)
        nll = -log_probs.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
        return nll.masked_fill(targets < 0, 0.0), memory
