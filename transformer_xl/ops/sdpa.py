"""Inference: PyTorch's fused attention with the position term as its mask.

Left of the diagonal the mask is the shifted view of `strided`, without a copy. One T x S product is written and read.
Scores and probabilities are never stored.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from .masks import Mask, mask_distant, mask_wrapped, next_multiple, shifted_view, with_spare, without_padding


def attend(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B H S K"],
    v: Float[Tensor, "B H S K"],
    r: Float[Tensor, "H R K"],
    content_bias: Float[Tensor, "H K"],
    position_bias: Float[Tensor, "H K"],
    *,
    mask: Mask,
    dropout_p: float,
    scale: float,
) -> Float[Tensor, "B H T K"]:
    """See `relative_attention`."""
    B, H, T, K = q.shape
    if mask.attn_len is not None:  # drop the keys that no query sees
        reached = mask.attn_len - 1 + T
        k, v = k[:, :, -reached:], v[:, :, -reached:]
    S = k.shape[2]
    seen = S if mask.attn_len is None else min(mask.attn_len, S)
    position_q = ((q + position_bias[:, None]) * scale).transpose(0, 1).reshape(H, B * T, K)
    if T == 1:  # no shift is needed, and a matrix times a vector is fastest with the matrix on the left
        shifted = torch.bmm(r[:, r.shape[1] - S :], position_q.mT).mT.reshape(H, B, 1, S)
    else:
        position = torch.bmm(position_q, with_spare(r, next_multiple(S + mask.ahead)).mT)
        if seen < S:
            mask_distant(position, seen + mask.ahead)
        shifted = shifted_view(position, (H * B, T, S), S - T, mask.ahead).unflatten(0, (H, B))
    padded = mask.valid is not None or mask.end is not None
    if seen > S - T + 1 or padded:  # otherwise the window of the first query hides all that wraps
        mask_wrapped(shifted, S - T, mask._replace(attn_len=None))
    content_q = q + content_bias[:, None]
    out = F.scaled_dot_product_attention(content_q, k, v, shifted.transpose(0, 1), dropout_p, scale=scale)
    return without_padding(out.transpose(0, 1), mask).transpose(0, 1)
