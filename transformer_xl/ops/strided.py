"""The shift of the paper's Appendix B without a copy, in plain PyTorch for any device.

The position table gets one more row (row 0, never read), so row i of `(q + v) r^T` has S + 1 entries. Reading the same
memory from offset T in rows of S moves row i left by T - 1 - i, which is the shift:

    written, T = 2, S = 3, by distance    * 2 1 0 | * 2 1 0
    read from offset 2                        1 0   * | 2 1 0

The wrapped entries are right of the diagonal, j > M + i, where the mask hides them.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .dropout import dropout
from .masks import mask_wrapped, with_spare, without_padding


def attend(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B H S K"],
    v: Float[Tensor, "B H S K"],
    r: Float[Tensor, "H R K"],
    content_bias: Float[Tensor, "H K"],
    position_bias: Float[Tensor, "H K"],
    *,
    attn_len: int | None,
    valid: Int[Tensor, " B"] | None,
    dropout_p: float,
    scale: float,
) -> Float[Tensor, "B H T K"]:
    """See `relative_attention`. Inside, the first axis is heads: one product with `r` per head then covers all rows."""
    B, H, T, K = q.shape
    if attn_len is not None:  # drop the keys that no query sees
        reached = attn_len - 1 + T
        k, v = k[:, :, -reached:], v[:, :, -reached:]
    S = k.shape[2]
    q_HBTK = (q * scale).transpose(0, 1)
    content_q = (q_HBTK + (content_bias * scale)[:, None, None]).reshape(H * B, T, K)
    position_q = (q_HBTK + (position_bias * scale)[:, None, None]).reshape(H, B * T, K)

    position = torch.bmm(position_q, with_spare(r, S + 1).mT)
    shifted = position.view(H, B, T * (S + 1))[:, :, T:].unflatten(2, (T, S))
    mask_wrapped(shifted, attn_len=attn_len, valid=valid)
    score = torch.baddbmm(shifted.flatten(0, 1), content_q, k.transpose(0, 1).reshape(H * B, S, K).mT)
    probability = dropout(score.softmax(-1), dropout_p)
    out = torch.bmm(probability, v.transpose(0, 1).reshape(H * B, S, K)).view(H, B, T, K)
    return without_padding(out, valid).transpose(0, 1)
