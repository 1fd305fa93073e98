"""One step at a time, with shapes and memory that never change: `VectorStep` for a backbone, `Step` for tokens.

On a CPU the step in C++ reads where it can, on a GPU in half precision the one in Triton, where `txl env --check`
passed; see `kernels`.

A step keeps keys and values in a ring as long as the window W. The new position overwrites the oldest slot; the index
of each row's slot is in a tensor. Position scores are computed in the order of distances, then moved to the order of
the ring:

    score_j = scale * ((q + u) . k_j + (q + v) . r_d),    d = (slot - j) mod W,    seen while d <= count
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, Self, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from ..config.settings import Lengths
from ..mistake import Mistake
from ..ops.call import product_dtype
from .attention import Positions, RelativeMultiheadAttention
from .inference import KVCache, check_state, tokens_of
from .kernels import can_fuse, can_step, fused_step, native_step
from .memory import Memory, reset_tokens
from .modules import as_marks, check_vectors, has_hooks, is_plain
from .transformer_xl import DecoderLayer, TransformerXL, TransformerXLBackbone

State = TypeVar("State")


class VectorStep:
    """Reads one more vector of each row with a backbone. It holds the past, and each call changes it.

        step = VectorStep(backbone, backbone.empty_memory(rows, lengths), lengths)
        output = step(x)        # [rows, 1, D] -> [rows, D]
        step.reset(ended)       # empties these rows, where an episode ended

    It returns the last output of `backbone(x, memory, lengths)` for the same past, to rounding; of a longer past it
    reads the part that `lengths` allow. It keeps projections of the past, so make a new one when the weights change. It
    consumes a `KVCache`.
    """

    @torch.no_grad()
    def __init__(
        self,
        backbone: TransformerXLBackbone,
        past: Memory | KVCache,
        lengths: Lengths,
        *,
        graph: bool = False,
        head: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Begin after `past`.

        Args:
            graph: replay a CUDA graph on CUDA, which is faster if many steps follow.
            head: what to compute from the output; its result is returned, and it is in the graph too.

        Raises:
            Mistake: the backbone is in training mode or of another kind, `past` does not fit it, or a row of `past`
                begins with padding.
        """
        _check_start(backbone, past)
        cache = past.grow_to(lengths.mem_len) if isinstance(past, KVCache) else backbone.cached(past, lengths)
        assert isinstance(cache, KVCache), "a packaged backbone has a cache"
        self.backbone: TransformerXLBackbone = backbone
        self.head: Callable[[Tensor], Tensor] | None = head
        self.graph: bool = graph and cache.buffers[0].is_cuda
        self.tokens: Tensor | None = None
        self.lengths: Lengths = lengths
        self.window: int = lengths.mem_len + 1 if lengths.attn_len is None else lengths.attn_len
        self.zero_kv: list[Tensor] | None = cache.zero_kv
        newest = cache.newest(self.window - 1)
        length = newest[0].shape[3]
        self.counts: Tensor = cache.counts.clamp(max=length)
        self.most: Tensor = torch.full_like(self.counts, self.window - 1)
        self.rings: list[Tensor] = [pad(kv, (0, 0, 0, self.window - length)) for kv in newest]
        self.slots: Tensor = torch.full_like(self.counts, length % self.window)
        self.rows: Tensor | None = None
        self.positions: list[Positions] = []
        for own in backbone.positions(self.window, lengths.clamp_len, backbone.like):
            assert own is not None, "a packaged backbone has positions"
            self.positions.append(Positions(*(each.to(self.rings[0].dtype).contiguous() for each in own)))
        self._readers: list[Callable[[Tensor, Tensor | None], Tensor]] = []
        """None before the first call. Selections share them."""

    def __call__(self, x: Float[Tensor, "B 1 D"]) -> Float[Tensor, "B O"]:
        return self.read(x)

    @torch.no_grad()
    def read(self, x: Float[Tensor, "B 1 D"]) -> Float[Tensor, "B O"]:
        """The last layer's output at this position, or what `head` computes from it, in the caller's autocast."""
        rows = len(self.counts) if self.rows is None else len(self.rows)
        check_vectors(x, self.backbone.like)
        if x.shape[:2] != (rows, 1):
            raise Mistake(f"x must be one vector of each of the {rows} rows, [{rows}, 1, D], got {list(x.shape)}.")
        if (dtype := product_dtype(x)) != (own := self.rings[0].dtype):
            raise Mistake(f"A step reads in the precision in which it began, {own}, got {dtype}. Use one autocast.")
        if not self._readers:
            self._readers.append(self._new_reader(x))
        out = self._readers[0](x, self.rows)
        self.slots.add_(1).remainder_(self.window)
        torch.minimum(self.counts.add_(1), self.most, out=self.counts)
        return out

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_readers": []}  # they hold the rings, so a copy makes its own

    def reset(self, rows: Bool[Tensor, " B"]) -> None:
        """Empty the marked rows, where a document or episode ended; keep the others."""
        marked = as_marks(rows, self.counts if self.rows is None else self.rows)
        self.tokens = reset_tokens(self.tokens, marked)
        if self.rows is not None:
            marked = marked.new_zeros(len(self.counts)).index_copy_(0, self.rows, marked)
        if self.zero_kv is None:
            self.counts.masked_fill_(marked, 0)
            return
        for kv, zeros in zip(self.rings, self.zero_kv, strict=True):
            kv[marked] = zeros

    def select(self, rows: Int[Tensor, " R"]) -> Self:
        """A step with only these rows, each at most once. The graph stays, with as many rows as before.

        It shares the state of this step: after its calls the other rows are undefined until `put` or `reset`.
        """
        chosen = copy(self)
        chosen._readers = self._readers
        chosen.rows = rows if self.rows is None else self.rows[rows]
        chosen.tokens = None if self.tokens is None else self.tokens[rows]
        return chosen

    @torch.no_grad()
    def put(self, row: int, cache: KVCache, reach: int | None = None, *, slot: int | None = None) -> None:
        """Let a row go on after the past of a cache of one row, which this consumes.

        From now on the row sees at most `reach` earlier positions; None: all that the lengths of the step allow. Its
        outputs do not depend on what the row held before. With the `slot` of the row that the past was taken from, they
        are the same to the last bit as if it had stayed there.
        """
        assert len(cache.counts) == 1 and self.rows is None, "one row goes into one row of the whole step"
        most = self.window - 1 if reach is None else min(reach, self.window - 1)
        count, newest = cache.counts[0], cache.newest(most)
        length = newest[0].shape[3]
        slot = length if slot is None else slot
        held = torch.arange(slot - length, slot, device=self.slots.device) % self.window
        for ring, kv in zip(self.rings, newest, strict=True):
            ring[row].zero_()  # what is not seen must not be NaN
            ring[row].index_copy_(2, held, kv[0].to(ring.dtype))
        if self.tokens is not None:
            own = tokens_of(cache)[0]
            self.tokens[row] = pad(own, (self.tokens.shape[1] - len(own), 0), value=-1)
        self.most[row], self.slots[row], self.counts[row] = most, slot % self.window, count.clamp(max=length)

    @torch.no_grad()
    def take(self, row: int) -> KVCache:
        """A copy of a row's past as a cache of one row. The row does not change."""
        assert self.rows is None, "one row of the whole step"
        count, slot = int(self.counts[row]), int(self.slots[row])
        held = torch.arange(slot - count, slot, device=self.slots.device) % self.window
        buffers = [ring[row : row + 1].index_select(3, held) for ring in self.rings]
        tokens = None if self.tokens is None else self.tokens[row : row + 1].clone()
        return KVCache(buffers, self.lengths, count, zero_kv=self.zero_kv, tokens=tokens)

    def _new_reader(self, x: Tensor) -> Callable[[Tensor, Tensor | None], Tensor]:
        """The function that reads the x of the given rows. It must not refer to the step, whose rings would then stay
        until Python looks for cycles."""
        head, state = self.head, (self.rings, self.slots, self.counts)
        if can_step(self.backbone, self.rings[0]):
            native = native_step(self.backbone, self.positions, head)
            return lambda x, rows: native(x[:, 0], *state, rows)
        read = fused_step if can_fuse(self.backbone, self.rings[0]) else read_next
        read = partial(read, self.backbone, self.positions, *state)

        def run(x: Tensor) -> Tensor:
            with _uncached(x.device.type):
                return read(x) if head is None else head(read(x))

        every_row = x.new_zeros(len(self.counts), *x.shape[1:])
        return partial(_of_all, _capture_graph(run, every_row) if self.graph else run, len(every_row))


