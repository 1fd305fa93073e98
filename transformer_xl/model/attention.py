"""Relative multi-head attention with memory (Dai et al. 2019, section 3.3) and its sinusoids."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..ops import check_backend
from ..ops.dropout import Dropout
from ..ops.masks import Mask, visible, without_padding


def sinusoids(
    length: int, d_model: int, *, clamp_len: int | None = None, device: Any = None, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "S D"]:
    """The encodings R of distances S - 1, ..., 1, 0: sines in the first half, cosines in the second."""
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


@runtime_checkable
class Projected(Protocol):
    """A past that holds projected keys and values."""

    def append(
        self, k: Float[Tensor, "B H T K"], v: Float[Tensor, "B H T K"], /
    ) -> tuple[Float[Tensor, "B H S K"], Float[Tensor, "B H S K"]]:
        """Add a segment's keys and values; return all of them."""
        ...


PARTS = 4
"""A compiled loop reads this many parts of a matrix at a time, because that uses more memory bandwidth."""
ROWS = 16
"""In bfloat16 on a CPU a product with more rows gets a multiple of this number."""


class RowLinear(nn.Linear):
    """PyTorch's linear layer, with faster products of a single row on a CPU.

    In bfloat16 PyTorch's matrix-vector product is faster than its matrix product. Under torch.compile the product is
    written as a sum, so that the compiled loop reads several parts of the matrix at a time.

    In bfloat16 oneDNN also makes a kernel for each number of rows (1 ms) and keeps it (0.7 MB). Texts have any length,
    so without gradients the input is padded to a multiple of `ROWS`.
    """

    def forward(self, x: Float[Tensor, "*B I"]) -> Float[Tensor, "*B O"]:
        weight, rows = self.weight, x.numel() // self.in_features
        compiling = torch.compiler.is_compiling()
        if rows != 1 or not weight.is_cpu:
            any_length = weight.is_cpu and weight.dtype == torch.bfloat16 and not (torch.is_grad_enabled() or compiling)
            if not any_length or rows < ROWS or rows % ROWS == 0:
                return super().forward(x)
            padded = F.pad(x.reshape(rows, -1), (0, 0, 0, -rows % ROWS))
            return super().forward(padded)[:rows].view(*x.shape[:-1], -1)
        if compiling:
            wide = torch.promote_types(weight.dtype, torch.float32)
            row = x.reshape(-1).to(weight.dtype).to(wide)
            out = torch.cat([(part.to(wide) * row).sum(-1) for part in weight.chunk(PARTS)])
            return (out if self.bias is None else out + self.bias.to(wide)).view(*x.shape[:-1], -1)
        fits = x.dtype == weight.dtype or torch.is_autocast_enabled("cpu")
        if weight.dtype != torch.bfloat16 or not fits:
            return super().forward(x)
        row = x.reshape(-1).to(weight.dtype)
        out = torch.mv(weight, row) if self.bias is None else torch.addmv(self.bias, weight, row)
        return out.view(*x.shape[:-1], -1)


