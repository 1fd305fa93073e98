"""The attention sublayer of Transformer-XL around the scores of another model."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..attention import Projected, RelativeMultiheadAttention


class Sublayer(RelativeMultiheadAttention):
    """Norm, projections, `attend`, residual; there are no sinusoids of distances to project."""

    def __init__(self, *sizes: int, **settings: Any):
        super().__init__(*sizes, **settings)
        del self.position

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        past: Float[Tensor, "B M D"] | Projected,
        positions: Float[Tensor, "H R K"],
        content_bias: Float[Tensor, "H K"] | None,
        position_bias: Float[Tensor, "N H"] | None,
        *,
        attn_len: int | None = None,
        valid: Int[Tensor, " B"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """As that of `RelativeMultiheadAttention`."""
        new = self.norm(x) if self.pre_lnorm else x
        q, k, v = self._heads(self.qkv(new), 3)
        if not isinstance(past, Tensor):
            k, v = past.append(k, v)
        elif past.shape[1]:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.keys_values(past), (k, v), strict=True))
        if self.dropout.locked:
            q, k, v = (self.dropout(part) for part in (q, k, v))
        attended = self.attend(q, k, v, positions, content_bias, position_bias, attn_len=attn_len, valid=valid)
        x = x + self.dropout(self.output(attended.transpose(1, 2).flatten(2)))
        return x if self.pre_lnorm else self.norm(x)

    @abstractmethod
    def attend(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B H S K"],
        v: Float[Tensor, "B H S K"],
        positions: Float[Tensor, "H R K"],
        content_bias: Float[Tensor, "H K"] | None,
        position_bias: Float[Tensor, "N H"] | None,
        *,
        attn_len: int | None,
        valid: Int[Tensor, " B"] | None,
    ) -> Float[Tensor, "B H T K"]:
        """What each head gives; the masks are those of `ops.relative_attention`."""
