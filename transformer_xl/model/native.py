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

from ..ops.choice import native_refusal
from ..ops.dropout import Dropout
from .adaptive import AdaptiveSoftmax
from .attention import RelativeMultiheadAttention, RowLinear
from .transformer_xl import DecoderLayer, FeedForward

MOST_ROWS = 64
"""With more rows PyTorch's products are faster."""
_MODULES = (DecoderLayer, RelativeMultiheadAttention, FeedForward, RowLinear, nn.LayerNorm, Dropout, AdaptiveSoftmax)
"""The modules that it computes; a gate is another one."""


def can_step(backbone: Any, kv: Float[Tensor, "B 2 H L K"]) -> bool:
    """Whether the step in C++ can read with this backbone after keys and values like `kv`, in the caller's autocast."""
    mixed = torch.is_autocast_enabled("cpu")
    return (
        native_refusal(kv.device, torch.float32) is None
        and kv.dtype in (torch.float32, torch.bfloat16)
        and mixed == (kv.dtype == torch.bfloat16)
        and len(kv) <= MOST_ROWS
        and all(_is_known(module, kv.dtype) for module in _modules(backbone))
    )


def includes_head(backbone: Any, head: Any) -> bool:
    """Whether the step in C++ also computes this head: a softmax with one band, no projection and fitting weights."""
    if type(head) is not AdaptiveSoftmax or not _is_known(head, torch.float32):
        return False
    table, dtype = head.tables[0], backbone.layers[0].attention.qkv.weight.dtype
    return len(head.sizes) == 1 and not head.projected and table.dtype == dtype and table.is_contiguous()


def native_step(
    backbone: Any, positions: Sequence[Any], head: Callable[[Tensor], Tensor] | None
) -> Callable[..., Float[Tensor, "B _"]]:
    """A function of `(x, rings, slots, counts, rows)` that returns what `head` computes from the backbone's output.

    It writes the keys and values of the vectors x into the rings. Vector i follows row `rows[i]` of the rings; `rows`
    None: row i. `head` None: the output itself.
    """
    config, norm, included = backbone.config, backbone.final_norm, includes_head(backbone, head)
    layers = [_weights(layer, own) for layer, own in zip(backbone.layers, positions, strict=True)]
    final = [] if norm is None else [norm.weight, norm.bias]
    softmax: list[Tensor] = [head.tables[0], head.bias] if included else []  # type: ignore[union-attr]
    make_step = import_module("transformer_xl.ops.native").make_step
    read = make_step(layers, final, softmax, config.pre_lnorm, config.relu_output, config.layer_norm_epsilon)
    return read if included or head is None else lambda *arguments: head(read(*arguments))


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
