"""The state of a Transformer-XL: the layer inputs of earlier segments (section 3.2, h-tilde)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ..mistake import Mistake
from ..ops.masks import Bounds, running_max
from .modules import Valid, Vectors, as_marks


class Memory(NamedTuple):
    """Detached inputs of each layer, oldest first.

    Each call projects them again, because in training the projections get gradients from them. `valid` is the number
    of each row's newest positions that count; None means all. A negative `valid[b]` means that the next call's first
    -valid[b] tokens of row b are padding, which nothing attends to. With `zero_filled` (`model.zero_memory`) a row
    holds zeros where it has no past, and they count. (Changed copies name every field, because torch 2.11 compiles
    `_replace` to an empty tuple.)
    """

    layers: tuple[Float[Tensor, "B M D"], ...]
    valid: Valid = None
    zero_filled: bool = False
    tokens: Int[Tensor, "B L"] | None = None
    """The last tokens of each row, oldest first, -1 before its first; None without n-grams and matches."""

    def __repr__(self) -> str:
        shapes = [list(x.shape) if isinstance(x, Tensor) else x for x in self.layers]  # maps of trees hold anything
        return f"Memory(layers of {shapes}, valid={self.valid}, zero_filled={self.zero_filled})"

    @property
    def length(self) -> int:
        """M, the number of positions of each layer."""
        return self.layers[0].shape[1]

    @property
    def counts(self) -> Int[Tensor, " B"]:
        """`valid` as a tensor, also if it is None."""
        rows = self.layers[0]
        return torch.full((rows.shape[0],), self.length, device=rows.device) if self.valid is None else self.valid

    def grow_to(self, mem_len: int) -> Memory:
        """The memory, filled up to `mem_len` positions with zeros that count (`model.zero_memory`)."""
        lacking = max(mem_len - self.length, 0)
        if self.valid is None and not lacking:
            return Memory(self.layers, None, True, self.tokens)
        length = self.length + lacking
        unused = torch.arange(length, device=self.layers[0].device) < length - self.counts[:, None]
        padded = (pad(x, (0, 0, lacking, 0)) for x in self.layers)
        layers = tuple(x.masked_fill(unused[..., None], 0) for x in padded)
        valid = None if length <= mem_len else self.counts.clamp(min=mem_len)
        return Memory(layers, valid, True, self.tokens)

    def extend(self, inputs: Sequence[Vectors], *, mem_len: int) -> Memory:
        """Append this segment's layer inputs, detached, and keep the newest `mem_len` positions."""
        layers = tuple(_append(old, new, mem_len) for old, new in zip(self.layers, inputs, strict=True))
        valid = self.valid
        if valid is not None:
            valid = (valid + inputs[0].shape[1]).clamp(max=layers[0].shape[1])
        return Memory(layers, valid, self.zero_filled, self.tokens)

    def with_tokens(self, tokens: Int[Tensor, "B L"]) -> Memory:
        """The same memory with these last tokens."""
        return Memory(self.layers, self.valid, self.zero_filled, tokens)

    def with_valid(self, valid: Int[Tensor, " B"]) -> Memory:
        """The same memory with another `valid`."""
        return Memory(self.layers, valid, self.zero_filled, self.tokens)

    def select(self, rows: Int[Tensor, " R"] | slice) -> Memory:
        """The given rows (streams), in the given order."""
        valid, tokens = (None if x is None else x[rows] for x in (self.valid, self.tokens))
        return Memory(tuple(x[rows] for x in self.layers), valid, self.zero_filled, tokens)

    @staticmethod
    def cat(memories: Sequence[Memory]) -> Memory:
        """Join the rows of several memories. Shorter ones get padding in front, which counts with `zero_filled`."""
        if len(memories) == 1:  # most training steps: nothing is copied
            return memories[0]
        tokens, first = cat_tokens([m.tokens for m in memories]), memories[0]
        length = max(m.length for m in memories)
        layers = tuple(
            torch.cat([pad(x, (0, 0, length - x.shape[1], 0)) for x in layer])
            for layer in zip(*(m.layers for m in memories), strict=True)
        )
        whole = first.zero_filled or all(m.valid is None and m.length == length for m in memories)
        valid = None if whole else torch.cat([m.counts for m in memories])
        return Memory(layers, valid, first.zero_filled, tokens)

    def reset(self, rows: Bool[Tensor, " B"]) -> Memory:
        """Empty the marked rows, where a document or episode ended; keep the others."""
        marked = as_marks(rows, self.layers[0])
        tokens = reset_tokens(self.tokens, marked)
        if self.zero_filled:
            layers = tuple(x.masked_fill(marked[:, None, None], 0) for x in self.layers)
            return Memory(layers, self.valid, True, tokens)
        return Memory(self.layers, reset_counts(self.counts, marked), False, tokens)


torch.serialization.add_safe_globals([Memory])  # so that `torch.load` reads a saved memory


def first_keys(memory: int, valid: Valid, begins: Bool[Tensor, "B T"] | None) -> Bounds:
    """The first key that each query sees after `memory` positions, of which `valid` count. Where a token of the segment
    `begins` a document, it and what follows see nothing before it."""
    start = None if valid is None else memory - valid[:, None]
    if begins is None:
        return start
    own = torch.arange(memory, memory + begins.shape[1], device=begins.device)
    first = running_max(own.where(begins, 0))
    return first if start is None else torch.maximum(first, start)


def reset_counts(counts: Int[Tensor, " B"], rows: Bool[Tensor, " B"]) -> Int[Tensor, " B"]:
    """The counts of a state after the marked rows are emptied. Padding of a later text stays padding."""
    return torch.where(rows, counts.clamp(max=0), counts)


def reset_tokens(tokens: Int[Tensor, "B L"] | None, rows: Bool[Tensor, " B"]) -> Int[Tensor, "B L"] | None:
    """The tokens of a state after the marked rows are emptied."""
    return None if tokens is None else tokens.masked_fill(rows[:, None], -1)


def cat_tokens(tokens: Sequence[Int[Tensor, "_ L"] | None]) -> Int[Tensor, "B L"] | None:
    """The tokens of several states, joined."""
    given = [each for each in tokens if each is not None]
    if not tokens or 0 < len(given) < len(tokens):
        raise Mistake(
            f"cat must get one state or more, and the tokens of all or none, got {len(tokens)} with {len(given)}. "
            "A model with n-grams or matches makes its states itself: model.empty_memory(rows, lengths)."
        )
    return torch.cat(given) if given else None


def _append(old: Tensor, new: Tensor, mem_len: int) -> Tensor:
    kept = max(mem_len - new.shape[1], 0)
    recent = new[:, new.shape[1] - min(mem_len, new.shape[1]) :]
    return torch.cat([old[:, max(old.shape[1] - kept, 0) :].to(new.dtype), recent], dim=1).detach()
