"""What the two sublayers of a layer share, and the feed-forward."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.settings import TransformerXLConfig
from ..ops.call import product_dtype
from ..ops.choice import fused_sublayer
from ..ops.dropout import Dropout, dropout_relu
from .gates import build_join
from .modules import Draw, RowLinear, Vectors, dropped_share, has_hooks, twin_of, with_twin


class Sublayer(nn.Module):
    """What attention and feed-forward share: x joined with dropout of y, and a norm, here or before (`pre_lnorm`)."""

    def add_end(self, config: TransformerXLConfig) -> None:
        """The modules of the end. A subclass calls this after it made its own, because the order of weights counts."""
        self.pre_lnorm: bool = config.pre_lnorm
        self.norm: nn.LayerNorm = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.dropout: Dropout = Dropout(config.dropout, locked=config.locked_dropout)
        self.join: Callable[[Tensor, Tensor], Tensor] = build_join(config)

    def end(self, x: Vectors, inner: Vectors, product: nn.Linear, draw: Draw | None) -> Vectors:
        """The sublayer's output for its input `x` and what its last `product` reads; with a `draw` one kernel computes
        all but the product, if it can."""
        p = dropped_share(self.dropout) if draw is not None and self._can_fuse(x) else None
        if p is None or draw is None:
            x = self.join(x, self.dropout(product(inner)))
            return x if self.pre_lnorm else self.norm(x)
        kernels = fused_sublayer("triton", x)
        if p and draw.seed is None:
            draw = Draw(kernels.new_seed(x.device))
        bias = _exact_bias(product)
        if bias is not None and isinstance(product, RowLinear):
            y = F.linear(inner, product.used(inner)[0])
        else:
            y = product(inner)
        normed, rounded = kernels.dropout_norm(x, y, self.norm, bias, p, *draw)
        return with_twin(normed, rounded, draw)

    def _can_fuse(self, x: Vectors) -> bool:
        norm, half = self.norm, product_dtype(x)
        return (
            self.join is operator.add
            and not self.pre_lnorm
            and type(norm) is nn.LayerNorm
            and not has_hooks(norm)
            and [p.dtype for p in norm.parameters()] == [torch.float32] * 2
            and half.itemsize == 2
            and torch.is_autocast_enabled(x.device.type)
            and not torch._C._are_functorch_transforms_active()
        )


def _exact_bias(product: nn.Linear) -> Tensor | None:
    """A layer's bias, if the layer adds it in fp32 and does nothing else besides the product."""
    exact = product.bias is not None and product.bias.dtype == torch.float32
    return product.bias if type(product) is RowLinear and not has_hooks(product) and exact else None


class FeedForward(Sublayer):
    """The position-wise sublayer: norm, two linear layers with a ReLU between, residual or gate."""

    def __init__(self, config: TransformerXLConfig):
        super().__init__()
        self.inner: nn.Linear = RowLinear(config.d_model, config.d_inner)
        self.outer: nn.Linear = RowLinear(config.d_inner, config.d_model)
        self.add_end(config)

    def forward(self, x: Vectors) -> Vectors:
        twin, p = twin_of(x), dropped_share(self.dropout)
        draw = Draw() if twin is None else twin.draw.another()
        inner = self.inner(self.norm(x) if self.pre_lnorm else x)
        inner = F.relu(self.dropout(inner), inplace=True) if p is None else dropout_relu(inner, p, *draw)
        return self.end(x, inner, self.outer, None if twin is None else draw.another())
