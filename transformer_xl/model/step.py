"""One token a row at a time, with nothing whose shape or place changes: the step that is compiled or captured.

Keys and values lie in a ring as long as the window W. A token's stand at a place held in a tensor, where the oldest
ones were; scores of positions come in the order of distances and are put into that of the ring:

    score_j = scale * ((q + u) . k_j + (q + v) . r_d),    d = (place - j) mod W,    seen while d <= held
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..config.settings import Lengths
from .memory import KVCache
from .transformer_xl import TransformerXL

Way = Literal["plain", "compiled", "captured"]
STREAMS = 4
"""Parts of a matrix that a compiled loop reads side by side, for memory gives more to several."""


def has_compiler() -> bool:
    """Whether this machine has what torch.compile needs for its CPU."""
    return any(map(shutil.which, ("c++", "g++", "clang++")))


def stepping(model: Any, state: Any, lengths: Lengths, *, compiled: bool = False) -> Any:
    """The state for tokens one at a time: a `Step` where one serves and is faster, else the state it was given.

    A `KVCache` of `TransformerXL` itself, not of its baselines, becomes a step that is captured as a CUDA graph on
    CUDA; on a CPU one that is compiled, if that is asked for. Everything else goes on by `log_probs`.
    """
    if type(model) is not TransformerXL or not isinstance(state, KVCache):
        return state
    if state.device.type == "cuda":
        return Step(model, state, lengths, "captured")
    return Step(model, state, lengths, "compiled") if compiled else state


class Step:
    """What `KVCache` holds, and the call that reads one more token of each row. It takes the cache's place and keeps
    its own: each call changes it.

    `way`: "plain" calls PyTorch; "compiled" has torch.compile write the loops; "captured" replays a CUDA graph.
    """

    @torch.no_grad()
    def __init__(self, model: TransformerXL, cache: KVCache, lengths: Lengths, way: Way = "plain") -> None:
        assert not model.training, "a step serves inference: give what for_inference gives"
        self.model, self.way = model, way
        self.window = lengths.mem_len + 1 if lengths.attn_len is None else lengths.attn_len
        pairs = cache.newest(self.window - 1)
        length = pairs[0][0].shape[2]
        self.rings = [_ring(k, v, self.window) for k, v in pairs]
        self.place = torch.full((1,), length % self.window, device=cache.device)
        self.held = cache.counts.clamp(max=length)
        assert not (self.held < 0).any(), "a row still begins with padding: read the whole prompt first"
        self.rows: Tensor | None = None
        bias = model.softmax.bias
        tables = model._positions(self.window, clamp_len=lengths.clamp_len, like=bias.new_empty((), dtype=_wide(bias)))
        biases = model._biases(lengths.clamp_len)
        self.positions = [_positions(*own) for own in zip(model.layers, tables, *biases, strict=True)]
        self._run: Callable[[Tensor], Tensor] = self._next
        if way == "compiled":
            self._run = torch.compile(self._next, dynamic=False)

    @torch.no_grad()
    def __call__(self, ids: Int[Tensor, "B 1"]) -> Float[Tensor, "B V"]:
        """Log-probabilities of what follows these tokens, in the caller's autocast."""
        if self.rows is not None:
            ids = ids.new_zeros(len(self.held), 1).index_copy_(0, self.rows, ids)
        x = self.model.embedding(ids)[:, 0]
        if self.way == "captured" and self._run == self._next:
            self._run = _captured(self._next, x)
        out = self._run(x)
        self.place.add_(1).remainder_(self.window)
        self.held.add_(1).clamp_(max=self.window - 1)
        return out if self.rows is None else out[self.rows]

    def select(self, rows: Int[Tensor, " R"]) -> Step:
        """These rows go on. What was compiled or captured stays, for as many rows as before."""
        chosen = copy(self)
        if self.way != "plain":
            chosen.rows = rows if self.rows is None else self.rows[rows]
            return chosen
        chosen.rings, chosen.held, chosen.place = [x[rows] for x in self.rings], self.held[rows], self.place.clone()
        chosen._run = chosen._next
        return chosen

    def _next(self, x: Float[Tensor, "B D"]) -> Float[Tensor, "B V"]:
        kind = x.device.type
        mixed = torch.is_autocast_enabled(kind)
        product = _loops if self.way == "compiled" and len(x) == 1 else _call
        slots = torch.arange(self.window, device=x.device)
        order = (slots - self.place - 1) % self.window  # tables begin with the farthest
        unseen = (self.window - 1 - order > self.held[:, None])[:, None]
        with torch.autocast(kind, enabled=False):
            for layer, ring, own in zip(self.model.layers, self.rings, self.positions, strict=True):
                x = _attended(layer.attention, x, ring, own, (self.place, order, unseen), product)
                x = _fed(layer.feed_forward, x, product)
            if self.model.final_norm is not None:
                x = self.model.final_norm(x)
        # A graph must not keep the weights that a cache of casts holds only for a while.
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=mixed, cache_enabled=False):
            return self.model.softmax.log_probs(x)


