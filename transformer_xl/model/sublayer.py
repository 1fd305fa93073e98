"""What the two sublayers of a layer share, and the feed-forward."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ..config.settings import TransformerXLConfig
from ..ops import check_backend
from ..ops.call import in_autocast, in_transform, product_dtype
from ..ops.choice import fused_sublayer
from ..ops.dropout import Dropout, dropout_relu
from .gates import build_join
from .modules import RowLinear, Vectors, is_plain

Fused = tuple[ModuleType, Tensor | None]
"""The module `ops.fused_sublayer`, and the seed of a call's dropout; None without dropout."""


class Sublayer(nn.Module):
    """What attention and feed-forward share: x joined with dropout of y, and a norm, here or before (`pre_lnorm`).

    In half precision on a GPU one kernel computes the sum of both, dropout and the norm, where the fused kernels serve.
    """

    def add_end(self, config: TransformerXLConfig, backend: str) -> None:
        """The modules of the end. A subclass calls this after it made its own, because the order of weights counts."""
        self.backend: str = check_backend(backend)
        self.d_head: int = config.d_head
        self.pre_lnorm: bool = config.pre_lnorm
        self.norm: nn.LayerNorm = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.dropout: Dropout = Dropout(config.dropout, locked=config.locked_dropout)
        self.join: Callable[[Tensor, Tensor], Tensor] = build_join(config)

    def end(self, x: Vectors, inner: Float[Tensor, "B T W"], product: nn.Linear, fused: Fused | None) -> Vectors:
        """The sublayer's output for its input `x` and what its last `product` reads."""
        if fused is None:
            x = self.join(x, self.dropout(product(inner)))
            return x if self.pre_lnorm else self.norm(x)
        kernels, seed = fused
        own = product if is_plain(product, RowLinear) else None
        bias = None if own is None or own.bias is None or own.bias.dtype != torch.float32 else own.bias
        y = product(inner) if own is None or bias is None else F.linear(inner, own.used(inner)[0])
        unseen = own is not None and own.rounded is not None and own.rounded.unseen
        p = 0.0 if seed is None else self.dropout.p
        normed, half = kernels.dropout_norm(x, y, self.norm, bias, p, seed, rounds=unseen)
        if unseen:
            vars(normed)["rounded"] = half  # for the next product
        return normed

    def fused(self, x: Vectors) -> Fused | None:
        """What a call with the input `x` needs to use the fused kernels; None where they cannot serve."""
        norm, drop, half = self.norm, self.dropout, product_dtype(x)
        serves = (
            self.join is operator.add
            and not self.pre_lnorm
            and is_plain(norm, nn.LayerNorm)
            and is_plain(drop, Dropout)
            and not drop.locked
            and [p.dtype for p in norm.parameters()] == [torch.float32] * 2
            and half.itemsize == 2
            and in_autocast(x)
            and not torch.compiler.is_compiling()
            and not in_transform()
        )
        kernels = fused_sublayer(self.backend, x, self.d_head) if serves else None
        if kernels is None:
            return None
        return kernels, kernels.new_seed(x.device) if drop.training and drop.p else None


class FeedForward(Sublayer):
    """The position-wise sublayer: norm, two linear layers with a ReLU between, residual or gate."""

    def __init__(self, config: TransformerXLConfig, backend: str = "auto"):
        super().__init__()
        self.inner: nn.Linear = RowLinear(config.d_model, config.d_inner)
        self.outer: nn.Linear = RowLinear(config.d_inner, config.d_model)
        self.add_end(config, backend)

    def forward(self, x: Vectors) -> Vectors:
        inner, fused, drop = self.inner(self.norm(x) if self.pre_lnorm else x), self.fused(x), self.dropout
        own = is_plain(self.inner, RowLinear) and is_plain(drop, Dropout)  # else a hook may have kept what is written
        if own and not drop.locked:
            inner = dropout_relu(inner, drop.p if drop.training else 0.0, None if fused is None else fused[1])
        else:
            inner = F.relu(drop(inner), inplace=own and not torch.is_grad_enabled())
        return self.end(x, inner, self.outer, fused)
