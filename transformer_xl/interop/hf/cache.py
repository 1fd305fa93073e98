"""The memory of a Transformer-XL as the cache that Hugging Face's transformers pass from call to call."""

from __future__ import annotations

from dataclasses import dataclass, replace

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


class TransformerXLCache(Cache):
    """A `Memory` as `past_key_values`, and the number of tokens seen. The memory keeps the last `mem_len`.

    A call does not change the given memory; it returns a new cache. While a text is written, a token at a time, a cache
    also has the keys of its memory, which the next call takes; a second call with the same cache projects them again.
    """

    def __init__(self, memory: Memory | None = None, seen: int = 0, keys: KVCache | None = None):
        super().__init__(layers=[])
        self.memory, self.seen, self._keys = memory, seen, keys

    def read(
        self, model: TransformerXL, ids: Int[Tensor, "B T"], lengths: Lengths
    ) -> tuple[list[Float[Tensor, "B T D"]], TransformerXLCache]:
        """The output of every layer, and the cache after these tokens."""
        seen, memory = self.seen + ids.shape[1], self.memory
        writes = ids.shape[1] == 1 and lengths.mem_len and not (torch.is_grad_enabled() or model.training)
        keys = self._take_keys(model, memory, lengths) if writes and memory is not None else None
        if keys is None or memory is None:
            outputs, _, after = model.read(ids, memory, lengths)
            return outputs, TransformerXLCache(after, seen)
        outputs, _, keys = model.read(ids, keys, lengths)
        assert isinstance(keys, _Keys), "a call returns what it was given"
        after = Memory(keys.layers, keys.valid, memory.zero_filled, keys.tokens)
        return outputs, TransformerXLCache(after, seen, keys)

    def _take_keys(self, model: TransformerXL, memory: Memory, lengths: Lengths) -> KVCache | None:
        """The keys of the memory, projected unless a call like this one returned them; None: the model has none."""
        keys, self._keys = self._keys, None
        if keys is not None and keys.lengths == lengths:
            kept, inference = keys.buffers[0], torch.is_inference_mode_enabled()
            if kept.dtype == product_dtype(model.backbone.like) and kept.is_inference() == inference:
                return replace(keys, layers=memory.layers)
        memory = memory.grow_to(lengths.mem_len) if memory.zero_filled else memory
        found = model.cached(memory, lengths)
        return _Keys(**vars(found), layers=memory.layers) if isinstance(found, KVCache) else None

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
        self.memory = self._keys = None
        self.seen: int = 0

    def reorder_cache(self, beam_idx: Int[Tensor, " R"]) -> None:
        """Select these rows, in this order."""
        if self.memory is not None:
            rows = beam_idx.to(self.memory.layers[0].device)
            self.memory, self._keys = self.memory.select(rows), self._keys and self._keys.select(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self.reorder_cache(torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Raise `Mistake`: a memory cannot restore the tokens that it has dropped."""
        raise Mistake("past_key_values of a Transformer-XL cannot be cropped. Keep the one from before those tokens.")