class RelativeMultiheadAttention(nn.Module):
    """The attention sublayer without the op: norm, projections without bias, residual or gate.

    Keys and values come from memory and segment, queries from the segment alone. With `share_position` the projection
    of the tokens also projects positions, and both biases are the query of distance 0. With `qk_norm` the queries and
    keys of each head have mean 0 and variance 1, and a learned gain multiplies the queries before biases are added.
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
        project_position: bool = True,
        qk_norm: bool = False,
        join: Callable[[Tensor, Tensor], Tensor] = operator.add,
        backend: str = "auto",
    ):
        super().__init__()
        self.n_head: int = n_head
        self.d_head: int = d_head
        self.dropatt: float = dropatt
        self.pre_lnorm: bool = pre_lnorm
        self.backend: str = check_backend(backend)
        self.qkv: RowLinear = RowLinear(d_model, 3 * n_head * d_head, bias=False)
        own = project_position and not share_position
        self.position: RowLinear | None = RowLinear(d_model, n_head * d_head, bias=False) if own else None
        self.output: RowLinear = RowLinear(n_head * d_head, d_model, bias=False)
        self.norm: nn.LayerNorm = nn.LayerNorm(d_model, eps=layer_norm_epsilon)
        self.dropout: Dropout = Dropout(dropout, locked=locked)
        self.join = join
        self.qk_norm: nn.Parameter | None = nn.Parameter(torch.ones(())) if qk_norm else None
        """The gain of normalised queries."""

    def register_forward_hook(self, *arguments: Any, **options: Any) -> Any:
        """As in PyTorch, with a warning: the hook will never run."""
        warnings.warn(
            "A hook on `attention` never runs, because a layer calls its parts. Hook the layer, or attention.qkv, "
            "attention.position or attention.output.",
            stacklevel=2,
        )
        return super().register_forward_hook(*arguments, **options)

    def heads(
        self, x: Float[Tensor, "B T D"], past: Float[Tensor, "B M D"] | Projected
    ) -> tuple[Float[Tensor, "B H T K"], Float[Tensor, "B H S K"], Float[Tensor, "B H S K"]]:
        """Queries of the segment `x`; keys and values of the past and the segment."""
        q, k, v = self._split(self.qkv(self.norm(x) if self.pre_lnorm else x), 3)
        if self.qk_norm is not None:
            q, k = self.qk_norm.to(q.dtype) * _normalised(q), _normalised(k)
        if not isinstance(past, Tensor):
            k, v = past.append(k, v)
        elif past.shape[1]:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.keys_values(past), (k, v), strict=True))
        return (self.dropout(q), self.dropout(k), self.dropout(v)) if self.dropout.locked else (q, k, v)

    def keys_values(self, past: Float[Tensor, "B M D"]) -> tuple[Float[Tensor, "B H M K"], Float[Tensor, "B H M K"]]:
        """Keys and values of memory. No gradient reaches the memory itself."""
        weight = self.qkv.weight[self.n_head * self.d_head :]
        k, v = self._split(F.linear(self.norm(past) if self.pre_lnorm else past, weight), 2)
        return (k if self.qk_norm is None else _normalised(k)), v

    def positions(
        self,
        encodings: Float[Tensor, "S D"],
        content_bias: Float[Tensor, "H K"] | None = None,
        position_bias: Float[Tensor, "H K"] | None = None,
    ) -> Positions:
        """The encodings, projected for this layer's heads, and the biases: pass None with `share_position`."""
        if self.position is not None:
            assert content_bias is not None and position_bias is not None, "biases may be None only with share_position"
            [r] = self._split(self.position(encodings), 1)
            return Positions(self.dropout(r) if self.dropout.locked else r, content_bias, position_bias)
        queries, keys = self._split(F.linear(encodings, self.qkv.weight[: 2 * self.n_head * self.d_head]), 2)
        both = torch.cat([keys, queries])
        r, queries = (self.dropout(both) if self.dropout.locked else both).chunk(2)
        return Positions(r, queries[:, -1], queries[:, -1])

    def add(self, x: Float[Tensor, "B T D"], attended: Float[Tensor, "B H T K"]) -> Float[Tensor, "B T D"]:
        """The sublayer's output: `x` joined with the projected outputs of the heads."""
        x = self.join(x, self.dropout(self.output(attended.transpose(1, 2).flatten(2))))
        return x if self.pre_lnorm else self.norm(x)

    def _split(self, x: Float[Tensor, "*B L W"], parts: int) -> list[Float[Tensor, "*B H L K"]]:
        return [part.unflatten(-1, (self.n_head, self.d_head)).transpose(-2, -3) for part in x.chunk(parts, dim=-1)]


def _normalised(x: Float[Tensor, "B H L K"]) -> Float[Tensor, "B H L K"]:
    """Each vector with mean 0 and variance 1, in its dtype; under CUDA's autocast `layer_norm` returns fp32."""
    return F.layer_norm(x, x.shape[-1:]).to(x.dtype)


def content_attention(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B H S K"],
    v: Float[Tensor, "B H S K"],
    *,
    attn_len: int | None = None,
    valid: Int[Tensor, " B"] | None = None,
    dropout_p: float = 0.0,
) -> Float[Tensor, "B H T K"]:
    """Causal attention by content alone, with the masks of `ops.relative_attention`, always by PyTorch's kernels."""
    queries, keys = q.shape[2], k.shape[2]
    if valid is None and (attn_len is None or attn_len >= keys) and queries in (1, keys):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=queries > 1)
    mask = Mask(attn_len, valid)
    seen = visible(queries, keys, mask, device=q.device)
    seen = seen | ~seen.any(-1, keepdim=True)  # padding sees no key, and some kernels then return nan
    out = F.scaled_dot_product_attention(q, k, v, seen, dropout_p)
    return without_padding(out.transpose(0, 1), mask).transpose(0, 1)
