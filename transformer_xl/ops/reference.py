"""The paper's attention, written directly from the equation: by index, without the shift, in any dtype.

Dai et al. 2019, section 3.3, for query i and key j at distance d = M + i - j:

    A_ij = (a) q_i . k_j  +  (b) q_i . r_d  +  (c) u . k_j  +  (d) v . r_d

It is simple, at the cost of speed, because every other backend is tested against it.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from .call import Call
from .masks import visible


def scores_by_term(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B H S K"],
    r: Float[Tensor, "H R K"],
    content_bias: Float[Tensor, "H K"],
    position_bias: Float[Tensor, "H K"],
    *,
    scale: float | None = None,
    ahead: int = 0,
) -> tuple[Float[Tensor, "B H T S"], ...]:
    """Terms (a) to (d) as separate tensors, scaled. The last row of `r` is distance -`ahead`. Keys that are not seen,
    j > M + i + `ahead`, have that row's (b) and (d)."""
    queries, keys = q.shape[2], k.shape[2]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    i = torch.arange(queries, device=q.device)[:, None]
    j = torch.arange(keys, device=q.device)
    distance = (keys - queries + i - j).clamp(min=-ahead)
    r_HTSK = r[:, r.shape[1] - 1 - ahead - distance]
    a = torch.einsum("bhtk,bhsk->bhts", q, k)
    b = torch.einsum("bhtk,htsk->bhts", q, r_HTSK)
    c = torch.einsum("hk,bhsk->bhs", content_bias, k)[:, :, None].expand_as(a)
    d = torch.einsum("hk,htsk->hts", position_bias, r_HTSK)[None].expand_as(a)
    return a * factor, b * factor, c * factor, d * factor


def attend(call: Call) -> Float[Tensor, "B H T K"]:
    """See `relative_attention`."""
    q, k, v, r, content_bias, position_bias, mask, dropout_p, scale = call
    score = torch.stack(scores_by_term(q, k, r, content_bias, position_bias, scale=scale, ahead=mask.ahead)).sum(0)
    seen = visible(q.shape[2], k.shape[2], mask, device=q.device)
    score = score.masked_fill(~seen, torch.finfo(score.dtype).min)
    probability = score.softmax(-1).masked_fill(~seen, 0.0)
    probability = torch.nn.functional.dropout(probability, dropout_p)
    return torch.einsum("bhts,bhsk->bhtk", probability, v)
