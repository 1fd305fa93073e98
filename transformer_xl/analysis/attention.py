"""Attention of each head by distance: averaged over a text, whole and term by term, and of single tokens.

Dai et al. 2019, section 3.3 and Appendix D, Figures 5 to 7. The score of a query and the key d positions before it is

    (a) q . k  +  (b) q . r_d  +  (c) u . k  +  (d) v . r_d

Attention is the softmax of the sum; each term alone goes through its own softmax. Both are computed from the inputs of
each attention layer during the forward pass, in blocks of queries. Only sums are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from ..config.settings import Lengths
from ..data.loader import Segment
from ..mistake import Mistake, join_words
from ..model.memory import Memory
from ..model.transformer_xl import DecoderLayer, TransformerXL
from ..ops.masks import Bounds
from ..runtime.device import autocast, sums_on

KINDS = ("attention", "a", "b", "c", "d")
"""The averages: attention itself, and the softmax of each term alone."""
TERMS = {"transformer-xl": "abcd", "shaw": "ab", "vaswani": "a", "al-rfou": "a"}
"""The terms in the scores of each kind of model. The other terms are 0 there, and their softmax is uniform."""
TOP = 0.2
"""Share of the memory that is marked, as in Figure 6."""
BLOCK = 1 << 23
"""Maximum number of elements of one tensor of maps."""
Head = tuple[int, int]
"""Layer and head, counted from 0. Output counts them from 1."""


class Maps(NamedTuple):
    """Attention of some queries of one layer; column d holds the probability of the key at distance d."""

    layer: int
    first: int
    """The first query's position in its segment."""
    probability: Float[Tensor, "kinds B H T S"]
    """0 where a query sees no key."""
    seen: Bool[Tensor, "#B 1 T S"]


def terms_by_distance(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B H S K"],
    r: Float[Tensor, "H R K"],
    content_bias: Float[Tensor, "H K"],
    position_bias: Float[Tensor, "H K"],
    columns: int,
) -> Float[Tensor, "4 B H T columns"]:
    """Terms (a) to (d), scaled, for distances 0 to columns - 1. Values at distances
    beyond the oldest key are undefined."""
    B, H, T, K = q.shape
    keys = k.shape[2]
    key = torch.arange(keys - T, keys, device=q.device)[:, None] - torch.arange(columns, device=q.device)
    key = key.clamp(min=0)
    r = r.flip(1)[:, :columns]
    a = (q @ k.transpose(-1, -2)).gather(-1, key.expand(B, H, -1, -1))
    b = torch.einsum("bhtk,hsk->bhts", q, r)
    c = torch.einsum("hk,bhsk->bhs", content_bias, k)[:, :, key]
    d = torch.einsum("hk,hsk->hs", position_bias, r)[:, None].expand_as(a)
    return torch.stack([a, b, c, d]).mul_(K**-0.5)


def seen_by_distance(
    queries: int, keys: int, columns: int, first: Bounds, device: torch.device | None = None
) -> Bool[Tensor, "#B 1 T columns"]:
    """Whether each query sees a key at each distance; `first` is the first key that it sees."""
    last = torch.arange(keys - queries, keys, device=device)[None] - (0 if first is None else first)
    return torch.arange(columns, device=device) <= last[:, None, :, None]


