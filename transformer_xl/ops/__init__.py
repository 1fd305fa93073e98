"""Relative attention as a function of tensors.

from transformer_xl.ops import relative_attention
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..mistake import Mistake
from . import chunked, reference, sdpa, strided
from .masks import Mask
from .reference import scores_by_term
from .verdict import doubt

__all__ = ["BACKENDS", "check_backend", "relative_attention", "resolve_backend", "scores_by_term"]


def _triton(*tensors: Tensor, **options: Any) -> Tensor:
    q = tensors[0]
    reason = triton_refusal(q.device, q.dtype, q.shape[-1])
    if reason is not None:
        raise Mistake(f"backend triton cannot serve this call: {reason}. Use auto, strided or sdpa.")
    return sys.modules[f"{__name__}.triton"].attend(*tensors, **options)


def _native(*tensors: Tensor, **options: Any) -> Tensor:
    q = tensors[0]
    compiling = torch.compiler.is_compiling()
    reason = "torch.compile cannot trace it" if compiling else native_refusal(q.device, q.dtype)
    if reason is not None:
        raise Mistake(f"backend native cannot serve this call: {reason}. Use auto, strided or sdpa.")
    return import_module(".native", __name__).attend(*tensors, **options)


def native_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels in C++ cannot serve a call; None if they can."""
    try:
        return import_module(".native", __name__).refusal(device, dtype)
    except ImportError:
        return "the folder ops/native is missing"


