"""Relative multi-head attention with memory (Dai et al. 2019, section 3.3) and its sinusoids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ..config.settings import TransformerXLConfig
from ..mistake import Mistake
from ..ops import relative_attention
from ..ops.masks import Bounds
from .modules import Keys, Past, Queries, RowLinear, Vectors, is_plain
from .sublayer import Sublayer


def sinusoids(
    length: int,
    d_model: int,
    *,
    clamp_len: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "S D"]:
    """The encodings R of distances S - 1, ..., 1, 0: sines in the first half, cosines in the second."""
    if d_model % 2:
        raise Mistake(f"d_model must be even, because half of an encoding is sines, got {d_model}.")
    exact = torch.promote_types(dtype, torch.float32)  # half precision cannot represent all distances up to 3,000
    distance = torch.arange(length - 1, -1, -1, device=device, dtype=exact)
    if clamp_len is not None:
        distance = distance.clamp(max=clamp_len)
    return sines_then_cosines(distance, d_model).to(dtype)


def sines_then_cosines(distance: Float[Tensor, " R"], d_model: int) -> Float[Tensor, "R D"]:
    """The paper's encodings of any distances."""
    frequency = 10000 ** -(torch.arange(0, d_model, 2, device=distance.device, dtype=distance.dtype) / d_model)
    angle = torch.outer(distance, frequency)
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


class Positions(NamedTuple):
    """The positions of one layer: encodings of distances S - 1, ..., 1, 0, and the paper's biases u and v."""

    r: Float[Tensor, "H S K"]
    content_bias: Float[Tensor, "H K"]
    position_bias: Float[Tensor, "H K"]


