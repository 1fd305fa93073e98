"""Inference: PyTorch's fused attention with the position term as its mask.

Left of the diagonal the mask is the shifted view of `strided`, without a copy. One T x S product is written and read.
Scores and probabilities are never stored.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from .call import Call
from .masks import hide_scores, next_multiple, shifted_view, with_spare, without_padding


def attend(call: Call) -> Float[Tensor, "B H T K"]:
    """See `relative_attention`."""
    q, k, v, r, content_bias, position_bias, mask, dropout_p, scale = call
    B, H, T, K = q.shape
    if mask.attn_len is not None:  # drop the keys that no query sees
        dropped = max(k.shape[2] - (mask.attn_len - 1 + T), 0)
        k, v, mask = k[:, :, dropped:], v[:, :, dropped:], mask.part(dropped)
    S = k.shape[2]
    seen = mask.window(S)
    position_q = ((q + position_bias[:, None]) * scale).transpose(0, 1).reshape(H, B * T, K)
    if T == 1:  # no shift is needed, and a matrix times a vector is fastest with the matrix on the left
        shifted = torch.bmm(r[:, r.shape[1] - S :], position_q.mT).mT.reshape(H, B, 1, S)
    else:
        position = torch.bmm(position_q, with_spare(r, next_multiple(S + mask.ahead)).mT)
        if seen < S:  # hide distant keys before the shift, where each distance is a column: faster than after it
            with torch.no_grad():
                position[..., : -(seen + mask.ahead)] = torch.finfo(q.dtype).min
        shifted = shifted_view(position, (H * B, T, S), S - T, mask.ahead).unflatten(0, (H, B))
    padded = mask.first is not None or mask.until is not None
    if seen > S - T + 1 or padded:  # otherwise the window of the first query hides all that wraps
        shifted = hide_scores(shifted, S - T, mask._replace(attn_len=None))
    content_q = q + content_bias[:, None]
    out = F.scaled_dot_product_attention(content_q, k, v, shifted.transpose(0, 1), dropout_p, scale=scale)
    return without_padding(out.transpose(0, 1), S - T, mask).transpose(0, 1)
