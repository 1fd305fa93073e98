"""The step in C++ (`ops/native/step.cpp`): which backbones it can read with, and a function that calls it.

It computes in fp32, or in bf16 as `inference_copy` does under autocast: weights of products, keys and values in bf16,
norms and sums in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..ops import native_refusal
from ..ops.dropout import Dropout
from .attention import Linear, RelativeMultiheadAttention
from .transformer_xl import DecoderLayer, FeedForward

MOST_ROWS = 64
"""With more rows PyTorch's products are faster."""
_MODULES = (DecoderLayer, RelativeMultiheadAttention, FeedForward, Linear, nn.LayerNorm, Dropout)
"""The modules that it computes; a gate is another one."""


def can_step(backbone: Any, kv: Float[Tensor, "B 2 H L K"]) -> bool:
    """Whether the step in C++ can read with this backbone after keys and values like `kv`, in the caller's autocast."""
    mixed = torch.is_autocast_enabled("cpu")
    return (
        native_refusal(kv.device, kv.dtype) is None
        and mixed == (kv.dtype == torch.bfloat16)
        and len(kv) <= MOST_ROWS
        and all(_is_known(module, kv.dtype) for module in _modules(backbone))
    )


def native_step(backbone: Any, positions: Sequence[Any]) -> Callable[..., Float[Tensor, "B D"]]:
    """A function of `(x, rings, slots, counts, rows)` that returns the last output of the backbone.

    It writes the keys and values of the vectors x into the rings. Vector i follows row `rows[i]` of the rings; `rows`
    None: row i.
    """
    config, norm = backbone.config, backbone.final_norm
    layers = [_weights(layer, own) for layer, own in zip(backbone.layers, positions, strict=True)]
    final = [] if norm is None else [norm.weight, norm.bias]
    make_step = import_module("transformer_xl.ops.native").make_step
    return make_step(layers, final, config.pre_lnorm, config.relu_output, config.layer_norm_epsilon)


def _modules(backbone: Any) -> Iterator[nn.Module]:
    for part in (*backbone.layers, backbone.final_norm):
        yield from () if part is None else part.modules()


def _is_known(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a module computes only what its class says, with weights that the step can read."""
    dtype = dtype if isinstance(module, nn.Linear) else torch.float32
    plain = type(module) in _MODULES and not module._forward_hooks and not module._forward_pre_hooks
    weights = module.parameters(recurse=False)
    return plain and all(type(w) is nn.Parameter and w.dtype == dtype and w.is_contiguous() for w in weights)


def _weights(layer: Any, own: Any) -> list[Tensor]:
    """The weights of a layer and its `Positions`, in the order that step.cpp names."""
    attention, feed_forward = layer.attention, layer.feed_forward
    own = [each.to(attention.qkv.weight.dtype).contiguous() for each in own]
    gain = [] if attention.qk_norm is None else [attention.qk_norm.to(attention.qkv.weight.dtype)]
    norms, inner, outer = (attention.norm, feed_forward.norm), feed_forward.inner, feed_forward.outer
    first, second = ((norm.weight, norm.bias) for norm in norms)
    products = attention.qkv.weight, attention.output.weight
    return [*first, *products, *second, inner.weight, inner.bias, outer.weight, outer.bias, *own, *gain]
