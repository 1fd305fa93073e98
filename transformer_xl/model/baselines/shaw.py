"""Relative positions as Shaw et al. 2018 learn them: an encoding of each distance, for each layer and head.

    A_ij = q_i . k_j + q_i . r_d                  d = min(M + i - j, positions - 1)
    A_ij = (q_i + u) . k_j + q_i . r_d + b_d      with `score_biases`, the original code's attn_type 1

Distances beyond the table have its last encoding. Values carry no positions, as in the ablations of Dai et al. 2019.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from ...ops import relative_attention
from ..transformer_xl import TransformerXL
from .sublayer import Sublayer


class ShawAttention(Sublayer):
    """Attention whose `positions` are learned; `position_bias` holds the bias of each distance, farthest first."""

    def attend(self, q, k, v, positions, content_bias, position_bias, *, attn_len, valid):
        u = q.new_zeros(self.n_head, self.d_head) if content_bias is None else content_bias
        r = positions
        if position_bias is not None:  # stands behind each encoding, against a one behind each query
            b = _reaching(position_bias.T[..., None], r.shape[1])
            r, q = torch.cat([r, b], dim=-1), pad(q, (0, 1), value=1.0)
            k, v, u = (pad(x, (0, 1)) for x in (k, v, u))
        attended = relative_attention(
            q,
            k,
            v,
            r.to(q.dtype),
            u,
            torch.zeros_like(u),
            attn_len=attn_len,
            valid=valid,
            dropout_p=self.dropatt if self.training else 0.0,
            scale=self.d_head**-0.5,
            backend=self.backend,
        )
        return attended[..., : self.d_head]


class Shaw(TransformerXL):
    """Transformer-XL with Shaw's encodings in place of its own. `distances` holds them farthest first."""

    attention = ShawAttention

    def _add_positional(self) -> None:
        config = self.config
        sizes = (config.n_layer, config.positions, config.n_head)
        self.distances = nn.Parameter(torch.empty(*sizes, config.d_head))
        self.distance_bias = nn.Parameter(torch.empty(sizes)) if config.score_biases else None
        biases = (config.n_layer, config.n_head, config.d_head)
        self.content_bias = nn.Parameter(torch.empty(biases)) if config.score_biases else None

    def _positions(self, length: int, *, clamp_len: int | None, like: Tensor) -> Iterable[Float[Tensor, "H S _"]]:
        return (_reaching(_known(table, clamp_len).transpose(0, 1), length) for table in self.distances)

    def _biases(self, clamp_len: int | None):
        if self.content_bias is None or self.distance_bias is None:
            return [None] * len(self.layers), [None] * len(self.layers)
        return self.content_bias, [_known(table, clamp_len) for table in self.distance_bias]


def _known(table: Float[Tensor, "N ..."], clamp_len: int | None) -> Float[Tensor, "_ ..."]:
    """The rows of distances up to `clamp_len`."""
    return table if clamp_len is None else table[max(len(table) - 1 - clamp_len, 0) :]


def _reaching(table: Float[Tensor, "H N _"], length: int) -> Float[Tensor, "H S _"]:
    """Rows for distances length - 1, ..., 0, of which all too far ones are as the first row."""
    lacking = max(length - table.shape[1], 0)
    return torch.cat([table[:, :1].expand(-1, lacking, -1), table[:, table.shape[1] - length + lacking :]], dim=1)
