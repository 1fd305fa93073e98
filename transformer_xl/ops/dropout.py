"""Dropout whose masks are cheap to draw on a CPU, where PyTorch draws one number per element in one thread.

A mask may be the same at all positions (Gal & Ghahramani 2016), or at all positions of a word (Merity et al. 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from math import prod

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from .call import in_transform

_STEPS = 1 << 16
_TINY = 1e-6


def dropout(x: Float[Tensor, "*shape"], p: float) -> Float[Tensor, "*shape"]:
    """Zero each element with probability `p` and divide the others by 1 - p.

    On a CPU four elements share one 64-bit random number, so the probability is `p` to the nearest 1 / 65,536.
    Elsewhere this is PyTorch's own.
    """
    if p == 0:
        return x
    if x.device.type != "cpu" or in_transform() or torch.compiler.is_exporting():  # which knows no operators of ours
        return F.dropout(x, p)
    if torch.compiler.is_compiling():  # which does not trace `Tensor.random_`
        keep = _keep_mask(x.shape, p, torch.randint(1 << 62, (), device="cpu"))
    else:
        keep = keep_mask(x.shape, p)
    return _MaskProduct.apply(x, keep, p)


def dropout_relu(
    x: Float[Tensor, "*shape"], p: float, seed: Int[Tensor, " 1"] | None = None
) -> Float[Tensor, "*shape"]:
    """`F.relu(dropout(x, p))`; with a `seed`, by one Triton kernel. Without gradients and dropout it overwrites `x`.

    For backward it keeps its result and no mask: where that is above 0, `x` was above 0 and was kept.
    """
    if p == 0 or torch.compiler.is_compiling() or in_transform():
        # `x` is often a view, whose gradient is copied four times if it was overwritten.
        return F.relu(dropout(x, p), inplace=not torch.is_grad_enabled())
    return _DropoutReLU.apply(x, p, seed)


class _DropoutReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p, seed):
        if seed is None:
            out = F.relu(dropout(x, p), inplace=True)
        else:
            out = import_module(".fused_sublayer", __package__).dropped_relu(x, p, seed)  # needs triton
        ctx.save_for_backward(out)
        ctx.p = p
        return out

    @staticmethod
    def backward(ctx, d_out):
        (out,) = ctx.saved_tensors
        if d_out.is_cuda and not torch.is_grad_enabled():  # one kernel: an ELU whose negative part is 0, times a scale
            return torch.ops.aten.elu_backward(d_out, 0.0, 1 / (1 - ctx.p), 1.0, True, out), None, None
        scale = torch.ones((), dtype=out.dtype, device=out.device).div_(1 - ctx.p)  # as in `_MaskProduct`
        return torch.ops.aten.threshold_backward(d_out, out, 0).mul_(scale), None, None


class _MaskProduct(torch.autograd.Function):
    """`x * keep / (1 - p)`. It keeps one byte per element for backward; the plain product keeps a float."""

    @staticmethod
    def forward(x, keep, p):
        return keep.to(x.dtype).div_(1 - p).mul_(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, keep, ctx.p = inputs
        ctx.save_for_backward(keep)

    @staticmethod
    def backward(ctx, d_out):
        (keep,) = ctx.saved_tensors
        return d_out * keep.to(d_out.dtype).div_(1 - ctx.p), None, None  # d_out may be a batch of gradients


def word_dropout(
    x: Float[Tensor, "B T D"], ids: Int[Tensor, "B T"], p: float, vocab_size: int
) -> Float[Tensor, "B T D"]:
    """Drop the vectors `x` of a share `p` of all words, at every position, and divide the others by 1 - p.

    A dropped vector becomes tiny, not zero: a row that begins with zeros stays zero from layer to layer, and each norm
    after a residual then multiplies gradients by 1 / sqrt(epsilon), until they overflow.
    """
    if p == 0:
        return x
    kept = dropout(x.new_ones(vocab_size), p)[ids][..., None]
    tiny = _TINY * (1 - 2 * (torch.arange(x.shape[-1], device=x.device) % 2)).to(x.dtype)
    return torch.where(kept > 0, x * kept, tiny)


def keep_mask(shape: Sequence[int], p: float, generator: torch.Generator | None = None) -> UInt8[Tensor, "*shape"]:
    """A mask for the CPU: 1 where dropout keeps an element, otherwise 0.

    The mask is bytes, because PyTorch converts them to floats three to eight times as fast as booleans.
    """
    # An int16 is uniform in [-32768, 32767]; p * 65536 of its values are below the threshold.
    numbers = torch.empty(-(-prod(shape) // 4), dtype=torch.int64, device="cpu")
    numbers.random_(-(1 << 63), None, generator=generator)
    kept = numbers.view(torch.int16)[: prod(shape)].view(shape) >= min(round(p * _STEPS), _STEPS - 1) - _STEPS // 2
    # torch 2.11 cannot compile a view of booleans.
    return kept.to(torch.uint8) if torch.compiler.is_compiling() else kept.view(torch.uint8)


_NAME = f"{__name__.replace('.', '_')}::keep_mask"
"""Each copy of this file, for instance in an exported folder, has an operator of its own."""


@torch.library.custom_op(_NAME, mutates_args=(), schema="(SymInt[] shape, float p, Tensor seed) -> Tensor")
def _keep_mask(shape: Sequence[int], p: float, seed: Tensor) -> Tensor:
    """`keep_mask` for the compiler, which joins equal calls: therefore each has a seed."""
    return keep_mask(shape, p, torch.Generator().manual_seed(int(seed)))


@_keep_mask.register_fake
def _empty_mask(shape: Sequence[int], p: float, seed: Tensor) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="cpu")


class Dropout(nn.Module):
    """`dropout` in training only; `locked`: one mask per row, the same at all positions (the last axis but one)."""

    def __init__(self, p: float, *, locked: bool = False):
        super().__init__()
        self.p: float = p
        self.locked: bool = locked

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        if not self.training or not self.p:
            return x
        if self.locked:
            return x * dropout(x.new_ones(*x.shape[:-2], 1, x.shape[-1]), self.p)
        return dropout(x, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, locked={self.locked}"
