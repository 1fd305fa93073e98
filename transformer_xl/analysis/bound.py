"""What a part of the work must multiply and read, at least.

Matrix products, each as [batch, m, k] x [batch, k, n], `times` often; 2 batch m k n FLOP each time. No recomputation,
of attention only what is not masked, and no product whose result nobody needs: in training memory and sinusoids have no
gradient; in evaluation keys, values and the position table were projected once. With T queries behind M keys of memory
a share (M + (T + 1) / 2) / (M + T) of the scores is seen. Letters are those of docs/math.md, F is d_inner.

    product, every layer      rows x inside x outside               also backward: to the weight, to the input
    queries, keys, values     B T x D x 3 H K                       both
    keys, values of memory    B M x D x 2 H K    training only      weight
    positions                 S x D x H K        training only      weight
    content scores            B H: T x K x S     what is seen       both
    position scores           H: B T x K x S     what is seen       both
    weighted values           B H: T x S x K     what is seen       both
    output                    B T x H K x D                         both
    feed-forward              B T x D x F, B T x F x D              both
    softmax                   B T x D x V; in bands: the head, and each tail for the rows it has     both

Bytes: an optimizer step reads weight, gradient and two moments and writes three of them, after the gradient's norm is
known; a token that is generated reads every weight of a product, each row's keys and values, and the position table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from ..config.settings import TransformerXLConfig


class Product(NamedTuple):
    """A matrix product, and how often it is needed."""

    name: str
    batch: int
    m: int
    k: int
    n: int
    times: float

    @property
    def flop(self) -> float:
        return 2 * self.batch * self.m * self.k * self.n * self.times


class Work(NamedTuple):
    """One call of the model: B rows of T tokens behind M of memory; rows of each band of the softmax but the first."""

    batch: int
    tgt_len: int
    mem_len: int
    tail_rows: Sequence[float] = ()
    attn_len: int | None = None
    """A window: every query sees so many keys."""


def zipf(count: int) -> Float[np.ndarray, " count"]:
    """Probabilities of tokens under Zipf's law, 1 / (n + 2.7) for the n-th: as frequent as words and bytes in texts."""
    weights = 1 / (np.arange(count) + 2.7)
    return weights / weights.sum()


def zipf_ids(vocab_size: int, count: int, seed: int = 1111) -> Int[np.ndarray, " count"]:
    """A text by `zipf`; after a million tokens it repeats."""
    ids = np.random.default_rng(seed).choice(vocab_size, min(count, 1 << 20), p=zipf(vocab_size))
    return np.resize(ids.astype(np.int32), count)


def expected_work(
    config: TransformerXLConfig, batch: int, tgt_len: int, mem_len: int, attn_len: int | None = None
) -> Work:
    """A call whose targets follow `zipf`, which decides how many rows each band of the softmax has."""
    edges = [*config.cutoffs, config.vocab_size] if config.cutoffs else []
    cumulative = np.append(0, zipf(config.vocab_size).cumsum())
    tails = (batch * tgt_len * float(cumulative[high] - cumulative[low]) for low, high in pairwise(edges))
    return Work(batch, tgt_len, mem_len, tuple(tails), attn_len)


def seen_share(work: Work) -> float:
    """The share of the T x S scores that is not masked."""
    keys = work.mem_len + work.tgt_len
    seen = work.mem_len + (work.tgt_len + 1) / 2 if work.attn_len is None else work.attn_len
    return seen / keys


def products(config: TransformerXLConfig, work: Work, *, training: bool) -> list[Product]:
    """All of one step, or of one evaluated segment."""
    heads, size, width, layers = config.n_head, config.d_head, config.d_model, config.n_layer
    rows, keys, inside = work.batch * work.tgt_len, work.mem_len + work.tgt_len, heads * size
    both = (True, True) if training else (False, False)
    weight = (True, False)
    found = [*_product("qkv", 1, rows, width, 3 * inside, layers, *both)]
    if training:
        found += _product("qkv of memory", 1, work.batch * work.mem_len, width, 2 * inside, layers, *weight)
        found += _product("positions", 1, keys, width, inside, layers, *weight)
    found += attention_products(work, heads, size, training=training, times=layers)
    found += _product("output", 1, rows, inside, width, layers, *both)
    found += _product("inner", 1, rows, width, config.d_inner, layers, *both)
    found += _product("outer", 1, rows, config.d_inner, width, layers, *both)
    found += _softmax(config, rows, work.tail_rows, both)
    return [product for product in found if product.flop]


