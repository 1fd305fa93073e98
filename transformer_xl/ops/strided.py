"""The free shift: the paper's Appendix B without a copy, in plain PyTorch for any device.

Give the position table one more row (row 0, never read) and multiply: row i of `(q + v) r^T` then has S + 1 entries,
and reading the same memory from offset T in rows of S moves row i left by T - 1 - i, exactly what the shift does:

    written, T = 2, S = 3, by distance    * 2 1 0 | * 2 1 0
    read from offset 2                        1 0   * | 2 1 0

The wrapped entries lie right of the diagonal, j > M + i, where no query looks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .dropout import dropout
from .masks import visible


def attend(q, k, v, r, content_bias, position_bias, *, attn_len, valid, dropout_p, scale):
    """See `relative_attention`. Heads stand first inside, so that one product per head covers all rows with `r`."""
    B, H, T, K = q.shape
    if attn_len is not None:  # keys no query reaches
        reached = attn_len - 1 + T
        k, v, r = k[:, :, -reached:], v[:, :, -reached:], r[:, -reached:]
    S = k.shape[2]
    q_HBTK = (q * scale).transpose(0, 1)
    content_q = (q_HBTK + (content_bias * scale)[:, None, None]).reshape(H * B, T, K)
    position_q = (q_HBTK + (position_bias * scale)[:, None, None]).reshape(H, B * T, K)

    position = torch.bmm(position_q, F.pad(r, (0, 0, 1, 0)).mT)
    shifted = position.view(H * B, T * (S + 1))[:, T:].unflatten(1, (T, S))
    _mask_wrapped(shifted, B, attn_len=attn_len, valid=valid)
    score = torch.baddbmm(shifted, content_q, k.transpose(0, 1).reshape(H * B, S, K).mT)
    probability = dropout(score.softmax(-1), dropout_p)
    out = torch.bmm(probability, v.transpose(0, 1).reshape(H * B, S, K)).view(H, B, T, K)
    if valid is not None:  # padding sees nothing, not even itself, and gives nothing
        padding = torch.arange(T, device=q.device) < -valid[:, None]
        out = out.masked_fill(padding[:, :, None], 0.0)
    return out.transpose(0, 1)


@torch.no_grad()  # what is hidden has probability 0, so its gradient is 0 without autograd knowing
def _mask_wrapped(shifted, rows, *, attn_len, valid):
    _, T, S = shifted.shape
    lowest = torch.finfo(shifted.dtype).min
    if valid is None and (attn_len is None or attn_len >= S):
        hidden = torch.ones(T, T, dtype=torch.bool, device=shifted.device).triu(1)
        shifted[:, :, S - T :].masked_fill_(hidden, lowest)
    else:
        seen = visible(T, S, attn_len=attn_len, valid=valid, device=shifted.device).squeeze(1)
        shifted.unflatten(0, (-1, rows)).masked_fill_(~seen, lowest)
