"""Inference: PyTorch's fused attention, the position term handed to it as its mask.

On the left of the diagonal that mask is the shifted view of `strided`, read where it lies; so one T x S product is
written and read, and neither scores nor probabilities ever are. What a window hides is masked before the shift, where
a distance is a column: that costs next to nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .masks import aligned, mask_distant, mask_wrapped, shifted_view, with_spare, without_padding


def attend(q, k, v, r, content_bias, position_bias, *, attn_len, valid, dropout_p, scale):
    """See `relative_attention`."""
    B, H, T, K = q.shape
    if attn_len is not None:  # keys no query reaches
        reached = attn_len - 1 + T
        k, v = k[:, :, -reached:], v[:, :, -reached:]
    S = k.shape[2]
    seen = S if attn_len is None else min(attn_len, S)
    position_q = ((q + position_bias[:, None]) * scale).transpose(0, 1).reshape(H, B * T, K)
    if T == 1:  # nothing to shift, and a matrix times a vector is fastest with the matrix on the left
        shifted = torch.bmm(r[:, r.shape[1] - S :], position_q.mT).mT.reshape(H, B, 1, S)
    else:
        position = torch.bmm(position_q, with_spare(r, aligned(S)).mT)
        if seen < S:
            mask_distant(position, seen)
        shifted = shifted_view(position, (H * B, T, S)).unflatten(0, (H, B))
    if seen > S - T + 1 or valid is not None:  # else the first query has its window full, and what wraps is distant
        mask_wrapped(shifted, valid=valid)
    content_q = q + content_bias[:, None]
    out = F.scaled_dot_product_attention(content_q, k, v, shifted.transpose(0, 1), dropout_p, scale=scale)
    return without_padding(out.transpose(0, 1), valid).transpose(0, 1)
