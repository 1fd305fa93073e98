"""The shift of the paper's Appendix B without a copy, in plain PyTorch for any device.

The position table gets one more row (row 0, whose products the mask hides), so row i of `(q + v) r^T` has S + 1
entries. Reading the same memory from offset T in rows of S moves row i left by T - 1 - i, which is the shift:

    written, T = 2, S = 3, by distance    * 2 1 0 | * 2 1 0
    read from offset 2                        1 0   * | 2 1 0

The wrapped entries are right of the diagonal, j > M + i, where the mask hides them. If queries see `ahead` later keys,
the table ends at distance -`ahead`. The wrapped entries are then at j > M + i + `ahead`, which is hidden too.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from .call import Call
from .dropout import dropout
from .masks import hide_scores, with_spare, without_padding


def attend(call: Call) -> Float[Tensor, "B H T K"]:
    """See `relative_attention`. Inside, the first axis is heads: one product with `r` per head then covers all rows."""
    q, k, v, r, content_bias, position_bias, mask, dropout_p, scale = call
    B, H, T, K = q.shape
    if mask.attn_len is not None and not torch.compiler.is_exporting():  # drop the keys that no query sees
        dropped = max(k.shape[2] - (mask.attn_len - 1 + T), 0)
        k, v, mask = k[:, :, dropped:], v[:, :, dropped:], mask.part(dropped)
    S = k.shape[2]
    q_HBTK = (q * scale).transpose(0, 1)
    content_q = (q_HBTK + (content_bias * scale)[:, None, None]).reshape(H * B, T, K)
    position_q = (q_HBTK + (position_bias * scale)[:, None, None]).reshape(H, B * T, K)

    W = S + max(mask.ahead, 1)
    position = torch.bmm(position_q, with_spare(r, W).mT)
    # Key j of query i is column j + W - 1 - ahead - M - i of row i, so it is at offset + i (W - 1) + j of all rows.
    offset = W - 1 - mask.ahead - (S - T)
    shifted = position.view(H, B, T * W)[:, :, offset : offset + T * (W - 1)].unflatten(2, (T, W - 1))[..., :S]
    shifted = hide_scores(shifted, S - T, mask)
    score = torch.baddbmm(shifted.flatten(0, 1), content_q, k.transpose(0, 1).reshape(H * B, S, K).mT)
    probability = dropout(score.softmax(-1), dropout_p)
    out = torch.bmm(probability, v.transpose(0, 1).reshape(H * B, S, K)).view(H, B, T, K)
    return without_padding(out, S - T, mask).transpose(0, 1)
