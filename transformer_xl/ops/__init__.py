"""Relative attention as a function: tensors in, tensors out.

from transformer_xl.ops import relative_attention
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor

from . import reference, strided
from .reference import scores_by_term

__all__ = ["BACKENDS", "relative_attention", "resolve_backend", "scores_by_term"]

BACKENDS: dict[str, Callable[..., Tensor]] = {"reference": reference.attend, "strided": strided.attend}


def resolve_backend(backend: str) -> tuple[str, str]:
    """The backend that serves a request, and why.

    Raises:
        ValueError: there is no such backend.
    """
    if backend == "auto":
        return "strided", "the fastest one for every device, dtype and size so far"
    if backend not in BACKENDS:
        raise ValueError(f"backend must be auto or one of {', '.join(BACKENDS)}, got {backend!r}.")
    return backend, "asked for by name"


def relative_attention(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B H S K"],
    v: Float[Tensor, "B H S K"],
    r: Float[Tensor, "H S K"],
    content_bias: Float[Tensor, "H K"],
    position_bias: Float[Tensor, "H K"],
    *,
    attn_len: int | None = None,
    valid: Int[Tensor, " B"] | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: str = "auto",
) -> Float[Tensor, "B H T K"]:
    """Causal attention of T queries over S = M + T keys with relative positions (Dai et al. 2019, section 3.3).

    Query i scores key j, at distance d = M + i - j >= 0, with `scale * ((q_i + u) . k_j + (q_i + v) . r_d)`.

    Args:
        k, v: memory first, then the T new positions.
        r: encoded distances S - 1, ..., 1, 0 (the last row is distance 0), clamped by the caller.
        content_bias, position_bias: the paper's u and v.
        attn_len: how many keys a query sees, itself included; None: all there are.
        valid: how many of each row's newest memory rows count, in [-T, M]; a negative one hides as many of the row's
            own first tokens (left padding). None: all M. A query that sees no key gives 0.
        dropout_p: dropout on the probabilities.
        scale: None is 1 / sqrt(K).
        backend: "auto" or a name in `BACKENDS`.

    Raises:
        ValueError: shapes that do not fit, attn_len or dropout_p out of range, or no such backend.
    """
    _check_shapes(q, k, v, r, content_bias, position_bias, valid)
    if attn_len is not None and attn_len < 1:
        raise ValueError(f"attn_len must be at least 1, for a query sees itself; got {attn_len}.")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be at least 0 and below 1, got {dropout_p}.")
    name, _ = resolve_backend(backend)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    biases = content_bias.to(q.dtype), position_bias.to(q.dtype)
    return BACKENDS[name](q, k, v, r, *biases, attn_len=attn_len, valid=valid, dropout_p=dropout_p, scale=scale)


def _check_shapes(q, k, v, r, content_bias, position_bias, valid) -> None:
    B, H, T, K = q.shape
    S = k.shape[2]
    expected = {
        "k": (k, (B, H, S, K)),
        "v": (v, (B, H, S, K)),
        "r": (r, (H, S, K)),
        "content_bias": (content_bias, (H, K)),
        "position_bias": (position_bias, (H, K)),
        "valid": (valid, (B,)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape} to fit q {tuple(q.shape)}, got {tuple(tensor.shape)}.")
    if S < T:
        raise ValueError(f"k must hold the T = {T} new positions behind its memory, got S = {S} of them.")
