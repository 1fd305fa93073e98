"""Relative multi-head attention with memory (Dai et al. 2019, section 3.3) and its sinusoids."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..ops import check_backend, relative_attention
from ..ops.dropout import Dropout


def sinusoids(
    length: int, d_model: int, *, clamp_len: int | None = None, device=None, dtype=torch.float32
) -> Float[Tensor, "S D"]:
    """The encodings R of distances S - 1, ..., 1, 0: sines in the first half, cosines in the second."""
    exact = torch.promote_types(dtype, torch.float32)  # half precision cannot count to 3,000
    distance = torch.arange(length - 1, -1, -1, device=device, dtype=exact)
    if clamp_len is not None:
        distance = distance.clamp(max=clamp_len)
    frequency = 10000 ** -(torch.arange(0, d_model, 2, device=device, dtype=exact) / d_model)
    angle = torch.outer(distance, frequency)
    return torch.cat([angle.sin(), angle.cos()], dim=-1).to(dtype)


class Linear(nn.Linear):
    """PyTorch's, but one row in bfloat16 on a CPU goes through its matrix-vector product, which is faster."""

    def forward(self, x: Float[Tensor, "*B I"]) -> Float[Tensor, "*B O"]:
        weight = self.weight
        fits = x.dtype == weight.dtype or torch.is_autocast_enabled("cpu")
        if x.numel() != self.in_features or weight.dtype != torch.bfloat16 or not weight.is_cpu or not fits:
            return super().forward(x)
        row = x.reshape(-1).to(weight.dtype)
        out = torch.mv(weight, row) if self.bias is None else torch.addmv(self.bias, weight, row)
        return out.view(*x.shape[:-1], -1)


@runtime_checkable
class Projected(Protocol):
    """A past whose keys and values are there already: `append` adds a segment's, and gives all."""

    def append(
        self, k: Float[Tensor, "B H T K"], v: Float[Tensor, "B H T K"], /
    ) -> tuple[Float[Tensor, "B H S K"], Float[Tensor, "B H S K"]]: ...


class RelativeMultiheadAttention(nn.Module):
    """The attention sublayer: norm, projections, the op, residual. Linear layers carry no bias.

    Keys and values are projected from memory and segment, queries from the segment alone. With `share_position`
    positions are projected like words, and both biases are the query of distance 0.
    """

    def __init__(
        self,
        d_model: int,
        n_head: int,
        d_head: int,
        *,
        dropout: float = 0.0,
        dropatt: float = 0.0,
        pre_lnorm: bool = False,
        layer_norm_epsilon: float = 1e-5,
        locked: bool = False,
        share_position: bool = False,
        backend: str = "auto",
    ):
        super().__init__()
        self.n_head, self.d_head, self.dropatt, self.pre_lnorm = n_head, d_head, dropatt, pre_lnorm
        self.backend = check_backend(backend)
        self.qkv = Linear(d_model, 3 * n_head * d_head, bias=False)
        self.position = None if share_position else Linear(d_model, n_head * d_head, bias=False)
        self.output = Linear(n_head * d_head, d_model, bias=False)
        self.norm = nn.LayerNorm(d_model, eps=layer_norm_epsilon)
        self.dropout = Dropout(dropout, locked=locked)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        past: Float[Tensor, "B M D"] | Projected,
        positions: Float[Tensor, "_ R K"],
        content_bias: Float[Tensor, "H K"] | None,
        position_bias: Tensor | None,
        *,
        attn_len: int | None = None,
        valid: Int[Tensor, " B"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """`past` is what this layer read before, or what that was projected to; `positions` are its own encodings."""
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

    def attend(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B H S K"],
        v: Float[Tensor, "B H S K"],
        positions: Float[Tensor, "_ R K"],
        content_bias: Float[Tensor, "H K"] | None,
        position_bias: Tensor | None,
        *,
        attn_len: int | None,
        valid: Int[Tensor, " B"] | None,
    ) -> Float[Tensor, "B H T K"]:
        """What each head gives; the masks are those of `ops.relative_attention`."""
        if self.position is None:
            positions, queries = positions.chunk(2)
            content_bias = position_bias = queries[:, -1]
        assert content_bias is not None and position_bias is not None, "positions have a projection of their own"
        return relative_attention(
            q,
            k,
            v,
            positions,
            content_bias,
            position_bias,
            attn_len=attn_len,
            valid=valid,
            dropout_p=self.dropatt if self.training else 0.0,
            backend=self.backend,
        )

    def keys_values(self, past: Float[Tensor, "B M D"]) -> tuple[Float[Tensor, "B H M K"], Float[Tensor, "B H M K"]]:
        """What memory is projected to; nothing flows back into memory itself."""
        weight = self.qkv.weight[self.n_head * self.d_head :]
        k, v = self._heads(F.linear(self.norm(past) if self.pre_lnorm else past, weight), 2)
        return k, v

    def positions(self, encodings: Float[Tensor, "S D"]) -> Float[Tensor, "_ S K"]:
        """The encodings of distances as this layer's heads read them; behind them, if `share_position`, as queries."""
        if self.position is None:
            queries, keys = self._heads(F.linear(encodings, self.qkv.weight[: 2 * self.n_head * self.d_head]), 2)
            r = torch.cat([keys, queries])
        else:
            [r] = self._heads(self.position(encodings), 1)
        return self.dropout(r) if self.dropout.locked else r

    def _heads(self, x: Float[Tensor, "*B L W"], parts: int) -> list[Float[Tensor, "*B H L K"]]:
        return [part.unflatten(-1, (self.n_head, self.d_head)).transpose(-2, -3) for part in x.chunk(parts, dim=-1)]