@torch.compiler.assume_constant_result  # torch.compile would stop at the import
def triton_refusal(device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
    """Why the fused kernel cannot serve a call; None if it can."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"it runs on a CUDA device, got {device}"
    try:
        kernels = import_module(".triton", __name__)
    except ImportError:
        return "triton is not installed (pip install triton)"
    if dtype not in kernels.DTYPES or head_size > kernels.MAX_HEAD_SIZE:
        kind = str(dtype).removeprefix("torch.")
        return f"it takes fp32, bf16 or fp16 and heads of at most {kernels.MAX_HEAD_SIZE}, got {kind} and {head_size}"
    return None


BACKENDS: dict[str, Callable[..., Tensor]] = {
    "reference": reference.attend,
    "strided": strided.attend,
    "chunked": chunked.attend,
    "sdpa": sdpa.attend,
    "triton": _triton,
    "native": _native,
}


STRIDED_SCORES = 1 << 22
"""Training on a CPU keeps all scores of a call, B H T S, up to this number. At this number, computing them twice takes
1.3 times as long. From twice this number on it takes 0.6 to 0.8 times as long, because the system then allocates such
tensors again each time.
"""


def native_was_measured() -> bool:
    """Whether in bf16 this processor is of a kind that `native_wins` knows: with AMX, or AMD's with AVX512-BF16.

    TXL_NATIVE=1 says yes for all others.
    """
    known = torch.cpu._is_amx_tile_supported() or (torch.cpu._is_avx512_bf16_supported() and _is_amd())
    return known or os.environ.get("TXL_NATIVE") == "1"


def build_native(device: torch.device | None, *, needed: bool = False) -> None:
    """Build the kernels for this CPU, once: if `auto` takes them on it in bf16, or if this call uses them (`needed`).

    Lines go to standard error, because a result may be JSON.
    """
    if device is not None and device.type == "cpu" and (needed or native_was_measured()):
        import_module(".native", __name__).build(partial(print, file=sys.stderr, flush=True))


@cache
def _is_amd() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text()


def native_wins(dtype: torch.dtype, head_size: int, queries: int, *, training: bool, many: bool) -> bool:
    """Whether the native kernels were mostly at least 1.2 times as fast as the other backends, where this was measured.

    Blocks are multiples of 32 queries, and heads are padded to a multiple of 32. `many`: more than `STRIDED_SCORES`.
    """
    whole, amx = head_size % 32 == 0, torch.cpu._is_amx_tile_supported()
    if dtype != torch.bfloat16:
        return whole and (many and queries >= 512 if training else queries >= 128)
    if not native_was_measured():
        return False
    if not training:
        return queries >= 16
    return queries >= 64 and (whole or amx) if many else queries >= (128 if amx else 512) and whole


def check_backend(backend: str) -> str:
    """The name, or a `Mistake` if there is no such backend."""
    if backend != "auto" and backend not in BACKENDS:
        raise Mistake(f"backend must be auto or one of {', '.join(BACKENDS)}, got {backend!r}.")
    return backend


def resolve_backend(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    *,
    training: bool,
    scores: int,
    queries: int = 1,
    compiled: bool = False,
) -> tuple[str, str]:
    """The backend that serves a call, and why.

    Args:
        training: whether gradients are needed.
        scores: B H T S of all rows of a call.
        queries: T.
        compiled: whether torch.compile will trace the call.

    Raises:
        ValueError: there is no such backend.
    """
    if check_backend(backend) != "auto":
        return backend, "as the settings say"
    if device.type == "cuda" and (training or (queries >= 64 and dtype.itemsize == 2)):
        reason = triton_refusal(device, dtype, head_size)
        why = f"the fused kernel cannot serve: {reason}" if reason else doubt(device)
        if why is None:
            return "triton", "the fused kernel, which passed its contract on this card"
        if training:
            return "strided", why
    many = training and scores > STRIDED_SCORES
    note = ""
    if device.type == "cpu" and not compiled and native_wins(dtype, head_size, queries, training=training, many=many):
        reason = native_refusal(device, dtype)
        if reason is None:
            return "native", "the kernels in C++ for this processor"
        note = f" (native cannot serve: {reason})"
    if not training:
        return "sdpa", f"without gradients PyTorch's fused attention takes the position term as its mask{note}"
    if many:
        return "chunked", f"more than {STRIDED_SCORES:,} scores a layer are computed twice and never all kept{note}"
    return "strided", f"up to {STRIDED_SCORES:,} scores a layer are all kept{note}"


def relative_attention(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B H S K"],
    v: Float[Tensor, "B H S K"],
    r: Float[Tensor, "H R K"],
    content_bias: Float[Tensor, "H K"],
    position_bias: Float[Tensor, "H K"],
    *,
    attn_len: int | None = None,
    valid: Int[Tensor, " B"] | None = None,
    end: Int[Tensor, " B"] | None = None,
    causal: bool = True,
    look_ahead: int | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: str = "auto",
) -> Float[Tensor, "B H T K"]:
    """Attention of T queries over S = M + T keys with relative positions (Dai et al. 2019, section 3.3).

    Query i scores key j, at distance d = M + i - j, with `scale * ((q_i + u) . k_j + (q_i + v) . r_d)`. It sees keys
    at d >= 0, and with `causal` False also later ones, at d < 0.

    Args:
        k, v: memory first, then the T new positions.
        r: encoded distances R - 1, ..., 1, 0 (the last row is distance 0); R is at least S. With `causal` False they go
            on to -(T - 1), and R is at least S + T - 1. The caller clamps them.
        content_bias, position_bias: the paper's u and v.
        attn_len: number of keys up to its own that a query sees; None: all.
        valid: for each row, the number of its newest memory positions that count, in [-T, M]. A negative number -n
            hides the row's first n tokens (left padding). None: all M.
        end: for each row, the number of its T new positions before the padding on the right, in [0, T]. None: all T.
        look_ahead: with `causal` False, the number of keys after its own that a query sees; None: all.
        dropout_p: dropout on the probabilities.
        scale: None is 1 / sqrt(K).
        backend: "auto" or a name in `BACKENDS`.

    Returns:
        The attended values; 0 for padding.

    Raises:
        ValueError: shapes that do not fit, arguments out of range, or no such backend.
    """
    later = 0 if causal else q.shape[2] - 1
    _check_shapes(q, k, v, r, content_bias, position_bias, valid, end, later)
    if attn_len is not None and attn_len < 1:
        raise Mistake(f"attn_len must be at least 1, because a query sees itself; got {attn_len}.")
    if look_ahead is not None and (causal or look_ahead < 0):
        raise Mistake(
            f"look_ahead must be at least 0, and None with causal=True; got {look_ahead} and causal={causal}."
        )
    if not 0 <= dropout_p < 1:
        raise Mistake(f"dropout_p must be at least 0 and below 1, got {dropout_p}.")
    name = check_backend(backend)
    if name == "auto" and torch._C._are_functorch_transforms_active():
        name = "strided"  # requires_grad says nothing inside vmap, and only this has all derivatives
    if name == "auto":
        inputs = (q, k, v, r, content_bias, position_bias)
        training = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        scores = q.shape[:3].numel() * k.shape[2]
        call = {"training": training, "scores": scores, "queries": q.shape[2]}
        call["compiled"] = torch.compiler.is_compiling()
        name, _ = resolve_backend(name, q.device, q.dtype, q.shape[-1], **call)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    ahead = later if look_ahead is None else min(look_ahead, later)
    r = r[:, : r.shape[1] - (later - ahead)]
    added = (x.to(q.dtype) for x in (r, content_bias, position_bias))
    return BACKENDS[name](q, k, v, *added, mask=Mask(attn_len, valid, ahead, end), dropout_p=dropout_p, scale=scale)


def _check_tensor(name: str, given: Any, dims: int) -> None:
    if not isinstance(given, Tensor) or given.ndim != dims:
        got = f"{given.ndim}" if isinstance(given, Tensor) else type(given).__name__
        raise Mistake(f"{name} must be a tensor of {dims} dimensions, got {got}.")


def _check_shapes(q, k, v, r, content_bias, position_bias, valid, end, later) -> None:
    for name, each, dims in (("q", q, 4), ("k", k, 4), ("v", v, 4), ("r", r, 3), ("valid", valid, 1), ("end", end, 1)):
        if each is not None or dims > 1:
            _check_tensor(name, each, dims)
    for name, each in (("content_bias", content_bias), ("position_bias", position_bias)):
        _check_tensor(name, each, 2)
    B, H, T, K = q.shape
    S = k.shape[2]
    expected = {
        "k": (k, (B, H, S, K)),
        "v": (v, (B, H, S, K)),
        "r": (r, (H, max(S + later, r.shape[1]), K)),
        "content_bias": (content_bias, (H, K)),
        "position_bias": (position_bias, (H, K)),
        "valid": (valid, (B,)),
        "end": (end, (B,)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise Mistake(f"{name} must have shape {shape} to fit q {tuple(q.shape)}, got {tuple(tensor.shape)}.")
    if S < T:
        raise Mistake(f"k must hold the T = {T} new positions after its memory, got S = {S}.")
