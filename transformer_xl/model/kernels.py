"""The step of `step.py` by kernels: which backbones they can read with, and a call of them.

In C++ on a CPU (`ops/native/step.cpp`) it computes in fp32, or in bf16 as `TransformerXL.for_inference` does under
autocast: weights of products, keys and values in bf16, norms and sums in fp32. In Triton on a GPU (`ops/fused_step.py`
and `ops/fused_sublayer.py`) it computes in half precision, with eight kernels per layer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..ops.choice import doubt, native_refusal, triton_refusal
from ..ops.dropout import Dropout
from .adaptive import AdaptiveSoftmax
from .attention import Positions, RelativeMultiheadAttention
from .gates import add_positive
from .modules import RowLinear, has_hooks
from .sublayer import Sublayer
from .transformer_xl import DecoderLayer, FeedForward, TransformerXLBackbone

MOST_ROWS = 64
"""With more rows PyTorch's products are faster."""
_MODULES = (DecoderLayer, RelativeMultiheadAttention, FeedForward, RowLinear, nn.LayerNorm, Dropout, AdaptiveSoftmax)
"""The modules that it computes; a gate is another one."""


def can_step(backbone: TransformerXLBackbone, kv: Float[Tensor, "B 2 H L K"]) -> bool:
    """Whether the step in C++ can read with this backbone after keys and values like `kv`, in the caller's autocast."""
    mixed = torch.is_autocast_enabled("cpu")
    return (
        native_refusal(kv.device, torch.float32) is None
        and kv.dtype in (torch.float32, torch.bfloat16)
        and mixed == (kv.dtype == torch.bfloat16)
        and len(kv) <= MOST_ROWS
        and known_modules(backbone, kv.dtype)
    )


def can_fuse(backbone: TransformerXLBackbone, kv: Float[Tensor, "B 2 H W K"]) -> bool:
    """Whether the step in Triton can read with this backbone in the caller's autocast, and has passed on this card."""
    mixed = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == kv.dtype
    return (
        kv.is_cuda
        and mixed
        and triton_refusal(kv.device, kv.dtype, kv.shape[4]) is None
        and doubt(kv.device) is None
        and known_modules(backbone, kv.dtype)
    )


def known_modules(backbone: TransformerXLBackbone, dtype: torch.dtype) -> bool:
    """Whether the layers and the last norm compute only what their classes say, the products in this dtype."""
    parts = (*backbone.layers, *([] if backbone.final_norm is None else [backbone.final_norm]))
    modules = [module for part in parts for module in part.modules()]
    join = add_positive if backbone.config.relu_output else operator.add
    joined = all(module.join is join for module in modules if isinstance(module, Sublayer))
    return joined and all(_is_known(module, dtype) for module in modules)


def includes_head(backbone: TransformerXLBackbone, head: object) -> bool:
    """Whether the step in C++ also computes this head: a softmax with one band, no projection and fitting weights."""
    if type(head) is not AdaptiveSoftmax or not _is_known(head, torch.float32):
        return False
    table, dtype = head.tables[0], next(iter(backbone.layers)).attention.qkv.weight.dtype
    return len(head.sizes) == 1 and not head.projected and table.dtype == dtype and table.is_contiguous()


def native_step(
    backbone: TransformerXLBackbone, positions: Sequence[Positions], head: Callable[[Tensor], Tensor] | None
) -> Callable[..., Float[Tensor, "R O"]]:
    """The step in C++ as a function of vectors x [R D], and of the rings, slots, counts and rows of a `VectorStep`.

    It returns what the head computes from the backbone's output, or the output itself, and writes the keys and values
    of x into the rings. Vector i follows row `rows[i]` of the rings; `rows` None: row i.
    """
    from ..ops.native import step_of

    config, norm, softmax = backbone.config, backbone.final_norm, []
    if isinstance(head, AdaptiveSoftmax) and includes_head(backbone, head):
        softmax, head = [head.tables[0], head.bias], None
    layers = [_weights(layer, own) for layer, own in zip(backbone.layers, positions, strict=True)]
    final = [] if norm is None else [norm.weight, norm.bias]
    read = step_of(layers, final, softmax, config.pre_lnorm, config.relu_output, config.layer_norm_epsilon).read
    return read if head is None else lambda *call: head(read(*call))


def fused_step(
    backbone: TransformerXLBackbone,
    positions: Sequence[Sequence[Tensor]],
    rings: list[Float[Tensor, "B 2 H W K"]],
    slots: Int[Tensor, " B"],
    counts: Int[Tensor, " B"],
    x: Float[Tensor, "B 1 D"],
) -> Float[Tensor, "B D"]:
    """The step in Triton: the backbone's output, fp32. It writes into the rings, whose dtype `positions` have."""
    from ..ops.fused_step import attend_next  # triton is not installed everywhere
    from ..ops.fused_sublayer import add_and_norm

    pre, relu = backbone.config.pre_lnorm, backbone.config.relu_output
    # The norms of the sublayers' sums: with `pre_lnorm` that of the next one, so the last sum has none.
    norms = iter([norm for layer in backbone.layers for norm in (layer.attention.norm, layer.feed_forward.norm)])
    x = x[:, 0].float().contiguous()
    rounded = (next(norms)(x) if pre else x).to(rings[0].dtype)
    for layer, kv, (r, u, v) in zip(backbone.layers, rings, positions, strict=True):
        attention, ahead = layer.attention, layer.feed_forward
        qkv = F.linear(rounded, attention.qkv.weight)
        attended = attend_next(qkv, kv, slots, counts, r, u, v, attention.qk_norm)
        update = F.linear(attended, attention.output.weight)
        x, rounded = add_and_norm(x, update, next(norms), relu=relu, pre=pre)
        inner = torch.ops.aten._addmm_activation(ahead.inner.bias, rounded, ahead.inner.weight.T)  # with a ReLU
        update = F.linear(inner, ahead.outer.weight, ahead.outer.bias)
        norm = next(norms, None)
        if norm is None:
            x = ahead.join(x, update)
        else:
            x, rounded = add_and_norm(x, update, norm, relu=relu, pre=pre)
    return x if backbone.final_norm is None else backbone.final_norm(x)


def _is_known(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a module computes only what its class says, with weights that the step can read."""
    dtype = dtype if isinstance(module, nn.Linear) else torch.float32
    plain = type(module) in _MODULES and not has_hooks(module)
    weights = module.parameters(recurse=False)
    return plain and all(type(w) is nn.Parameter and w.dtype == dtype and w.is_contiguous() for w in weights)


def _weights(layer: DecoderLayer, own: Positions) -> list[Tensor]:
    """The weights of a layer and its positions, in the order that step.cpp names."""
    attention, feed_forward = layer.attention, layer.feed_forward
    dtype = attention.qkv.weight.dtype
    return [
        *(attention.norm.weight, attention.norm.bias),
        *(attention.qkv.weight, attention.output.weight),
        *(feed_forward.norm.weight, feed_forward.norm.bias),
        *(feed_forward.inner.weight, feed_forward.inner.bias),
        *(feed_forward.outer.weight, feed_forward.outer.bias),
        *own,
        *([] if attention.qk_norm is None else [attention.qk_norm.to(dtype)]),
    ]