def read_next(
    backbone: TransformerXLBackbone,
    positions: Sequence[Positions],
    rings: list[Float[Tensor, "B 2 H W K"]],
    slots: Int[Tensor, " B"],
    counts: Int[Tensor, " B"],
    x: Float[Tensor, "B 1 D"],
) -> Float[Tensor, "B D"]:
    """The backbone's output, by PyTorch's operators. It writes into the rings."""
    window = rings[0].shape[3]
    # Distance d = (slot - j) mod W is row W - 1 - d of the table; it is seen while d <= count.
    order = (torch.arange(window, device=x.device) - slots[:, None] - 1) % window
    unseen = (window - 1 - order > counts[:, None])[:, None]
    for layer, kv, own in zip(backbone.layers, rings, positions, strict=True):
        q, k, v = layer.attention.heads(x, partial(_overwrite, kv, slots))
        x = layer.feed_forward(layer.attention.add(x, _attend(q, k, v, own, order, unseen)))
    return (x if backbone.final_norm is None else backbone.final_norm(x))[:, 0]


def _overwrite(
    kv: Float[Tensor, "B 2 H W K"], slots: Int[Tensor, " B"], k: Float[Tensor, "B H 1 K"], v: Float[Tensor, "B H 1 K"]
) -> tuple[Float[Tensor, "B H W K"], Float[Tensor, "B H W K"]]:
    """Overwrite each row's slot; return the keys and values of all slots."""
    at = slots[:, None, None, None, None].expand(*kv.shape[:3], 1, kv.shape[4])
    kv.scatter_(3, at, torch.stack([k, v], dim=1).to(kv.dtype))
    return kv[:, 0], kv[:, 1]


