"""Hashed n-grams and matches: the vector of a token also depends on the tokens before it.

    x_t = scale (E[id_t] + sum over n of W_n G_n[hash(id_(t-n+1), ..., id_t)] + sum over n of V_n F_n[id_(s+1)])

A hash selects the row of G_n, so different n-grams may share a row. Pagnoni et al. 2024 (Byte Latent Transformer,
arXiv 2412.09871, section 3.2.1) use hashed embeddings of byte n-grams. Our rows are narrower than the model, and W_n
projects them.

s is the last position before t where the same n tokens ended, a match. Akyurek et al. 2024 (arXiv 2401.12973) attend to
the tokens after all such positions; we embed the token after the last one.

A training step changes only the rows that it reads, so a large table costs little time. `Trainer` therefore makes the
table's gradients sparse.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int, Integer
from torch import Tensor, nn
from typing_extensions import TypeVar

from ..config.settings import TransformerXLConfig
from .inference import KVCache, tokens_of
from .memory import Memory
from .modules import Ids, RowLinear, Vectors

State = TypeVar("State", Memory, KVCache)
PRIME, BASE = (1 << 31) - 1, 1_540_483_477
"""The hash is a polynomial modulo a prime. No product exceeds 2^62, so it is the same on every device."""


class NgramEmbedding(nn.Module):
    """The vector of the n-grams that end at each token, and of their matches.

    One table has the rows of all: `ngram_sizes` has the number for each n in `ngrams`, then for each in `matches`. None
    of them reaches over a `document_end`. Training leaves out a share `ngram_dropout` of the n-grams, not of matches.
    """

    def __init__(self, config: TransformerXLConfig):
        super().__init__()
        self.config: TransformerXLConfig = config
        sizes = config.ngram_sizes
        self.table: nn.Embedding = nn.Embedding(sum(sizes), config.ngram_width)
        self.projection: RowLinear = RowLinear(len(sizes) * config.ngram_width, config.d_model, bias=False)

    @property
    def reach(self) -> int:
        """The number of earlier tokens that the vector of one token needs."""
        config = self.config
        return max(*config.ngrams, *(config.match_window + n for n in config.matches), 1) - 1

    def add(self, x: Vectors, ids: Ids, memory: State, mem_len: int) -> tuple[Vectors, State]:
        """The embeddings `x` of these tokens plus the vectors of their n-grams, and `memory` with its next tokens."""
        earlier = tokens_of(memory)
        if not ids.shape[1]:
            return x, memory
        tokens = ids.long()
        if memory.valid is not None:
            padding = torch.arange(ids.shape[1], device=ids.device) < -memory.valid[:, None]
            tokens = tokens.masked_fill(padding, -1)  # no token
        tokens = torch.cat([earlier, tokens], 1)
        return x + self(tokens, ids.shape[1]), memory.with_tokens(self.last(tokens, mem_len))

    def forward(self, tokens: Int[Tensor, "B L"], count: int, only: Int[Tensor, " R"] | None = None) -> Vectors:
        """Vectors for the last T = `count` of the given tokens. -1 stands for no token, as before a row's first.

        `only`: the rows that are looked up, which takes most of the time. All are projected, because the bits of a
        product depend on the number of its rows; the others have any vector.
        """
        read: Any = self._read
        if torch.compiler.is_compiling():  # as a decorator it would import torch._dynamo, as long as torch
            read = torch.compiler.disable(read)  # sparse gradients cannot be compiled
        return read(tokens, count, only)

    def _read(self, tokens: Int[Tensor, "B L"], count: int, only: Int[Tensor, " R"] | None) -> Vectors:
        found = self.rows_of(tokens if only is None else tokens[only], count)
        if only is not None:
            found = found.new_zeros(len(tokens), *found.shape[1:]).index_copy_(0, only, found)
        config, vectors = self.config, self.table(found)
        if self.training and config.ngram_dropout:
            kept = F.dropout(vectors.new_ones(*vectors.shape[:-2], len(config.ngrams)), config.ngram_dropout)
            vectors = vectors * F.pad(kept, (0, len(config.matches)), value=1.0)[..., None]
        return config.input_scale * self.projection(vectors.flatten(-2))

    def rows_of(self, tokens: Int[Tensor, "B L"], count: int) -> Int[Tensor, "B T N"]:
        """Table rows for the last T = `count` tokens: for each token one of each n-gram, then one of each match."""
        config, needed = self.config, count + self.reach
        # Codes are ids + 1, because 0 is no token. Zeros come first where there are fewer than `needed`.
        codes = F.pad(tokens[:, -needed:] + 1, (max(needed - tokens.shape[1], 0), 0))
        documents = None if config.document_end is None else (codes == config.document_end + 1).cumsum(1)
        starts = tuple(accumulate((0, *config.ngram_sizes[:-1])))
        if count == 1 and _by_numpy(codes):
            if documents is not None:
                codes = codes.where(documents == documents[:, -1:], 0)
            return torch.from_numpy(_columns_of_one(codes.numpy(), config) + starts)[:, None]
        found = [hashed % config.ngram_rows for hashed in _hashes(codes, documents, config.ngrams, count, PRIME)]
        found += _followers(codes, documents, config.matches, config.match_window, count)
        return torch.stack([row + start for row, start in zip(found, starts, strict=True)], -1)

    def last(self, tokens: Int[Tensor, "B L"], mem_len: int) -> Int[Tensor, "B N"]:
        """The last N tokens, which the next call needs. With `mem_len` 0 it begins without a past, and N is 0."""
        count = self.reach if mem_len else 0
        return F.pad(tokens, (count, 0), value=-1)[:, tokens.shape[1] :]

    def no_tokens(self, batch: int, mem_len: int) -> Int[Tensor, "B N"]:
        """What `last` returns before the first token."""
        return self.last(torch.empty(batch, 0, dtype=torch.long, device=self.table.weight.device), mem_len)


def _hashes(
    codes: Int[Tensor, "B L"],
    documents: Int[Tensor, "B L"] | None,
    lengths: Sequence[int],
    count: int,
    modulus: int | None,
) -> list[Int[Tensor, "B T"]]:
    """For each n the hash of the last n codes of a document, at each of the last T = `count` positions.

    It is the sum over a of code[t - a] BASE^(a + 1). None: modulo 2^64, where equal hashes are taken for equal n-grams.
    With p the largest power of two below n, hash(n codes) = hash(the newer p) + BASE^p hash(the older n - p): a few
    products serve all lengths, and column j of `known[n]` is the n-gram that ends at position j + n - 1.
    """
    needed = count + max(lengths, default=1) - 1
    known = {1: codes[:, -needed:] * BASE % PRIME}

    def hash_of(n: int) -> Int[Tensor, "B _"]:
        if n not in known:
            newer = 1 << (n - 1).bit_length() - 1
            later, earlier = hash_of(newer)[:, n - newer :], hash_of(n - newer)[:, : needed - n + 1]
            if documents is not None:
                recent = documents[:, -needed:]
                same = recent[:, n - 1 :] == recent[:, n - 1 - newer : needed - newer]
                earlier = earlier.where(same, 0)
            total = later + pow(BASE, newer, modulus or 1 << 63) * earlier
            known[n] = total % modulus if modulus else total
        return known[n]

    return [hash_of(n)[:, -count:] for n in lengths]


def _followers(
    codes: Int[Tensor, "B L"], documents: Int[Tensor, "B L"] | None, lengths: Sequence[int], window: int, count: int
) -> list[Int[Tensor, "B T"]]:
    """For each n, and the n-grams that end at the last T = `count` positions: the code that followed the last earlier
    occurrence in the same document, 0 if that ended more than `window` positions earlier or does not exist."""
    K, followers = window + count, []
    positions = torch.arange(K, device=codes.device)
    for keys in _hashes(codes, None, lengths, K, None):
        if torch.compiler.is_exporting() or count == 1:  # ONNX has no searchsorted; for one token to compare is faster
            same = (keys[:, -count:, None] == keys[:, None]) & (positions < positions[-count:, None])
            last = positions.where(same, -1).amax(-1)
            found = (last >= 0) & (positions[-count:] - last <= window)
        else:
            # Sorted by (n-gram, position), the entry before an n-gram's own is its last earlier occurrence, if any.
            bits = K.bit_length()
            marked = keys << bits | positions
            # NumPy sorts several times as fast as PyTorch 2.13.
            ordered = torch.from_numpy(np.sort(marked.numpy())) if _by_numpy(marked) else marked.sort().values
            own = marked[:, -count:].contiguous()
            before = ordered.gather(1, (torch.searchsorted(ordered, own) - 1).clamp(min=0))
            last = before & (1 << bits) - 1
            found = (before < own) & (before >> bits == own >> bits) & (positions[-count:] - last <= window)
        if documents is not None:
            found &= documents[:, -K:].gather(1, last.clamp(min=0)) == documents[:, -count:]
        followers.append(codes[:, -K:].gather(1, (last + 1).clamp(max=K - 1)).where(found, 0))
    return followers


def _columns_of_one(codes: Integer[np.ndarray, "B L"], config: TransformerXLConfig) -> Integer[np.ndarray, "B N"]:
    """The hashes and followers of the last position. `codes` has zeros, then the document of that position."""
    ngrams, matches, window = np.array(config.ngrams, int), config.matches, config.match_window
    recent = codes[:, ::-1]
    powers = np.array([pow(BASE, a + 1, PRIME) for a in range(max(config.ngrams, default=0))], int)
    hashes = (recent[:, : len(powers)] * powers % PRIME).cumsum(1)[:, ngrams - 1] % PRIME % config.ngram_rows
    rows, start = np.arange(len(codes)), codes.shape[1] - 1 - window
    same, followers = np.ones((len(codes), window), bool), np.zeros((len(codes), len(matches)), codes.dtype)
    for age in range(max(matches, default=0)):  # all at once: a text may repeat one token, which occurs everywhere
        same &= codes[:, start - age : -1 - age] == recent[:, age, None]
        if not same.any():
            break
        if age + 1 in matches:
            last = window - 1 - same[:, ::-1].argmax(1)
            followers[:, matches.index(age + 1)] = np.where(same[rows, last], codes[rows, start + last + 1], 0)
    return np.concatenate([hashes, followers], 1)


def _by_numpy(x: Tensor) -> bool:
    traced = torch.compiler.is_exporting() or torch._C._are_functorch_transforms_active()
    watched = torch._C._len_torch_dispatch_stack()  # a mode would take the result for a constant, or has no numbers
    return x.device.type == "cpu" and not traced and not watched