def attention_products(work: Work, heads: int, size: int, *, training: bool, times: int = 1) -> list[Product]:
    """Those of the op, `times` often."""
    keys, pairs, seen = work.mem_len + work.tgt_len, work.batch * heads, times * seen_share(work)
    return [
        *_product("content scores", pairs, work.tgt_len, size, keys, seen, training, training),
        *_product("position scores", heads, work.batch * work.tgt_len, size, keys, seen, training, training),
        *_product("weighted values", pairs, work.tgt_len, keys, size, seen, training, training),
    ]


def _product(
    name: str, batch: int, m: int, k: int, n: int, times: float, to_weight: bool, to_input: bool
) -> Iterator[Product]:
    yield Product(name, batch, m, k, n, times)
    if to_weight:
        yield Product(f"{name}, to the weight", batch, k, m, n, times)
    if to_input:
        yield Product(f"{name}, to the input", batch, m, n, k, times)


def _softmax(config: TransformerXLConfig, rows: int, tail_rows: Sequence[float], both) -> Iterator[Product]:
    edges = (0, *config.cutoffs, config.vocab_size)
    projected = config.div_val > 1 or config.embed_width != config.d_model
    for band, (low, high) in enumerate(pairwise(edges)):
        count = round(tail_rows[band - 1]) if band else rows
        symbols = high - low + (0 if band else len(config.cutoffs))
        embed = config.embed_width // config.div_val**band
        if projected:
            yield from _product(f"softmax's projection {band}", 1, count, config.d_model, embed, 1, *both)
        looked_up = count if band else rows - (round(sum(tail_rows)) if config.div_val > 1 else 0)
        if projected and (config.div_val > 1 or band == 0):
            yield from _product(f"embedding's projection {band}", 1, looked_up, embed, config.d_model, 1, *both)
        yield from _product(f"softmax {band}", 1, count, embed, symbols, 1, *both)


def vanilla_products(config: TransformerXLConfig, windows: int, attn_len: int) -> list[Product]:
    """The vanilla model over windows, of each of which the last position is wanted: see `vanilla.py`."""
    heads, size, width = config.n_head, config.d_head, config.d_model
    rows, inside, pairs, below = windows * attn_len, heads * size, windows * heads, config.n_layer - 1
    causal = below * (attn_len + 1) / 2 / attn_len
    return [
        Product("keys, values", 1, rows, width, 2 * inside, config.n_layer),
        Product("queries", 1, rows, width, inside, below),
        Product("scores", pairs, attn_len, size, attn_len, causal),
        Product("weighted values", pairs, attn_len, attn_len, size, causal),
        Product("output", 1, rows, inside, width, below),
        Product("inner", 1, rows, width, config.d_inner, below),
        Product("outer", 1, rows, config.d_inner, width, below),
        Product("last query", 1, windows, width, inside, 1),
        Product("last scores", pairs, 1, size, attn_len, 1),
        Product("last weighted values", pairs, 1, attn_len, size, 1),
        Product("last output", 1, windows, inside, width, 1),
        Product("last inner", 1, windows, width, config.d_inner, 1),
        Product("last outer", 1, windows, config.d_inner, width, 1),
        Product("softmax", 1, windows, width, config.vocab_size, 1),
    ]


def optimizer_bytes(config: TransformerXLConfig) -> int:
    """What an Adam step over all weights reads and writes, in fp32."""
    return 7 * 4 * weights(config)


def weights(config: TransformerXLConfig) -> int:
    """Numbers in the matrices; norms and biases are left out."""
    inside = config.n_head * config.d_head
    layer = config.d_model * (5 * inside + 2 * config.d_inner)
    edges = (0, *config.cutoffs, config.vocab_size)
    projected = config.div_val > 1 or config.embed_width != config.d_model
    widths = [config.embed_width // config.div_val**band for band in range(len(edges) - 1)]
    tables = sum((high - low) * width for (low, high), width in zip(pairwise(edges), widths, strict=True))
    return config.n_layer * layer + tables + (config.d_model * sum(widths) if projected else 0)


def token_bytes(config: TransformerXLConfig, batch: int, mem_len: int, precision: str) -> int:
    """What one step of generation reads: weights but those of the positions, keys and values, the position table."""
    inside, size = config.n_head * config.d_head, 2 if precision == "bf16" else 4
    read = weights(config) - config.n_layer * config.d_model * inside
    return size * (read + config.n_layer * inside * (mem_len + 1) * (2 * batch + 1))
