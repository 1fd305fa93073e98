"""Relative attention as a function of tensors.

from transformer_xl.ops import relative_attention
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..mistake import Mistake
from .call import Call, in_transform, product_dtype
from .choice import BACKENDS, check_backend, resolve_backend
from .masks import Bounds, Mask
from .reference import scores_by_term

__all__ = ["BACKENDS", "check_backend", "relative_attention", "resolve_backend", "scores_by_term"]


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
    first: Bounds = None,
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
        first: for each query, or for all of a row, the first key that it sees, from 0: where its document or episode
            begins. It counts as at least that of the query before it. With `causal` False a later key is hidden if it
            does not see the query.
        look_ahead: with `causal` False, the number of keys after its own that a query sees; None: all.
        dropout_p: dropout on the probabilities.
        scale: None is 1 / sqrt(K).
        backend: "auto" or a name in `BACKENDS`.

    Returns:
        The attended values; 0 for padding.

    Raises:
        ValueError: shapes that do not fit, a number out of range (numbers in tensors are not read), or no such backend.
    """
    later = 0 if causal else q.shape[2] - 1
    _check_tensors(q, {"k": k, "v": v, "r": r, "content_bias": content_bias, "position_bias": position_bias}, later)
    check_masks(q, valid, end, first, attn_len=attn_len, look_ahead=look_ahead, causal=causal)
    if not 0 <= dropout_p < 1:
        raise Mistake(f"dropout_p must be at least 0 and below 1, got {dropout_p}.")
    name = check_backend(backend)
    if (dtype := product_dtype(q)) != q.dtype:  # the caller's autocast
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if not q.numel():  # nothing, whose gradients are zeros
        return q + 0 * (k.sum() + v.sum() + r.sum() + content_bias.sum() + position_bias.sum()).to(q.dtype)
    if name == "auto" and (in_transform() or torch.compiler.is_exporting()):
        name = "strided"  # requires_grad says nothing inside vmap, only this has all derivatives, and sizes stay free
    if name == "auto":
        inputs = (q, k, v, r, content_bias, position_bias)
        name, _ = resolve_backend(
            name,
            q.device,
            q.dtype,
            q.shape[-1],
            training=torch.is_grad_enabled() and any(x.requires_grad for x in inputs),
            scores=q.shape[:3].numel() * k.shape[2],
            queries=q.shape[2],
        )
    factor: float = q.shape[-1] ** -0.5 if scale is None else scale
    ahead = later if look_ahead is None else min(look_ahead, later)
    r = r[:, : r.shape[1] - (later - ahead)]
    r = r.to(q.dtype)
    if name != "triton":  # which reads biases of any dtype
        content_bias, position_bias = content_bias.to(q.dtype), position_bias.to(q.dtype)
    mask = Mask.of(k.shape[2] - q.shape[2], attn_len, valid, ahead=ahead, end=end, first=first)
    return BACKENDS[name](Call(q, k, v, r, content_bias, position_bias, mask, dropout_p, factor))


def _check_tensors(q: Tensor, others: dict[str, Tensor], later: int) -> None:
    """Raise a `Mistake` unless the tensors fit `q`; `later` is the number of keys after a query for which `r` must have
    encodings."""
    if not isinstance(q, Tensor) or q.ndim != 4:
        raise Mistake(f"q must be a tensor of 4 dimensions, got {_described(q)}.")
    (B, H, T, K), k, r = q.shape, others["k"], others["r"]
    S = k.shape[2] if isinstance(k, Tensor) and k.ndim == 4 else T
    R = r.shape[1] if isinstance(r, Tensor) and r.ndim == 3 else 0
    expected = {"k": (B, H, max(S, T), K), "v": (B, H, S, K), "r": (H, max(S + later, R), K)}
    for name, given in others.items():
        _check_shape(name, given, q, [expected.get(name, (H, K))])


def check_masks(
    q: Tensor,
    valid: Tensor | None,
    end: Tensor | None,
    first: Tensor | None,
    *,
    attn_len: int | None,
    look_ahead: int | None,
    causal: bool,
) -> None:
    """Raise a `Mistake` unless these arguments of `relative_attention` fit `q`."""
    if attn_len is not None and attn_len < 1:
        raise Mistake(f"attn_len must be at least 1, because a query sees itself; got {attn_len}.")
    if look_ahead is not None and (causal or look_ahead < 0):
        raise Mistake(
            f"look_ahead must be at least 0, and None with causal=True; got {look_ahead} and causal={causal}."
        )
    B, _, T, _ = q.shape
    for name, given, shapes in (("valid", valid, [(B,)]), ("end", end, [(B,)]), ("first", first, [(B, T), (B, 1)])):
        if given is not None:
            _check_shape(name, given, q, shapes)
            if given.dtype == torch.bool or given.is_floating_point():
                raise Mistake(f"{name} must be a tensor of integers, got {given.dtype}.")


def _check_shape(name: str, given: object, q: Tensor, shapes: Sequence[tuple[int, ...]]) -> None:
    if not isinstance(given, Tensor) or all(given.shape != shape for shape in shapes):  # torch.compile fails at `in`
        raise Mistake(f"{name} must be a tensor {shapes[0]} to fit q {tuple(q.shape)}, got {_described(given)}.")


def _described(given: object) -> str:
    return str(tuple(given.shape)) if isinstance(given, Tensor) else type(given).__name__