@contextmanager
def watch_attention(model: TransformerXL, see: Callable[[Maps], None]) -> Iterator[None]:
    """Inside the block, each call of the model passes the maps of all layers to `see`, in blocks of queries."""
    hooks = [
        layer.register_forward_pre_hook(_hook(number, see), with_kwargs=True)
        for number, layer in enumerate(attending_layers(model))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def attending_layers(model: TransformerXL) -> list[DecoderLayer]:
    """The model's layers. Raises a `Mistake` if its kind is not in `TERMS`."""
    if model.config.kind in TERMS:
        return list(model.backbone.layers)
    kinds = join_words((f'"{kind}"' for kind in TERMS), "or")
    raise Mistake(
        f'Attention maps are for kind = {kinds}, and the model is of kind "{model.config.kind}". Give another run.'
    )


def _hook(layer: int, see: Callable[[Maps], None]) -> Callable[..., None]:
    def before(module: DecoderLayer, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        x, past, positions = given
        q, k, _ = module.attention.heads(x, past)
        none = q.new_zeros(module.attention.n_head, 1, module.attention.d_head)
        r, u, v = positions or (none.expand(-1, k.shape[2], -1), none[:, 0], none[:, 0])
        exact = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            inputs = [tensor.to(exact) for tensor in (q, k, r, u, v)]
            for maps in _blocks(layer, inputs, **named):
                see(maps)

    return before


def _blocks(layer: int, inputs: list[Tensor], *, attn_len: int | None, first: Bounds) -> Iterator[Maps]:
    q, k, r, u, v = inputs
    B, H, T, _ = q.shape
    memory = k.shape[2] - T
    size = max(1, BLOCK // (len(KINDS) * B * H * k.shape[2]))
    for start in range(0, T, size):
        part = q[:, :, start : start + size]
        queries, keys = part.shape[2], memory + start + part.shape[2]
        columns = keys if attn_len is None else min(keys, attn_len)
        terms = terms_by_distance(part, k[:, :, :keys], r, u, v, columns)
        own = first if first is None or first.shape[1] == 1 else first[:, start : start + size]
        seen = seen_by_distance(queries, keys, columns, own, q.device)
        scores = torch.cat([terms.sum(0, keepdim=True), terms]).masked_fill_(~seen, torch.finfo(terms.dtype).min)
        yield Maps(layer, start, scores.softmax(-1).masked_fill_(~seen, 0.0), seen)


@dataclass(frozen=True)
class AverageAttention:
    """Attention summed over the queries of a text, in float64."""

    sums: Float[np.ndarray, "kinds N H S"]
    """Probability of each distance: `KINDS`, layers, heads, distances."""
    counts: Float[np.ndarray, " S"]
    """The number of queries that have a key at each distance."""
    queries: int
    beyond_segment: Float[np.ndarray, "N H"]
    """The share of attention that goes to memory."""
    entropy: Float[np.ndarray, "N H"]
    """Mean entropy in nats: ln n if n keys share the attention evenly."""

    @property
    def probability(self) -> Float[np.ndarray, "kinds N H S"]:
        """The mean probability of each distance, over the queries that have a key there, as in the figures."""
        return self.sums / np.maximum(self.counts, 1)

    @property
    def mean_distance(self) -> Float[np.ndarray, "N H"]:
        """The mean distance in tokens; 0 is the query's own token."""
        return self.sums[0] @ np.arange(len(self.counts)) / self.queries

    def widest(self, count: int) -> list[tuple[int, int]]:
        """Layer and head, from 0, of the `count` heads with the largest mean distance, the largest first."""
        flat = np.argsort(-self.mean_distance, axis=None, kind="stable")[:count].tolist()
        return [divmod(index, self.sums.shape[2]) for index in flat]


def average_attention(
    model: TransformerXL,
    loader: Iterable[Segment],
    lengths: Lengths,
    *,
    context_len: int = 0,
    precision: str = "fp32",
) -> AverageAttention:
    """The average over all queries whose target is scored; the memory continues from segment to segment. A `loader`
    without memory may repeat `context_len` tokens before each segment."""
    device = next(model.parameters()).device
    shape = (len(attending_layers(model)), model.config.n_head)
    reach = lengths.attn_len or lengths.mem_len + context_len + lengths.tgt_len
    host = sums_on(device)
    memory: Memory | None = None
    sums = torch.zeros(len(KINDS), *shape, reach, dtype=torch.float64, device=host)
    counts, beyond, nats = sums.new_zeros(reach), sums.new_zeros(shape), sums.new_zeros(shape)
    queries, scored = 0, torch.empty(0, 0)

    def add(maps: Maps) -> None:
        layer, first, probability, seen = maps
        T, S = probability.shape[-2:]
        counted = scored[:, None, first : first + T, None]
        probability, seen = (probability * counted).to(host), seen.to(host)
        sums[:, layer, :, :S] += probability.sum((1, 3), dtype=torch.float64)
        position = torch.arange(first, first + T, device=host)[:, None]
        memory_only = torch.arange(S, device=host) > position
        beyond[layer] += (probability[0] * memory_only).sum((0, 2, 3), dtype=torch.float64)
        nats[layer] += torch.special.entr(probability[0]).sum((0, 2, 3), dtype=torch.float64)
        if layer == 0:
            counts[:S] += (seen & counted.to(host)).sum((0, 1, 2))

    reader = model.for_inference(precision)
    with torch.no_grad(), autocast(precision, device), watch_attention(reader, add):
        for segment in loader:
            memory = reader.empty_memory(len(segment.ids), lengths) if memory is None else memory
            memory = memory if segment.reset is None else memory.reset(segment.reset)
            scored = (segment.targets >= 0).to(device)
            queries += int(scored.sum())
            _, memory = reader.hidden(segment.ids.to(device), memory, lengths)
    assert queries, "the text must have a target"
    shares = ((total / queries).cpu().numpy() for total in (beyond, nats))
    return AverageAttention(sums.cpu().numpy(), counts.cpu().numpy(), queries, *shares)


class PositionAttention(NamedTuple):
    """The attention of one token, the first of its segment, so all its context is memory; and that of the tokens after
    it to the same memory."""

    position: int
    """The query's position in the text."""
    ids: Int[np.ndarray, " S"]
    """The tokens that it sees, oldest first; the last is the query itself."""
    probability: Float[np.ndarray, "N H S"]
    targets: Int[np.ndarray, " T"]
    """The tokens of the segment; the first is the query."""
    to_memory: Float[np.ndarray, "N H T M"]
    """The attention of each of `targets` to the memory: to all of `ids` but the last. Without a memory M is 0."""

    def top(self) -> Bool[np.ndarray, "N H M"]:
        """Mark the share `TOP` of the memory positions, the ones with the most attention: of `ids` without the last."""
        return most_attended(self.probability[..., :-1])


def most_attended(memory: Float[np.ndarray, "*rows S"]) -> Bool[np.ndarray, "*rows S"]:
    """Mark the share `TOP` of the positions of each row, the ones with the most attention."""
    order, marked = np.argsort(-memory, axis=-1, kind="stable"), np.zeros(memory.shape, bool)
    np.put_along_axis(marked, order[..., : math.ceil(TOP * memory.shape[-1])], True, axis=-1)
    return marked


@torch.no_grad()
def position_attention(
    model: TransformerXL,
    ids: Integer[np.ndarray, " L"],
    position: int,
    lengths: Lengths,
    *,
    count: int = 1,
    context_len: int = 0,
    precision: str = "fp32",
    start: int = 0,
) -> PositionAttention:
    """Attention of `ids[position]` in all layers and heads, as if all tokens since `start` were read before it; without
    a memory, the `context_len` tokens before it are. It begins a segment of `count` tokens.

    Only the segments that can reach it are read. Zeros before a text (`zero_memory`) are not tokens and are left out.
    """
    device, layers = next(model.parameters()).device, len(attending_layers(model))
    reader = model.for_inference(precision)
    text = ids[: position + count].astype(np.int64)
    tokens = torch.from_numpy(text)[None].to(device)
    first = max(position - context_len, start)
    reach = layers * (lengths.mem_len + lengths.tgt_len) + (0 if model.ngrams is None else model.ngrams.reach)
    begin = start + max(first - reach - start, 0) // lengths.tgt_len * lengths.tgt_len
    targets, most = len(text) - position, min(lengths.mem_len + context_len, position - start)
    by_distance = np.zeros((targets, layers, model.config.n_head, most + targets))

    def add(maps: Maps) -> None:
        queries = maps.probability[0, 0].double().cpu().numpy().swapaxes(0, 1)
        for query, probability in enumerate(queries, first + maps.first - position):
            if query >= 0:
                known = probability[:, : most + targets]  # beyond are zeros of `zero_memory`
                by_distance[query, maps.layer, :, : known.shape[1]] = known

    memory = reader.empty_memory(1, lengths)
    with autocast(precision, device):
        for read in range(begin, first, lengths.tgt_len):
            _, memory = reader.hidden(tokens[:, read : min(read + lengths.tgt_len, first)], memory, lengths)
        with watch_attention(reader, add):
            reader.hidden(tokens[:, first:], memory, lengths)
    columns = min(most + 1, lengths.attn_len or most + 1, position + 1 - start)
    known = columns - 1 if lengths.mem_len else 0
    # The newest token of the memory is query + 1 before each query.
    to_memory = [by_distance[query, ..., query + 1 : query + 1 + known] for query in range(targets)]
    return PositionAttention(
        position,
        text[position + 1 - columns : position + 1],
        by_distance[0, ..., columns - 1 :: -1],
        text[position:],
        np.stack(to_memory, axis=2)[..., ::-1],
    )
