"""The step of `step.py` with eight kernels per layer on a GPU (`ops/fused_step.py`), in half precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..ops.choice import doubt, triton_refusal
from .attention import Positions
from .native import known_modules
from .transformer_xl import TransformerXLBackbone


def can_fuse(backbone: TransformerXLBackbone, kv: Float[Tensor, "B 2 H W K"]) -> bool:
    """Whether these kernels can read with this backbone in the caller's autocast, and have passed on this card."""
    mixed = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == kv.dtype
    return (
        kv.is_cuda
        and mixed
        and triton_refusal(kv.device, kv.dtype, kv.shape[4]) is None
        and doubt(kv.device) is None
        and known_modules(backbone, kv.dtype)
    )


class FusedStep:
    """A backbone's next output for one more vector of each row."""

    def __init__(
        self,
        backbone: TransformerXLBackbone,
        positions: Sequence[Positions],
        rings: list[Float[Tensor, "B 2 H W K"]],
        slots: Int[Tensor, " B"],
        counts: Int[Tensor, " B"],
    ):
        """It writes into the rings, and reads `slots` and `counts` anew in each call."""
        self.backbone: TransformerXLBackbone = backbone
        self.rings: list[Tensor] = rings
        self.now: tuple[Tensor, Tensor] = slots, counts
        self.positions: list[list[Tensor]] = [[each.to(rings[0].dtype).contiguous() for each in p] for p in positions]
        self.pre: bool = backbone.config.pre_lnorm
        norms = [norm for layer in backbone.layers for norm in (layer.attention.norm, layer.feed_forward.norm)]
        self.first: nn.LayerNorm | None = norms.pop(0) if self.pre else None
        self.norms: list[nn.LayerNorm] = norms
        """The norms of the sublayers' sums: with `pre_lnorm` that of the next one, so the last sum has none."""

    def __call__(self, x: Float[Tensor, "B 1 D"]) -> Float[Tensor, "B D"]:
        """The output, fp32."""
        from ..ops.fused_step import add_and_norm, attend_next  # triton is not installed everywhere

        relu = self.backbone.config.relu_output
        x = x[:, 0].float().contiguous()
        rounded = (x if self.first is None else self.first(x)).to(self.rings[0].dtype)
        norms = iter(self.norms)
        for layer, kv, (r, u, v) in zip(self.backbone.layers, self.rings, self.positions, strict=True):
            attention, ahead = layer.attention, layer.feed_forward
            qkv = F.linear(rounded, attention.qkv.weight)
            attended = attend_next(qkv, kv, *self.now, r, u, v, attention.qk_norm)
            update = F.linear(attended, attention.output.weight)
            x, rounded = add_and_norm(x, update, next(norms), relu=relu, pre=self.pre)
            inner = torch.ops.aten._addmm_activation(ahead.inner.bias, rounded, ahead.inner.weight.T)  # with a ReLU
            update = F.linear(inner, ahead.outer.weight, ahead.outer.bias)
            norm = next(norms, None)
            if norm is None:
                x = layer.feed_forward.join(x, update)
            else:
                x, rounded = add_and_norm(x, update, norm, relu=relu, pre=self.pre)
        return x if self.backbone.final_norm is None else self.backbone.final_norm(x)