def _attend(
    q: Float[Tensor, "B H 1 K"],
    k: Float[Tensor, "B H W K"],
    v: Float[Tensor, "B H W K"],
    positions: Positions,
    order: Int[Tensor, "B W"],
    unseen: Bool[Tensor, "B 1 W"],
) -> Float[Tensor, "B H 1 K"]:
    """See `relative_attention`: one query per row, keys in the order of the ring; `unseen` is the only mask.

    `order` has for each slot the row of its distance in `positions.r`, which begins with the farthest distance.
    """
    q, scale = q[:, :, 0], q.shape[-1] ** -0.5
    query = (q + positions.position_bias.to(q.dtype)) * scale
    scores = torch.bmm(positions.r, query.permute(1, 2, 0).to(positions.r.dtype)).permute(2, 0, 1)
    scores = scores.gather(2, order[:, None].expand(scores.shape))
    scores = scores.masked_fill(unseen, torch.finfo(scores.dtype).min)[:, :, None]
    query = (q + positions.content_bias.to(q.dtype)).to(k.dtype)[:, :, None]
    return F.scaled_dot_product_attention(query, k, v, scores, scale=scale)


def _of_all(run: Callable[[Tensor], Tensor], count: int, x: Tensor, rows: Int[Tensor, " R"] | None) -> Tensor:
    """`run` for these of `count` rows, with zeros in the others, because shapes must not change."""
    if rows is None:
        return run(x)
    return run(x.new_zeros(count, *x.shape[1:]).index_copy_(0, rows, x))[rows]


def _uncached(kind: str) -> torch.autocast:
    """The caller's autocast without its cache: a graph must not use weights in it, because they are freed later."""
    mixed, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return torch.autocast(kind, dtype=dtype, enabled=mixed, cache_enabled=False)


def _check_start(backbone: TransformerXLBackbone, past: Memory | KVCache) -> None:
    """Raise a `Mistake` if no step can begin after `past`."""
    if isinstance(backbone, TransformerXL):
        raise Mistake("backbone must be the layers alone, got a whole language model. Give its backbone.")
    if backbone.training or not _is_plain(backbone):
        raise Mistake(
            "backbone must be in eval mode and of kind transformer-xl, with its own attention and no hooks on that or "
            f"on layers, to read one step at a time, got {type(backbone).__name__}, kind = {backbone.config.kind} and "
            f"training = {backbone.training}. Call its eval(); with others, call the backbone itself."
        )
    rows = len(past.counts) if isinstance(past, Memory | KVCache) else 0
    check_state(past, [backbone.config.d_model] * len(backbone.layers), backbone.like.expand(rows, 1, -1))
    if (past.counts < 0).any():
        raise Mistake("memory must not begin with padding in any row. Read the whole prompt before the first step.")


