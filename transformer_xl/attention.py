"""Relative multi-head attention with memory (Dai et al. 2019, section 3.3) and its sinusoids."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from .ops import relative_attention, resolve_backend
from .ops.dropout import Dropout


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


class RelativeMultiheadAttention(nn.Module):
    """The attention sublayer: norm, projections, the op, residual. Linear layers carry no bias.

    Keys and values are projected from memory and segment, queries from the segment alone.
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
        backend: str = "auto",
    ):
        super().__init__()
        self.n_head, self.d_head, self.dropatt, self.pre_lnorm = n_head, d_head, dropatt, pre_lnorm
        self.backend, _ = resolve_backend(backend)
        self.qkv = nn.Linear(d_model, 3 * n_head * d_head, bias=False)
        self.position = nn.Linear(d_model, n_head * d_head, bias=False)
        self.output = nn.Linear(n_head * d_head, d_model, bias=False)
        self.norm = nn.LayerNorm(d_model, eps=layer_norm_epsilon)
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        past: Float[Tensor, "B M D"],
        encodings: Float[Tensor, "S D"],
        content_bias: Float[Tensor, "H K"],
        position_bias: Float[Tensor, "H K"],
        *,
        attn_len: int | None = None,
        valid: Int[Tensor, " B"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        context = torch.cat([past, x], dim=1)
        if self.pre_lnorm:
            context = self.norm(context)
        width = self.n_head * self.d_head
        queries, keys_values = self.qkv.weight.split([width, 2 * width])
        q = F.linear(context[:, past.shape[1] :], queries)
        k, v = F.linear(context, keys_values).chunk(2, dim=-1)
        r = self.position(encodings)
        attended = relative_attention(
            self._heads(q),
            self._heads(k),
            self._heads(v),
            self._heads(r),
            content_bias,
            position_bias,
            attn_len=attn_len,
            valid=valid,
            dropout_p=self.dropatt if self.training else 0.0,
            backend=self.backend,
        )
        x = x + self.dropout(self.output(attended.transpose(-2, -3).flatten(-2)))
        return x if self.pre_lnorm else self.norm(x)

    def _heads(self, x: Float[Tensor, "*B L HK"]) -> Float[Tensor, "*B H L K"]:
        return x.unflatten(-1, (self.n_head, self.d_head)).transpose(-2, -3)
