"""Hashed n-gram embeddings: the vector of a token also depends on the tokens just before it.

    x_t = scale (E[id_t] + sum over n of W_n G_n[hash(id_t-n+1, ..., id_t)])

A hash selects the row of G_n, so different n-grams may share a row. Pagnoni et al. 2024 (Byte Latent Transformer,
arXiv 2412.09871, section 3.2.1) use hashed embeddings of byte n-grams. Our rows are narrower than the model, and W_n
projects them. A training step changes only the rows of the n-grams it reads, so a large table costs little time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn

from ..config.settings import Lengths

_PRIME, _BASE = (1 << 31) - 1, 1_540_483_477
"""The hash is a polynomial modulo a prime. No product exceeds 2^62, so it is the same on every device."""


class NgramEmbedding(nn.Module):
    """The vector of the n-grams that end at each token. Each n in `lengths` has its own `rows` rows of one table."""

    def __init__(self, lengths: tuple[int, ...], rows: int, width: int, d_model: int, *, scale: float = 1.0):
        super().__init__()
        self.lengths: tuple[int, ...] = lengths
        self.rows: int = rows
        self.scale: float = scale
        self.table: nn.Embedding = nn.Embedding(len(lengths) * rows, width, sparse=True)
        self.projection: nn.Linear = nn.Linear(len(lengths) * width, d_model, bias=False)

    @property
    def reach(self) -> int:
        """The number of earlier tokens that the longest n-gram needs."""
        return max(self.lengths) - 1

    @torch.compiler.disable  # it cannot compile sparse gradients
    def forward(self, tokens: Int[Tensor, "B L"], count: int, dropout: float = 0.0) -> Float[Tensor, "B T D"]:
        """Vectors for the last T = `count` of the given tokens. -1 stands for no token, as before a row's first.

        In training each n-gram of each token is left out with probability `dropout`.
        """
        vectors = self.table(self.rows_of(tokens, count))
        if self.training and dropout:
            vectors = vectors * F.dropout(vectors.new_ones(vectors.shape[:-1]), dropout)[..., None]
        return self.scale * self.projection(vectors.flatten(-2))

    def rows_of(self, tokens: Int[Tensor, "B L"], count: int) -> Int[Tensor, "B T N"]:
        """Table rows for the last T = `count` tokens: one row for each token and each of the N lengths of n-grams."""
        codes = F.pad(tokens + 1, (max(count + self.reach - tokens.shape[1], 0), 0))
        start = codes.shape[1] - count
        key, factor, rows = 0, 1, []
        for n in range(1, self.reach + 2):
            factor = factor * _BASE % _PRIME
            key = (key + factor * codes[:, start - n + 1 : codes.shape[1] - n + 1]) % _PRIME
            if n in self.lengths:
                rows.append(key % self.rows + len(rows) * self.rows)
        return torch.stack(rows, -1)

    def last(self, tokens: Int[Tensor, "B L"], mem_len: int) -> Int[Tensor, "B N"]:
        """The last N tokens, which the next call needs. With `mem_len` 0 it begins without a past, and N is 0."""
        count = self.reach if mem_len else 0
        return F.pad(tokens, (count, 0), value=-1)[:, tokens.shape[1] :]

    def no_tokens(self, batch: int, mem_len: int) -> Int[Tensor, "B N"]:
        """What `last` returns before the first token."""
        return self.last(torch.empty(batch, 0, dtype=torch.long, device=self.table.weight.device), mem_len)


def add_ngrams(
    model: Any, x: Float[Tensor, "B T D"], ids: Integer[Tensor, "B T"], memory: Any, lengths: Lengths
) -> tuple[Float[Tensor, "B T D"], Any]:
    """The embeddings `x` of these tokens plus the vectors of their n-grams, and `memory` with its next tokens."""
    if model.ngrams is None:
        return x, memory
    state = model.empty_memory(len(ids), lengths) if memory is None else memory
    if not hasattr(state, "with_tokens") or len(state.counts) != len(ids):
        return x, state  # the backbone refuses it
    tokens = joined_tokens(ids, state)
    x = x + model.ngrams(tokens, ids.shape[1], model.config.ngram_dropout)
    return x, state.with_tokens(model.ngrams.last(tokens, lengths.mem_len))


def joined_tokens(ids: Integer[Tensor, "B T"], memory: Any) -> Int[Tensor, "B L"]:
    """The tokens that `memory` keeps, and these ids. Padding becomes -1."""
    ids = ids.long()
    if memory.valid is not None:
        padding = torch.arange(ids.shape[1], device=ids.device) < -memory.valid[:, None]
        ids = ids.masked_fill(padding, -1)
    return ids if memory.tokens is None else torch.cat([memory.tokens, ids], 1)
