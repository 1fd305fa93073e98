"""The state of a Transformer-XL: what the last segments left behind (section 3.2, equation for h-tilde).

`Memory` is the paper's: inputs of the layers, projected in every call, for in training the projections learn through
it. `KVCache` holds what they were projected to: the same numbers for less work, where the weights stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ..config.settings import Lengths
from ..mistake import Mistake
from ..ops.masks import aligned


class Memory(NamedTuple):
    """Detached inputs of each layer, oldest first, and how many of a row's newest positions count.

    `valid` None means all of them. On entry of a call `valid[b]` may be negative: then the first -valid[b] tokens of
    row b in that call are padding (prompts of different lengths, padded on the left); nothing ever attends them.
    """

    layers: tuple[Float[Tensor, "B M D"], ...]
    valid: Int[Tensor, " B"] | None = None

    @classmethod
    def empty(cls, n_layer: int, batch: int, d_model: int, *, valid=None, dtype=None, device=None) -> Memory:
        """No positions at all, as the original PyTorch code starts."""
        return cls.zeros(n_layer, batch, 0, d_model, dtype=dtype, device=device)._replace(valid=valid)

    @classmethod
    def zeros(cls, n_layer: int, batch: int, mem_len: int, d_model: int, *, dtype=None, device=None) -> Memory:
        """`mem_len` positions of zeros that are attended, as the TensorFlow code and Hugging Face start."""
        shape = (batch, mem_len, d_model)
        return cls(tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(n_layer)))

    @property
    def length(self) -> int:
        """M, the positions each layer holds."""
        return self.layers[0].shape[1]

    @property
    def counts(self) -> Int[Tensor, " B"]:
        """`valid`, spelled out."""
        layer = self.layers[0]
        full = torch.full((layer.shape[0],), self.length, device=layer.device)
        return full if self.valid is None else self.valid

    def zero_filled(self, mem_len: int) -> Memory:
        """What a row lacks of `mem_len` positions, filled in front with zeros that count."""
        lacking = max(mem_len - self.length, 0)
        if self.valid is None and not lacking:
            return self
        length = self.length + lacking
        unused = torch.arange(length, device=self.layers[0].device) < length - self.counts[:, None]
        padded = (pad(x, (0, 0, lacking, 0)) for x in self.layers)
        layers = tuple(x.masked_fill(unused[..., None], 0) for x in padded)
        return Memory(layers, None if length <= mem_len else self.counts.clamp(min=mem_len))

    def extend(self, inputs: Sequence[Float[Tensor, "B T D"]], *, mem_len: int) -> Memory:
        """Append this segment's layer inputs, detached, and keep the newest `mem_len` positions."""
        layers = tuple(_append(old, new, mem_len) for old, new in zip(self.layers, inputs, strict=True))
        if self.valid is None:
            return Memory(layers)
        return Memory(layers, (self.valid + inputs[0].shape[1]).clamp(max=layers[0].shape[1]))

    def select(self, rows: Int[Tensor, " R"] | slice) -> Memory:
        """The given rows (streams), in the given order."""
        return Memory(tuple(x[rows] for x in self.layers), None if self.valid is None else self.valid[rows])

    @staticmethod
    def cat(memories: Sequence[Memory]) -> Memory:
        """Rows of several memories as one; shorter ones are padded in front with positions that do not count."""
        if len(memories) == 1:
            return memories[0]
        length = max(m.length for m in memories)
        layers = tuple(
            torch.cat([pad(x, (0, 0, length - x.shape[1], 0)) for x in layer])
            for layer in zip(*(m.layers for m in memories), strict=True)
        )
        if all(m.valid is None and m.length == length for m in memories):
            return Memory(layers)
        return Memory(layers, torch.cat([m.counts for m in memories]))

    def to(self, where: torch.device | str | torch.dtype) -> Memory:
        """On another device, or in another dtype."""
        valid = self.valid if self.valid is None or isinstance(where, torch.dtype) else self.valid.to(where)
        return Memory(tuple(x.to(where) for x in self.layers), valid)

    def reset(self, rows: Bool[Tensor, " B"]) -> Memory:
        """Empty the marked rows: a document or episode ended there. Other rows go on."""
        return self._replace(valid=self.counts.masked_fill(rows.to(self.layers[0].device), 0))


def _append(old: Tensor, new: Tensor, mem_len: int) -> Tensor:
    kept = max(mem_len - new.shape[1], 0)
    recent = new[:, new.shape[1] - min(mem_len, new.shape[1]) :]
    return torch.cat([old[:, max(old.shape[1] - kept, 0) :].to(new.dtype), recent], dim=1).detach()


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
    """What a row holds where it has no past; None: nothing, which `valid` says."""
    first: int = 0
    positions: Sequence[Float[Tensor, "_ R K"]] = ()
    """Of each layer, the encoded distances R - 1, ..., 0; R grows with what is asked for."""
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

    @property
    def counts(self) -> Int[Tensor, " B"]:
        """`valid`, spelled out."""
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

    def cover(self, tokens: int, encode: Callable[[int], Iterable[Float[Tensor, "_ R K"]]]) -> None:
        """Have the encodings of the distances in a call with so many new tokens, by `encode`, which gives each layer's.

        While the cache fills there are more than needed; then there are just as many, for a part of a table is copied
        before a product. Where queries are several, some are spare (see `ops.masks.shifted_view`).
        """
        needed = aligned(self.length + tokens) if tokens > 1 else self.length + tokens
        held = self.positions[0].shape[1] if self.positions else 0
        filling = self.length < self.lengths.mem_len
        if held < needed or (held > needed and not filling):
            self.positions = [r.contiguous() for r in encode(max(needed, 2 * held) if filling else needed)]

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
        return replace(chosen, valid=valid, ground=self.ground, positions=self.positions)

    select = fork

    def to(self, where: torch.device | str | torch.dtype) -> KVCache:
        """A copy on another device, or in another dtype."""

        def moved(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
            return [(k.to(where, copy=True), v.to(where, copy=True)) for k, v in pairs]

        self._check()
        valid = self.valid if self.valid is None or isinstance(where, torch.dtype) else self.valid.to(where)
        ground = None if self.ground is None else moved(self.ground)
        positions = [r.to(where) for r in self.positions]
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
        longest = max(caches, key=lambda cache: cache.positions[0].shape[1] if cache.positions else 0)
        cache = KVCache.of(((k, v) for k, v in joined), caches[0].lengths, valid=valid)
        return replace(cache, ground=caches[0].ground, positions=longest.positions)

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


def check_state(memory: Memory | KVCache, widths: Sequence[int], x: Float[Tensor, "B T D"]) -> None:
    """`ValueError` for a memory that is not of a model with states of these `widths`, or not for the rows of `x`."""
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


def _roomy(x: Float[Tensor, "B H L K"], room: int) -> Float[Tensor, "B H C K"]:
    """`x` at the front of a buffer."""
    buffer = x.new_zeros(*x.shape[:2], room, x.shape[3])
    buffer[:, :, : x.shape[2]] = x
    return buffer
