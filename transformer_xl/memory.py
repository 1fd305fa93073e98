"""The state of a Transformer-XL: what the last segments left behind (section 3.2, equation for h-tilde)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


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
        padded = (torch.nn.functional.pad(x, (0, 0, lacking, 0)) for x in self.layers)
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
        length = max(m.length for m in memories)
        layers = tuple(
            torch.cat([torch.nn.functional.pad(x, (0, 0, length - x.shape[1], 0)) for x in layer])
            for layer in zip(*(m.layers for m in memories), strict=True)
        )
        if all(m.valid is None and m.length == length for m in memories):
            return Memory(layers)
        return Memory(layers, torch.cat([m.counts for m in memories]))

    def reset(self, rows: Bool[Tensor, " B"]) -> Memory:
        """Empty the marked rows: a document or episode ended there. Other rows go on."""
        return self._replace(valid=self.counts.masked_fill(rows.to(self.layers[0].device), 0))


def _append(old: Tensor, new: Tensor, mem_len: int) -> Tensor:
    kept = max(mem_len - new.shape[1], 0)
    recent = new[:, new.shape[1] - min(mem_len, new.shape[1]) :]
    return torch.cat([old[:, max(old.shape[1] - kept, 0) :].to(new.dtype), recent], dim=1).detach()