def _is_plain(backbone: TransformerXLBackbone) -> bool:
    """Whether its layers compute what a step computes, and not what a class of a user's own does. A step calls parts of
    a layer, and not the layer."""
    own = backbone.config.kind == "transformer-xl" and not has_hooks(backbone)
    return own and all(
        is_plain(layer, DecoderLayer) and is_plain(layer.attention, RelativeMultiheadAttention)
        for layer in backbone.layers
    )


class Step(VectorStep):
    """Reads one more token of each row with a language model: its embedding, the backbone and its softmax.

    It consumes a `KVCache`. On CUDA it replays CUDA graphs: one of the n-grams, one of backbone and softmax.
    """

    def __init__(self, model: TransformerXL, cache: KVCache, lengths: Lengths) -> None:
        assert not model.training, "a Step needs the model that for_inference returns"
        super().__init__(model.backbone, cache, lengths, graph=True, head=model.softmax)
        if model.ngrams is not None:
            self.tokens: Tensor | None = model.ngrams.last(tokens_of(cache), lengths.mem_len)
        self.model: TransformerXL = model
        self._ngrams: list[Callable[[Tensor], Tensor]] = []
        """As `_readers`."""

    @torch.no_grad()
    def __call__(self, ids: Int[Tensor, "B 1"]) -> Float[Tensor, "B V"]:
        """Log-probabilities of the token after each of these, in the caller's autocast."""
        return self.read(self.inputs(ids))

    def inputs(self, ids: Int[Tensor, "B 1"], only: Int[Tensor, " R"] | None = None) -> Float[Tensor, "B 1 D"]:
        """What the backbone reads of the next token of each row. With `only` the others may have any n-grams."""
        x = self.model.embedding(ids)
        if self.model.config.document_end is not None:
            self.reset(ids[:, 0] == self.model.config.document_end)
        if self.model.ngrams is not None and self.tokens is not None:
            tokens = torch.cat([self.tokens, ids], 1)
            if self.graph and not self._ngrams:
                every_row = tokens.new_zeros(len(self.counts), tokens.shape[1])
                self._ngrams.append(_capture_graph(partial(_look_up, self.model.ngrams, None), every_row))
            if self.graph:
                x = x + _of_all(self._ngrams[0], len(self.counts), tokens, self.rows)
            else:
                x = x + _look_up(self.model.ngrams, only, tokens)
            self.tokens = tokens[:, 1:]
        return x


def _look_up(ngrams: nn.Module, only: Int[Tensor, " R"] | None, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B 1 D"]:
    with _uncached(tokens.device.type):
        return ngrams(tokens, 1, only)


def step_state(model: object, state: State, lengths: Lengths) -> State | Step:
    """The state for reading one token at a time: a `Step` if one is possible and faster, otherwise `state` itself.

    Only a `KVCache` of Transformer-XL, not of a baseline, becomes a `Step`: on CUDA, and on a CPU if the step in C++
    can read. Call `log_probs` with other states.
    """
    if not isinstance(state, KVCache) or not isinstance(model, TransformerXL) or not _is_plain(model.backbone):
        return state
    keys = state.buffers[0]
    return Step(model, state, lengths) if keys.is_cuda or can_step(model.backbone, keys) else state


def _capture_graph(run: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[Tensor], Tensor]:
    """A CUDA graph of `run` for inputs like `x`. The runs before the capture write only the token's own slot in the
    rings, which the first replay writes again."""
    entry, side = x.clone(), torch.cuda.Stream(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        for _ in range(3):
            run(entry)
    torch.cuda.current_stream(x.device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # PyTorch's own stream is of the first device that recorded, and it waits for the current device.
    with torch.cuda.device_of(x), torch.cuda.graph(graph, stream=side):
        out = run(entry)

    def replay(x: Tensor) -> Tensor:
        entry.copy_(x)
        graph.replay()
        return out.clone()

    return replay