class RelativeMultiheadAttention(Sublayer):
    """The attention sublayer: norm, projections without bias, relative attention, residual or gate.

    Keys and values come from memory and segment, queries from the segment alone. With `share_position_projection` the
    projection of the tokens also projects positions, and both biases are the query of distance 0. With `qk_norm` the
    queries and keys of each head have mean 0 and variance 1, and a learned gain multiplies the queries before biases
    are added.
    """

    project_position: ClassVar[bool] = True
    """Whether Transformer-XL projects the encodings of distances. Baselines do not."""

    def __init__(self, config: TransformerXLConfig, backend: str = "auto"):
        super().__init__()
        width = config.n_head * config.d_head
        self.n_head: int = config.n_head
        self.dropatt: float = config.dropatt
        self.qkv: RowLinear = RowLinear(config.d_model, 3 * width, bias=False)
        self.qkv.tail = width  # the rows from here on, keys and values, are all that memory needs
        self.position: RowLinear | None = None
        own = self.project_position and config.base_kind == "transformer-xl"
        if own and not config.share_position_projection:
            self.position = RowLinear(config.d_model, width, bias=False)
        self.output: RowLinear = RowLinear(width, config.d_model, bias=False)
        self.add_end(config, backend)
        self.qk_norm: nn.Parameter | None = nn.Parameter(torch.ones(())) if config.qk_norm else None
        """The gain of normalised queries."""

    def forward(
        self,
        x: Vectors,
        past: Past,
        positions: Positions | None,
        attn_len: int | None = None,
        first: Bounds = None,
    ) -> Vectors:
        """The sublayer's output for the segment `x`; for the arguments see `DecoderLayer`."""
        q, k, v = self.heads(x, past)
        return self.add(x, self.attend(q, k, v, positions, attn_len, first))

    def attend(
        self, q: Queries, k: Keys, v: Keys, positions: Positions | None, attn_len: int | None, first: Bounds
    ) -> Queries:
        """Relative attention (section 3.3). A class whose `positions` are None overrides this."""
        assert positions is not None, "relative attention needs positions"
        return relative_attention(
            *(q, k, v, *positions),
            attn_len=attn_len,
            first=first,
            dropout_p=self.dropatt if self.training else 0.0,
            backend=self.backend,
        )

    def heads(self, x: Vectors, past: Past) -> tuple[Queries, Keys, Keys]:
        """Queries of the segment `x`; keys and values of the past and the segment."""
        q, k, v = self._split(self.qkv(self.norm(x) if self.pre_lnorm else x), 3)
        if self.qk_norm is not None:
            q, k = self.qk_norm.to(q.dtype) * _normalised(q), _normalised(k)
        if not isinstance(past, Tensor):
            k, v = past(k, v)
        elif past.shape[1]:
            pairs = zip(self.keys_values(past), (k, v), strict=True)  # heads first, as backends read them
            k, v = (torch.cat([part.transpose(0, 1) for part in pair], 2).transpose(0, 1) for pair in pairs)
        return (self.dropout(q), self.dropout(k), self.dropout(v)) if self.dropout.locked else (q, k, v)

    def keys_values(self, past: Float[Tensor, "B M D"]) -> tuple[Float[Tensor, "B H M K"], Float[Tensor, "B H M K"]]:
        """Keys and values of memory."""
        k, v = self._projected(self.norm(past) if self.pre_lnorm else past, slice(1, 3))
        return (k if self.qk_norm is None else _normalised(k)), v

    def positions(
        self,
        encodings: Float[Tensor, "S D"],
        content_bias: Float[Tensor, "H K"] | None = None,
        position_bias: Float[Tensor, "H K"] | None = None,
        projected: Float[Tensor, "S W"] | None = None,
    ) -> Positions:
        """The encodings, projected for the heads, and the biases; with `share_position_projection` give no biases."""
        if self.position is not None:
            assert content_bias is not None and position_bias is not None, (
                "biases may be None only with share_position_projection"
            )
            r = self.position(encodings) if projected is None else projected
            r = r.unflatten(-1, (self.n_head, self.d_head)).transpose(-2, -3)
            return Positions(self.dropout(r) if self.dropout.locked else r, content_bias, position_bias)
        queries, keys = self._projected(encodings, slice(0, 2))
        both = torch.cat([keys, queries])
        r, queries = (self.dropout(both) if self.dropout.locked else both).chunk(2)
        return Positions(r, queries[:, -1], queries[:, -1])

    def add(self, x: Vectors, attended: Queries) -> Vectors:
        """The sublayer's output: `x` joined with the projected outputs of the heads."""
        return self.end(x, attended.transpose(1, 2).flatten(2), self.output, self.fused(x))

    def _projected(self, x: Float[Tensor, "*B L D"], parts: slice) -> list[Float[Tensor, "*B H L K"]]:
        """The chosen `parts` of the queries, keys and values of `x`. Only their rows of the weight are multiplied,
        unless the projection has hooks or is wrapped, for instance by a low-rank addition."""
        if not is_plain(self.qkv, RowLinear):
            return self._split(self.qkv(x), 3)[parts]
        width = self.n_head * self.d_head
        rows = self.qkv.used_from(width, x) if parts.start else self.qkv.used(x)[0][: 2 * width]
        return self._split(F.linear(x, rows), 2)

    def _split(self, x: Float[Tensor, "*B L W"], parts: int) -> list[Float[Tensor, "*B H L K"]]:
        return [part.transpose(-2, -3) for part in x.unflatten(-1, (parts, self.n_head, self.d_head)).unbind(-3)]


def project_together(
    attentions: Sequence[RelativeMultiheadAttention], encodings: Float[Tensor, "S D"]
) -> Sequence[tuple[Float[Tensor, "S W"]] | tuple[()]]:
    """For each attention its projected encodings, from one product of all. `()`: it projects them itself, because no
    gradient is wanted (then nothing need be kept) or a projection is not plain."""
    own = [each.position for each in attentions if type(each).positions is RelativeMultiheadAttention.positions]
    plain = [each for each in own if each is not None and is_plain(each, RowLinear) and each.bias is None]
    if not torch.is_grad_enabled() or len(plain) < len(attentions):
        return [()] * len(attentions)
    weights = torch.stack([each.used(encodings)[0] for each in plain])
    return [(r,) for r in torch.bmm(encodings.expand(len(plain), -1, -1), weights.mT)]


def _normalised(x: Float[Tensor, "B H L K"]) -> Float[Tensor, "B H L K"]:
    """Each vector with mean 0 and variance 1, in its dtype; under CUDA's autocast `layer_norm` returns fp32."""
    return F.layer_norm(x, x.shape[-1:]).to(x.dtype)
