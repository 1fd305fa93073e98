"""Inference: a copy of the model, a cache of projected memory, and a one-token step that is compiled or captured.

`KVCache` gives the numbers of `Memory` for less work, because at inference the weights stay as they are. `Step` reads
one token a row at a time with shapes that never change. Its keys and values lie in a ring as long as the window W. The
new token overwrites the oldest slot; the slot's index is a tensor. Scores of positions are computed in the order of
distances and put into the order of the ring:

    score_j = scale * ((q + u) . k_j + (q + v) . r_d),    d = (slot - j) mod W,    seen while d <= held
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from ..config.settings import Lengths
from ..mistake import Mistake
from ..ops.masks import aligned
from .memory import Memory

Way = Literal["plain", "compiled", "captured"]


class LayerCache(NamedTuple):
    """One layer's part of a `KVCache` in a call: places `first` to `end` of its buffers are in use."""

    keys: Float[Tensor, "B H C K"]
    values: Float[Tensor, "B H C K"]
    first: int
    end: int

    def append(
        self, k: Float[Tensor, "B H T K"], v: Float[Tensor, "B H T K"]
    ) -> tuple[Float[Tensor, "B H S K"], Float[Tensor, "B H S K"]]:
        """Write the new ones behind the others, and give all of them, in order, as views."""
        end = self.end + k.shape[2]
        self.keys[:, :, self.end : end], self.values[:, :, self.end : end] = k, v
        return self.keys[:, :, self.first : end], self.values[:, :, self.first : end]


