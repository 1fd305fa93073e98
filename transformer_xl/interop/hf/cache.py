"""The memory of a Transformer-XL as the cache that Hugging Face's transformers pass from call to call."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import Cache

from ...mistake import Mistake
from ...model.memory import Memory


class TransformerXLCache(Cache):
    """A `Memory` as `past_key_values`, and the number of tokens seen. The memory keeps the last `mem_len`.

    A call does not change the given cache; it returns a new one.
    """

    def __init__(self, memory: Memory | None = None, seen: int = 0):
        super().__init__(layers=[])
        self.memory, self.seen = memory, seen

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
        self.memory = None
        self.seen: int = 0

    def reorder_cache(self, beam_idx: Int[Tensor, " R"]) -> None:
        """Select these rows, in this order."""
        if self.memory is not None:
            self.memory = self.memory.select(beam_idx.to(self.memory.layers[0].device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self.reorder_cache(torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Raise `Mistake`: a memory cannot restore the tokens that it has dropped."""
        raise Mistake("past_key_values of a Transformer-XL cannot be cropped. Keep the one from before those tokens.")
