"""Transformers with other positions: the paper's vanilla models, and the distances of Shaw et al. 2018.

    Vaswani et al. 2017    adds a sinusoid of the position to each embedded token
    Al-Rfou et al. 2019    adds a learned vector of the position to the input of each layer; each layer has a table
    Shaw et al. 2018       learns an encoding of each distance, for each layer and head:
                           A_ij = q_i . k_j + q_i . r_d,    d = min(M + i - j, positions - 1)

The first two count positions from 0 in each segment (after a row's padding). Memory keeps the positions of its own
segment, so tokens of different segments share positions: the paper argues with this for relative ones.

The third uses the last encoding of its table for all farther distances. Values carry no positions, as in the ablations
of Dai et al. 2019.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ...config.settings import Lengths, TransformerXLConfig
from ...mistake import Mistake
from ...ops.masks import Bounds, Mask, visible, without_padding
from ..attention import Positions, RelativeMultiheadAttention, sinusoids
from ..modules import Keys, Queries, Valid, Vectors
from ..transformer_xl import State, TransformerXLBackbone


class ContentAttention(RelativeMultiheadAttention):
    """Attention by content alone, with the masks of `ops.relative_attention`, always by PyTorch's kernels."""

    def attend(
        self, q: Queries, k: Keys, v: Keys, positions: Positions | None, attn_len: int | None, first: Bounds
    ) -> Queries:
        dropout_p = self.dropatt if self.training else 0.0
        queries, keys = q.shape[2], k.shape[2]
        if first is None and (attn_len is None or attn_len >= keys) and queries in (1, keys):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=queries > 1)
        mask = Mask.of(keys - queries, attn_len, first=first)
        seen = visible(queries, keys, mask, device=q.device)
        seen = seen | ~seen.any(-1, keepdim=True)  # padding sees no key, and some kernels then return nan
        out = F.scaled_dot_product_attention(q, k, v, seen, dropout_p)
        return without_padding(out.transpose(0, 1), keys - queries, mask).transpose(0, 1)


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
        self, x: Vectors, memory: State | None, lengths: Lengths, begins: Bool[Tensor, "B T"] | None = None
    ) -> tuple[list[Vectors], State]:
        table = sinusoids(x.shape[1], x.shape[2], device=x.device, dtype=x.dtype).flip(0)
        x = _add_positions(table, x, None if memory is None else memory.valid)
        return super().forward(x, memory, lengths, begins)


class AlRfou(Absolute):
    """Adds learned positions to the input of every layer. Memory holds these sums."""

    def add_weights(self, config: TransformerXLConfig) -> None:
        self.places: nn.Parameter = nn.Parameter(torch.empty(config.n_layer, config.positions, config.d_model))

    def layer_input(self, number: int, x: Vectors, valid: Valid) -> Vectors:
        if x.shape[1] > self.config.positions:
            raise Mistake(
                f"tgt_len must be at most model.positions = {self.config.positions}, got a segment of {x.shape[1]} "
                "tokens. Lower it."
            )
        return _add_positions(self.places[number], x, valid)


def _add_positions(table: Float[Tensor, "N D"], x: Vectors, valid: Valid) -> Vectors:
    """Add the table's row of each token's position; positions count from a row's first token after its padding."""
    if valid is None:
        return x + table[: x.shape[1]]
    position = torch.arange(x.shape[1], device=x.device) + valid.clamp(max=0)[:, None]
    return x + table[position.clamp(min=0)]


class Shaw(TransformerXLBackbone):
    """Transformer-XL's backbone with learned encodings and without u and v. `distances` begins with the farthest."""

    def add_weights(self, config: TransformerXLConfig) -> None:
        shape = (config.n_layer, config.positions, config.n_head, config.d_head)
        self.distances: nn.Parameter = nn.Parameter(torch.empty(shape))

    def positions(self, length: int, clamp_len: int | None, like: Tensor) -> Iterable[Positions]:
        none = like.new_zeros(self.config.n_head, self.config.d_head)
        for table in self.distances:
            first = 0 if clamp_len is None else max(len(table) - 1 - clamp_len, 0)
            known = table[first:].transpose(0, 1)
            lacking = max(length - known.shape[1], 0)
            nearest = known[:, known.shape[1] - length + lacking :]
            yield Positions(torch.cat([known[:, :1].expand(-1, lacking, -1), nearest], dim=1), none, none)