@dataclass(eq=False)
class KVCache:
    """Keys, values and encoded distances of each layer, for inference; `valid` as in `Memory`.

    Keys carry no position, so they are exact wherever they stand. They lie in order, in buffers that grow to twice the
    window, and move to the front when a buffer is full. A call writes into them: it consumes the cache it is given and
    returns another; `fork` it before, where both ways are wanted.
    """

    buffers: list[tuple[Float[Tensor, "B H C K"], Float[Tensor, "B H C K"]]]
    lengths: Lengths
    length: int
    """Positions in use."""
    valid: Int[Tensor, " B"] | None = None
    ground: list[tuple[Float[Tensor, "H 1 K"], Float[Tensor, "H 1 K"]]] | None = None
    """What a row holds where it has no past; None: nothing, and `valid` says so."""
    first: int = 0
    positions: Sequence[Any] = ()
    """Each layer's `Positions`, for distances R - 1, ..., 0; R grows with what calls need."""
    reach: int = 0
    """R."""
    spent: bool = False

    @classmethod
    def of(
        cls,
        keys_values: Iterable[tuple[Float[Tensor, "B H M K"], Float[Tensor, "B H M K"]]],
        lengths: Lengths,
        *,
        valid: Int[Tensor, " B"] | None = None,
    ) -> KVCache:
        """A cache of the given keys and values, which become its own."""
        pairs = list(keys_values)
        return cls(pairs, lengths, pairs[0][0].shape[2], valid)

    @classmethod
    def of_memory(cls, memory: Memory, lengths: Lengths, projections: Sequence[Callable[[Tensor], Any]]) -> KVCache:
        """A cache of `memory`; `projections` give each layer's keys and values."""
        pairs = zip(projections, memory.layers, strict=True)
        cache = cls.of((project(past) for project, past in pairs), lengths, valid=memory.valid)
        if memory.zero_ground:
            zeros = memory.layers[0].new_zeros(1, 1, memory.layers[0].shape[2])
            cache.ground = [(k[0], v[0]) for k, v in (project(zeros) for project in projections)]
        return cache

    def grown(self, mem_len: int, *, zero_ground: bool = False) -> KVCache:
        """Itself: it was made as long as its lengths want it."""
        return self

    def context(
        self, x: Float[Tensor, "B T D"], lengths: Lengths, encode: Callable[..., Iterable[Any]]
    ) -> tuple[list[LayerCache], Sequence[Any]]:
        """As `Memory.context`."""
        assert self.lengths.clamp_len == lengths.clamp_len, "a cache keeps the clamp_len it was made for"
        pasts = self.layers(x.shape[1])
        self.cover(x.shape[1], lambda length: encode(length, lengths.clamp_len, x))
        return pasts, self.positions

    @property
    def counts(self) -> Int[Tensor, " B"]:
        """`valid` as a tensor in any case."""
        keys, _ = self.buffers[0]
        return torch.full((len(keys),), self.length, device=keys.device) if self.valid is None else self.valid

    @property
    def device(self) -> torch.device:
        return self.buffers[0][0].device

    def newest(self, count: int) -> list[tuple[Float[Tensor, "B H L K"], Float[Tensor, "B H L K"]]]:
        """At most so many of each layer's last keys and values, in order, as views. It consumes the cache."""
        self._check()
        self.spent = True
        first = max(self.length - count, 0)
        return [(k[:, :, first:], v[:, :, first:]) for k, v in self._live()]

    def layers(self, tokens: int) -> list[LayerCache]:
        """Each layer's part for a call with so many new tokens."""
        self._check()
        assert not torch.is_grad_enabled(), "a KVCache serves inference: call under torch.no_grad(), or give a Memory"
        end, room = self.first + self.length, self.buffers[0][0].shape[2]
        if end + tokens > room:
            if 2 * self.length + tokens <= room:
                for buffer in (buffer for pair in self.buffers for buffer in pair):
                    buffer[:, :, : self.length] = buffer[:, :, self.first : end]
            else:  # while it fills, or for a segment longer than tgt_len
                needed = self.length + tokens
                room = max(needed, min(2 * needed, 2 * self.lengths.mem_len + self.lengths.tgt_len))
                self.buffers = [(_roomy(k, room), _roomy(v, room)) for k, v in self._live()]
            self.first, end = 0, self.length
        return [LayerCache(*pair, self.first, end) for pair in self.buffers]

    def cover(self, tokens: int, encode: Callable[[int], Iterable[Any]]) -> None:
        """Have the positions of a call with `tokens` new tokens, by `encode`, which gives each layer's.

        While the cache fills there are more than needed. Afterwards there are exactly as many, because a part of a
        table is copied before a product. Where queries are several, some are spare (see `ops.masks.shifted_view`).
        """
        needed = aligned(self.length + tokens) if tokens > 1 else self.length + tokens
        filling = self.length < self.lengths.mem_len
        if self.reach < needed or (self.reach > needed and not filling):
            self.reach = max(needed, 2 * self.reach) if filling else needed
            self.positions = [_contiguous(own) for own in encode(self.reach)]

    def extend(self, inputs: Sequence[Float[Tensor, "B T D"]], *, mem_len: int) -> KVCache:
        """After a call: the cache with this segment in it, cut to the newest `mem_len` positions."""
        self.spent = True
        tokens = inputs[0].shape[1]
        length = min(self.length + tokens, mem_len)
        valid = None if self.valid is None else (self.valid + tokens).clamp(max=length)
        first = self.first + self.length + tokens - length
        return replace(self, length=length, valid=valid, first=first, spent=False)

    def fork(self, rows: Int[Tensor, " R"] | slice = slice(None)) -> KVCache:
        """A copy of the given rows, in the given order, with buffers of its own."""
        self._check()
        chosen = KVCache.of(((k[rows].clone(), v[rows].clone()) for k, v in self._live()), self.lengths)
        valid = None if self.valid is None else self.valid[rows]
        return replace(chosen, valid=valid, ground=self.ground, positions=self.positions, reach=self.reach)

    select = fork

    def to(self, where: torch.device | str | torch.dtype) -> KVCache:
        """A copy on another device, or in another dtype."""

        def moved(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
            return [(k.to(where, copy=True), v.to(where, copy=True)) for k, v in pairs]

        self._check()
        valid = self.valid if self.valid is None or isinstance(where, torch.dtype) else self.valid.to(where)
        ground = None if self.ground is None else moved(self.ground)
        positions = [type(own)(*(x.to(where) for x in own)) for own in self.positions]
        return replace(self, buffers=moved(self._live()), first=0, valid=valid, ground=ground, positions=positions)

    @staticmethod
    def cat(caches: Sequence[KVCache]) -> KVCache:
        """Rows of several caches as one; shorter ones are padded in front with positions that do not count."""
        for cache in caches:
            cache._check()
        length = max(cache.length for cache in caches)
        joined = [
            [torch.cat([pad(x, (0, 0, length - x.shape[2], 0)) for x in part]) for part in zip(*layer, strict=True)]
            for layer in zip(*(cache._live() for cache in caches), strict=True)
        ]
        whole = all(cache.valid is None and cache.length == length for cache in caches)
        valid = None if whole else torch.cat([cache.counts for cache in caches])
        longest = max(caches, key=lambda cache: cache.reach)
        cache = KVCache.of(((k, v) for k, v in joined), caches[0].lengths, valid=valid)
        return replace(cache, ground=caches[0].ground, positions=longest.positions, reach=longest.reach)

    def reset(self, rows: Bool[Tensor, " B"]) -> KVCache:
        """Empty the marked rows: a document or episode ended there. Other rows go on. It consumes the cache, too."""
        self._check()
        self.spent = True
        marked = rows.to(self.buffers[0][0].device)
        if self.ground is None:
            return replace(self, valid=self.counts.masked_fill(marked, 0), spent=False)
        live = slice(self.first, self.first + self.length)
        for pair, ground in zip(self.buffers, self.ground, strict=True):
            for buffer, value in zip(pair, ground, strict=True):
                buffer[marked, :, live] = value
        return replace(self, spent=False)

    def _check(self) -> None:
        if self.spent:
            raise RuntimeError("This KVCache was given to a call before; use the one that the call returned, or fork.")

    def _live(self) -> Iterable[tuple[Tensor, Tensor]]:
        live = slice(self.first, self.first + self.length)
        return ((k[:, :, live], v[:, :, live]) for k, v in self.buffers)


def check_state(memory: Any, widths: Sequence[int], x: Float[Tensor, "B T D"]) -> None:
    """Raise a `Mistake` unless `memory` is of a model with states of these `widths`, and has a row for each of `x`."""
    if isinstance(memory, KVCache):
        layers = [keys for keys, _ in memory.buffers]
        fits = len(layers) == len(widths) and len(layers[0]) == len(x) and layers[0].device == x.device
    elif isinstance(memory, Memory):
        layers, rows = memory.layers, (len(x), memory.length if memory.layers else 0)
        mixed = torch.is_autocast_enabled(x.device.type)
        fits = [tuple(layer.shape) for layer in layers] == [(*rows, width) for width in widths] and all(
            layer.device == x.device and (mixed or layer.dtype == x.dtype) for layer in layers
        )
    else:
        raise Mistake(f"memory must be a Memory or a KVCache, got {type(memory).__name__}.")
    if not fits:
        wide = ", ".join(dict.fromkeys(map(str, widths)))
        got = ", ".join(dict.fromkeys(f"{list(layer.shape)} {layer.dtype} on {layer.device}" for layer in layers))
        raise Mistake(
            f"memory must hold {len(widths)} tensors of {len(x)} rows, {wide} wide, {x.dtype} on {x.device}, got "
            f"{len(layers)}: {got}. Give what empty_memory({len(x)}) or the call before returned."
        )


def _contiguous(positions: Any) -> Any:
    """The same `Positions`, or none, whose table can be cut without a copy."""
    return positions._replace(r=positions.r.contiguous()) if positions else positions


def _roomy(x: Float[Tensor, "B H L K"], room: int) -> Float[Tensor, "B H C K"]:
    """`x` at the front of a buffer."""
    buffer = x.new_zeros(*x.shape[:2], room, x.shape[3])
    buffer[:, :, : x.shape[2]] = x
    return buffer


def inference_copy(model: Any, precision: str = "fp32") -> Any:
    """A copy of a model to evaluate with: no dropout, the backend for inference, and the same weights.

    In bf16 it holds weights of products rounded once, instead of in every call. The embedding's tables stay as they
    are, because they are looked up and not multiplied; the softmax then has its own.
    """
    kept = {id(p): p for p in model.parameters()}
    copied = deepcopy(model, dict(kept))
    if precision == "bf16":
        copied.softmax = deepcopy(copied.softmax, dict(kept))
        copied.softmax.tied = False
        linear = (module for module in copied.modules() if isinstance(module, nn.Linear))
        for module in (*linear, copied.softmax, copied.embedding.projections):
            for owner in module.modules():
                for name, p in list(owner.named_parameters(recurse=False)):
                    if p.dtype == torch.float32 and not (owner is copied.softmax and name.endswith("bias")):
                        setattr(owner, name, nn.Parameter(p.detach().bfloat16(), requires_grad=False))
    for module in copied.modules():
        if hasattr(module, "backend"):
            module.backend = "auto"
    return copied.eval()


def has_compiler() -> bool:
    """Whether this machine has what torch.compile needs for its CPU."""
    return any(map(shutil.which, ("c++", "g++", "clang++")))


def stepping(model: Any, state: Any, lengths: Lengths, *, compiled: bool = False) -> Any:
    """The state for tokens one at a time: a `Step` where one serves and is faster, else the state itself.

    A `KVCache` of Transformer-XL, and of no baseline, becomes a step: on CUDA one that is captured as a CUDA graph, on
    a CPU one that is compiled, if `compiled` asks for it. Other states go on through `log_probs`.
    """
    if not isinstance(state, KVCache) or not hasattr(model, "backbone") or model.config.kind != "transformer-xl":
        return state
    if state.device.type == "cuda":
        return Step(model, state, lengths, "captured")
    return Step(model, state, lengths, "compiled") if compiled else state


class Ring(NamedTuple):
    """One layer's past in a `Step`: keys and values of the last W tokens."""

    pairs: Float[Tensor, "B 2 H W K"]
    slot: Int[Tensor, " 1"]
    """Where the new token goes."""
    order: Int[Tensor, " W"]
    """For each slot, the row of its distance in a table that begins with the farthest."""
    unseen: Bool[Tensor, "B 1 W"]

    def append(
        self, k: Float[Tensor, "B H 1 K"], v: Float[Tensor, "B H 1 K"]
    ) -> tuple[Float[Tensor, "B H W K"], Float[Tensor, "B H W K"]]:
        """Overwrite the oldest slot; return all of them."""
        self.pairs.index_copy_(3, self.slot, torch.stack([k, v], dim=1).to(self.pairs.dtype))
        return self.pairs[:, 0], self.pairs[:, 1]

    def attend(
        self,
        q: Float[Tensor, "B H 1 K"],
        k: Float[Tensor, "B H W K"],
        v: Float[Tensor, "B H W K"],
        r: Float[Tensor, "H W K"],
        content_bias: Float[Tensor, "H K"],
        position_bias: Float[Tensor, "H K"],
        **_: Any,
    ) -> Float[Tensor, "B H 1 K"]:
        """The op for one query a row, keys in the order of the ring; `unseen` is the only mask."""
        q, scale = q[:, :, 0], q.shape[-1] ** -0.5
        query = (q + position_bias.to(q.dtype)) * scale
        scores = torch.bmm(r, query.permute(1, 2, 0).to(r.dtype)).permute(2, 0, 1).index_select(2, self.order)
        scores = scores.masked_fill(self.unseen, torch.finfo(scores.dtype).min)[:, :, None]
        query = (q + content_bias.to(q.dtype)).to(k.dtype)[:, :, None]
        return F.scaled_dot_product_attention(query, k, v, scores, scale=scale)


class Step:
    """The call that reads one more token of each row, and the past it reads. It takes a `KVCache`'s position. Each call
    changes it.

    `way`: "plain" calls PyTorch; "compiled" has torch.compile write the loops; "captured" replays a CUDA graph.
    """

    @torch.no_grad()
    def __init__(self, model: Any, cache: KVCache, lengths: Lengths, way: Way = "plain") -> None:
        assert not model.training, "a step serves inference: give what for_inference gives"
        self.model, self.way = model, way
        self.window = lengths.mem_len + 1 if lengths.attn_len is None else lengths.attn_len
        pairs = cache.newest(self.window - 1)
        length = pairs[0][0].shape[2]
        self.rings = [_ring(k, v, self.window) for k, v in pairs]
        self.slot = torch.full((1,), length % self.window, device=cache.device)
        self.held = cache.counts.clamp(max=length)
        assert not (self.held < 0).any(), "a row still begins with padding: read the whole prompt first"
        self.rows: Tensor | None = None
        bias, backbone = model.softmax.bias, model.backbone
        wide = bias.new_empty((), dtype=torch.promote_types(bias.dtype, torch.float32))
        tables = zip(backbone.layers, backbone.positions(self.window, lengths.clamp_len, wide), strict=True)
        self.positions = [
            own._replace(r=own.r.to(layer.attention.qkv.weight.dtype).contiguous()) for layer, own in tables
        ]
        self._run: Callable[[Tensor], Tensor] | None = self._next if way == "plain" else None

    @torch.no_grad()
    def __call__(self, ids: Int[Tensor, "B 1"]) -> Float[Tensor, "B V"]:
        """Log-probabilities of what follows these tokens, in the caller's autocast."""
        if self.rows is not None:
            ids = ids.new_zeros(len(self.held), 1).index_copy_(0, self.rows, ids)
        x = self.model.embedding(ids)
        if self._run is None:
            self._run = torch.compile(self._next, dynamic=False) if self.way == "compiled" else _captured(self._next, x)
        out = self._run(x)
        self.slot.add_(1).remainder_(self.window)
        self.held.add_(1).clamp_(max=self.window - 1)
        return out if self.rows is None else out[self.rows]

    def select(self, rows: Int[Tensor, " R"]) -> Step:
        """These rows go on. What was compiled or captured stays, for as many rows as before."""
        chosen = copy(self)
        if self.way != "plain":
            chosen.rows = rows if self.rows is None else self.rows[rows]
            return chosen
        chosen.rings, chosen.held, chosen.slot = [x[rows] for x in self.rings], self.held[rows], self.slot.clone()
        chosen._run = chosen._next
        return chosen

    def _next(self, x: Float[Tensor, "B 1 D"]) -> Float[Tensor, "B V"]:
        kind, backbone = x.device.type, self.model.backbone
        slots = torch.arange(self.window, device=x.device)
        order = (slots - self.slot - 1) % self.window
        unseen = (self.window - 1 - order > self.held[:, None])[:, None]
        # A graph must not keep the weights that autocast's cache holds only for a while.
        mixed = torch.is_autocast_enabled(kind)
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=mixed, cache_enabled=False):
            for layer, pairs, own in zip(backbone.layers, self.rings, self.positions, strict=True):
                x = layer(x, Ring(pairs, self.slot, order, unseen), own)
            x = x if backbone.final_norm is None else backbone.final_norm(x)
            return self.model.softmax.log_probs(x[:, 0])


def _ring(k: Float[Tensor, "B H L K"], v: Float[Tensor, "B H L K"], window: int) -> Float[Tensor, "B 2 H W K"]:
    ring = k.new_zeros(len(k), 2, k.shape[1], window, k.shape[3])
    ring[:, 0, :, : k.shape[2]], ring[:, 1, :, : k.shape[2]] = k, v
    return ring


def _captured(run: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[Tensor], Tensor]:
    """A CUDA graph of `run` for inputs like `x`. Running before it is captured writes only what the first replay
    writes again: the token's own place in the rings."""
    entry, side = x.clone(), torch.cuda.Stream(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        for _ in range(3):
            run(entry)
    torch.cuda.current_stream(x.device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(entry)

    def replay(x: Tensor) -> Tensor:
        entry.copy_(x)
        graph.replay()
        return out.clone()

    return replay
