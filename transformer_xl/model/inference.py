"""A cache of projected memory for inference.

It gives the same numbers as `Memory` with less work, because the weights do not change at inference. See `step` for
reading one token at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ..config.settings import Lengths
from ..mistake import Mistake
from ..ops.call import in_autocast
from ..ops.masks import next_multiple
from .attention import Positions
from .memory import Memory, cat_tokens, reset_counts, reset_tokens
from .modules import Keys, Past, Queries, Valid, Vectors, as_marks


@dataclass(eq=False)
class KVCache:
    """Keys, values and encoded distances of each layer, for inference; `valid` as in `Memory`.

    Keys contain no position, so they stay exact as they get older. They are stored in order, in buffers that grow to
    2 `mem_len` + `tgt_len` positions, and are moved to the front of a full buffer. A call writes into the buffers: it
    consumes the cache that it gets and returns a new one. `fork` a cache before the call to keep the old one.
    """

    buffers: list[Float[Tensor, "B 2 H C K"]] = field(repr=False)
    lengths: Lengths
    length: int
    """Positions in use."""
    valid: Valid = None
    zero_kv: list[Float[Tensor, "2 H 1 K"]] | None = field(default=None, repr=False)
    """Keys and values of the zeros that a row attends to where it has no past; None: no zeros are attended."""
    first: int = 0
    positions: Sequence[Positions | None] = field(default=(), repr=False)
    """Each layer's `Positions`, for distances `reach` - 1, ..., 0; `reach` grows when a call needs more."""
    reach: int = 0
    spent: bool = False
    tokens: Int[Tensor, "B L"] | None = field(default=None, repr=False)
    """The last tokens, as in `Memory`."""

    def grow_to(self, mem_len: int) -> KVCache:
        """The cache, or a new one, filled up to `mem_len` positions with zeros that count (`model.zero_memory`)."""
        lacking = mem_len - self.length
        if self.zero_kv is None or lacking <= 0:
            return self
        self._check()
        pairs = zip(self._live(), self.zero_kv, strict=True)
        buffers = [torch.cat([zeros.expand(len(kv), -1, -1, lacking, -1), kv], dim=3) for kv, zeros in pairs]
        return replace(self, buffers=buffers, length=mem_len, first=0)

    def begin(self, tokens: int, lengths: Lengths) -> int:
        """Make room for T = `tokens` more positions. Return the number of distances to encode, at least what it needs.

        While the cache fills, it keeps more encoded distances than a call needs, so that it computes them seldom. A
        full one keeps exactly as many, because PyTorch copies a part of a table before a product. Several queries need
        spare distances (see `ops.masks.next_multiple`).
        """
        self._check()
        if self.lengths.clamp_len != lengths.clamp_len:
            raise Mistake(
                f"clamp_len must be {self.lengths.clamp_len}, as the KVCache was made for, got {lengths.clamp_len}."
            )
        if torch.is_grad_enabled():
            raise Mistake("A KVCache is for inference: call under torch.no_grad(), or give a Memory.")
        self._make_room(tokens)
        needed = next_multiple(self.length + tokens) if tokens > 1 else max(self.length + tokens, 1)
        filling = self.length < self.lengths.mem_len
        if self.reach < needed:
            return max(needed, 2 * self.reach) if filling else needed
        if self.reach > needed and not filling:
            self.keep_positions([each and each._replace(r=each.r[:, -needed:]) for each in self.positions], needed)
        return self.reach

    @property
    def pasts(self) -> list[Past]:
        """For each layer a function that appends new keys and values, and returns views of all of them, in order."""
        return [partial(_append, buffer, self.first, self.first + self.length) for buffer in self.buffers]

    def keep_positions(self, positions: Iterable[Positions | None], reach: int) -> None:
        """Keep each layer's positions, for the distances `reach` - 1, ..., 0, for later calls. Forks share them."""
        self.positions = [each and each._replace(r=each.r.contiguous()) for each in positions]
        self.reach = reach

    def _make_room(self, tokens: int) -> None:
        needed, size, live = self.length + tokens, self.buffers[0].shape[3], self._live()
        if self.first + needed <= size:
            return
        if self.length + needed > size:  # the cache is not full yet, or a segment is longer than tgt_len
            size = max(needed, min(2 * needed, 2 * self.lengths.mem_len + self.lengths.tgt_len))
            self.buffers = [kv.new_empty(*kv.shape[:3], size, kv.shape[4]) for kv in self.buffers]
        for buffer, kv in zip(self.buffers, live, strict=True):
            buffer[..., : self.length, :] = kv
        self.first = 0

    @property
    def counts(self) -> Int[Tensor, " B"]:
        """`valid` as a tensor, also if it is None."""
        rows = self.buffers[0]
        return torch.full((rows.shape[0],), self.length, device=rows.device) if self.valid is None else self.valid

    def newest(self, count: int) -> list[Float[Tensor, "B 2 H L K"]]:
        """At most `count` of each layer's last keys and values, in order, as views. This consumes the cache."""
        return [kv[..., max(self.length - count, 0) :, :] for kv in self._spend()._live()]

    def extend(self, inputs: Sequence[Vectors], *, mem_len: int) -> KVCache:
        """The cache after a call: with this segment, cut to the newest `mem_len` positions."""
        tokens = inputs[0].shape[1]
        length = min(self.length + tokens, mem_len)
        valid = None if self.valid is None else (self.valid + tokens).clamp(max=length)
        first = self.first + self.length + tokens - length
        return replace(self._spend(), length=length, valid=valid, first=first)

    def with_tokens(self, tokens: Int[Tensor, "B L"] | None) -> KVCache:
        """The same cache with these last tokens. This consumes the cache."""
        return replace(self._spend(), tokens=tokens)

    def with_valid(self, valid: Int[Tensor, " B"]) -> KVCache:
        """The same cache with another `valid`. This consumes the cache."""
        return replace(self._spend(), valid=valid)

    def fork(self, rows: Int[Tensor, " R"] | slice = slice(None)) -> KVCache:
        """A copy of the given rows, in the given order, with buffers of its own."""
        self._check()
        valid, tokens = (None if x is None else x[rows] for x in (self.valid, self.tokens))
        buffers = [kv[rows].clone() if isinstance(rows, slice) else kv[rows] for kv in self._live()]
        return replace(self, buffers=buffers, first=0, valid=valid, tokens=tokens)

    select = fork

    @staticmethod
    def cat(caches: Sequence[KVCache]) -> KVCache:
        """Join the rows of several caches. Shorter ones are padded in front with positions that do not count, or, with
        `zero_memory`, with zeros that do."""
        for cache in caches:
            cache._check()
        length = max(cache.length for cache in caches)
        caches = [cache.grow_to(length) for cache in caches]
        layers = zip(*(cache._live() for cache in caches), strict=True)
        buffers = [torch.cat([pad(kv, (0, 0, length - kv.shape[3], 0)) for kv in layer]) for layer in layers]
        whole = all(cache.valid is None and cache.length == length for cache in caches)
        valid = None if whole else torch.cat([cache.counts for cache in caches])
        tokens = cat_tokens([cache.tokens for cache in caches])
        longest = max(caches, key=lambda cache: cache.reach)
        return replace(longest, buffers=buffers, length=length, valid=valid, first=0, tokens=tokens)

    def reset(self, rows: Bool[Tensor, " B"]) -> KVCache:
        """Empty the marked rows, where a document or episode ended; keep the others. This consumes the cache."""
        marked = as_marks(rows, self.buffers[0])
        after = self.with_tokens(reset_tokens(self.tokens, marked))
        if self.zero_kv is None:
            return after.with_valid(reset_counts(self.counts, marked))
        for kv, zeros in zip(self._live(), self.zero_kv, strict=True):
            kv[marked] = zeros
        return after

    def _spend(self) -> KVCache:
        """The same cache. Nobody may use this one any more."""
        self._check()
        self.spent = True
        return replace(self, spent=False)

    def _check(self) -> None:
        if self.spent:
            raise RuntimeError("A call has used this KVCache. Use the one that the call returned, or fork it before.")

    def _live(self) -> list[Float[Tensor, "B 2 H L K"]]:
        return [buffer[..., self.first : self.first + self.length, :] for buffer in self.buffers]


