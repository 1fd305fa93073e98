"""Transformers with positions in a segment instead of distances: the paper's vanilla models.

    Vaswani et al. 2017    adds a sinusoid of the position to each embedded token
    Al-Rfou et al. 2019    adds a learned vector of the position to the input of each layer; each layer has a table

Positions count from 0 in each segment (after a row's padding). Memory keeps the positions of its own segment, so tokens
of different segments share positions. This incoherence is the paper's argument for relative positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ...config.settings import Lengths, TransformerXLConfig
from ...mistake import Mistake
from ...ops.masks import Mask, visible, without_padding
from ..attention import Positions, RelativeMultiheadAttention, sinusoids
from ..transformer_xl import State, TransformerXLBackbone


class ContentAttention(RelativeMultiheadAttention):
    """Attention by content alone, with the masks of `ops.relative_attention`, always by PyTorch's kernels."""

    project_position: ClassVar[bool] = False

    def attend(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B H S K"],
        v: Float[Tensor, "B H S K"],
        positions: Positions | None,
        attn_len: int | None,
        valid: Int[Tensor, " B"] | None,
    ) -> Float[Tensor, "B H T K"]:
        dropout_p = self.dropatt if self.training else 0.0
        queries, keys = q.shape[2], k.shape[2]
        if valid is None and (attn_len is None or attn_len >= keys) and queries in (1, keys):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=queries > 1)
        mask = Mask(attn_len, valid)
        seen = visible(queries, keys, mask, device=q.device)
        seen = seen | ~seen.any(-1, keepdim=True)  # padding sees no key, and some kernels then return nan
        out = F.scaled_dot_product_attention(q, k, v, seen, dropout_p)
        return without_padding(out.transpose(0, 1), mask).transpose(0, 1)


class Absolute(TransformerXLBackbone):
    """A backbone whose layers attend by content alone."""

    attention_class: ClassVar[type[RelativeMultiheadAttention]] = ContentAttention

    def positions(self, length: int, clamp_len: int | None, like: Tensor) -> Iterable[None]:
        """No positions, because content attention takes none."""
        if clamp_len is not None:
            raise Mistake(
                f"clamp_len must be none for kind = {self.config.kind}, which uses no distances, got {clamp_len}. "
                "Leave it out."
            )
        return [None] * len(self.layers)


class Vaswani(Absolute):
    """Adds sinusoids to the embeddings."""

    def forward(
        self, x: Float[Tensor, "B T D"], memory: State | None, lengths: Lengths
    ) -> tuple[list[Float[Tensor, "B T D"]], State]:
        table = sinusoids(x.shape[1], x.shape[2], device=x.device, dtype=x.dtype).flip(0)
        x = _add_positions(table, x, None if memory is None else memory.valid)
        return super().forward(x, memory, lengths)


class AlRfou(Absolute):
    """Adds learned positions to the input of every layer. Memory holds these sums."""

    def __init__(
        self, config: TransformerXLConfig, *, backend: str = "auto", recompute: bool = False, draw: bool = True
    ):
        super().__init__(config, backend=backend, recompute=recompute, draw=draw)
        self.places: nn.Parameter = nn.Parameter(torch.empty(config.n_layer, config.positions, config.d_model))
        if draw:
            self.init_weight("places", self.places)

    def layer_input(
        self, number: int, x: Float[Tensor, "B T D"], valid: Int[Tensor, " B"] | None
    ) -> Float[Tensor, "B T D"]:
        if x.shape[1] > self.config.positions:
            raise Mistake(
                f"tgt_len must be at most model.positions = {self.config.positions}, got a segment of {x.shape[1]} "
                "tokens. Lower it."
            )
        return _add_positions(self.places[number], x, valid)


def _add_positions(
    table: Float[Tensor, "N D"], x: Float[Tensor, "B T D"], valid: Int[Tensor, " B"] | None
) -> Float[Tensor, "B T D"]:
    """Add the table's row of each token's position; positions count from a row's first token after its padding."""
    if valid is None:
        return x + table[: x.shape[1]]
    position = torch.arange(x.shape[1], device=x.device) + valid.clamp(max=0)[:, None]
    return x + table[position.clamp(min=0)]
