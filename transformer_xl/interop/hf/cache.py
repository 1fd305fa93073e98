"""The memory of a Transformer-XL as the cache that Hugging Face's transformers pass from call to call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from ...config.settings import Lengths
from ...mistake import Mistake
from ...model.inference import KVCache
from ...model.memory import Memory
from ...model.transformer_xl import TransformerXL
from ...ops.call import product_dtype


@dataclass(eq=False)
class _Keys(KVCache):
    """The keys and values of a memory, which it keeps up to date, too."""

    layers: tuple[Float[Tensor, "B M D"], ...] = ()

    def extend(self, inputs: list[Float[Tensor, "B T D"]], *, mem_len: int) -> _Keys:  # type: ignore[override]
        layers = Memory(self.layers).extend(inputs, mem_len=mem_len).layers
        return replace(super().extend(inputs, mem_len=mem_len), layers=layers)  # type: ignore[return-value]


def _keys(model: TransformerXL, memory: Memory, lengths: Lengths) -> _Keys | None:
    """The memory with its keys; None if layers of another kind have none."""
    found = model.cached(memory, lengths)
    return _Keys(**vars(found), layers=memory.layers) if isinstance(found, KVCache) else None


class TransformerXLCache(Cache):
    """A `Memory` as `past_key_values`, and the number of tokens seen. The memory keeps the last `mem_len`.

    A call does not change the memory; it returns a new cache. While a text is written, a token at a time, the cache
    also has the memory's keys for one further call, as a cache of other models has: they are of the weights of their
    call. Copies and files do not have them, and other calls project the memory.
    """

    _kept: tuple[Memory, tuple[object, ...], Any] | None = None
    """A memory after a call of one token, what that call depended on, and the keys if it had them."""

    def __init__(self, memory: Memory | None = None, seen: int = 0):
        super().__init__(layers=[])
        self.memory, self.seen = memory, seen

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_kept": None}

    def read(
        self, model: TransformerXL, ids: Int[Tensor, "B T"], lengths: Lengths
    ) -> tuple[list[Float[Tensor, "B T D"]], TransformerXLCache]:
        """The output of every layer, and the cache after these tokens."""
        kept, memory, self._kept = self._kept, self.memory, None
        writes = ids.shape[1] == 1 and lengths.mem_len and not (torch.is_grad_enabled() or model.training)
        if not writes or torch.compiler.is_compiling():
            outputs, _, after = model.read(ids, memory, lengths)
            return outputs, TransformerXLCache(after, self.seen + ids.shape[1])
        call = (model, lengths, product_dtype(model.backbone.like), torch.is_inference_mode_enabled())
        keys: Any = None
        if memory is not None and kept is not None and kept[0] is memory and kept[1] == call:
            keys = _keys(model, memory, lengths) if kept[2] is None else replace(kept[2], layers=memory.layers)
        outputs, _, after = model.read(ids, memory if keys is None else keys, lengths)
        if isinstance(after, _Keys):
            keys, after = after, Memory(after.layers, after.valid, after.zero_kv is not None, after.tokens)
        cache = TransformerXLCache(after, self.seen + 1)
        cache._kept = after, call, keys
        return outputs, cache

    def __len__(self) -> int:
        return 0 if self.memory is None else len(self.memory.layers)

    @property
    def batch_size(self) -> int:
        """The number of rows; -1 while it is empty."""
        return -1 if self.memory is None else len(self.memory.layers[0])

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_linear(self) -> list[bool]:
        return [False]  # an empty list means to transformers 5.24 that a text need not be cut to its new tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens seen, including tokens that the memory has dropped."""
        return self.seen

    def reset(self) -> None:
        """Empty the memory."""
        self.memory = self._kept = None
        self.seen: int = 0

    def reorder_cache(self, beam_idx: Int[Tensor, " R"]) -> None:
        """Select these rows, in this order."""
        if self.memory is not None:
            kept, rows = self._kept, beam_idx.to(self.memory.layers[0].device)
            memory = self.memory.select(rows)
            if kept is not None and kept[0] is self.memory:
                self._kept = memory, kept[1], kept[2] and kept[2].select(rows)
            self.memory = memory

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self.reorder_cache(torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Raise `Mistake`: a memory cannot restore the tokens that it has dropped."""
        raise Mistake("past_key_values of a Transformer-XL cannot be cropped. Keep the one from before those tokens.")
