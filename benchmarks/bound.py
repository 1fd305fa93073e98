"""The bound: the matrix products and bytes that training, evaluation and generation cannot avoid.

A product is [batch, m, k] x [batch, k, n], `times` times, with 2 batch m k n FLOP each time. Nothing is recomputed, and
masked scores are left out. Products with an unused result are left out too: in training, memory and sinusoids have no
gradient; in evaluation, keys, values and the position table were projected once. T queries after M keys of memory see
a share (M + (T + 1) / 2) / (M + T) of the scores. The letters are defined in docs/math.md; F is d_inner.

    product, every layer      rows x inside x outside               also backward: to the weight, to the input
    queries, keys, values     B T x D x 3 H K                       both
    keys, values of memory    B M x D x 2 H K    training only      weight
    positions                 S x D x H K        training only      weight
    content scores            B H: T x K x S     unmasked           both
    position scores           H: B T x K x S     unmasked           both
    weighted values           B H: T x S x K     unmasked           both
    output                    B T x H K x D                         both
    feed-forward              B T x D x F, B T x F x D              both
    gates, two a layer        B T x D x GATES[gate] D             both
    n-grams                   B T x tables ngram_width x D          both
    softmax                   B T x D x V; in bands: the head, and each tail for its own rows     both

Bytes: an optimizer step reads weight, gradient and two moments and writes three of them, after the gradient's norm is
known; a generated token reads every weight of a product, the keys and values of each row, and the position table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from transformer_xl.config.settings import TransformerXLConfig

GATES = {"none": 0, "input": 1, "output": 1, "highway": 1, "sigmoid-tanh": 2, "gru": 6}
"""Number of matrices, d_model by d_model, in each of a layer's two gates."""


class Product(NamedTuple):
    """A matrix product, and the number of times it is needed."""

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
    """The sizes of one call of the model: `batch` rows of `tgt_len` tokens after `mem_len` tokens of memory."""

    batch: int
    tgt_len: int
    mem_len: int
    tail_rows: Sequence[float] = ()
    """The number of targets in each band of the softmax except the first."""
    attn_len: int | None = None
    """The number of keys that every query sees; None: all."""


def zipf(count: int) -> Float[np.ndarray, " count"]:
    """Probabilities by Zipf's law, as in natural text: proportional to 1 / (n + 2.7) for the n-th token."""
    weights = 1 / (np.arange(count) + 2.7)
    return weights / weights.sum()


def zipf_ids(vocab_size: int, count: int, seed: int = 1111) -> Int[np.ndarray, " count"]:
    """Random ids drawn by `zipf`; they repeat after 2^20 tokens."""
    ids = np.random.default_rng(seed).choice(vocab_size, min(count, 1 << 20), p=zipf(vocab_size))
    return np.resize(ids.astype(np.int32), count)


def expected_work(
    config: TransformerXLConfig, batch: int, tgt_len: int, mem_len: int, attn_len: int | None = None
) -> Work:
    """The sizes of a call whose targets follow `zipf`, which gives the expected `tail_rows`."""
    edges = [*config.cutoffs, config.vocab_size] if config.cutoffs else []
    cumulative = np.append(0, zipf(config.vocab_size).cumsum())
    tails = (batch * tgt_len * float(cumulative[high] - cumulative[low]) for low, high in pairwise(edges))
    return Work(batch, tgt_len, mem_len, tuple(tails), attn_len)


def seen_share(work: Work) -> float:
    """The unmasked share of the T x S scores."""
    keys = work.mem_len + work.tgt_len
    seen = work.mem_len + (work.tgt_len + 1) / 2 if work.attn_len is None else work.attn_len
    return seen / keys


def products(config: TransformerXLConfig, work: Work, *, training: bool) -> list[Product]:
    """The products of one training step, or of one evaluated segment."""
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
    found += _product("gates", 1, rows, width, GATES[config.gate] * width, 2 * layers, *both)
    found += _product("n-grams", 1, rows, len(config.ngram_sizes) * config.ngram_width, width, 1, *both)
    found += _softmax(config, rows, work.tail_rows, both)
    return [product for product in found if product.flop]


def attention_products(work: Work, heads: int, size: int, *, training: bool, times: int = 1) -> list[Product]:
    """The products of the attention op, `times` times."""
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
        tokens = high - low + (0 if band else len(config.cutoffs))
        embed = config.embed_width // config.div_val**band
        if projected:
            yield from _product(f"softmax's projection {band}", 1, count, config.d_model, embed, 1, *both)
        looked_up = count if band else rows - (round(sum(tail_rows)) if config.div_val > 1 else 0)
        if projected and (config.div_val > 1 or band == 0):
            yield from _product(f"embedding's projection {band}", 1, looked_up, embed, config.d_model, 1, *both)
        yield from _product(f"softmax {band}", 1, count, embed, tokens, 1, *both)


def weights(config: TransformerXLConfig) -> int:
    """The number of weights in the matrices; norms, biases and tables of n-grams, of which a step uses a few rows, are
    left out."""
    inside = config.n_head * config.d_head
    layer = config.d_model * (5 * inside + 2 * config.d_inner + 2 * GATES[config.gate] * config.d_model)
    edges = (0, *config.cutoffs, config.vocab_size)
    projected = config.div_val > 1 or config.embed_width != config.d_model
    widths = [config.embed_width // config.div_val**band for band in range(len(edges) - 1)]
    tables = sum((high - low) * width for (low, high), width in zip(pairwise(edges), widths, strict=True))
    ngrams = config.d_model * len(config.ngram_sizes) * config.ngram_width
    return config.n_layer * layer + tables + ngrams + (config.d_model * sum(widths) if projected else 0)


def least_work(part: str, config: TransformerXLConfig, work: Work, precision: str) -> tuple[list[Product], int]:
    """The products of one unit of a part, and the bytes that it reads and writes besides: in training, in fp32.

    A token that is generated (any other part than train and eval) reads the weights except `position`, the keys and
    values of each row, and the position table.
    """
    if part in ("train", "eval"):
        training = part == "train"
        return products(config, work, training=training), 7 * 4 * weights(config) if training else 0
    inside, size = config.n_head * config.d_head, 4 if precision == "fp32" else 2
    keys = work.mem_len + 1 if work.attn_len is None else work.attn_len
    read = weights(config) - config.n_layer * config.d_model * inside
    return [], size * (read + config.n_layer * inside * keys * (2 * work.batch + 1))