def _append(buffer: Float[Tensor, "B 2 H C K"], first: int, end: int, k: Queries, v: Queries) -> tuple[Keys, Keys]:
    """Write new keys and values from position `end` of the buffer on; return those from `first` on."""
    new = slice(end, end + k.shape[2])
    buffer[:, 0, :, new], buffer[:, 1, :, new] = k, v
    keys, values = buffer[..., first : new.stop, :].unbind(1)
    return keys, values


def tokens_of(state: Memory | KVCache) -> Int[Tensor, "B L"]:
    """The last tokens of each row, which n-grams and matches need. A state of no positions may lack them.

    Raises:
        Mistake: it has a past without tokens, because a backbone or another model made it.
    """
    if state.tokens is not None:
        return state.tokens
    if state.length:
        raise Mistake(
            "memory must have the last tokens of each row, because the model has n-grams or matches. Give the "
            "result of empty_memory or of the previous call."
        )
    return state.counts.new_empty(len(state.counts), 0, dtype=torch.long)


def check_state(memory: object, widths: Sequence[int], x: Vectors, heads: tuple[int, int] | None = None) -> None:
    """Raise a `Mistake` unless `memory` has states of these `widths` and as many rows as `x`. The keys of a cache must
    have the number and the size of `heads`."""
    if not isinstance(memory, Memory | KVCache):
        raise Mistake(f"memory must be a Memory or a KVCache, got {type(memory).__name__}.")
    layers = memory.buffers if isinstance(memory, KVCache) else memory.layers
    same = [rows.shape[0] == x.shape[0] and rows.device == x.device for rows in layers]
    fits = len(layers) == len(widths) and all(same)
    if fits and isinstance(memory, Memory):
        mixed = in_autocast(x)
        shapes = [(layers[0].shape[1], width) for width in widths]
        fits = [rows.shape[1:] for rows in layers] == shapes and (mixed or all(r.dtype == x.dtype for r in layers))
    elif fits and heads is not None:
        fits = all(kv.shape[2::2] == heads for kv in layers)
    if not fits:
        wide = ", ".join(dict.fromkeys(map(str, widths)))
        got = ", ".join(dict.fromkeys(f"{list(layer.shape)} {layer.dtype} on {layer.device}" for layer in layers))
        wide += "" if heads is None else f" ({heads[0]} heads of {heads[1]})"
        raise Mistake(
            f"memory must hold {len(widths)} tensors of {len(x)} rows, {wide} wide, {x.dtype} on {x.device}, got "
            f"{len(layers)}: {got}. Give the result of empty_memory({len(x)}) or of the previous call."
        )
    valid = memory.valid
    if valid is not None and (valid.shape != x.shape[:1] or valid.dtype not in (torch.int64, torch.int32)):
        raise Mistake(  # a sum of smaller integers overflows
            f"valid of the memory must be an int64 or int32 for each of {len(x)} rows, got {list(valid.shape)} "
            f"{valid.dtype}."
        )