def _ring(k: Float[Tensor, "B H L K"], v: Float[Tensor, "B H L K"], window: int) -> Float[Tensor, "B 2 H W K"]:
    ring = k.new_zeros(len(k), 2, k.shape[1], window, k.shape[3])
    ring[:, 0, :, : k.shape[2]], ring[:, 1, :, : k.shape[2]] = k, v
    return ring


def _positions(layer: Any, table: Tensor, u: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's encoded distances and biases."""
    if u is None or v is None:  # the query of distance 0
        table, queries = table.chunk(2)
        u = v = queries[:, -1]
    return table.to(layer.attention.qkv.weight.dtype).contiguous(), u, v


def _attended(attention: Any, x: Tensor, ring: Tensor, own: Sequence[Tensor], at: Sequence[Tensor], product: Any):
    (table, u, v), (place, order, unseen) = own, at
    new = attention.norm(x) if attention.pre_lnorm else x
    qkv = product(attention.qkv, new).view(len(x), 3, *u.shape)
    ring.index_copy_(3, place, qkv[:, 1:, :, None].to(ring.dtype))
    q, scale = qkv[:, 0], u.shape[1] ** -0.5
    out = _attend(q + u.to(q.dtype), (q + v.to(q.dtype)) * scale, ring, table, order, unseen, scale)
    x = x + product(attention.output, out.flatten(1))
    return x if attention.pre_lnorm else attention.norm(x)


def _attend(content_q, position_q, ring, table, order, unseen, scale):
    position = torch.bmm(table, position_q.permute(1, 2, 0).to(table.dtype)).permute(2, 0, 1).index_select(2, order)
    position = position.masked_fill(unseen, torch.finfo(position.dtype).min)
    query = content_q.to(ring.dtype)[:, :, None]
    return F.scaled_dot_product_attention(query, ring[:, 0], ring[:, 1], position[:, :, None], scale=scale)[:, :, 0]


def _fed(feed_forward: Any, x: Tensor, product: Any) -> Tensor:
    inner = F.relu(product(feed_forward.inner, feed_forward.norm(x) if feed_forward.pre_lnorm else x))
    x = x + product(feed_forward.outer, inner)
    return x if feed_forward.pre_lnorm else feed_forward.norm(x)


def _call(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(x.to(linear.weight.dtype))


def _loops(linear: nn.Linear, x: Float[Tensor, "1 I"]) -> Float[Tensor, "1 O"]:
    """The product of one row, written out: the compiler makes a loop of it that reads the matrix in several places."""
    wide = _wide(linear.weight)
    row = x.to(linear.weight.dtype).to(wide)
    out = torch.cat([(part.to(wide) * row).sum(-1) for part in linear.weight.chunk(STREAMS)])[None]
    return out if linear.bias is None else out + linear.bias.to(wide)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


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
