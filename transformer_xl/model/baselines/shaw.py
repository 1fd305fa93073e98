"""Relative positions as Shaw et al. 2018 learn them: an encoding of each distance, for each layer and head.

    A_ij = q_i . k_j + q_i . r_d        d = min(M + i - j, positions - 1)

Distances beyond the table use its last encoding. Values carry no positions, as in the ablations of Dai et al. 2019.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...config.settings import TransformerXLConfig
from ..attention import Positions, RelativeMultiheadAttention
from ..transformer_xl import TransformerXLBackbone


class ShawAttention(RelativeMultiheadAttention):
    """Attention that does not project encodings: they are learned for its heads."""

    project_position: ClassVar[bool] = False


class Shaw(TransformerXLBackbone):
    """Transformer-XL's backbone with learned encodings and without u and v. `distances` begins with the farthest."""

    attention_class: ClassVar[type[RelativeMultiheadAttention]] = ShawAttention

    def __init__(
        self, config: TransformerXLConfig, *, backend: str = "auto", recompute: bool = False, draw: bool = True
    ):
        super().__init__(config, backend=backend, recompute=recompute, draw=draw)
        self.distances: nn.Parameter = nn.Parameter(
            torch.empty(config.n_layer, config.positions, config.n_head, config.d_head)
        )
        if draw:
            self.init_weight("distances", self.distances)

    def positions(self, length: int, clamp_len: int | None, like: Tensor) -> Iterable[Positions]:
        none = like.new_zeros(self.config.n_head, self.config.d_head)
        for table in self.distances:
            first = 0 if clamp_len is None else max(len(table) - 1 - clamp_len, 0)
            known = table[first:].transpose(0, 1)
            lacking = max(length - known.shape[1], 0)
            nearest = known[:, known.shape[1] - length + lacking :]
            yield Positions(torch.cat([known[:, :1].expand(-1, lacking, -1), nearest], dim=1), none, none)
